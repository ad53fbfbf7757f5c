//! Amounts as Kubernetes writes them: `100m`, `1.5`, `64Mi`, `1e3` (its API's `resource.Quantity`).

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Amounts by resource name (`cpu`, `memory`, `storage`).
pub type Resources = BTreeMap<String, Quantity>;

/// Fractions count down to this part of one.
const NANO: i128 = 1_000_000_000;

/// An amount, exact to a nano-unit, that prints as it was written and compares by value.
#[derive(Debug, Clone)]
pub struct Quantity {
    text: String,
    nanos: i128,
}

/// `text` is not a quantity.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid quantity {text:?}: want a number with an optional suffix n, u, m, k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi, Ei or e<exponent>"
)]
pub struct QuantityError {
    pub text: String,
}

impl Quantity {
    /// So many bytes, written with the largest binary suffix that fits exactly.
    pub fn from_bytes(bytes: u64) -> Self {
        let suffixes = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
        let mut amount = bytes;
        let mut at = 0;
        while amount != 0 && amount.is_multiple_of(1024) && at + 1 < suffixes.len() {
            amount /= 1024;
            at += 1;
        }
        Self { text: format!("{amount}{}", suffixes[at]), nanos: i128::from(bytes) * NANO }
    }

    /// Whole units, rounded up (bytes of `memory` and `storage`); negative amounts count as 0.
    pub fn value(&self) -> u64 {
        round_up(self.nanos, NANO)
    }

    /// Thousandths, rounded up (milli-CPUs of `cpu`); negative amounts count as 0.
    pub fn milli_value(&self) -> u64 {
        round_up(self.nanos, NANO / 1000)
    }

    /// Whole units; `None` for a fraction of one and for a negative amount.
    pub fn exact_value(&self) -> Option<u64> {
        exact(self.nanos, NANO)
    }

    /// Thousandths; `None` for a fraction of one and for a negative amount.
    pub fn exact_milli_value(&self) -> Option<u64> {
        exact(self.nanos, NANO / 1000)
    }

    pub fn is_negative(&self) -> bool {
        self.nanos < 0
    }
}

fn exact(nanos: i128, unit: i128) -> Option<u64> {
    u64::try_from(nanos / unit).ok().filter(|_| nanos % unit == 0 && nanos >= 0)
}

fn round_up(nanos: i128, unit: i128) -> u64 {
    let nanos = nanos.max(0);
    u64::try_from((nanos + unit - 1) / unit).unwrap_or(u64::MAX)
}

impl FromStr for Quantity {
    type Err = QuantityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match parse_nanos(text) {
            Some(nanos) => Ok(Self { text: text.to_owned(), nanos }),
            None => Err(QuantityError { text: text.to_owned() }),
        }
    }
}

/// `None` for wrong syntax and for what no 64-bit number of units can hold.
fn parse_nanos(text: &str) -> Option<i128> {
    let (negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let number_end = unsigned.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(unsigned.len());
    let (number, suffix) = unsigned.split_at(number_end);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return None;
    }
    let (multiplier, divisor) = scale(suffix)?;
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let places = 10_i128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let numerator = digits.checked_mul(multiplier)?.checked_mul(NANO)?;
    let denominator = places.checked_mul(divisor)?;
    // Like Kubernetes: finer than a nano-unit rounds away from zero.
    let nanos = numerator.checked_add(denominator - 1)? / denominator;
    if nanos > i128::from(i64::MAX) * NANO {
        return None;
    }
    Some(if negative { -nanos } else { nanos })
}

/// The factor of a suffix, as (multiplier, divisor).
fn scale(suffix: &str) -> Option<(i128, i128)> {
    let binary = |power: u32| Some((1024_i128.pow(power), 1));
    let decimal = |power: u32| Some((10_i128.pow(power), 1));
    match suffix {
        "n" => Some((1, NANO)),
        "u" => Some((1, 1_000_000)),
        "m" => Some((1, 1000)),
        "" => Some((1, 1)),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        "Ki" => binary(1),
        "Mi" => binary(2),
        "Gi" => binary(3),
        "Ti" => binary(4),
        "Pi" => binary(5),
        "Ei" => binary(6),
        _ => exponent(suffix.strip_prefix(['e', 'E'])?),
    }
}

