//! Sizes: what a claim may have, and how a person writes one.

use proto::csi::CapacityRange;

use crate::error::{Error, Result};

/// What a claim without a size gets, unless its limit is lower.
const DEFAULT_BYTES: u64 = 1 << 30;

/// capacity_range, checked: `required <= limit`, 0 for "none given".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WantedCapacity {
    required_bytes: u64,
    limit_bytes: u64,
}

impl WantedCapacity {
    pub(crate) fn parse(range: Option<&CapacityRange>) -> Result<Self> {
        let CapacityRange { required_bytes, limit_bytes } = range.copied().unwrap_or_default();
        let unsigned = |field, value: i64| {
            u64::try_from(value).map_err(|_| Error::invalid(field, value.to_string(), "negative"))
        };
        let wanted = Self {
            required_bytes: unsigned("capacity_range.required_bytes", required_bytes)?,
            limit_bytes: unsigned("capacity_range.limit_bytes", limit_bytes)?,
        };
        if wanted.limit_bytes != 0 && wanted.limit_bytes < wanted.required_bytes {
            let reason = format!("below required_bytes {required_bytes}");
            return Err(Error::invalid("capacity_range.limit_bytes", limit_bytes.to_string(), reason));
        }
        Ok(wanted)
    }

    /// The size of a new volume: exactly what is required.
    pub(crate) fn choose(self) -> u64 {
        match (self.required_bytes, self.limit_bytes) {
            (0, 0) => DEFAULT_BYTES,
            (0, limit) => limit.min(DEFAULT_BYTES),
            (required, _) => required,
        }
    }

    pub(crate) fn admits(self, bytes: u64) -> bool {
        bytes >= self.required_bytes && (self.limit_bytes == 0 || bytes <= self.limit_bytes)
    }
}

impl std::fmt::Display for WantedCapacity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "at least {} bytes", self.required_bytes)?;
        if self.limit_bytes != 0 {
            write!(f, " and at most {}", self.limit_bytes)?;
        }
        Ok(())
    }
}

/// Why a claim of `wanted_bytes` does not fit; `None` when it does.
pub(crate) fn refusal(wanted_bytes: u64, committed_bytes: u64, pool_bytes: u64) -> Option<Error> {
    if wanted_bytes > pool_bytes {
        return Some(Error::LargerThanPool { wanted_bytes, pool_bytes });
    }
    (committed_bytes.saturating_add(wanted_bytes) > pool_bytes).then_some(Error::PoolFull {
        wanted_bytes,
        committed_bytes,
        pool_bytes,
    })
}

/// `1073741824`, `1Gi` or `1G`, as Kubernetes quantities are written, whole numbers only.
pub(crate) fn parse_quantity(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match &text[digits.len()..] {
        "" => 1,
        "k" => 1000,
        "M" => 1000 * 1000,
        "G" => 1000 * 1000 * 1000,
        "T" => 1000 * 1000 * 1000 * 1000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        other => return Err(format!("unknown unit {other:?}: known are k M G T Ki Mi Gi Ti")),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .filter(|bytes| *bytes > 0 && i64::try_from(*bytes).is_ok())
        .ok_or_else(|| format!("{text:?} is no whole number of bytes from 1 to 2^63-1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(required_bytes: i64, limit_bytes: i64) -> Result<WantedCapacity> {
        WantedCapacity::parse(Some(&CapacityRange { required_bytes, limit_bytes }))
    }

    #[test]
    fn a_volume_gets_exactly_what_is_required() {
        for (required, limit, chosen) in
            [(0, 0, DEFAULT_BYTES), (5, 0, 5), (5, 5, 5), (5, 9, 5), (0, 7, 7), (0, i64::MAX, DEFAULT_BYTES)]
        {
            let wanted = wanted(required, limit).unwrap();
            assert_eq!(wanted.choose(), chosen, "{required}..{limit}");
            assert!(wanted.admits(chosen));
        }
    }

    #[test]
    fn negative_and_contradictory_ranges_are_refused() {
        for (required, limit) in [(-1, 0), (0, -1), (2, 1)] {
            assert!(
                matches!(wanted(required, limit), Err(Error::InvalidField { .. })),
                "{required}..{limit}"
            );
        }
    }

    #[test]
    fn the_pools_size_and_what_is_left_of_it_are_different_refusals() {
        assert!(refusal(10, 0, 10).is_none());
        assert!(matches!(refusal(11, 0, 10), Some(Error::LargerThanPool { .. })));
        assert!(matches!(refusal(10, 1, 10), Some(Error::PoolFull { committed_bytes: 1, .. })));
        assert!(matches!(refusal(1, u64::MAX, 10), Some(Error::PoolFull { .. })));
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, bytes) in
            [("1", 1), ("1k", 1000), ("2Mi", 2 << 20), ("1Gi", 1 << 30), ("3T", 3_000_000_000_000)]
        {
            assert_eq!(parse_quantity(text), Ok(bytes));
        }
        for text in ["", "Gi", "-1", "1.5Gi", "1GB", "0", "9223372036854775808", "99999999Ti"] {
            assert!(parse_quantity(text).is_err(), "{text}");
        }
    }
}
