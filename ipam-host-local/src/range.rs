//! Ranges of addresses: validation, and the next address. No I/O.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnetwork::IpNetwork;

use crate::RangeError;

/// A range as written in the configuration.
#[derive(Clone, Debug, Default)]
pub struct RawRange {
    pub subnet: Option<IpNetwork>,
    pub start: Option<IpAddr>,
    pub end: Option<IpAddr>,
    pub gateway: Option<IpAddr>,
}

/// Addresses from `start` to `end`, both inclusive, in one subnet with at least two host bits. The
/// gateway is never allocated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    pub subnet: IpNetwork,
    pub start: IpAddr,
    pub end: IpAddr,
    pub gateway: IpAddr,
}

impl Range {
    pub(crate) fn new(raw: &RawRange) -> Result<Self, RangeError> {
        let subnet = raw.subnet.ok_or(RangeError::NoSubnet)?;
        let bits = if subnet.is_ipv4() { 32 } else { 128 };
        if subnet.prefix() > bits - 2 {
            return Err(RangeError::TooSmall { network: subnet });
        }
        if subnet.ip().to_canonical() != subnet.ip() {
            return Err(RangeError::MaskOfOtherFamily);
        }
        if subnet.ip() != subnet.network() {
            return Err(RangeError::HostBits { length: subnet.prefix(), network: subnet.network() });
        }
        let bound = |name, given: Option<IpAddr>, default| match given.map(|ip| ip.to_canonical()) {
            None => Ok(default),
            Some(ip) if subnet.contains(ip) => Ok(ip),
            Some(ip) => Err(RangeError::Outside { bound: name, ip, network: subnet }),
        };
        let first = next(subnet.network());
        let start = bound("RangeStart", raw.start, first)?;
        let end = bound("RangeEnd", raw.end, last_host(&subnet))?;
        if number(end) < number(start) {
            // The reference's error names the bound that was given, the start first. It accepts a
            // start beyond the default end, and allocates from there.
            let (bound, ip) = if raw.start.is_some() { ("RangeStart", start) } else { ("RangeEnd", end) };
            return Err(RangeError::Outside { bound, ip, network: subnet });
        }
        Ok(Self { subnet, start, end, gateway: raw.gateway.map_or(first, |ip| ip.to_canonical()) })
    }

    pub fn contains(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.start.is_ipv4() && (number(self.start)..=number(self.end)).contains(&number(ip))
    }

    fn whole(&self) -> Vec<Segment<'_>> {
        self.between(self.start, self.end)
    }

    /// The addresses from `first` to `last`, both inclusive and in this range, without the gateway.
    fn between(&self, first: IpAddr, last: IpAddr) -> Vec<Segment<'_>> {
        let mut segments = Vec::with_capacity(2);
        let mut push = |first, last| segments.push(Segment { first, last, range: self });
        let whole = Segment { first, last, range: self };
        if !whole.contains(self.gateway) {
            push(first, last);
            return segments;
        }
        if self.gateway != first {
            push(first, previous(self.gateway));
        }
        if self.gateway != last {
            push(next(self.gateway), last);
        }
        segments
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.contains(other.start) || self.contains(other.end) || other.contains(self.start)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.start, self.end)
    }
}

/// One or more ranges of one family that do not overlap; ADD takes one address of each set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeSet {
    ranges: Vec<Range>,
}

impl RangeSet {
    /// Validates the ranges and fills in the defaults: all addresses between network and broadcast
    /// address; the first one is the gateway.
    pub fn new(raw: &[RawRange]) -> Result<Self, RangeError> {
        let ranges = raw.iter().map(Range::new).collect::<Result<Vec<_>, _>>()?;
        let first = ranges.first().ok_or(RangeError::Empty)?;
        if ranges.iter().any(|range| range.start.is_ipv4() != first.start.is_ipv4()) {
            return Err(RangeError::MixedFamilies);
        }
        for (at, range) in ranges.iter().enumerate() {
            if let Some(other) = ranges[at + 1..].iter().find(|other| range.overlaps(other)) {
                return Err(RangeError::Overlap { first: range.to_string(), second: other.to_string() });
            }
        }
        Ok(Self { ranges })
    }

    pub fn is_ipv4(&self) -> bool {
        self.ranges[0].start.is_ipv4()
    }

    pub fn contains(&self, ip: IpAddr) -> bool {
        self.range_of(ip).is_some()
    }

    pub fn range_of(&self, ip: IpAddr) -> Option<&Range> {
        self.ranges.iter().find(|range| range.contains(ip))
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        self.ranges.iter().any(|a| other.ranges.iter().any(|b| a.overlaps(b)))
    }

