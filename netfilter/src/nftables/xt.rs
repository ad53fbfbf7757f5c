//! Decodes xtables matches and targets as written by iptables-nft: C structures in host byte order
//! (`include/uapi/linux/netfilter/`).

use std::net::{IpAddr, SocketAddr};

use super::expression::Expression;
use crate::attributes::text;

/// `NF_NAT_RANGE_MAP_IPS` and `NF_NAT_RANGE_PROTO_SPECIFIED`.
const ADDRESS_AND_PORT: u32 = 0x1 | 0x2;

/// The text of a `comment` match: `struct xt_comment_info { char comment[256]; }`.
pub(super) fn comment(expression: &Expression) -> Option<String> {
    match expression {
        Expression::XtMatch { name, info, .. } if name == "comment" => Some(text(info)),
        _ => None,
    }
}

/// The destination of a `DNAT` target with one address and port. Since revision 2, both families
/// share one structure (`struct nf_nat_range2`): flags, first and last address with 16 bytes each,
/// first and last port. Before, IPv6 had the same without the last fields (revision 1), and IPv4
/// its own (revision 0, `struct nf_nat_ipv4_multi_range_compat`): a count, flags, addresses of 4
/// bytes.
pub(super) fn dnat_target(expression: &Expression) -> Option<SocketAddr> {
    let Expression::XtTarget { name, revision, info } = expression else { return None };
    if name != "DNAT" {
        return None;
    }
    let (at, length) = if *revision == 0 { (4, 4) } else { (0, 16) };
    let flags = u32::from_ne_bytes(*info.get(at..)?.first_chunk()?);
    let mut rest = info.get(at + 4..)?;
    let mut take = |length| {
        let (taken, behind) = rest.split_at_checked(length)?;
        rest = behind;
        Some(taken)
    };
    let (first, last) = (take(length)?, take(length)?);
    let (port, last_port) = (take(2)?, take(2)?);
    if flags & ADDRESS_AND_PORT != ADDRESS_AND_PORT || first != last || port != last_port {
        return None;
    }
    Some(SocketAddr::new(address(first)?, u16::from_be_bytes(port.try_into().ok()?)))
}

/// 16 bytes are an IPv4 address if all after the first 4 are zero: no container has the
/// corresponding IPv6 address.
fn address(octets: &[u8]) -> Option<IpAddr> {
    let (first, rest) = octets.split_first_chunk::<4>()?;
    if rest.iter().all(|octet| *octet == 0) {
        return Some((*first).into());
    }
    Some(<[u8; 16]>::try_from(octets).ok()?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dnat(revision: u32, info: &[u8]) -> Option<String> {
        let target = Expression::XtTarget { name: "DNAT".to_owned(), revision, info: info.to_vec() };
        dnat_target(&target).map(|to| to.to_string())
    }

    fn range(flags: u32, first: &str, last: &str, ports: [u16; 2]) -> Vec<u8> {
        let octets = |text: &str| match text.parse().unwrap() {
            IpAddr::V4(ip) => [&ip.octets()[..], &[0; 12]].concat(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        let ports = ports.map(u16::to_be_bytes).concat();
        [flags.to_ne_bytes().to_vec(), octets(first), octets(last), ports, vec![0; 8]].concat()
    }

    #[test]
    fn a_dnat_to_one_address_and_port_is_understood() {
        assert_eq!(dnat(2, &range(3, "10.7.2.2", "10.7.2.2", [80, 80])).as_deref(), Some("10.7.2.2:80"));
        assert_eq!(dnat(1, &range(3, "fd00::2", "fd00::2", [80, 80])).as_deref(), Some("[fd00::2]:80"));
        let old = [&[1, 0, 0, 0, 3, 0, 0, 0][..], &[10, 7, 2, 2], &[10, 7, 2, 2], &[0, 80, 0, 80]].concat();
        assert_eq!(dnat(0, &old).as_deref(), Some("10.7.2.2:80"));
    }

    #[test]
    fn ranges_and_torn_structures_are_not() {
        assert_eq!(dnat(2, &range(3, "10.7.2.2", "10.7.2.3", [80, 80])), None);
        assert_eq!(dnat(2, &range(3, "10.7.2.2", "10.7.2.2", [80, 81])), None);
        assert_eq!(dnat(2, &range(1, "10.7.2.2", "10.7.2.2", [0, 0])), None);
        let whole = range(3, "10.7.2.2", "10.7.2.2", [80, 80]);
        for length in 0..40 {
            assert_eq!(dnat(2, &whole[..length]), None);
        }
    }
}
