//! What a plain scalar means, exactly as in Kubernetes.
//!
//! Kubernetes reads YAML by `sigs.k8s.io/yaml`, which follows YAML 1.1 with its
//! own exceptions: `yes` and `on` are booleans, `0644` is octal, `1_000` is a
//! number, a date is a string. A manifest must not mean one thing here and
//! another thing on a node of a cluster.

use std::borrow::Cow;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scalar<'a> {
    Null,
    Bool(bool),
    Integer(i64),
    /// Beyond `i64`.
    Unsigned(u64),
    Float(f64),
    Text(Cow<'a, str>),
}

impl<'a> Scalar<'a> {
    /// The value of an unquoted, untagged scalar.
    pub(super) fn of_plain(text: Cow<'a, str>) -> Self {
        resolve(&text).unwrap_or(Self::Text(text))
    }

    /// What is called a string in messages needs no quotes.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Integer(_) | Self::Unsigned(_) | Self::Float(_) => "a number",
            Self::Text(_) => "a string",
        }
    }

    /// As the key of a mapping, which is a string in JSON; `None` for null.
    pub(super) fn into_key(self) -> Option<Cow<'a, str>> {
        match self {
            Self::Null => None,
            Self::Bool(flag) => Some(flag.to_string().into()),
            Self::Integer(number) => Some(number.to_string().into()),
            Self::Unsigned(number) => Some(number.to_string().into()),
            Self::Float(number) => Some(number.to_string().into()),
            Self::Text(text) => Some(text),
        }
    }
}

fn resolve(text: &str) -> Option<Scalar<'static>> {
    if let Some(word) = word(text) {
        return Some(word);
    }
    match text.as_bytes().first()? {
        b'.' => text.parse().ok().map(float),
        b'0'..=b'9' | b'+' | b'-' => number(&text.replace('_', "")),
        _ => None,
    }
}

fn word(text: &str) -> Option<Scalar<'static>> {
    Some(match text {
        "" | "~" | "null" | "Null" | "NULL" => Scalar::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            Scalar::Bool(true)
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            Scalar::Bool(false)
        }
        ".nan" | ".NaN" | ".NAN" => Scalar::Float(f64::NAN),
        ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => Scalar::Float(f64::INFINITY),
        "-.inf" | "-.Inf" | "-.INF" => Scalar::Float(f64::NEG_INFINITY),
        _ => return None,
    })
}

fn number(text: &str) -> Option<Scalar<'static>> {
    let (negative, digits) = match text.as_bytes() {
        [b'-', ..] => (true, &text[1..]),
        [b'+', ..] => (false, &text[1..]),
        _ => (false, text),
    };
    if let Some(magnitude) = whole(digits) {
        return match (negative, i64::try_from(magnitude)) {
            (false, Ok(number)) => Some(Scalar::Integer(number)),
            (false, Err(_)) => Some(Scalar::Unsigned(magnitude)),
            (true, _) => 0i64
                .checked_sub_unsigned(magnitude)
                .map(Scalar::Integer)
                .or_else(|| text.parse().ok().map(float)),
        };
    }
    is_decimal_float(digits).then(|| text.parse().ok().map(float)).flatten()
}

/// Go's `strconv.ParseUint` with base 0.
fn whole(digits: &str) -> Option<u64> {
    let (base, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', b'o' | b'O', ..] => (8, &digits[2..]),
        [b'0', b'b' | b'B', ..] => (2, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    // `from_str_radix` would take a second sign.
    digits.bytes().all(|digit| digit.is_ascii_hexdigit()).then(|| u64::from_str_radix(digits, base).ok())?
}

/// `(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?`
fn is_decimal_float(text: &str) -> bool {
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (text, None),
    };
    let all_digits = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit());
    let exponent_ok = exponent.is_none_or(|exponent| {
        let digits = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        !digits.is_empty() && all_digits(digits)
    });
    let mantissa_ok = match mantissa.split_once('.') {
        Some((whole, fraction)) => {
            all_digits(whole) && all_digits(fraction) && !(whole.is_empty() && fraction.is_empty())
        }
        None => !mantissa.is_empty() && all_digits(mantissa),
    };
    exponent_ok && mantissa_ok
}

/// JSON, through which Kubernetes passes every value, knows no `1.0` beside `1`.
fn float(number: f64) -> Scalar<'static> {
    const EXACT: f64 = 9_007_199_254_740_992.0;
    if number.fract() == 0.0 && number.abs() < EXACT {
        #[expect(clippy::cast_possible_truncation, reason = "whole, and within 53 bits")]
        return Scalar::Integer(number as i64);
    }
    Scalar::Float(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(text: &str) -> Scalar<'_> {
        Scalar::of_plain(text.into())
    }

    /// The values are those that `sigs.k8s.io/yaml` gives.
    #[test]
    fn plain_scalars_mean_what_they_mean_in_kubernetes() {
        for (text, value) in [
            ("", Scalar::Null),
            ("~", Scalar::Null),
            ("yes", Scalar::Bool(true)),
            ("Off", Scalar::Bool(false)),
            ("n", Scalar::Bool(false)),
            ("oN", Scalar::Text("oN".into())),
            ("12", Scalar::Integer(12)),
            ("0644", Scalar::Integer(0o644)),
            ("0o644", Scalar::Integer(0o644)),
            ("-0x1F", Scalar::Integer(-31)),
            ("0b101", Scalar::Integer(5)),
            ("1_000", Scalar::Integer(1000)),
            ("08", Scalar::Integer(8)),
            ("1.0", Scalar::Integer(1)),
            ("1e3", Scalar::Integer(1000)),
            ("0.5", Scalar::Float(0.5)),
            (".5", Scalar::Float(0.5)),
            ("-9223372036854775808", Scalar::Integer(i64::MIN)),
            ("18446744073709551615", Scalar::Unsigned(u64::MAX)),
            (".inf", Scalar::Float(f64::INFINITY)),
        ] {
            assert_eq!(plain(text), value, "{text}");
        }
        for text in [
            "1Gi",
            "500m",
            "2026-11-22",
            "12:30:45",
            "1.2.3",
            "0x",
            "-",
            "+-1",
            "--1",
            "0xg",
            "...",
            "e5",
            "1e",
        ] {
            assert_eq!(plain(text), Scalar::Text(text.into()), "{text}");
        }
    }
}
