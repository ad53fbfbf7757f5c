//! Sizes: what a claim may have, and how a person writes one.

use proto::csi::CapacityRange;
use quantity::{Quantity, QuantityError};

use crate::error::{Error, Result};
use crate::model::records::Source;

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

    /// The size of a new volume that is to hold all of `source`: as much as that
    /// has, unless more is required.
    pub(crate) fn choose_for(self, source: &Source, source_bytes: u64) -> Result<u64> {
        let chosen = if self.required_bytes == 0 { source_bytes } else { self.required_bytes };
        if chosen >= source_bytes && self.admits(chosen) {
            return Ok(chosen);
        }
        let wanted_bytes = if self.required_bytes == 0 { self.limit_bytes } else { self.required_bytes };
        Err(Error::SourceLarger { origin: source.to_string(), source_bytes, wanted_bytes })
    }

    /// The size that a volume of `bytes` is to grow to: exactly what is required.
    pub(crate) fn growth(self, bytes: u64) -> Option<u64> {
        (self.required_bytes > bytes).then_some(self.required_bytes)
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

/// What the pool has, and what of it may be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// The most that one claim may have.
    pub pool_bytes: u64,
    /// The most that all claims together may have.
    pub promised_bytes: u64,
    /// `None`: its file system makes inodes as long as there is space.
    pub inodes: Option<InodeRoom>,
}

/// What a pool has of inodes, and what of them may be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InodeRoom {
    pub promised: u64,
    /// One inode for so many bytes of a claim: [`BYTES_PER_INODE`], or as many as its file
    /// system has, so that the inodes last as long as the bytes do.
    pub bytes_each: u64,
}

impl InodeRoom {
    /// What a claim may have where `committed` are claimed.
    pub(crate) fn bytes_left(self, committed: u64) -> u64 {
        let left = self.promised.saturating_sub(committed).saturating_sub(OWN_INODES);
        if left < LEAST_INODES { 0 } else { left.saturating_mul(self.bytes_each) }
    }
}

/// Why a claim of `wanted_bytes` does not fit; `None` when it does.
pub(crate) fn refusal(wanted_bytes: u64, committed_bytes: u64, room: Room) -> Option<Error> {
    let Room { pool_bytes, promised_bytes, inodes: _ } = room;
    if wanted_bytes > pool_bytes {
        return Some(Error::LargerThanPool { wanted_bytes, pool_bytes });
    }
    (committed_bytes.saturating_add(wanted_bytes) > promised_bytes).then_some(Error::PoolFull {
        wanted_bytes,
        committed_bytes,
        pool_bytes: promised_bytes,
    })
}

/// Why a claim of `wanted` inodes does not fit; `None` when it does.
pub(crate) fn inode_refusal(wanted: u64, committed: u64, room: InodeRoom) -> Option<Error> {
    let promised = room.promised;
    (committed.saturating_add(wanted) > promised).then_some(Error::PoolOutOfInodes {
        wanted,
        committed,
        promised,
    })
}

/// One inode for so many bytes, unless the pool's file system has fewer.
pub(crate) const BYTES_PER_INODE: u64 = 4096;
/// What the smallest volume may hold.
const LEAST_INODES: u64 = 1024;
/// What the driver itself keeps of each volume and snapshot: its directories and records.
pub(crate) const OWN_INODES: u64 = 16;

/// The most that a volume may hold; 0 is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VolumeLimits {
    pub bytes: u64,
    /// Files, directories and links.
    pub inodes: u64,
}

/// The most files, directories and links a volume of that size may hold: one for each
/// `bytes_each`, and never fewer than 1024. 0 for a volume without a limit.
pub(crate) fn inode_limit(capacity_bytes: u64, bytes_each: u64) -> u64 {
    if capacity_bytes == 0 { 0 } else { (capacity_bytes / bytes_each.max(1)).max(LEAST_INODES) }
}

/// A figure that a daemon gave, as far as it can be true: a volume holds no more than
/// `limit`; 0 is no limit.
pub(crate) fn clamped(figure: u64, limit: u64) -> u64 {
    if limit == 0 { figure } else { figure.min(limit) }
}

/// How many times the pool's size may be promised: 1 to 100, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overcommit {
    thousandths: u32,
}

impl Overcommit {
    pub const NONE: Self = Self { thousandths: 1000 };

    /// `1`, `1.5` or `2.125`.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let wrong = || format!("{text:?} is no number from 1 to 100 with at most three decimals");
        let (whole, decimals) = text.split_once('.').unwrap_or((text, "0"));
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !is_number(whole) || !is_number(decimals) || decimals.len() > 3 {
            return Err(wrong());
        }
        let whole: u32 = whole.parse().map_err(|_| wrong())?;
        let decimals: u32 = format!("{decimals:0<3}").parse().map_err(|_| wrong())?;
        let thousandths = whole.checked_mul(1000).and_then(|n| n.checked_add(decimals));
        thousandths
            .filter(|n| (1000..=100_000).contains(n))
            .map(|thousandths| Self { thousandths })
            .ok_or_else(wrong)
    }

    /// What may be promised of a pool of `bytes`.
    pub(crate) fn of(self, bytes: u64) -> u64 {
        let promised = u128::from(bytes) * u128::from(self.thousandths) / 1000;
        u64::try_from(promised).unwrap_or(u64::MAX)
    }
}

