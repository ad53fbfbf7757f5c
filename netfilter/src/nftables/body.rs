//! Compiles rules in the notation of nft to the same bytecode as nft, so that `nft list ruleset`
//! shows them like its own.

use std::net::{IpAddr, SocketAddr};

use super::Family;
use super::expression::{CmpOp, Expression, MetaKey, NatKind, PayloadBase, Verdict};

const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;
const ETHERTYPE_IPV4: [u8; 2] = [0x08, 0x00];
const ETHERTYPE_IPV6: [u8; 2] = [0x86, 0xdd];

/// `NFT_FIB_RESULT_ADDRTYPE`, `NFTA_FIB_F_*`, `RTN_LOCAL`.
const FIB_ADDRESS_TYPE: u32 = 3;
const FIB_SADDR: u32 = 1;
const FIB_DADDR: u32 = 2;
const FIB_IIF: u32 = 8;
const LOCAL: u32 = 2;

/// The kernel's `IFNAMSIZ`.
const INTERFACE_NAME: usize = 16;

/// Whether equality or inequality matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Is {
    Equal,
    Not,
}

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    /// `IPPROTO_*`.
    pub fn number(self) -> u8 {
        match self {
            Self::Tcp => 6,
            Self::Udp => 17,
            Self::Sctp => 132,
        }
    }
}

/// A rule under construction: each method appends the expressions of its nft statement, for a table
/// of `family`.
///
/// ```text
/// RuleBody::new(Family::Inet)
///     .saddr(Is::Equal, "10.7.2.2".parse()?, 32)    ip saddr 10.7.2.2
///     .daddr(Is::Not, "10.7.2.0".parse()?, 24)      ip daddr != 10.7.2.0/24
///     .masquerade()                                 masquerade
///     .build()
/// ```
///
/// The caller must choose addresses of the table's family: others make rules that the kernel
/// refuses or that never match.
#[derive(Debug, Clone)]
#[must_use]
pub struct RuleBody {
    family: Family,
    /// The network and the transport protocol that the rule is already limited to: nft writes these
    /// once for each rule.
    network: Option<u8>,
    transport: Option<u8>,
    expressions: Vec<Expression>,
}

impl RuleBody {
    pub fn new(family: Family) -> Self {
        Self { family, network: None, transport: None, expressions: Vec::new() }
    }

    pub fn build(self) -> Vec<Expression> {
        self.expressions
    }

    /// `ip saddr` or `ip6 saddr`: a single address with prefix length 32 or 128, otherwise a
    /// network. Host bits are cleared.
    pub fn saddr(self, is: Is, address: IpAddr, prefix: u8) -> Self {
        let offset = if address.is_ipv4() { 12 } else { 8 };
        self.address(offset, is, address, prefix)
    }

    /// `ip daddr` or `ip6 daddr`.
    pub fn daddr(self, is: Is, address: IpAddr, prefix: u8) -> Self {
        let offset = if address.is_ipv4() { 16 } else { 24 };
        self.address(offset, is, address, prefix)
    }

    /// `tcp dport`.
    pub fn dport(self, protocol: Protocol, is: Is, port: u16) -> Self {
        self.port(protocol, 2, is, port)
    }

    /// `tcp sport`.
    pub fn sport(self, protocol: Protocol, is: Is, port: u16) -> Self {
        self.port(protocol, 0, is, port)
    }

    /// `meta l4proto`.
    pub fn l4proto(mut self, is: Is, number: u8) -> Self {
        self.expressions.push(Expression::Meta { register: 1, key: MetaKey::L4Proto });
        self.compare(is, vec![number])
    }

    /// `iifname "eth0"`; a final `*` matches any suffix.
    pub fn iifname(mut self, is: Is, name: &str) -> Self {
        self.expressions.push(Expression::Meta { register: 1, key: MetaKey::IifName });
        self.compare(is, interface_name(name))
    }

    /// `oifname "eth0"`.
    pub fn oifname(mut self, is: Is, name: &str) -> Self {
        self.expressions.push(Expression::Meta { register: 1, key: MetaKey::OifName });
        self.compare(is, interface_name(name))
    }

