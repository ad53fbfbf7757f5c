//! The MAC of a container, and whether its segment must be informed of it. No I/O.
//!
//! An address that is used again with another MAC needs an announcement: hosts that keep the old
//! MAC in their neighbour tables do not reach the container for up to a minute. An announcement is a
//! broadcast, which each container of the bridge handles: beside 300 of them, one takes 1.7 ms.
//! Hence a container's MAC follows from its IPv4 address where possible. If the host has no address
//! on the bridge, it does not know which MACs the containers remember, for example the random one
//! that the reference gave to an earlier owner of the address.

use std::net::{IpAddr, Ipv4Addr};

use cni_plugin::IpConfig;
use linux::netlink::Mac;

use crate::config::Config;

/// First bytes of a MAC that follows from an IPv4 address: locally administered, unicast.
const DERIVED: [u8; 2] = [0x0a, 0x58];

/// What the container's interface gets beside its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Introduction {
    pub(crate) mac: Mac,
    /// Whether the IPv4 addresses are broadcast at the end (gratuitous ARP).
    pub(crate) announced: bool,
}

/// What is known when the addresses are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    /// The interface's MAC so far.
    pub(crate) current: Mac,
    /// The MAC of an earlier owner of the first IPv4 address, as this host remembers it.
    pub(crate) earlier: Option<Mac>,
    /// Whether the interface has IPv6. Its multicast reports, the last one a second later, have the
    /// container's MAC as source, so all switches of the segment learn its port.
    pub(crate) has_ipv6: bool,
}

impl Introduction {
    pub(crate) fn new(config: &Config, ips: &[IpConfig], known: Known) -> Self {
        let derived = derived_mac(config, ips);
        let mac = derived.unwrap_or(known.current);
        let is_certain =
            derived.is_some() && config.is_gateway() && known.earlier.is_none_or(|earlier| earlier == mac);
        let is_silent = known.has_ipv6 && (is_certain || first_ipv4(ips).is_none());
        Self { mac, announced: !is_silent }
    }
}

/// `None` if the configuration names a MAC, if the IPAM plugin has used the current one, or unless
/// there is exactly one IPv4 address.
fn derived_mac(config: &Config, ips: &[IpConfig]) -> Option<Mac> {
    if !config.has_plain_ipam() {
        return None;
    }
    let mut v4 = ipv4(ips);
    match (config.container_mac, v4.next(), v4.next()) {
        (None, Some(ip), None) => {
            let ([a, b], [c, d, e, f]) = (DERIVED, ip.octets());
            Some([a, b, c, d, e, f])
        }
        _ => None,
    }
}

pub(crate) fn first_ipv4(ips: &[IpConfig]) -> Option<Ipv4Addr> {
    ipv4(ips).next()
}

fn ipv4(ips: &[IpConfig]) -> impl Iterator<Item = Ipv4Addr> {
    ips.iter().filter_map(|ip| match ip.address.ip() {
        IpAddr::V4(v4) => Some(v4),
        IpAddr::V6(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::plain;
    use crate::config::{Container, Role};

    const RANDOM: Mac = [2, 1, 2, 3, 4, 5];

    fn introduced(addresses: &[&str], change: impl Fn(&mut Config, &mut Known)) -> Introduction {
        let ips: Vec<IpConfig> = addresses
            .iter()
            .map(|text| IpConfig { interface: None, address: text.parse().unwrap(), gateway: None })
            .collect();
        let container = Container::Layer3 { ipam: "host-local".to_owned() };
        let mut config = Config { container, role: Role::Gateway, ..plain() };
        let mut known = Known { current: RANDOM, earlier: None, has_ipv6: true };
        change(&mut config, &mut known);
        Introduction::new(&config, &ips, known)
    }

    #[test]
    fn nothing_is_announced_if_the_mac_follows_from_the_address() {
        let derived = [0x0a, 0x58, 10, 1, 0, 2];
        let silent = Introduction { mac: derived, announced: false };
        assert_eq!(introduced(&["10.1.0.2/24"], |_, _| ()), silent);
        assert_eq!(
            introduced(&["10.1.0.2/24", "fd00::2/64"], |_, known| known.earlier = Some(derived)),
            silent
        );
        assert_eq!(introduced(&["fd00::2/64"], |_, _| ()), Introduction { mac: RANDOM, announced: false });
    }

    #[test]
    fn an_address_that_may_be_known_by_another_mac_is_announced() {
        let given = [2, 9, 9, 9, 9, 9];
        let one = ["10.1.0.2/24"];
        assert!(introduced(&one, |_, known| known.earlier = Some(given)).announced);
        assert!(introduced(&one, |_, known| known.has_ipv6 = false).announced);
        let two = introduced(&["10.1.0.2/24", "10.2.0.2/24"], |_, _| ());
        assert_eq!(two, Introduction { mac: RANDOM, announced: true });
        let leased =
            introduced(&one, |config, _| config.container = Container::Layer3 { ipam: "dhcp".to_owned() });
        assert_eq!(leased, two, "the lease is for the current MAC");
        let named = introduced(&one, |config, known| {
            config.container_mac = Some(given);
            known.current = given;
        });
        assert_eq!(named, Introduction { mac: given, announced: true });
    }

    #[test]
    fn without_an_address_of_the_host_on_the_bridge_every_ipv4_address_is_announced() {
        let as_switch = |addresses: &[&str]| introduced(addresses, |config, _| config.role = Role::Switch);
        let derived = [0x0a, 0x58, 10, 1, 0, 2];
        assert_eq!(as_switch(&["10.1.0.2/24"]), Introduction { mac: derived, announced: true });
        assert_eq!(as_switch(&["fd00::2/64"]), Introduction { mac: RANDOM, announced: false });
    }
}