    /// Every address once, without gateways: round robin from the one after `last`, or from the
    /// first if `last` is not in this set.
    pub fn round(&self, last: Option<IpAddr>) -> Vec<Segment<'_>> {
        let position = last.and_then(|ip| Some((self.ranges.iter().position(|r| r.contains(ip))?, ip)));
        let Some((at, ip)) = position else {
            return self.ranges.iter().flat_map(Range::whole).collect();
        };
        let (before, from_here) = self.ranges.split_at(at);
        let (here, after) = (&from_here[0], &from_here[1..]);
        let rest = if ip == here.end { Vec::new() } else { here.between(next(ip), here.end) };
        let others = after.iter().chain(before).flat_map(Range::whole);
        rest.into_iter().chain(others).chain(here.between(here.start, ip)).collect()
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each: Vec<String> = self.ranges.iter().map(Range::to_string).collect();
        f.write_str(&each.join(","))
    }
}

/// Consecutive addresses of one range that may be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment<'a> {
    pub first: IpAddr,
    /// Not before `first`.
    pub last: IpAddr,
    pub range: &'a Range,
}

impl Segment<'_> {
    pub fn contains(&self, ip: IpAddr) -> bool {
        ip.is_ipv4() == self.first.is_ipv4() && (number(self.first)..=number(self.last)).contains(&number(ip))
    }

    /// In their order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let last = self.last;
        std::iter::successors(Some(self.first), move |ip| (*ip != last).then(|| next(*ip)))
    }
}

/// The address as a number, comparable within one family.
fn number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u128::from(u32::from(v4)),
        IpAddr::V6(v6) => u128::from(v6),
    }
}

/// The following address of the same family.
fn next(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from(u32::from(v4).wrapping_add(1))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6).wrapping_add(1))),
    }
}

/// The preceding address of the same family.
fn previous(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from(u32::from(v4).wrapping_sub(1))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6).wrapping_sub(1))),
    }
}