fn exponent(text: &str) -> Option<(i128, i128)> {
    let power: i32 = text.parse().ok()?;
    let factor = 10_i128.checked_pow(power.unsigned_abs())?;
    Some(if power < 0 { (1, factor) } else { (factor, 1) })
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(QuantityVisitor)
    }
}

/// Manifests write amounts as strings and as bare numbers (`cpu: 1`, `cpu: 0.5`).
struct QuantityVisitor;

impl Visitor<'_> for QuantityVisitor {
    type Value = Quantity;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity such as 100m or 64Mi")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Quantity, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Quantity, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Quantity, E> {
        self.visit_str(&number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantity(text: &str) -> Quantity {
        text.parse().unwrap()
    }

    #[test]
    fn every_suffix_has_its_factor() {
        assert_eq!(quantity("64Mi").value(), 64 << 20);
        assert_eq!(quantity("1Gi").value(), 1 << 30);
        assert_eq!(quantity("1.5Gi").value(), 3 << 29);
        assert_eq!(quantity("2k").value(), 2000);
        assert_eq!(quantity("1e3").value(), 1000);
        assert_eq!(quantity("12E2").value(), 1200);
        assert_eq!(quantity("100m").milli_value(), 100);
        assert_eq!(quantity("0.5").milli_value(), 500);
        assert_eq!(quantity("1").milli_value(), 1000);
        assert_eq!(quantity("1500u").milli_value(), 2);
        assert_eq!(quantity("100m").value(), 1);
        assert_eq!(quantity("-1").value(), 0);
    }

    #[test]
    fn an_exact_value_is_neither_rounded_nor_negative() {
        for (text, value, milli_value) in [
            ("0", Some(0), Some(0)),
            ("1.5Gi", Some(3 << 29), Some((3 << 29) * 1000)),
            ("250m", None, Some(250)),
            ("1.0001", None, None),
            ("-1m", None, None),
            ("-1", None, None),
        ] {
            let read = (quantity(text).exact_value(), quantity(text).exact_milli_value());
            assert_eq!(read, (value, milli_value), "{text}");
        }
    }

    #[test]
    fn invalid_text_is_refused_and_named() {
        for text in
            ["", "Gi", "1GB", "1 Gi", "1..2", "1.2.3", "abc", "1e", "--1", ".", "9Ei9", "16Ei", "1e99"]
        {
            let err = text.parse::<Quantity>().unwrap_err();
            assert_eq!(err.text, text);
        }
    }

    #[test]
    fn bytes_are_written_with_the_largest_exact_suffix() {
        assert_eq!(Quantity::from_bytes(1 << 30).to_string(), "1Gi");
        assert_eq!(Quantity::from_bytes((1 << 30) + 1024).to_string(), "1048577Ki");
        assert_eq!(Quantity::from_bytes(1000).to_string(), "1000");
        assert_eq!(Quantity::from_bytes(0).to_string(), "0");
    }

    /// For any number of bytes: print and parse give it back, and both order alike.
    #[test]
    fn bytes_survive_printing_and_parsing() {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut previous = Quantity::from_bytes(0);
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bytes = (state >> 1) >> (state % 63);
            let printed = Quantity::from_bytes(bytes);
            let parsed = quantity(&printed.to_string());
            assert_eq!(parsed.value(), bytes, "{printed}");
            assert_eq!(printed.cmp(&previous), bytes.cmp(&previous.value()));
            previous = printed;
        }
    }

    #[test]
    fn numbers_and_strings_are_read_alike() {
        let read: Vec<Quantity> = serde_json::from_str(r#"["1", 1, 0.5, "500m"]"#).unwrap();
        assert_eq!(read[0], read[1]);
        assert_eq!(read[2], read[3]);
    }
}
