//! The rules of the nftables backend. Tables, chains, rules and comments are the reference's, so
//! that either side finds the other's. No I/O.
//!
//! ```text
//! prerouting, output   <conditions> fib daddr type local jump hostports_all
//! hostports_all        jump hostip_hostports, jump hostports
//! hostports            [ip daddr H] tcp dport P dnat to C:p        comment = container id
//! masquerading         ip saddr C ip daddr C masquerade            comment = container id
//!                      ip saddr N ip daddr C meta l4proto tcp [ct original ip daddr H]
//!                        ct original proto-dst P ct status dnat masquerade
//! localnet_guard       iifname != "lo" ip daddr 127.0.0.0/8 fib daddr . iif type != local drop
//! ```
//!
//! Only we make the last rule of `masquerading`, for each mapping (`N`: the container's network), and
//! the last chain, for IPv4.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use cni_plugin::Invocation;
use ipnetwork::IpNetwork;
use netfilter::nftables as nf;
use netfilter::nftables::{
    BaseChain, ChainKind, CmpOp, Expression, Hook, Is, PayloadBase, Policy, Rule, RuleBody,
};

use crate::conditions::{Direction, InterfaceName, Match, Side, Subject};
use crate::config::Config;
use crate::error::Error;
use crate::family::Family;
use crate::mapping::{Mapping, Protocol, in_family};

pub(crate) const TABLE: &str = "cni_hostport";
pub(super) const TABLE_COMMENT: &str = "CNI portmap plugin";

pub(super) const HOSTPORTS: &str = "hostports";
/// Old versions of the reference use it for rules with a host address. Ours are in `hostports`, but
/// theirs must be found here.
pub(super) const HOSTIP_HOSTPORTS: &str = "hostip_hostports";
pub(super) const HOSTPORTS_ALL: &str = "hostports_all";
pub(super) const MASQUERADING: &str = "masquerading";
pub(super) const PREROUTING: &str = "prerouting";
pub(super) const OUTPUT: &str = "output";
pub(super) const LOCALNET_GUARD: &str = "localnet_guard";

/// The chains with containers' rules.
pub(super) const CONTAINER_CHAINS: [&str; 3] = [HOSTPORTS, HOSTIP_HOSTPORTS, MASQUERADING];

/// `NFT_CT_STATUS`, and of it `IPS_DST_NAT`.
const CT_STATUS: u32 = 2;
const DESTINATION_REWRITTEN: u32 = 1 << 5;

/// `NFT_CT_PROTO_DST`, `NFT_CT_DST_IP`, `NFT_CT_DST_IP6` and `IP_CT_DIR_ORIGINAL`.
const CT_PORT: u32 = 12;
const CT_ADDRESS_V4: u32 = 20;
const CT_ADDRESS_V6: u32 = 22;
const ORIGINAL: Option<u8> = Some(0);

pub(super) fn family_of(family: Family) -> nf::Family {
    match family {
        Family::V4 => nf::Family::Ipv4,
        Family::V6 => nf::Family::Ipv6,
    }
}

/// The hook of a chain: for the nat chains, nft's named priorities; for the guard, `raw`, before
/// address translation.
pub(super) fn base(chain: &str) -> Option<BaseChain> {
    let (kind, hook, priority) = match chain {
        PREROUTING => (ChainKind::Nat, Hook::Prerouting, -100),
        OUTPUT => (ChainKind::Nat, Hook::Output, -100),
        MASQUERADING => (ChainKind::Nat, Hook::Postrouting, 100),
        LOCALNET_GUARD => (ChainKind::Filter, Hook::Prerouting, -300),
        _ => return None,
    };
    Some(BaseChain { kind, hook, priority, policy: Policy::Accept })
}

/// Identifies an attachment's rules: the container id is in the comment, as in the reference;
/// network and interface are in a part of the rule that nft does not show. The reference's own
/// rules lack that part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) container_id: String,
    pub(crate) tag: Vec<u8>,
}

impl Owner {
    pub(crate) fn of(call: &Invocation) -> Self {
        Self { container_id: call.container_id.clone(), tag: tag(&call.conf.name, &call.ifname) }
    }

