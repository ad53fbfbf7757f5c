//! Between routing messages and our types. No I/O.
//!
//! Source: `include/uapi/linux/{rtnetlink,if_link,if_addr,ipv6,netconf}.h`.
//! Of a link's description, some 2 KiB in 60 attributes, a dozen values are
//! read, and nothing is made of the rest: a plugin has no time for it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Address, BridgeSpec, Link, Mac, OperState, PortFlags, PortSpec, Route, RouteSpec, VethSpec};
use crate::wire;
use crate::wire::attributes::{each, find, nest, put, put_text, text};

/// `RTM_*`.
const NEWLINK: u16 = 16;
const DELLINK: u16 = 17;
const GETLINK: u16 = 18;
const SETLINK: u16 = 19;
const NEWADDR: u16 = 20;
const DELADDR: u16 = 21;
const GETADDR: u16 = 22;
const NEWROUTE: u16 = 24;
const GETROUTE: u16 = 26;
const NEWNETCONF: u16 = 80;
const GETNETCONF: u16 = 82;

const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

/// `IFF_*`.
const UP: u32 = 1 << 0;
const PROMISCUOUS: u32 = 1 << 8;

// IFLA_*, IFLA_INFO_*, IFLA_BRPORT_*, VETH_INFO_PEER.
const LINK_ADDRESS: u16 = 1;
const LINK_NAME: u16 = 3;
const LINK_MTU: u16 = 4;
const LINK_LINK: u16 = 5;
const LINK_MASTER: u16 = 10;
const LINK_OPER_STATE: u16 = 16;
const LINK_INFO: u16 = 18;
const LINK_ALIAS: u16 = 20;
const LINK_FAMILIES: u16 = 26;
const LINK_NETNS_FD: u16 = 28;
const LINK_MASK: u16 = 29;
const LINK_TX_QUEUES: u16 = 31;
const LINK_RX_QUEUES: u16 = 32;
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const INFO_PORT_KIND: u16 = 4;
const INFO_PORT_DATA: u16 = 5;
const PORT_HAIRPIN: u16 = 4;
const PORT_ISOLATED: u16 = 33;
const VETH_PEER: u16 = 1;
/// `IFLA_INET6_CONF`: an array, whose places `DEVCONF_*` names.
const INET6_CONF: u16 = 2;
const ACCEPT_RA: usize = 3;
/// `RTEXT_FILTER_SKIP_STATS`.
const SKIP_STATISTICS: u32 = 1 << 3;

// IFA_*.
const ADDRESS_ADDRESS: u16 = 1;
const ADDRESS_LOCAL: u16 = 2;
const ADDRESS_BROADCAST: u16 = 4;
const ADDRESS_FLAGS: u16 = 8;
// IFA_F_*.
const NO_DETECTION: u32 = 0x02;
const DETECTION_FAILED: u32 = 0x08;
const TENTATIVE: u32 = 0x40;

// RTA_*, RTAX_*.
const ROUTE_DESTINATION: u16 = 1;
const ROUTE_LINK: u16 = 4;
const ROUTE_GATEWAY: u16 = 5;
const ROUTE_PRIORITY: u16 = 6;
const ROUTE_METRICS: u16 = 8;
const ROUTE_TABLE: u16 = 15;
const METRIC_MTU: u16 = 2;
const METRIC_ADV_MSS: u16 = 8;
/// `RT_TABLE_MAIN`, `RTPROT_BOOT`, `RT_SCOPE_UNIVERSE`.
const MAIN_TABLE: u8 = 254;
const BOOT: u8 = 3;
const GLOBAL: u8 = 0;
// RTN_*.
const UNICAST: u8 = 1;
const BLACKHOLE: u8 = 6;
const UNREACHABLE: u8 = 7;
const PROHIBIT: u8 = 8;

// NETCONFA_*.
const CONF_LINK: u16 = 1;
const CONF_FORWARDING: u16 = 2;
/// `NETCONFA_IFINDEX_ALL`.
const CONF_OF_ALL: i32 = -1;

/// What is asked or ordered: a type, and what stands behind the netlink header.
#[derive(Clone, Debug)]
pub(super) struct Request {
    kind: u16,
    body: Vec<u8>,
}

impl Request {
    fn new(kind: u16, header: &[u8]) -> Self {
        let mut body = Vec::with_capacity(256);
        body.extend_from_slice(header);
        Self { kind, body }
    }

