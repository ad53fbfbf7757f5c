//! Questions to the routing tables that are about no link in particular.

use std::net::IpAddr;

use super::{Netlink, messages};
use crate::{Error, Result};

impl Netlink {
    /// The index of the link by which a packet of this host to `destination`
    /// leaves; `None` when there is no route.
    pub fn link_towards(&self, destination: IpAddr) -> Result<Option<u32>> {
        match self.ask(&messages::route_towards(destination), messages::outgoing_link) {
            Err(e) if is_no_route(&e) => Ok(None),
            found => found.map_err(|e| Error::new("look up route", destination, e)),
        }
    }

    /// The addresses of all links, of both families.
    pub fn local_addresses(&self) -> Result<Vec<IpAddr>> {
        let ip = |kind, message: &[u8]| messages::address_of(kind, message).map(|(_, address)| address.ip);
        let addresses = self.dump(&messages::addresses_of(0), ip);
        addresses.map_err(|e| Error::new("list addresses", "all", e))
    }

    /// Whether this host forwards packets of a family (`net/ipv4/ip_forward`,
    /// `net/ipv6/conf/all/forwarding`); `None`: the kernel does not say. A file of
    /// `/proc/sys` takes ten times as long to read.
    pub fn forwards(&self, is_v4: bool) -> Result<Option<bool>> {
        let settings = self.ask(&messages::settings_of_all(is_v4), messages::forwarding_of);
        settings.map_err(|e| Error::new("read forwarding", if is_v4 { "IPv4" } else { "IPv6" }, e))
    }
}

/// What a lookup fails with where the table has nothing, or a route of type
/// `unreachable`, `prohibit` or `blackhole`.
fn is_no_route(error: &std::io::Error) -> bool {
    use nix::libc::{EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH};
    error.raw_os_error().is_some_and(|number| [EACCES, EHOSTUNREACH, EINVAL, ENETUNREACH].contains(&number))
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
                host.create_bridge(&BridgeSpec { name: "br", mac: [2, 0, 0, 0, 0, 1], mtu: None }).unwrap();
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