    /// `None` if the rule does not say.
    pub(super) fn owns(&self, rule: &Rule) -> Option<bool> {
        if rule.comment.as_deref() != Some(&self.container_id) {
            return Some(false);
        }
        rule.tag.as_ref().map(|tag| *tag == self.tag)
    }
}

/// 16 digits of the network's hash, then the interface name.
pub(super) fn tag(network: &str, ifname: &str) -> Vec<u8> {
    [network_tag(network).as_bytes(), ifname.as_bytes()].concat()
}

pub(super) fn network_tag(network: &str) -> String {
    cni_plugin::sha512_hex(network, 16)
}

/// The interface name, if the tag belongs to `network`.
pub(super) fn interface_in<'a>(tag: &'a [u8], network: &str) -> Option<&'a str> {
    std::str::from_utf8(tag.strip_prefix(network_tag(network).as_bytes())?).ok()
}

/// A rule of one container, without its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) chain: &'static str,
    pub(super) expressions: Vec<Expression>,
    pub(super) effect: Effect,
    /// The rule in nft's syntax.
    pub(super) text: String,
    /// Whether the reference makes it too.
    pub(super) common: bool,
}

/// The rules of the container with this address and its network's prefix length.
pub(super) fn container_rules(
    config: &Config,
    family: Family,
    container: IpNetwork,
) -> Result<Vec<Wanted>, Error> {
    let mappings = in_family(&config.entries, family)?;
    let mut rules: Vec<Wanted> =
        mappings.iter().map(|mapping| forward(mapping, family, container.ip())).collect();
    if config.snat {
        rules.extend(masquerades(config, &mappings, family, container));
    }
    Ok(rules)
}

fn forward(mapping: &Mapping, family: Family, container: IpAddr) -> Wanted {
    let to = SocketAddr::new(container, mapping.container_port);
    let mut body = RuleBody::new(family_of(family));
    let mut text = String::new();
    if let Some(host_ip) = mapping.host_ip {
        body = body.daddr(Is::Equal, host_ip, full(host_ip));
        text = format!("{} daddr {host_ip} ", family_of(family).name());
    }
    let body = body.dport(transport(mapping.protocol), Is::Equal, mapping.host_port).dnat(to);
    text += &format!("{} dport {} dnat to {to}", mapping.protocol.name(), mapping.host_port);
    let Mapping { protocol, host_ip, host_port, container_port: _ } = *mapping;
    let effect = Effect::Forward { protocol, host_ip, host_port, to };
    Wanted { chain: HOSTPORTS, expressions: body.build(), effect, text, common: true }
}

/// Masquerades connections whose answers would not return through the host: from the container to
/// itself, from the host's 127.0.0.1, and from the container's neighbours (which the reference does
/// only in its iptables backend). With `masqAll`, from anywhere.
fn masquerades(config: &Config, mappings: &[Mapping], family: Family, container: IpNetwork) -> Vec<Wanted> {
    let ip = container.ip();
    let name = family_of(family).name();
    let from = |source: IpAddr| {
        let body = RuleBody::new(family_of(family));
        let body = body.saddr(Is::Equal, source, full(source)).daddr(Is::Equal, ip, full(ip));
        Wanted {
            chain: MASQUERADING,
            expressions: body.masquerade().build(),
            effect: Effect::Masquerade { to: ip, host_port: None },
            text: format!("{name} saddr {source} {name} daddr {ip} masquerade"),
            common: true,
        }
    };
    let mut rules = vec![from(ip)];
    if family == Family::V4 {
        rules.push(from(Ipv4Addr::LOCALHOST.into()));
    }
    let (head, text) = if config.masq_all {
        (RuleBody::new(family_of(family)), String::new())
    } else if container.prefix() < full(ip) {
        let network = format!("{}/{}", container.network(), container.prefix());
        let head = RuleBody::new(family_of(family)).saddr(Is::Equal, ip, container.prefix());
        (head, format!("{name} saddr {network} "))
    } else {
        return rules;
    };
    let head = head.daddr(Is::Equal, ip, full(ip));
    let text = format!("{text}{name} daddr {ip}");
    let mut host_ports = BTreeSet::new();
    let distinct = mappings.iter().filter(|m| host_ports.insert((m.protocol, m.host_ip, m.host_port)));
    rules.extend(distinct.map(|mapping| masquerade_mapped(head.clone(), &text, mapping, family, ip)));
    rules
}

