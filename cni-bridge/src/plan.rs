//! Plans the configuration from the IPAM plugin's result. No I/O.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni_plugin::{CniResult, Interface, Route};
use ipnetwork::IpNetwork;
use linux::netlink::{Address, Mac};

use crate::config::{Config, Role};
use crate::error::Error;
use crate::names::format_mac;

/// The index of the container's interface in the result's list: bridge, host veth, container.
const CONTAINER_INTERFACE: i64 = 2;

/// Addresses and routes with all defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) result: CniResult,
    /// Gateway addresses that the bridge must have.
    pub(crate) gateways: Vec<IpNetwork>,
}

impl Plan {
    pub(crate) fn new(config: &Config, ipam: CniResult) -> Result<Self, Error> {
        if ipam.ips.is_empty() {
            return Err(Error::NoAddresses);
        }
        let mut result = CniResult { interfaces: Vec::new(), ..ipam };
        let mut gateways = Vec::new();
        for ip in &mut result.ips {
            ip.interface = Some(CONTAINER_INTERFACE);
            if config.role == Role::Switch {
                continue;
            }
            let gateway = *ip.gateway.get_or_insert_with(|| first_host(&ip.address));
            gateways.extend(IpNetwork::new(gateway, ip.address.prefix()));
            let default = default_of(ip.address.is_ipv4());
            let has_default = result.routes.iter().any(|route| route.dst == default && route.gw.is_some());
            if config.role == Role::DefaultGateway && !has_default {
                result.routes.push(Route::new(default, Some(gateway)));
            }
        }
        if let Some(dns) = &config.dns {
            result.dns = dns.clone();
        }
        Ok(Self { result, gateways })
    }

    /// The gateway of a route: its own, or the first one of its family.
    pub(crate) fn gateway_of(&self, route: &Route) -> Option<IpAddr> {
        let same_family = |gateway: &IpAddr| gateway.is_ipv4() == route.dst.is_ipv4();
        route.gw.or_else(|| self.result.ips.iter().filter_map(|ip| ip.gateway).find(same_family))
    }

    pub(crate) fn has_ipv6(&self) -> bool {
        self.result.ips.iter().any(|ip| ip.address.is_ipv6())
    }
}

/// The changes that give a bridge a gateway address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GatewayChange {
    None,
    Add {
        /// Conflicting addresses, removed first.
        replacing: Vec<IpNetwork>,
    },
}

/// IPv4: the bridge may have only this address. IPv6: it may have no other one in an overlapping
/// network. `Err` has the conflicting address.
pub(crate) fn gateway_change(
    existing: &[Address],
    wanted: IpNetwork,
    force_address: bool,
) -> Result<GatewayChange, IpNetwork> {
    let mut replacing = Vec::new();
    for address in existing.iter().filter(|address| address.ip.is_ipv4() == wanted.is_ipv4()) {
        let Ok(found) = IpNetwork::new(address.ip, address.prefix_len) else { continue };
        if found == wanted {
            return Ok(GatewayChange::None);
        }
        if found.is_ipv4() || found.contains(wanted.ip()) || wanted.contains(found.ip()) {
            replacing.push(found);
        }
    }
    match replacing.first() {
        Some(found) if !force_address => Err(*found),
        _ => Ok(GatewayChange::Add { replacing }),
    }
}

/// A link of the host in a result.
pub(crate) fn host_interface(name: &str, mac: Option<Mac>) -> Interface {
    Interface { name: name.to_owned(), mac: format_mac(mac), ..Interface::default() }
}

fn default_of(is_v4: bool) -> IpNetwork {
    let any = if is_v4 { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    IpNetwork::new(any, 0).expect("prefix length 0 fits both families")
}

/// The first address after the network's.
fn first_host(address: &IpNetwork) -> IpAddr {
    match address.network() {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from(u32::from(v4).wrapping_add(1))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from(u128::from(v6).wrapping_add(1))),
    }
}

#[cfg(test)]
mod tests {
    use cni_plugin::IpConfig;
    use linux::netlink::{DuplicateDetection, PortFlags};

    use super::*;
    use crate::config::Container;

