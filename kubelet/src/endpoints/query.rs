//! Paths and queries of URLs, decoded. They are hostile: a part that is no UTF-8, or that has a broken
//! escape, is refused.

use hyper::Uri;

/// A query has at most so many parameters; exec has one for each argument of its command.
const MOST_PARAMETERS: usize = 256;

/// Why a URL is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("the URL has an escape that is broken, or not UTF-8")]
    Escape,
    #[error("the query has more than {MOST_PARAMETERS} parameters")]
    Parameters,
    #[error("{name}={value}: {expected} is needed")]
    Value { name: &'static str, value: String, expected: &'static str },
}

/// The segments of the path.
pub(super) fn segments(uri: &Uri) -> Result<Vec<String>, Malformed> {
    let path = uri.path().trim_start_matches('/');
    path.trim_end_matches('/').split('/').map(|segment| decode(segment.as_bytes(), false)).collect()
}

/// The parameters of the query.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub(super) fn of(uri: &Uri) -> Result<Self, Malformed> {
        let mut parameters = Vec::new();
        for pair in uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            if parameters.len() == MOST_PARAMETERS {
                return Err(Malformed::Parameters);
            }
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            parameters.push((decode(name.as_bytes(), true)?, decode(value.as_bytes(), true)?));
        }
        Ok(Self(parameters))
    }

    /// The first value of a parameter.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// All values of a parameter.
    pub(super) fn all(&self, name: &str) -> Vec<String> {
        self.0.iter().filter(|(found, _)| found == name).map(|(_, value)| value.clone()).collect()
    }

    /// A boolean as Go's strconv.ParseBool and the Kubernetes API take it; absent: `false`.
    pub(super) fn flag(&self, name: &'static str) -> Result<bool, Malformed> {
        match self.get(name) {
            None => Ok(false),
            Some("" | "1" | "t" | "T" | "true" | "TRUE" | "True") => Ok(true),
            Some("0" | "f" | "F" | "false" | "FALSE" | "False") => Ok(false),
            Some(value) => Err(Malformed::Value { name, value: value.to_owned(), expected: "true or false" }),
        }
    }

    /// A number; absent: `None`.
    pub(super) fn number(&self, name: &'static str, least: u64) -> Result<Option<u64>, Malformed> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = value.parse::<u64>().ok().filter(|number| *number >= least);
        let expected = if least == 0 { "a number" } else { "a number greater than 0" };
        number.map(Some).ok_or_else(|| Malformed::Value { name, value: value.to_owned(), expected })
    }
}

/// Decodes `%xx`, and in queries `+`.
fn decode(text: &[u8], is_query: bool) -> Result<String, Malformed> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.iter();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let digit = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
                let (Some(high), Some(low)) = (digit(rest.next()), digit(rest.next())) else {
                    return Err(Malformed::Escape);
                };
                u8::try_from(high * 16 + low).map_err(|_| Malformed::Escape)?
            }
            b'+' if is_query => b' ',
            byte => *byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| Malformed::Escape)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Result<Query, Malformed> {
        Query::of(&format!("/exec?{text}").parse().unwrap())
    }

    #[test]
    fn parameters_are_decoded_and_may_repeat() {
        let query = query("command=sh&command=-c&command=echo+a%20%26b&tty=1&x").unwrap();
        assert_eq!(query.all("command"), ["sh", "-c", "echo a &b"]);
        assert_eq!(
            (query.flag("tty"), query.flag("stdin"), query.flag("x")),
            (Ok(true), Ok(false), Ok(true))
        );
    }

    #[test]
    fn wrong_values_name_the_parameter() {
        let query = query("tailLines=-1&limitBytes=0&follow=maybe").unwrap();
        assert_eq!(query.number("tailLines", 0).unwrap_err().to_string(), "tailLines=-1: a number is needed");
        let refused = query.number("limitBytes", 1).unwrap_err().to_string();
        assert_eq!(refused, "limitBytes=0: a number greater than 0 is needed");
        assert_eq!(query.flag("follow").unwrap_err().to_string(), "follow=maybe: true or false is needed");
    }

    #[test]
    fn an_escaped_slash_stays_within_its_segment() {
        let segments = |path: &str| segments(&path.parse().unwrap());
        assert_eq!(
            segments("/containerLogs/..%2f..%2fetc/p/c").unwrap(),
            ["containerLogs", "../../etc", "p", "c"]
        );
        assert_eq!(segments("/runningpods/").unwrap(), ["runningpods"]);
        for broken in ["/%", "/%4", "/%zz", "/%ff"] {
            assert_eq!(segments(broken), Err(Malformed::Escape), "{broken}");
        }
    }

    #[test]
    fn there_are_not_more_parameters_than_a_command_has_arguments() {
        assert_eq!(query(&"command=x&".repeat(256)).unwrap().all("command").len(), 256);
        assert_eq!(query(&"command=x&".repeat(257)), Err(Malformed::Parameters));
    }
}
