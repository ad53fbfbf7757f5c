//! Durations as Go reads them: `30s`, `1h15m`, `100ms`, `-1s`, `0`.

use std::time::Duration;

/// A duration that may lie in the past.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Span {
    Positive(Duration),
    Negative,
}

/// Go counts nanoseconds in 64 bits.
const MOST_SECONDS: f64 = 9_223_372_036.0;
/// The most that is useful: a week more or less makes no difference.
const MAX_SECONDS: f64 = 1e9;

pub(crate) fn parse(text: &str) -> Result<Span, String> {
    let invalid = || format!("invalid duration {text:?}: want for example 30s, 5m or 1h30m");
    let (is_negative, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    if rest == "0" {
        return Ok(Span::Positive(Duration::ZERO));
    }
    if rest.is_empty() {
        return Err(invalid());
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest
            .find(|letter: char| !(letter.is_ascii_digit() || letter == '.'))
            .ok_or_else(|| format!("missing unit in duration {text:?}: want for example {text}s"))?;
        let number: f64 = rest[..digits].parse().map_err(|_| invalid())?;
        rest = &rest[digits..];
        let end = rest.find(|letter: char| letter.is_ascii_digit() || letter == '.').unwrap_or(rest.len());
        let unit = match &rest[..end] {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(invalid()),
        };
        rest = &rest[end..];
        seconds += number * unit;
    }
    if seconds > MOST_SECONDS {
        return Err(invalid());
    }
    let span = Duration::try_from_secs_f64(seconds.min(MAX_SECONDS)).map_err(|_| invalid())?;
    Ok(if is_negative && !span.is_zero() { Span::Negative } else { Span::Positive(span) })
}

/// A duration of zero or more.
pub(crate) fn not_negative(text: &str) -> Result<Duration, String> {
    match parse(text)? {
        Span::Positive(span) => Ok(span),
        Span::Negative => Err(format!("invalid duration {text:?}: it is negative")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_go_reads_them() {
        for (text, milliseconds) in [
            ("0", 0),
            ("0s", 0),
            ("30s", 30_000),
            ("1.5h", 5_400_000),
            ("1h15m30.5s", 4_530_500),
            ("100ms", 100),
            ("+2m", 120_000),
            ("1h2m", 3_720_000),
            ("500ms", 500),
            ("2562047h", 1_000_000_000_000),
        ] {
            assert_eq!(parse(text), Ok(Span::Positive(Duration::from_millis(milliseconds))), "{text}");
        }
        assert_eq!(parse("-1s"), Ok(Span::Negative));
        for text in
            ["", "-", "5", "s", "1d", "1h5", "..s", "1 s", "90", "1m30", "2562048h", "99999999999999999999s"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
        not_negative("-1s").unwrap_err();
    }
}