    /// `ether saddr`, in tables of the bridge family.
    pub fn ether_saddr(mut self, is: Is, mac: [u8; 6]) -> Self {
        self.expressions.push(Expression::Payload {
            register: 1,
            base: PayloadBase::Link,
            offset: 6,
            length: 6,
        });
        self.compare(is, mac.to_vec())
    }

    /// `fib daddr type local`: the destination is one of this host's addresses.
    pub fn fib_daddr_type_local(self) -> Self {
        self.fib_type_local(Is::Equal, FIB_DADDR)
    }

    /// `fib daddr . iif type local`: the destination is an address of the link through which the
    /// packet arrived.
    pub fn fib_daddr_iif_type_local(self, is: Is) -> Self {
        self.fib_type_local(is, FIB_DADDR | FIB_IIF)
    }

    /// `fib saddr . iif type local`: the source is an address of that link.
    pub fn fib_saddr_iif_type_local(self, is: Is) -> Self {
        self.fib_type_local(is, FIB_SADDR | FIB_IIF)
    }

    fn fib_type_local(mut self, is: Is, flags: u32) -> Self {
        self.expressions.push(Expression::Fib { register: 1, result: FIB_ADDRESS_TYPE, flags });
        self.compare(is, LOCAL.to_ne_bytes().to_vec())
    }

    /// `meta mark & mask == value`; the mask `u32::MAX` stands for `meta mark value`.
    pub fn mark(mut self, is: Is, value: u32, mask: u32) -> Self {
        self.expressions.push(Expression::Meta { register: 1, key: MetaKey::Mark });
        if mask != u32::MAX {
            self = self.bitwise(mask.to_ne_bytes().to_vec(), vec![0; 4]);
        }
        self.compare(is, value.to_ne_bytes().to_vec())
    }

    /// `meta mark set meta mark | bits`.
    pub fn set_mark_bits(mut self, bits: u32) -> Self {
        self.expressions.push(Expression::Meta { register: 1, key: MetaKey::Mark });
        self = self.bitwise((!bits).to_ne_bytes().to_vec(), bits.to_ne_bytes().to_vec());
        self.expressions.push(Expression::SetMeta { register: 1, key: MetaKey::Mark });
        self
    }

    /// `counter`, from 0.
    pub fn counter(self) -> Self {
        self.then(Expression::Counter { packets: 0, bytes: 0 })
    }

    pub fn masquerade(self) -> Self {
        self.then(Expression::Masquerade { flags: 0, ports: None })
    }

    /// `dnat to address:port`.
    pub fn dnat(mut self, to: SocketAddr) -> Self {
        let (family, address) = match to.ip() {
            IpAddr::V4(ip) => (NFPROTO_IPV4, ip.octets().to_vec()),
            IpAddr::V6(ip) => (NFPROTO_IPV6, ip.octets().to_vec()),
        };
        self.expressions.push(Expression::Immediate { register: 1, value: address });
        self.expressions.push(Expression::Immediate { register: 2, value: to.port().to_be_bytes().to_vec() });
        self.then(Expression::Nat {
            kind: NatKind::Destination,
            family: u32::from(family),
            addresses: Some((1, 1)),
            ports: Some((2, 2)),
            flags: 0,
        })
    }

    pub fn jump(self, chain: &str) -> Self {
        self.then(Expression::Verdict(Verdict::Jump(chain.to_owned())))
    }

    pub fn goto(self, chain: &str) -> Self {
        self.then(Expression::Verdict(Verdict::Goto(chain.to_owned())))
    }

    /// `return`.
    pub fn ret(self) -> Self {
        self.then(Expression::Verdict(Verdict::Return))
    }

    pub fn accept(self) -> Self {
        self.then(Expression::Verdict(Verdict::Accept))
    }

    pub fn drop(self) -> Self {
        self.then(Expression::Verdict(Verdict::Drop))
    }

    fn then(mut self, expression: Expression) -> Self {
        self.expressions.push(expression);
        self
    }

    fn compare(self, is: Is, value: Vec<u8>) -> Self {
        let op = match is {
            Is::Equal => CmpOp::Eq,
            Is::Not => CmpOp::Ne,
        };
        self.then(Expression::Cmp { register: 1, op, value })
    }

    fn bitwise(self, mask: Vec<u8>, xor: Vec<u8>) -> Self {
        self.then(Expression::Bitwise { source: 1, register: 1, mask, xor })
    }

