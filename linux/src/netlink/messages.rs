//! Converts between rtnetlink's messages and our types. No I/O.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, InfoBridge, InfoBridgePort, InfoData, InfoPortData, LinkAttribute, LinkFlags,
    LinkInfo, LinkMessage, State,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteProtocol, RouteScope,
    RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::{Address, Link, Mac, OperState, PortFlags, Route, RouteSpec};

/// `struct nlmsghdr` and `struct ifinfomsg`.
const LINK_HEADER_BYTES: usize = 16 + 16;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// `NLA_TYPE_MASK`: the type without its flags.
const ATTRIBUTE_TYPE: u16 = 0x3fff;
const IFLA_IFALIAS: u16 = 20;
const IFLA_PROP_LIST: u16 = 52;
const IFLA_ALT_IFNAME: u16 = 53;

pub(super) fn link_message(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message
}

pub(super) fn up_message(index: u32) -> LinkMessage {
    let mut message = link_message(index);
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message
}

fn family(ip: IpAddr) -> AddressFamily {
    match ip {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

pub(super) fn address_message(index: u32, ip: IpAddr, prefix_len: u8) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(ip);
    message.header.prefix_len = prefix_len;
    message.header.index = index;
    message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    message
}

pub(super) fn broadcast(ip: Ipv4Addr, prefix_len: u8) -> Option<Ipv4Addr> {
    let host_bits = u32::MAX.checked_shr(u32::from(prefix_len)).unwrap_or(0);
    (prefix_len < 31).then(|| Ipv4Addr::from(u32::from(ip) | host_bits))
}

pub(super) fn route_message(want: &RouteSpec) -> RouteMessage {
    let (ip, prefix_len) = want.destination;
    let address = |ip| match ip {
        IpAddr::V4(v4) => RouteAddress::Inet(v4),
        IpAddr::V6(v6) => RouteAddress::Inet6(v6),
    };
    let mut message = RouteMessage::default();
    message.header.address_family = family(ip);
    message.header.destination_prefix_length = prefix_len;
    message.header.protocol = RouteProtocol::Boot;
    message.header.scope = want.scope.map_or(RouteScope::Universe, RouteScope::from);
    message.header.kind = RouteType::Unicast;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    if let Some(table) = want.table {
        // The header has only eight bits; the kernel uses the attribute.
        message.header.table = u8::try_from(table).unwrap_or(0);
        message.attributes.push(RouteAttribute::Table(table));
    }
    if prefix_len > 0 {
        message.attributes.push(RouteAttribute::Destination(address(ip)));
    }
    message.attributes.push(RouteAttribute::Oif(want.link));
    message.attributes.extend(want.gateway.map(|gateway| RouteAttribute::Gateway(address(gateway))));
    if want.priority > 0 {
        message.attributes.push(RouteAttribute::Priority(want.priority));
    }
    let metrics: Vec<RouteMetric> =
        [(want.mtu, RouteMetric::Mtu as fn(u32) -> RouteMetric), (want.adv_mss, RouteMetric::Advmss)]
            .into_iter()
            .filter(|(value, _)| *value > 0)
            .map(|(value, metric)| metric(value))
            .collect();
    if !metrics.is_empty() {
        message.attributes.push(RouteAttribute::Metrics(metrics));
    }
    message
}

pub(super) fn link_of(answer: RouteNetlinkMessage) -> Option<Link> {
    let RouteNetlinkMessage::NewLink(message) = answer else { return None };
    let flags = message.header.flags;
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        mac: None,
        kind: None,
        mtu: 0,
        up: flags.contains(LinkFlags::Up),
        promiscuous: flags.contains(LinkFlags::Promisc),
        oper_state: OperState::Unknown,
        master: None,
        alias: None,
        peer: None,
        port: None,
        accept_ra: None,
        snoops: false,
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Address(bytes) => link.mac = Mac::try_from(bytes.as_slice()).ok(),
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::OperState(state) => link.oper_state = oper_state(state),
            LinkAttribute::Controller(index) => link.master = Some(index),
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
            LinkAttribute::Link(index) => link.peer = Some(index),
            LinkAttribute::AfSpecUnspec(families) => link.accept_ra = accept_ra(&families),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => link.kind = Some(kind.to_string()),
                        LinkInfo::Data(InfoData::Bridge(settings)) => {
                            link.snoops = settings.contains(&InfoBridge::MulticastSnooping(true));
                        }
                        LinkInfo::PortData(InfoPortData::BridgePort(settings)) => {
                            link.port = Some(port_flags(&settings));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Some(link)
}

/// Replaces alias and alternative names of the link that `message` describes by as many `?` if they are not
/// UTF-8, since the decoder refuses the whole link for them. No attachment has such an alias.
pub(super) fn mask_texts(message: &mut [u8]) {
    let Some(attributes) = message.get_mut(LINK_HEADER_BYTES..) else { return };
    each_attribute(attributes, |kind, value| match kind {
        IFLA_IFALIAS => mask(value),
        IFLA_PROP_LIST => each_attribute(value, |kind, value| {
            if kind == IFLA_ALT_IFNAME {
                mask(value);
            }
        }),
        _ => {}
    });
}

fn mask(text: &mut [u8]) {
    if std::str::from_utf8(text).is_err() {
        text.iter_mut().filter(|byte| **byte != 0).for_each(|byte| *byte = b'?');
    }
}

/// Calls `visit` with the type and value of each attribute (`struct nlattr`), up to one that is not complete.
fn each_attribute(mut bytes: &mut [u8], mut visit: impl FnMut(u16, &mut [u8])) {
    while let &mut [l0, l1, t0, t1, ..] = bytes {
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let Some(value) = bytes.get_mut(ATTRIBUTE_HEADER_BYTES..length) else { return };
        visit(u16::from_ne_bytes([t0, t1]) & ATTRIBUTE_TYPE, value);
        bytes = bytes.get_mut(length.next_multiple_of(4)..).unwrap_or_default();
    }
}

fn accept_ra(families: &[AfSpecUnspec]) -> Option<i32> {
    families.iter().find_map(|family| match family {
        AfSpecUnspec::Inet6(settings) => settings.iter().find_map(|setting| match setting {
            AfSpecInet6::DevConf(all) => Some(all.accept_ra),
            _ => None,
        }),
        _ => None,
    })
}

fn port_flags(settings: &[InfoBridgePort]) -> PortFlags {
    let mut flags = PortFlags::default();
    for setting in settings {
        match setting {
            InfoBridgePort::HairpinMode(on) => flags.hairpin = *on,
            InfoBridgePort::Isolated(on) => flags.isolated = *on,
            _ => {}
        }
    }
    flags
}

fn oper_state(state: State) -> OperState {
    match state {
        State::NotPresent => OperState::NotPresent,
        State::Down => OperState::Down,
        State::LowerLayerDown => OperState::LowerLayerDown,
        State::Testing => OperState::Testing,
        State::Dormant => OperState::Dormant,
        State::Up => OperState::Up,
        _ => OperState::Unknown,
    }
}

pub(super) fn address_of(answer: RouteNetlinkMessage, index: u32) -> Option<Address> {
    let RouteNetlinkMessage::NewAddress(message) = answer else { return None };
    if message.header.index != index {
        return None;
    }
    let (mut local, mut address) = (None, None);
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    for attribute in message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(ip),
            AddressAttribute::Address(ip) => address = Some(ip),
            AddressAttribute::Flags(all) => flags = all,
            _ => {}
        }
    }
    // IFA_ADDRESS is the peer's on point-to-point links; IPv6 has no IFA_LOCAL.
    Some(Address {
        ip: local.or(address)?,
        prefix_len: message.header.prefix_len,
        tentative: flags.contains(AddressFlags::Tentative),
        dad_failed: flags.contains(AddressFlags::Dadfailed),
    })
}