/// Masquerades packets that match `head`, on connections through the mapping's host port. Others
/// are left alone: direct ones, and those that another program's rules rewrote, such as
/// kube-proxy's.
fn masquerade_mapped(head: RuleBody, text: &str, mapping: &Mapping, family: Family, to: IpAddr) -> Wanted {
    let Mapping { protocol, host_ip, host_port, container_port: _ } = *mapping;
    let mut text = format!("{text} meta l4proto {}", protocol.name());
    let mut expressions = head.l4proto(Is::Equal, protocol.number()).build();
    let equal = |value: Vec<u8>| Expression::Cmp { register: 1, op: CmpOp::Eq, value };
    if let Some(host_ip) = host_ip {
        let (key, value) = match host_ip {
            IpAddr::V4(ip) => (CT_ADDRESS_V4, ip.octets().to_vec()),
            IpAddr::V6(ip) => (CT_ADDRESS_V6, ip.octets().to_vec()),
        };
        expressions.extend([Expression::Ct { register: 1, key, direction: ORIGINAL }, equal(value)]);
        text += &format!(" ct original {} daddr {host_ip}", family_of(family).name());
    }
    let bytes = |number: u32| number.to_ne_bytes().to_vec();
    expressions.extend([
        Expression::Ct { register: 1, key: CT_PORT, direction: ORIGINAL },
        equal(host_port.to_be_bytes().to_vec()),
        Expression::Ct { register: 1, key: CT_STATUS, direction: None },
        Expression::Bitwise { source: 1, register: 1, mask: bytes(DESTINATION_REWRITTEN), xor: bytes(0) },
        Expression::Cmp { register: 1, op: CmpOp::Ne, value: bytes(0) },
    ]);
    expressions.extend(RuleBody::new(family_of(family)).masquerade().build());
    text += &format!(" ct original proto-dst {host_port} ct status dnat masquerade");
    let effect = Effect::Masquerade { to, host_port: Some(host_port) };
    Wanted { chain: MASQUERADING, expressions, effect, text, common: false }
}

/// The rules of `prerouting` and `output`, with parsed `conditions`.
pub(super) fn hook_rules(conditions: &[Vec<Match>], family: Family) -> Vec<Vec<Expression>> {
    let rule = |matches: &Vec<Match>| {
        let body = matches.iter().fold(RuleBody::new(family_of(family)), add_match);
        body.fib_daddr_type_local().jump(HOSTPORTS_ALL).build()
    };
    conditions.iter().map(rule).collect()
}

fn add_match(body: RuleBody, one: &Match) -> RuleBody {
    let is = if one.negated { Is::Not } else { Is::Equal };
    match &one.subject {
        Subject::Address(Side::Source, network) => body.saddr(is, network.ip(), network.prefix()),
        Subject::Address(Side::Destination, network) => body.daddr(is, network.ip(), network.prefix()),
        Subject::Interface(direction, name) => {
            let name = match name {
                InterfaceName::Exact(name) => name.clone(),
                InterfaceName::StartsWith(name) => format!("{name}*"),
            };
            match direction {
                Direction::In => body.iifname(is, &name),
                Direction::Out => body.oifname(is, &name),
            }
        }
        Subject::Mark(value) => body.mark(is, *value, u32::MAX),
        Subject::L4Protocol(number) => body.l4proto(is, *number),
        Subject::Port(protocol, Side::Source, port) => body.sport(transport(*protocol), is, *port),
        Subject::Port(protocol, Side::Destination, port) => body.dport(transport(*protocol), is, *port),
    }
}

/// The rules of `hostports_all`.
pub(super) fn all_rules() -> [Vec<Expression>; 2] {
    [HOSTIP_HOSTPORTS, HOSTPORTS].map(|chain| RuleBody::new(nf::Family::Ipv4).jump(chain).build())
}