    /// A prefix of whole bytes is loaded and compared as such; another one (and the empty one) is
    /// masked.
    fn address(mut self, offset: u32, is: Is, address: IpAddr, prefix: u8) -> Self {
        let octets = match address {
            IpAddr::V4(ip) => ip.octets().to_vec(),
            IpAddr::V6(ip) => ip.octets().to_vec(),
        };
        self.depend_on_network(address.is_ipv4());
        let whole = usize::from(prefix / 8).min(octets.len());
        let by_bytes = prefix > 0 && (prefix.is_multiple_of(8) || whole == octets.len());
        let length = if by_bytes { whole } else { octets.len() };
        self.expressions.push(Expression::Payload {
            register: 1,
            base: PayloadBase::Network,
            offset,
            length: u32::try_from(length).unwrap_or(u32::MAX),
        });
        if by_bytes {
            return self.compare(is, octets[..whole].to_vec());
        }
        let mask = prefix_mask(prefix, octets.len());
        let network = octets.iter().zip(&mask).map(|(octet, mask)| octet & mask).collect();
        let zeroes = vec![0; octets.len()];
        self.bitwise(mask, zeroes).compare(is, network)
    }

    fn port(mut self, protocol: Protocol, offset: u32, is: Is, port: u16) -> Self {
        if self.transport != Some(protocol.number()) {
            self.transport = Some(protocol.number());
            self = self.l4proto(Is::Equal, protocol.number());
        }
        self.expressions.push(Expression::Payload {
            register: 1,
            base: PayloadBase::Transport,
            offset,
            length: 2,
        });
        self.compare(is, port.to_be_bytes().to_vec())
    }

    /// The match that nft puts before an address if the table has more than one protocol.
    fn depend_on_network(&mut self, v4: bool) {
        let protocol = if v4 { NFPROTO_IPV4 } else { NFPROTO_IPV6 };
        if self.network.replace(protocol) == Some(protocol) {
            return;
        }
        let (key, value) = match self.family {
            Family::Ipv4 | Family::Ipv6 => return,
            Family::Inet => (MetaKey::NfProto, vec![protocol]),
            Family::Bridge if v4 => (MetaKey::Protocol, ETHERTYPE_IPV4.to_vec()),
            Family::Bridge => (MetaKey::Protocol, ETHERTYPE_IPV6.to_vec()),
        };
        self.expressions.push(Expression::Meta { register: 1, key });
        self.expressions.push(Expression::Cmp { register: 1, op: CmpOp::Eq, value });
    }
}

/// Padded with zeros to match only this name; not padded for a name that ends with `*`.
fn interface_name(name: &str) -> Vec<u8> {
    if let Some(beginning) = name.strip_suffix('*') {
        return beginning.as_bytes().iter().copied().take(INTERFACE_NAME).collect();
    }
    name.bytes().chain(std::iter::repeat(0)).take(INTERFACE_NAME).collect()
}

fn prefix_mask(prefix: u8, length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| {
            let ones = usize::from(prefix).saturating_sub(index * 8).min(8);
            (0xff00_u16 >> ones).to_le_bytes()[0]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_has_its_ones_in_front() {
        assert_eq!(prefix_mask(20, 4), [0xff, 0xff, 0xf0, 0]);
        assert_eq!(prefix_mask(0, 4), [0; 4]);
        assert_eq!(prefix_mask(32, 4), [0xff; 4]);
        assert_eq!(prefix_mask(62, 16)[..9], [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfc, 0]);
    }

    /// As `nft --debug=netlink` shows `fib daddr type local`, and `strace -e sendmsg` its numbers.
    #[test]
    fn the_routing_table_is_asked_for_the_type_of_the_destination() {
        let local = RuleBody::new(Family::Ipv4).fib_daddr_type_local().build();
        assert_eq!(local[0], Expression::Fib { register: 1, result: 3, flags: 2 });
        assert_eq!(local[1], Expression::Cmp { register: 1, op: CmpOp::Eq, value: vec![2, 0, 0, 0] });
    }

    #[test]
    fn interface_names_are_padded_but_for_wildcards() {
        assert_eq!(interface_name("eth0"), *b"eth0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(interface_name("eth*"), *b"eth");
    }
}
