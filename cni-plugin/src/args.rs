//! `CNI_ARGS`: `K=V;K=V`, keys case-sensitive.

use crate::CniError;

/// The reference's name for the part of its arguments with `IgnoreUnknown`: a known key that takes
/// no value.
const HOLDER: &str = "CommonArgs";

/// The values of `known` keys, in their order; `None` for absent ones. Other keys are an error
/// unless `IgnoreUnknown` is `1` or `true`.
pub fn parse<const N: usize>(text: &str, known: [&str; N]) -> Result<[Option<String>; N], CniError> {
    parse_validating(text, known, |_| Ok(()))
}

/// [`parse`] with validation: `validate` returns the error of a known key's value. It is an error
/// even if the key comes again later.
pub fn parse_validating<const N: usize>(
    text: &str,
    known: [&str; N],
    validate: impl Fn(&str) -> Result<(), String>,
) -> Result<[Option<String>; N], CniError> {
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
        let wrong =
            |why| CniError::internal(format_args!("ARGS: error parsing value of pair {pair:?}: {why}"));
        if key == "IgnoreUnknown" {
            ignore_unknown = boolean(value).map_err(wrong)?;
        } else if key == HOLDER {
            return Err(CniError::internal(format_args!(
                "ARGS: cannot unmarshal into field '{HOLDER}' - type '*types.{HOLDER}' does not implement encoding.TextUnmarshaler"
            )));
        } else if let Some(at) = known.iter().position(|name| *name == key) {
            validate(value).map_err(wrong)?;
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

fn boolean(value: &str) -> Result<bool, String> {
    let value = value.to_lowercase();
    match value.as_str() {
        "1" | "true" => Ok(true),
        "0" | "false" => Ok(false),
        _ => Err(format!("boolean unmarshal error: invalid input {value}")),
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

    #[test]
    fn the_references_own_field_takes_no_value_even_if_unknown_keys_are_ignored() {
        for text in ["CommonArgs=x", "IgnoreUnknown=1;CommonArgs=", "CommonArgs=x;IgnoreUnknown=1"] {
            let expected = "ARGS: cannot unmarshal into field 'CommonArgs' - type '*types.CommonArgs' does not implement encoding.TextUnmarshaler";
            assert_eq!(parse(text, ["IP"]).unwrap_err().msg, expected, "{text}");
        }
        assert_eq!(parse("IgnoreUnknown=1;commonargs=x", ["IP"]).unwrap(), [None]);
    }

    #[test]
    fn pairs_are_validated_one_after_the_other() {
        let msg = |text: &str| {
            let validate = |value: &str| if value == "no" { Err("a no".to_owned()) } else { Ok(()) };
            parse_validating(text, ["IP"], validate).map_err(|e| e.msg)
        };
        let refused = r#"ARGS: error parsing value of pair "IP=no": a no"#;
        for text in ["IP=no", "IP=no;IP=yes", "IP=no;nonsense", "FOO=x;IP=no"] {
            assert_eq!(msg(text).unwrap_err(), refused, "{text}");
        }
        assert_eq!(msg("nonsense;IP=no").unwrap_err(), r#"ARGS: invalid pair "nonsense""#);
        assert_eq!(msg("IP=no thanks;IP=yes").unwrap(), [Some("yes".to_owned())]);
    }
}
