//! Queries to the routing tables that concern no single link.

use std::net::IpAddr;

use netlink_packet_core::NLM_F_REQUEST;
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::neighbour::{NeighbourAddress, NeighbourAttribute, NeighbourMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::Undecodable;
use super::{Mac, Netlink};
use crate::{Error, Result};

impl Netlink {
    /// The index of the link through which this host sends packets to `destination`; `None` without
    /// a route.
    pub fn link_towards(&self, destination: IpAddr) -> Result<Option<u32>> {
        let mut message = RouteMessage::default();
        // The kernel's strict checks require the full prefix length.
        let (family, prefix_len, address) = match destination {
            IpAddr::V4(ip) => (AddressFamily::Inet, 32, RouteAddress::Inet(ip)),
            IpAddr::V6(ip) => (AddressFamily::Inet6, 128, RouteAddress::Inet6(ip)),
        };
        message.header.address_family = family;
        message.header.destination_prefix_length = prefix_len;
        message.attributes.push(RouteAttribute::Destination(address));
        let answers = match self.socket.request(RouteNetlinkMessage::GetRoute(message), NLM_F_REQUEST) {
            Ok(answers) => answers,
            Err(e) if is_no_route(&e) => return Ok(None),
            Err(e) => return Err(Error::new("look up route", destination, e)),
        };
        Ok(answers.into_iter().find_map(outgoing_link))
    }

    /// The MAC that this host has in its neighbour table for an address on a link; `None` without
    /// an entry, or without a MAC in it.
    pub fn neighbour(&self, link: u32, ip: IpAddr) -> Result<Option<Mac>> {
        let mut message = NeighbourMessage::default();
        message.header.ifindex = link;
        let (family, address) = match ip {
            IpAddr::V4(ip) => (AddressFamily::Inet, NeighbourAddress::Inet(ip)),
            IpAddr::V6(ip) => (AddressFamily::Inet6, NeighbourAddress::Inet6(ip)),
        };
        message.header.family = family;
        message.attributes.push(NeighbourAttribute::Destination(address));
        let request = RouteNetlinkMessage::GetNeighbour(message);
        match self.socket.request(request, NLM_F_REQUEST) {
            Ok(answers) => Ok(answers.into_iter().find_map(mac_of_neighbour)),
            Err(e) if e.raw_os_error() == Some(nix::libc::ENOENT) => Ok(None),
            Err(e) => Err(Error::new("look up neighbour", ip, e)),
        }
    }

    /// The addresses of all links, of both families.
    pub fn local_addresses(&self) -> Result<Vec<IpAddr>> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let answers = self.dump(request, Undecodable::Refused);
        let answers = answers.map_err(|e| Error::new("list addresses", "all", e))?;
        Ok(answers.into_iter().filter_map(local_address).collect())
    }
}

/// The error of a lookup without a match, or with a route of type `unreachable`, `prohibit` or
/// `blackhole`.
fn is_no_route(error: &std::io::Error) -> bool {
    use nix::libc::{EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH};
    error.raw_os_error().is_some_and(|number| [EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH].contains(&number))
}

fn outgoing_link(answer: RouteNetlinkMessage) -> Option<u32> {
    let RouteNetlinkMessage::NewRoute(message) = answer else { return None };
    // IPv6 answers with such routes; IPv4 fails.
    let refusing = [RouteType::Unreachable, RouteType::Prohibit, RouteType::BlackHole];
    if refusing.contains(&message.header.kind) {
        return None;
    }
    message.attributes.into_iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(index),
        _ => None,
    })
}

fn mac_of_neighbour(answer: RouteNetlinkMessage) -> Option<Mac> {
    let RouteNetlinkMessage::NewNeighbour(message) = answer else { return None };
    message.attributes.into_iter().find_map(|attribute| match attribute {
        NeighbourAttribute::LinkLayerAddress(bytes) => Mac::try_from(bytes.as_slice()).ok(),
        _ => None,
    })
}

fn local_address(answer: RouteNetlinkMessage) -> Option<IpAddr> {
    let RouteNetlinkMessage::NewAddress(message) = answer else { return None };
    let (mut local, mut address) = (None, None);
    for attribute in message.attributes {
        match attribute {
            AddressAttribute::Local(ip) => local = Some(ip),
            AddressAttribute::Address(ip) => address = Some(ip),
            _ => {}
        }
    }
    // IFA_ADDRESS is the peer's on point-to-point links; IPv6 has no IFA_LOCAL.
    local.or(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{BridgeSpec, DuplicateDetection};
    use crate::netns;

    #[test]
    fn the_link_towards_an_address_is_that_of_its_route() {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("host");
        let netns = netns::create_persistent(&path).unwrap();
        netns
            .run(|| {
                let host = Netlink::open().unwrap();
                let ip = |text: &str| text.parse::<IpAddr>().unwrap();
                for target in ["10.1.0.2", "fd00::2"] {
                    assert_eq!(host.link_towards(ip(target)).unwrap(), None);
                }
                host.create_bridge(&BridgeSpec { name: "br", mac: Some([2, 0, 0, 0, 0, 1]), mtu: None })
                    .unwrap();
                let bridge = host.link_by_name("br").unwrap().unwrap().index;
                host.set_up(bridge).unwrap();
                for (own, prefix_len) in [("10.1.0.1", 24), ("fd00::1", 64)] {
                    host.add_address(bridge, (ip(own), prefix_len), DuplicateDetection::Off).unwrap();
                }
                for target in ["10.1.0.2", "fd00::2"] {
                    assert_eq!(host.link_towards(ip(target)).unwrap(), Some(bridge));
                }
                let local = host.local_addresses().unwrap();
                assert!(local.contains(&ip("10.1.0.1")) && local.contains(&ip("fd00::1")), "{local:?}");
            })
            .unwrap();
        netns::remove_persistent(&path).unwrap();
    }
}