/// `None` for a route that is not unicast.
pub(super) fn route_of(answer: RouteNetlinkMessage) -> Option<Route> {
    let RouteNetlinkMessage::NewRoute(message) = answer else { return None };
    let header = &message.header;
    if header.kind != RouteType::Unicast {
        return None;
    }
    let any = match header.address_family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => return None,
    };
    let mut route = Route {
        destination: (any, header.destination_prefix_length),
        gateway: None,
        link: None,
        table: u32::from(header.table),
    };
    let address = |address| match address {
        RouteAddress::Inet(v4) => Some(IpAddr::V4(v4)),
        RouteAddress::Inet6(v6) => Some(IpAddr::V6(v6)),
        _ => None,
    };
    for attribute in message.attributes {
        match attribute {
            RouteAttribute::Destination(found) => route.destination.0 = address(found)?,
            RouteAttribute::Gateway(found) => route.gateway = address(found),
            RouteAttribute::Oif(link) => route.link = Some(link),
            RouteAttribute::Table(table) => route.table = table,
            _ => {}
        }
    }
    Some(route)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_texts_that_are_not_utf_8_are_masked_and_no_length_makes_it_panic() {
        let attribute = |kind: u16, value: &[u8]| {
            let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).unwrap();
            let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
            bytes.extend(value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
            bytes
        };
        let message = |alias: &[u8], name: &[u8]| {
            // NLA_F_NESTED.
            let names = attribute(0x8000 | IFLA_PROP_LIST, &attribute(IFLA_ALT_IFNAME, name));
            // IFLA_ADDRESS is no text.
            let address = attribute(1, b"\xff\xfe");
            [&[0; LINK_HEADER_BYTES][..], &address, &attribute(IFLA_IFALIAS, alias), &names].concat()
        };
        let masked = |mut bytes: Vec<u8>| {
            mask_texts(&mut bytes);
            bytes
        };
        assert_eq!(masked(message(b"B\xfcro\0", b"\xfc\0")), message(b"????\0", b"?\0"));
        let plain = message("Büro\0".as_bytes(), b"office\0");
        assert_eq!(masked(plain.clone()), plain);
        for length in 0..plain.len() {
            let (mut cut, mut wrong) = (plain[..length].to_vec(), plain.clone());
            mask_texts(&mut cut);
            wrong[length] = 0xff;
            mask_texts(&mut wrong);
        }
    }

    #[test]
    fn broadcast_addresses_follow_the_prefix() {
        let ip = Ipv4Addr::new(10, 1, 2, 3);
        assert_eq!(broadcast(ip, 24), Some(Ipv4Addr::new(10, 1, 2, 255)));
        assert_eq!(broadcast(ip, 30), Some(Ipv4Addr::new(10, 1, 2, 3)));
        assert_eq!(broadcast(ip, 31), None);
        assert_eq!(broadcast(ip, 0), Some(Ipv4Addr::BROADCAST));
    }
}