/// A number of bytes as a Kubernetes quantity: `1073741824`, `1Gi` or `1.5G`.
pub(crate) fn parse_bytes(text: &str) -> std::result::Result<u64, String> {
    let quantity: Quantity = text.parse().map_err(|e: QuantityError| e.to_string())?;
    let bytes = quantity.exact_value().filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| format!("{text:?} is not a whole number of bytes, at least 1"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ids::VolumeId;

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
    fn a_copy_gets_the_size_of_its_source_or_more() {
        let source = Source::Volume(VolumeId::from_key("0123456789abcdef0123456789abcdef").unwrap());
        let choose = |required, limit| wanted(required, limit).unwrap().choose_for(&source, 5);
        for (required, limit, chosen) in [(0, 0, 5), (0, 5, 5), (5, 0, 5), (7, 9, 7)] {
            assert_eq!(choose(required, limit).unwrap(), chosen, "{required}..{limit}");
        }
        for (required, limit, wanted) in [(4, 0, 4), (0, 4, 4), (3, 4, 3)] {
            let error = choose(required, limit).unwrap_err();
            assert!(
                matches!(error, Error::SourceLarger { wanted_bytes, source_bytes: 5, .. } if wanted_bytes == wanted),
                "{error}"
            );
        }
    }

    #[test]
    fn a_volume_grows_to_exactly_what_is_required_and_never_shrinks() {
        for (required, limit, growth) in [(5, 0, None), (6, 0, Some(6)), (6, 9, Some(6)), (0, 9, None)] {
            assert_eq!(wanted(required, limit).unwrap().growth(5), growth, "{required}..{limit}");
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
        let room = Room { pool_bytes: 10, promised_bytes: 15, inodes: None };
        assert!(refusal(10, 5, room).is_none());
        assert!(matches!(refusal(11, 0, room), Some(Error::LargerThanPool { pool_bytes: 10, .. })));
        let full = refusal(10, 6, room);
        assert!(matches!(full, Some(Error::PoolFull { committed_bytes: 6, pool_bytes: 15, .. })));
        assert!(matches!(refusal(1, u64::MAX, room), Some(Error::PoolFull { .. })));
    }

    #[test]
    fn a_volume_has_its_share_of_the_pools_inodes() {
        assert_eq!(inode_limit(0, 4096), 0);
        assert_eq!(inode_limit(1, 4096), LEAST_INODES);
        assert_eq!(inode_limit(1 << 30, 4096), 262_144);
        assert_eq!(inode_limit(1 << 30, 16_384), 65_536);
        let room = InodeRoom { promised: 5000, bytes_each: 16_384 };
        assert!(inode_refusal(1000, 4000, room).is_none());
        let refused = inode_refusal(1001, 4000, room);
        let wanted = Some(Error::PoolOutOfInodes { wanted: 1001, committed: 4000, promised: 5000 });
        assert_eq!(refused.map(|e| e.to_string()), wanted.map(|e| e.to_string()));
        assert_eq!(room.bytes_left(4000), 0, "fewer than the smallest volume has");
        let bytes = room.bytes_left(1000);
        assert_eq!(bytes, (4000 - OWN_INODES) * 16_384);
        assert!(inode_refusal(inode_limit(bytes, 16_384) + OWN_INODES, 1000, room).is_none());
    }

    #[test]
    fn a_factor_has_three_decimals_and_bounds() {
        for (text, of_ten_thousand) in [("1", 10_000), ("1.5", 15_000), ("2.125", 21_250), ("100", 1_000_000)]
        {
            assert_eq!(Overcommit::parse(text).unwrap().of(10_000), of_ten_thousand, "{text}");
        }
        assert_eq!(Overcommit::parse("100").unwrap().of(u64::MAX), u64::MAX);
        for text in ["", ".", "1.", ".5", "0.999", "100.001", "1.0001", "-1", "1e2", "99999999999", "+1"] {
            assert!(Overcommit::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        for (text, bytes) in
            [("1", 1), ("1k", 1000), ("2Mi", 2 << 20), ("1.5Gi", 3 << 29), ("3T", 3_000_000_000_000)]
        {
            assert_eq!(parse_bytes(text), Ok(bytes));
        }
        for text in ["", "Gi", "-1", "0.5", "1GB", "0", "9223372036854775808", "99999999Ti"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }
}