/// The last address; for IPv4, the one before the broadcast address.
fn last_host(subnet: &IpNetwork) -> IpAddr {
    match subnet {
        IpNetwork::V4(v4) => IpAddr::V4(Ipv4Addr::from(u32::from(v4.broadcast()) - 1)),
        IpNetwork::V6(v6) => IpAddr::V6(v6.broadcast()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn raw(subnet: &str, start: &str, end: &str, gateway: &str) -> RawRange {
        RawRange {
            subnet: cni_plugin::conf::parse_cidr(subnet),
            start: start.parse().ok(),
            end: end.parse().ok(),
            gateway: gateway.parse().ok(),
        }
    }

    fn set(ranges: &[RawRange]) -> RangeSet {
        RangeSet::new(ranges).unwrap()
    }

    fn round(set: &RangeSet, last: Option<&str>) -> Vec<String> {
        let last = last.map(|ip| ip.parse().unwrap());
        set.round(last).iter().flat_map(Segment::addresses).map(|ip| ip.to_string()).collect()
    }

    #[test]
    fn defaults_leave_out_network_gateway_and_broadcast() {
        let v4 = Range::new(&raw("10.0.0.0/29", "", "", "")).unwrap();
        assert_eq!(v4.to_string(), "10.0.0.1-10.0.0.6");
        assert_eq!(v4.gateway.to_string(), "10.0.0.1");
        let v6 = Range::new(&raw("fd00::/120", "", "", "")).unwrap();
        assert_eq!(v6.to_string(), "fd00::1-fd00::ff");
    }

    #[test]
    fn wrong_ranges_are_refused_in_the_references_words() {
        let refused = |range: RawRange| Range::new(&range).unwrap_err().to_string();
        assert_eq!(refused(raw("", "", "", "")), "IP <nil> not v4 nor v6");
        assert_eq!(refused(raw("10.0.0.0/31", "", "", "")), "Network 10.0.0.0/31 too small to allocate from");
        assert_eq!(
            refused(raw("10.0.0.5/24", "", "", "")),
            "Network has host bits set. For a subnet mask of length 24 the network address is 10.0.0.0"
        );
        assert_eq!(
            refused(raw("10.0.0.0/24", "10.0.1.1", "", "")),
            "RangeStart 10.0.1.1 not in network 10.0.0.0/24"
        );
        assert_eq!(
            refused(raw("10.0.0.0/24", "", "fd00::1", "")),
            "RangeEnd fd00::1 not in network 10.0.0.0/24"
        );
        assert_eq!(
            refused(raw("10.0.0.0/24", "10.0.0.9", "10.0.0.3", "")),
            "RangeStart 10.0.0.9 not in network 10.0.0.0/24"
        );
        assert_eq!(refused(raw("::ffff:10.0.0.0/120", "", "", "")), "IPNet IP and Mask version mismatch");

        let refused = |ranges: &[RawRange]| RangeSet::new(ranges).unwrap_err().to_string();
        assert_eq!(refused(&[]), "empty range set");
        let (v4, v6) = (raw("10.0.0.0/24", "", "", ""), raw("fd00::/64", "", "", ""));
        assert_eq!(refused(&[v4.clone(), v6]), "mixed address families");
        assert_eq!(refused(&[v4.clone(), v4]), "subnets 10.0.0.1-10.0.0.254 and 10.0.0.1-10.0.0.254 overlap");
    }

    #[test]
    fn a_round_starts_after_the_last_address_and_ends_with_it() {
        let one = set(&[raw("10.0.0.0/29", "", "", "")]);
        assert_eq!(round(&one, None), ["10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
        assert_eq!(
            round(&one, Some("10.0.0.4")),
            ["10.0.0.5", "10.0.0.6", "10.0.0.2", "10.0.0.3", "10.0.0.4"]
        );
        assert_eq!(round(&one, Some("10.9.0.4")).len(), 5, "a last address of elsewhere does not count");
    }

    #[test]
    fn a_round_goes_through_all_ranges_of_the_set() {
        let two = set(&[
            raw("10.0.0.0/24", "10.0.0.5", "10.0.0.6", ""),
            raw("10.0.1.0/24", "10.0.1.5", "10.0.1.7", "10.0.1.6"),
        ]);
        assert_eq!(round(&two, Some("10.0.0.6")), ["10.0.1.5", "10.0.1.7", "10.0.0.5", "10.0.0.6"]);
    }

    #[test]
    fn a_round_ends_where_all_addresses_end() {
        let top = set(&[raw("ffff::/16", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe", "", "")]);
        assert_eq!(
            round(&top, None),
            ["ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]
        );
        let v4 = set(&[raw("255.255.255.0/24", "255.255.255.254", "255.255.255.255", "")]);
        assert_eq!(round(&v4, Some("255.255.255.255")), ["255.255.255.254", "255.255.255.255"]);
    }

    fn any_ip() -> impl Strategy<Value = Option<IpAddr>> {
        let near = |offset: u8| IpAddr::from([10, 0, 0, offset]);
        prop_oneof![
            3 => (0..32u8).prop_map(move |offset| Some(near(offset))),
            3 => Just(None),
            1 => any::<[u8; 4]>().prop_map(|bytes| Some(bytes.into())),
            1 => any::<[u8; 16]>().prop_map(|bytes| Some(bytes.into())),
        ]
    }

    proptest! {
        /// Whatever a configuration says: a set that is accepted has every
        /// address once a round, all of its subnets, never a gateway.
        #[test]
        fn a_round_has_every_address_once(
            raws in proptest::collection::vec(
                (any_ip(), 24..34u8, any_ip(), any_ip(), any_ip()).prop_map(|(ip, prefix, start, end, gateway)| RawRange {
                    subnet: ip.and_then(|ip| IpNetwork::new(ip, prefix).ok()),
                    start,
                    end,
                    gateway,
                }),
                0..4,
            ),
            last in any_ip(),
        ) {
            let Ok(set) = RangeSet::new(&raws) else { return Ok(()) };
            let segments = set.round(last);
            // The large ones of IPv6 have too many to count.
            let few = set.ranges.iter().all(|range| number(range.end) - number(range.start) < 300);
            prop_assume!(few);
            let round: Vec<IpAddr> = segments.iter().flat_map(Segment::addresses).collect();
            for segment in &segments {
                prop_assert!(segment.addresses().all(|ip| segment.contains(ip) && segment.range.subnet.contains(ip)));
            }
            let mut expected: Vec<IpAddr> = Vec::new();
            for range in &set.ranges {
                let whole = Segment { first: range.start, last: range.end, range };
                expected.extend(whole.addresses().filter(|ip| *ip != range.gateway));
            }
            if let Some(last) = last.filter(|last| expected.contains(last)) {
                prop_assert_eq!(round.last(), Some(&last), "its turn comes at the end");
            }
            let mut sorted = round;
            sorted.sort();
            expected.sort();
            prop_assert_eq!(sorted, expected);
        }
    }

    #[test]
    fn a_range_of_nothing_but_the_gateway_gives_nothing() {
        let gateway_only = set(&[raw("10.0.0.0/24", "10.0.0.1", "10.0.0.1", "")]);
        assert!(round(&gateway_only, None).is_empty());
        assert!(round(&gateway_only, Some("10.0.0.1")).is_empty());
    }
}
