//! `CNI_ARGS`: `K=V;K=V`, keys case-sensitive.

use crate::CniError;

/// The values of `known` keys, in their order; `None` for absent ones. A key
/// outside `known` is an error unless `IgnoreUnknown` is `1` or `true`.
pub fn parse<const N: usize>(text: &str, known: [&str; N]) -> Result<[Option<String>; N], CniError> {
    let mut values = [const { None }; N];
    let (mut unknown, mut ignore_unknown) = (Vec::new(), false);
    if text.is_empty() {
        return Ok(values);
    }
    for pair in text.split(';') {
        let mut parts = pair.split('=');
        let (Some(key), Some(value), None) = (parts.next(), parts.next(), parts.next()) else {
            return Err(CniError::internal(format_args!("ARGS: invalid pair {pair:?}")));
        };
        if key == "IgnoreUnknown" {
            ignore_unknown = boolean(pair, value)?;
        } else if let Some(at) = known.iter().position(|name| *name == key) {
            values[at] = Some(value.to_owned());
        } else {
            unknown.push(format!("{pair:?}"));
        }
    }
    if !unknown.is_empty() && !ignore_unknown {
        return Err(CniError::internal(format_args!("ARGS: unknown args [{}]", unknown.join(" "))));
    }
    Ok(values)
}

fn boolean(pair: &str, value: &str) -> Result<bool, CniError> {
    let value = value.to_lowercase();
    match value.as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(CniError::internal(format_args!(
            "ARGS: error parsing value of pair {pair:?}: boolean unmarshal error: invalid input {value}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_keys_are_found_and_unknown_ones_refused_unless_told_otherwise() {
        assert_eq!(parse("", ["IP"]).unwrap(), [None]);
        assert_eq!(parse("IP=10.0.0.1", ["IP"]).unwrap(), [Some("10.0.0.1".to_owned())]);
        assert_eq!(parse("FOO=BAR;A=B", ["IP"]).unwrap_err().msg, r#"ARGS: unknown args ["FOO=BAR" "A=B"]"#);
        assert_eq!(parse("FOO=BAR;IgnoreUnknown=TRUE", ["IP"]).unwrap(), [None]);
        assert_eq!(parse("IP=a=b", ["IP"]).unwrap_err().msg, r#"ARGS: invalid pair "IP=a=b""#);
        assert_eq!(parse("none", ["IP"]).unwrap_err().msg, r#"ARGS: invalid pair "none""#);
        assert!(parse("IgnoreUnknown=yes", ["IP"]).unwrap_err().msg.ends_with("invalid input yes"));
    }
}