/// The guard. With `route_localnet`, the kernel accepts packets to and from 127.0.0.0/8 on a link,
/// and a pod can send such frames; the guard drops them. It does not affect answers to the host's
/// own 127.0.0.1, since they go to the address that masqueraded it, or links with their own address
/// in 127.0.0.0/8 (a VRF, as the kernel's documentation recommends).
pub(super) fn guard_rules() -> [(Vec<Expression>, &'static str); 2] {
    let loopback = (Ipv4Addr::new(127, 0, 0, 0).into(), 8);
    let from_elsewhere = || RuleBody::new(nf::Family::Ipv4).iifname(Is::Not, "lo");
    let to = from_elsewhere().daddr(Is::Equal, loopback.0, loopback.1);
    let from = from_elsewhere().saddr(Is::Equal, loopback.0, loopback.1);
    [
        (
            to.fib_daddr_iif_type_local(Is::Not).drop().build(),
            "iifname != \"lo\" ip daddr 127.0.0.0/8 fib daddr . iif type != local drop",
        ),
        (
            from.fib_saddr_iif_type_local(Is::Not).drop().build(),
            "iifname != \"lo\" ip saddr 127.0.0.0/8 fib saddr . iif type != local drop",
        ),
    ]
}

/// The effect of a container's rule, read from its bytecode, whichever program wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Effect {
    Forward {
        protocol: Protocol,
        host_ip: Option<IpAddr>,
        host_port: u16,
        to: SocketAddr,
    },
    /// Of packets to this address; with a port, only on connections that were made to this one.
    Masquerade {
        to: IpAddr,
        host_port: Option<u16>,
    },
}

impl Effect {
    /// The container's address.
    pub(crate) fn container(&self) -> IpAddr {
        match self {
            Self::Forward { to, .. } => to.ip(),
            Self::Masquerade { to, .. } => *to,
        }
    }

    /// `None` for rules with another effect. Rules of iptables-nft are understood too, if they use
    /// the kernel's own expressions.
    pub(crate) fn of(rule: &Rule) -> Option<Self> {
        let expressions = &rule.expressions;
        let host_ip = compared(expressions, |base, offset, length| {
            base == PayloadBase::Network && matches!((offset, length), (16, 4) | (24, 16))
        });
        let host_ip = host_ip.and_then(address);
        if let Some(to) = rule.dnat_target() {
            let host_port = compared(expressions, |base, offset, length| {
                (base, offset, length) == (PayloadBase::Transport, 2, 2)
            });
            let host_port = u16::from_be_bytes(host_port?.try_into().ok()?);
            return Some(Self::Forward { protocol: transport_of(expressions)?, host_ip, host_port, to });
        }
        let masquerades = expressions.iter().any(|e| matches!(e, Expression::Masquerade { .. }));
        let host_port = original_port(expressions);
        host_ip.filter(|_| masquerades).map(|to| Self::Masquerade { to, host_port })
    }
}

/// The value that the given part of a packet is compared with for equality.
fn compared(expressions: &[Expression], wanted: impl Fn(PayloadBase, u32, u32) -> bool) -> Option<&[u8]> {
    expressions.windows(2).find_map(|pair| match pair {
        [Expression::Payload { base, offset, length, .. }, Expression::Cmp { op: CmpOp::Eq, value, .. }] => {
            wanted(*base, *offset, *length).then_some(value.as_slice())
        }
        _ => None,
    })
}

/// The port that a connection's original destination is compared with for equality.
fn original_port(expressions: &[Expression]) -> Option<u16> {
    expressions.windows(2).find_map(|pair| match pair {
        [
            Expression::Ct { key: CT_PORT, direction: ORIGINAL, .. },
            Expression::Cmp { op: CmpOp::Eq, value, .. },
        ] => Some(u16::from_be_bytes(value.as_slice().try_into().ok()?)),
        _ => None,
    })
}

fn transport_of(expressions: &[Expression]) -> Option<Protocol> {
    expressions.windows(2).find_map(|pair| match pair {
        [
            Expression::Meta { key: nf::MetaKey::L4Proto, .. },
            Expression::Cmp { op: CmpOp::Eq, value, .. },
        ] => Protocol::from_number(*value.first()?),
        _ => None,
    })
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        _ => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
    }
}

fn transport(protocol: Protocol) -> nf::Protocol {
    match protocol {
        Protocol::Sctp => nf::Protocol::Sctp,
        Protocol::Tcp => nf::Protocol::Tcp,
        Protocol::Udp => nf::Protocol::Udp,
    }
}

/// The prefix length of a single address.
fn full(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}