    /// Of a link: `struct ifinfomsg`.
    fn of_link(kind: u16, header: LinkHeader) -> Self {
        Self::new(kind, &header.to_bytes())
    }

    pub(super) fn to_bytes(&self, flags: u16, sequence: u32) -> Vec<u8> {
        let length = wire::HEADER + self.body.len();
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(u32::try_from(length).unwrap_or(u32::MAX).to_ne_bytes());
        bytes.extend(self.kind.to_ne_bytes());
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(sequence.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes.extend(&self.body);
        bytes
    }

    fn put(mut self, kind: u16, value: &[u8]) -> Self {
        put(&mut self.body, kind, value);
        self
    }

    fn put_number(self, kind: u16, value: u32) -> Self {
        self.put(kind, &value.to_ne_bytes())
    }

    fn put_text(mut self, kind: u16, value: &str) -> Self {
        put_text(&mut self.body, kind, value);
        self
    }

    fn put_address(self, kind: u16, ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => self.put(kind, &ip.octets()),
            IpAddr::V6(ip) => self.put(kind, &ip.octets()),
        }
    }

    fn nest(mut self, kind: u16, inner: impl FnOnce(&mut Vec<u8>)) -> Self {
        nest(&mut self.body, kind, inner);
        self
    }

    fn when<T>(self, value: Option<T>, with: impl FnOnce(Self, T) -> Self) -> Self {
        match value {
            Some(value) => with(self, value),
            None => self,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct LinkHeader {
    index: u32,
    flags: u32,
    /// Which of `flags` are meant.
    change: u32,
}

impl LinkHeader {
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[4..8].copy_from_slice(&self.index.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.flags.to_ne_bytes());
        bytes[12..].copy_from_slice(&self.change.to_ne_bytes());
        bytes
    }
}

pub(super) fn link_called(name: &str) -> Request {
    Request::of_link(GETLINK, LinkHeader::default())
        .put_text(LINK_NAME, name)
        .put_number(LINK_MASK, SKIP_STATISTICS)
}

pub(super) fn link_numbered(index: u32) -> Request {
    let header = LinkHeader { index, ..LinkHeader::default() };
    Request::of_link(GETLINK, header).put_number(LINK_MASK, SKIP_STATISTICS)
}

/// All, or the ports of `master`: without strict checking the kernel may send all.
pub(super) fn all_links(master: Option<u32>) -> Request {
    Request::of_link(GETLINK, LinkHeader::default())
        .when(master, |request, master| request.put_number(LINK_MASTER, master))
        .put_number(LINK_MASK, SKIP_STATISTICS)
}

pub(super) fn new_bridge(want: &BridgeSpec<'_>) -> Request {
    Request::of_link(NEWLINK, LinkHeader::default())
        .put_text(LINK_NAME, want.name)
        .put(LINK_ADDRESS, &want.mac)
        .when(want.mtu, |request, mtu| request.put_number(LINK_MTU, mtu))
        .nest(LINK_INFO, |info| put_text(info, INFO_KIND, "bridge"))
}

pub(super) fn new_veth(want: &VethSpec<'_>, peer_netns: i32) -> Request {
    Request::of_link(NEWLINK, LinkHeader::default())
        .put_text(LINK_NAME, want.name)
        .put_number(LINK_MASTER, want.master)
        .when(want.mtu, |request, mtu| request.put_number(LINK_MTU, mtu))
        .put_number(LINK_TX_QUEUES, 1)
        .put_number(LINK_RX_QUEUES, 1)
        .nest(LINK_INFO, |info| {
            put_text(info, INFO_KIND, "veth");
            nest(info, INFO_DATA, |data| {
                nest(data, VETH_PEER, |peer| {
                    peer.extend(LinkHeader::default().to_bytes());
                    put_text(peer, LINK_NAME, want.peer_name);
                    put(peer, LINK_NETNS_FD, &peer_netns.to_ne_bytes());
                    put(peer, LINK_TX_QUEUES, &1_u32.to_ne_bytes());
                    put(peer, LINK_RX_QUEUES, &1_u32.to_ne_bytes());
                    if let Some(mtu) = want.mtu {
                        put(peer, LINK_MTU, &mtu.to_ne_bytes());
                    }
                    if let Some(mac) = want.peer_mac {
                        put(peer, LINK_ADDRESS, &mac);
                    }
                });
            });
        })
}

/// `RTM_NEWLINK` on an existing index: `RTM_SETLINK` ignores the port's data.
pub(super) fn port_up(want: &PortSpec<'_>) -> Request {
    Request::of_link(NEWLINK, LinkHeader { index: want.index, flags: UP, change: UP })
        .when(want.alias, |request, alias| request.put(LINK_ALIAS, alias.as_bytes()))
        .nest(LINK_INFO, |info| {
            put_text(info, INFO_PORT_KIND, "bridge");
            nest(info, INFO_PORT_DATA, |data| {
                put(data, PORT_HAIRPIN, &[want.flags.hairpin.into()]);
                put(data, PORT_ISOLATED, &[want.flags.isolated.into()]);
            });
        })
}

pub(super) fn set_up(index: u32, up: bool) -> Request {
    Request::of_link(SETLINK, LinkHeader { index, flags: if up { UP } else { 0 }, change: UP })
}

pub(super) fn set_promiscuous(index: u32, on: bool) -> Request {
    let flags = if on { PROMISCUOUS } else { 0 };
    Request::of_link(SETLINK, LinkHeader { index, flags, change: PROMISCUOUS })
}

pub(super) fn set_mac(index: u32, mac: Mac) -> Request {
    Request::of_link(SETLINK, LinkHeader { index, ..LinkHeader::default() }).put(LINK_ADDRESS, &mac)
}

pub(super) fn delete_link(index: u32) -> Request {
    Request::of_link(DELLINK, LinkHeader { index, ..LinkHeader::default() })
}

/// Of a link; 0: of all.
pub(super) fn addresses_of(index: u32) -> Request {
    Request::new(GETADDR, &address_header(0, 0, index))
}

pub(super) fn new_address(index: u32, ip: IpAddr, prefix_len: u8, detect: bool) -> Request {
    let request = address(NEWADDR, index, ip, prefix_len);
    match ip {
        IpAddr::V4(ip) => {
            let broadcast = broadcast(ip, prefix_len);
            request.when(broadcast, |request, ip| request.put_address(ADDRESS_BROADCAST, ip.into()))
        }
        IpAddr::V6(_) if detect => request,
        IpAddr::V6(_) => request.put_number(ADDRESS_FLAGS, NO_DETECTION),
    }
}

pub(super) fn delete_address(index: u32, ip: IpAddr, prefix_len: u8) -> Request {
    address(DELADDR, index, ip, prefix_len)
}

fn address(kind: u16, index: u32, ip: IpAddr, prefix_len: u8) -> Request {
    Request::new(kind, &address_header(family_of(ip), prefix_len, index))
        .put_address(ADDRESS_LOCAL, ip)
        .put_address(ADDRESS_ADDRESS, ip)
}

/// `struct ifaddrmsg`.
fn address_header(family: u8, prefix_len: u8, index: u32) -> [u8; 8] {
    let [a, b, c, d] = index.to_ne_bytes();
    [family, prefix_len, 0, GLOBAL, a, b, c, d]
}

fn family_of(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { AF_INET } else { AF_INET6 }
}

fn broadcast(ip: Ipv4Addr, prefix_len: u8) -> Option<Ipv4Addr> {
    let host_bits = u32::MAX.checked_shr(u32::from(prefix_len)).unwrap_or(0);
    (prefix_len < 31).then(|| Ipv4Addr::from(u32::from(ip) | host_bits))
}

/// `struct rtmsg`.
#[derive(Clone, Copy, Debug, Default)]
struct RouteHeader {
    family: u8,
    destination_len: u8,
    table: u8,
    protocol: u8,
    scope: u8,
    kind: u8,
}

impl RouteHeader {
    const LENGTH: usize = 12;

    fn to_bytes(self) -> [u8; Self::LENGTH] {
        let Self { family, destination_len, table, protocol, scope, kind } = self;
        [family, destination_len, 0, 0, table, protocol, scope, kind, 0, 0, 0, 0]
    }

    /// Behind it stand the attributes.
    fn read(message: &[u8]) -> Option<(Self, &[u8])> {
        let (header, attributes) = message.split_first_chunk::<{ Self::LENGTH }>()?;
        let [family, destination_len, _, _, table, protocol, scope, kind, ..] = *header;
        Some((Self { family, destination_len, table, protocol, scope, kind }, attributes))
    }
}

pub(super) fn new_route(want: &RouteSpec) -> Request {
    let (ip, prefix_len) = want.destination;
    let header = RouteHeader {
        family: family_of(ip),
        destination_len: prefix_len,
        // The header has eight bits only; the attribute is what counts.
        table: want.table.map_or(MAIN_TABLE, |table| u8::try_from(table).unwrap_or(0)),
        protocol: BOOT,
        scope: want.scope.unwrap_or(GLOBAL),
        kind: UNICAST,
    };
    let metrics = [(METRIC_MTU, want.mtu), (METRIC_ADV_MSS, want.adv_mss)];
    let metrics = metrics.into_iter().filter(|(_, value)| *value > 0);
    let some = |value: u32| Some(value).filter(|value| *value > 0);
    Request::new(NEWROUTE, &header.to_bytes())
        .when(want.table, |request, table| request.put_number(ROUTE_TABLE, table))
        .when((prefix_len > 0).then_some(ip), |request, ip| request.put_address(ROUTE_DESTINATION, ip))
        .put_number(ROUTE_LINK, want.link)
        .when(want.gateway, |request, gateway| request.put_address(ROUTE_GATEWAY, gateway))
        .when(some(want.priority), |request, priority| request.put_number(ROUTE_PRIORITY, priority))
        .when(some(want.mtu.max(want.adv_mss)), |request, _| {
            request.nest(ROUTE_METRICS, |nested| {
                metrics.for_each(|(kind, value)| put(nested, kind, &value.to_ne_bytes()));
            })
        })
}

/// All of one family.
pub(super) fn routes(is_v4: bool) -> Request {
    let family = if is_v4 { AF_INET } else { AF_INET6 };
    Request::new(GETROUTE, &RouteHeader { family, ..RouteHeader::default() }.to_bytes())
}

/// By which a packet to `destination` leaves.
pub(super) fn route_towards(destination: IpAddr) -> Request {
    // The kernel's strict checks want the whole address as prefix.
    let destination_len = if destination.is_ipv4() { 32 } else { 128 };
    let header = RouteHeader { family: family_of(destination), destination_len, ..RouteHeader::default() };
    Request::new(GETROUTE, &header.to_bytes()).put_address(ROUTE_DESTINATION, destination)
}

/// The settings of all links of one family (`net/ipv4/conf/all`).
pub(super) fn settings_of_all(is_v4: bool) -> Request {
    let family = if is_v4 { AF_INET } else { AF_INET6 };
    // `struct netconfmsg`, padded.
    Request::new(GETNETCONF, &[family, 0, 0, 0]).put(CONF_LINK, &CONF_OF_ALL.to_ne_bytes())
}

/// Whether the settings answered let packets be forwarded.
pub(super) fn forwarding_of(kind: u16, message: &[u8]) -> Option<bool> {
    if kind != NEWNETCONF {
        return None;
    }
    Some(number(find(message.get(4..)?, CONF_FORWARDING)?)? != 0)
}

pub(super) fn link_of(kind: u16, message: &[u8]) -> Option<Link> {
    if kind != NEWLINK {
        return None;
    }
    let (header, attributes) = message.split_first_chunk::<16>()?;
    let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let flags = word(8);
    let mut link = Link {
        index: word(4),
        name: String::new(),
        mac: None,
        kind: None,
        mtu: 0,
        up: flags & UP != 0,
        promiscuous: flags & PROMISCUOUS != 0,
        oper_state: OperState::Unknown,
        master: None,
        alias: None,
        peer: None,
        port: None,
        accept_ra: None,
    };
    for (kind, value) in each(attributes) {
        match kind {
            LINK_NAME => link.name = text(value),
            LINK_ADDRESS => link.mac = Mac::try_from(value).ok(),
            LINK_MTU => link.mtu = number(value)?,
            LINK_OPER_STATE => link.oper_state = oper_state(*value.first()?),
            LINK_MASTER => link.master = number(value),
            LINK_ALIAS => link.alias = Some(text(value)),
            LINK_LINK => link.peer = number(value),
            LINK_FAMILIES => link.accept_ra = accept_ra(value),
            LINK_INFO => {
                link.kind = find(value, INFO_KIND).map(text);
                let is_port = find(value, INFO_PORT_KIND).map(text).as_deref() == Some("bridge");
                link.port = find(value, INFO_PORT_DATA).filter(|_| is_port).map(port_flags);
            }
            _ => {}
        }
    }
    Some(link)
}

fn accept_ra(families: &[u8]) -> Option<i32> {
    let settings = find(find(families, AF_INET6.into())?, INET6_CONF)?;
    settings.chunks_exact(4).nth(ACCEPT_RA).and_then(number).map(u32::cast_signed)
}

fn port_flags(settings: &[u8]) -> PortFlags {
    let is_on = |kind| find(settings, kind).is_some_and(|value| value.first().is_some_and(|on| *on != 0));
    PortFlags { hairpin: is_on(PORT_HAIRPIN), isolated: is_on(PORT_ISOLATED) }
}

fn oper_state(number: u8) -> OperState {
    match number {
        1 => OperState::NotPresent,
        2 => OperState::Down,
        3 => OperState::LowerLayerDown,
        4 => OperState::Testing,
        5 => OperState::Dormant,
        6 => OperState::Up,
        _ => OperState::Unknown,
    }
}

/// With the index of its link.
pub(super) fn address_of(kind: u16, message: &[u8]) -> Option<(u32, Address)> {
    if kind != NEWADDR {
        return None;
    }
    let (header, attributes) = message.split_first_chunk::<8>()?;
    let [_family, prefix_len, flags, _scope, index @ ..] = *header;
    let (mut local, mut address, mut flags) = (None, None, u32::from(flags));
    for (kind, value) in each(attributes) {
        match kind {
            ADDRESS_LOCAL => local = ip(value),
            ADDRESS_ADDRESS => address = ip(value),
            ADDRESS_FLAGS => flags = number(value)?,
            _ => {}
        }
    }
    let address = Address {
        // IFA_ADDRESS is the peer's on point-to-point links; IPv6 has no IFA_LOCAL.
        ip: local.or(address)?,
        prefix_len,
        tentative: flags & TENTATIVE != 0,
        dad_failed: flags & DETECTION_FAILED != 0,
    };
    Some((u32::from_ne_bytes(index), address))
}

/// `None` for what is no unicast route.
pub(super) fn route_of(kind: u16, message: &[u8]) -> Option<Route> {
    let (header, attributes) = RouteHeader::read(message).filter(|_| kind == NEWROUTE)?;
    if header.kind != UNICAST {
        return None;
    }
    let any = match header.family {
        AF_INET => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AF_INET6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let mut route = Route {
        destination: (any, header.destination_len),
        gateway: None,
        link: None,
        table: u32::from(header.table),
    };
    for (kind, value) in each(attributes) {
        match kind {
            ROUTE_DESTINATION => route.destination.0 = ip(value)?,
            ROUTE_GATEWAY => route.gateway = ip(value),
            ROUTE_LINK => route.link = number(value),
            ROUTE_TABLE => route.table = number(value)?,
            _ => {}
        }
    }
    Some(route)
}

/// By which link a route leads out; `None` for one that refuses: IPv6 answers
/// with such routes where IPv4 fails.
pub(super) fn outgoing_link(kind: u16, message: &[u8]) -> Option<u32> {
    let (header, attributes) = RouteHeader::read(message).filter(|_| kind == NEWROUTE)?;
    if [UNREACHABLE, PROHIBIT, BLACKHOLE].contains(&header.kind) {
        return None;
    }
    number(find(attributes, ROUTE_LINK)?)
}

fn number(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|value| u32::from_ne_bytes(*value))
}

fn ip(value: &[u8]) -> Option<IpAddr> {
    let v4 = || <[u8; 4]>::try_from(value).map(IpAddr::from);
    v4().or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from)).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn broadcast_addresses_follow_the_prefix() {
        let ip = Ipv4Addr::new(10, 1, 2, 3);
        assert_eq!(broadcast(ip, 24), Some(Ipv4Addr::new(10, 1, 2, 255)));
        assert_eq!(broadcast(ip, 30), Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(broadcast(ip, 31), None);
        assert_eq!(broadcast(ip, 0), Some(Ipv4Addr::BROADCAST));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(kind in 0_u16..100, bytes: Vec<u8>) {
            let _link = link_of(kind, &bytes);
            let _address = address_of(kind, &bytes);
            let _route = (route_of(kind, &bytes), outgoing_link(kind, &bytes));
            let _settings = forwarding_of(kind, &bytes);
        }
    }
}