    fn config(role: Role) -> Config {
        Config {
            bridge: "br".to_owned(),
            mtu: None,
            promiscuous: false,
            port: PortFlags::default(),
            role,
            force_address: false,
            duplicate_detection: DuplicateDetection::Off,
            container_mac: None,
            masquerade: None,
            spoof_check: false,
            container: Container::Layer3 { ipam: "host-local".to_owned() },
            dns: None,
        }
    }

    fn net(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    fn ipam(addresses: &[&str], routes: Vec<Route>) -> CniResult {
        let ips =
            addresses.iter().map(|a| IpConfig { interface: None, address: net(a), gateway: None }).collect();
        CniResult { ips, routes, ..CniResult::default() }
    }

    #[test]
    fn a_gateway_is_the_first_host_unless_given() {
        let mut result = ipam(&["10.1.2.3/16", "fd00::7/64"], vec![]);
        result.ips[1].gateway = "fd00::fe".parse().ok();
        let plan = Plan::new(&config(Role::Gateway), result.clone()).unwrap();
        assert_eq!(plan.gateways, [net("10.1.0.1/16"), net("fd00::fe/64")]);
        assert!(plan.result.routes.is_empty());

        let plain = Plan::new(&config(Role::Switch), result).unwrap();
        assert!(plain.gateways.is_empty());
        assert_eq!((plain.result.ips[0].gateway, plain.result.ips[0].interface), (None, Some(2)));
    }

    #[test]
    fn a_default_gateway_adds_one_default_route_per_family_unless_there_is_one() {
        let addresses = ["10.1.0.2/24", "10.2.0.2/24", "fd00::7/64"];
        let plan = Plan::new(&config(Role::DefaultGateway), ipam(&addresses, vec![])).unwrap();
        let routes: Vec<String> =
            plan.result.routes.iter().map(|r| format!("{} {}", r.dst, r.gw.unwrap())).collect();
        assert_eq!(routes, ["0.0.0.0/0 10.1.0.1", "::/0 fd00::1"]);

        let own = Route::new(net("0.0.0.0/0"), "10.1.0.99".parse().ok());
        let plan =
            Plan::new(&config(Role::DefaultGateway), ipam(&addresses[..1], vec![own.clone()])).unwrap();
        assert_eq!(plan.result.routes, [own]);
        let without_gateway = Route::new(net("0.0.0.0/0"), None);
        let plan =
            Plan::new(&config(Role::DefaultGateway), ipam(&addresses[..1], vec![without_gateway])).unwrap();
        assert_eq!(plan.result.routes.len(), 2);
    }

    #[test]
    fn a_route_without_gateway_takes_the_first_of_its_family() {
        let plan = Plan::new(&config(Role::Gateway), ipam(&["fd00::7/64", "10.1.0.2/24"], vec![])).unwrap();
        assert_eq!(plan.gateway_of(&Route::new(net("10.9.0.0/16"), None)), "10.1.0.1".parse().ok());
        assert_eq!(plan.gateway_of(&Route::new(net("::/0"), "fd00::5".parse().ok())), "fd00::5".parse().ok());
    }

    #[test]
    fn a_bridge_keeps_its_addresses_unless_they_contradict_the_gateway() {
        let address = |text: &str| {
            let network = net(text);
            Address { ip: network.ip(), prefix_len: network.prefix(), tentative: false, dad_failed: false }
        };
        let existing = [address("10.1.0.1/24"), address("fe80::1/64"), address("fd00::1/64")];
        let add =
            |replacing: &[&str]| GatewayChange::Add { replacing: replacing.iter().map(|t| net(t)).collect() };
        let change = |wanted: &str, force| gateway_change(&existing, net(wanted), force);
        assert_eq!(change("10.1.0.1/24", false), Ok(GatewayChange::None));
        assert_eq!(change("10.2.0.1/24", false), Err(net("10.1.0.1/24")));
        assert_eq!(change("10.2.0.1/24", true), Ok(add(&["10.1.0.1/24"])));
        assert_eq!(change("fd00:1::1/64", false), Ok(add(&[])));
        assert_eq!(change("fd00::2/64", false), Err(net("fd00::1/64")));
        assert_eq!(change("fd00::1/48", true), Ok(add(&["fd00::1/64"])));
    }

    #[test]
    fn a_result_without_addresses_is_refused() {
        let err = Plan::new(&config(Role::Switch), CniResult::default()).unwrap_err();
        assert_eq!(err.to_string(), "IPAM plugin returned missing IP config");
    }
}
