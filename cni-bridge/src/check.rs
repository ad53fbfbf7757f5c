//! CHECK: whether everything is as ADD left it. Checks that the reference also makes use its error
//! messages.

use cni_plugin::delegate::Delegate;
use cni_plugin::{CniResult, Interface, Invocation, IpConfig, Route};
use linux::netlink::{Address, Link, Mac};

use crate::attach::Sockets;
use crate::config::{Config, Container};
use crate::error::Error;
use crate::names::format_mac;
use crate::rules::{self, Port};

pub(crate) fn check(call: &Invocation) -> Result<(), Error> {
    let config = Config::read(call)?;
    let sockets = Sockets::open(call)?;
    if let Some(ipam) = config.ipam() {
        Delegate::find(ipam, &call.path)?.check(call)?;
    }
    let result = call.conf.prev_result()?.ok_or(Error::NoPrevResult)?;
    let expected = Expected::read(&config, call, &result)?;

    let bridge = found(sockets.host.link_by_name(&config.bridge)?, &config.bridge)?;
    check_bridge(&config, expected.bridge, &bridge)?;
    let inside = found(sockets.container.link_by_name(&call.ifname)?, &call.ifname)?;
    let mac = check_container_link(expected.container, &inside)?;
    let port = check_port(&config, &sockets, &expected, &bridge, &inside)?;
    check_addresses(&call.ifname, &expected.ips, &sockets.container.addresses(inside.index)?)?;
    check_routes(&sockets, &expected.ips, &result.routes, &inside)?;
    let ips: Vec<IpConfig> = expected.ips.into_iter().cloned().collect();
    let port = Port { host_veth: &port.name, container_mac: mac, ips: &ips };
    rules::missing(&config, call, port)?.map_or(Ok(()), |sentence| Err(Error::Differs(sentence)))
}

/// This plugin's part of ADD's result; later plugins may have added interfaces and addresses.
struct Expected<'a> {
    bridge: &'a Interface,
    container: &'a Interface,
    /// The host's interfaces; one of them is the port.
    others: Vec<&'a Interface>,
    ips: Vec<&'a IpConfig>,
}

impl<'a> Expected<'a> {
    fn read(config: &Config, call: &Invocation, result: &'a CniResult) -> Result<Self, Error> {
        let named = |name: &str| result.interfaces.iter().position(|interface| interface.name == name);
        let Some(bridge) = named(&config.bridge) else {
            return differs("Interface name missing ".to_owned());
        };
        let sandboxed =
            |interface: &&Interface| interface.name == call.ifname && !interface.sandbox.is_empty();
        let container = result.interfaces.iter().find(sandboxed);
        let netns = call.netns.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
        let container = match container {
            Some(container) if container.sandbox == netns => container,
            other => {
                let sandbox = other.map_or("", |interface| &interface.sandbox);
                return differs(format!(
                    "Sandbox in prevResult {sandbox} doesn't match configured netns: {netns}"
                ));
            }
        };
        let bridge = &result.interfaces[bridge];
        if !bridge.sandbox.is_empty() {
            return differs(format!("Interface {} should not be in sandbox", bridge.name));
        }
        let others =
            result.interfaces.iter().filter(|i| i.sandbox.is_empty() && i.name != config.bridge).collect();
        let is_ours = |ip: &&IpConfig| match ip.interface.map(usize::try_from) {
            None => true,
            Some(at) => at.is_ok_and(|at| result.interfaces.get(at).is_some_and(|i| i == container)),
        };
        Ok(Self { bridge, container, others, ips: result.ips.iter().filter(is_ours).collect() })
    }
}

fn check_bridge(config: &Config, expected: &Interface, bridge: &Link) -> Result<(), Error> {
    let name = &bridge.name;
    if bridge.kind.as_deref() != Some("bridge") {
        return differs(format!("Interface {name} does not have link type of bridge"));
    }
    if !has_mac(expected, bridge.mac) {
        return differs(format!("Bridge interface {name} Mac doesn't match: {}", expected.mac));
    }
    if bridge.promiscuous != config.promiscuous {
        let (wanted, found) = (config.promiscuous, bridge.promiscuous);
        return differs(format!(
            "Bridge interface {name} configured Promisc Mode {wanted} doesn't match current state: {found} "
        ));
    }
    if !bridge.up {
        return differs(format!("Bridge interface {name} is down"));
    }
    Ok(())
}

fn check_container_link(expected: &Interface, inside: &Link) -> Result<Mac, Error> {
    let name = &inside.name;
    if inside.kind.as_deref() != Some("veth") {
        return differs(format!("Error: Container interface {name} not of type veth"));
    }
    if !has_mac(expected, inside.mac) {
        let (wanted, found) = (&expected.mac, format_mac(inside.mac));
        return differs(format!("Interface {name} Mac {wanted} doesn't match container Mac: {found}"));
    }
    Ok(inside.mac.unwrap_or_default())
}

/// The result's one interface on the host that is the peer of the container's: a port of the
/// bridge, up, with the configured settings.
fn check_port(
    config: &Config,
    sockets: &Sockets,
    expected: &Expected<'_>,
    bridge: &Link,
    inside: &Link,
) -> Result<Link, Error> {
    for interface in &expected.others {
        let link = found(sockets.host.link_by_name(&interface.name)?, &interface.name)?;
        let is_peer = link.peer == Some(inside.index) && inside.peer == Some(link.index);
        if link.kind.as_deref() != Some("veth") || !is_peer || link.master != Some(bridge.index) {
            continue;
        }
        let name = &link.name;
        if !has_mac(interface, link.mac) {
            return differs(format!("Interface {name} Mac doesn't match: {} not found", interface.mac));
        }
        if !link.up {
            return differs(format!("Interface {name} is down"));
        }
        if !inside.up && config.container != Container::Disabled {
            return differs(format!("Interface {} is down", inside.name));
        }
        let flags = link.port.unwrap_or_default();
        for (what, wanted, found) in [
            ("Hairpin Mode", config.port.hairpin, flags.hairpin),
            ("Port Isolation", config.port.isolated, flags.isolated),
        ] {
            if wanted != found {
                return differs(format!(
                    "Interface {name} configured {what} {wanted} doesn't match current state: {found}"
                ));
            }
        }
        return Ok(link);
    }
    differs(format!("CNI veth created for bridge {} was not found", bridge.name))
}

fn check_addresses(ifname: &str, expected: &[&IpConfig], found: &[Address]) -> Result<(), Error> {
    for ip in expected {
        let wanted = (ip.address.ip(), ip.address.prefix());
        if !found.iter().any(|address| (address.ip, address.prefix_len) == wanted) {
            return differs(format!("Failed to match addr {} on interface {ifname}", ip.address));
        }
    }
    Ok(())
}

/// The networks of the result's addresses, and its routes, each through the container's interface.
fn check_routes(
    sockets: &Sockets,
    ips: &[&IpConfig],
    expected: &[Route],
    inside: &Link,
) -> Result<(), Error> {
    for is_v4 in [true, false] {
        let ips: Vec<&&IpConfig> = ips.iter().filter(|ip| ip.address.is_ipv4() == is_v4).collect();
        let expected: Vec<&Route> = expected.iter().filter(|route| route.dst.is_ipv4() == is_v4).collect();
        if ips.is_empty() && expected.is_empty() {
            continue;
        }
        let mut found = sockets.container.routes(is_v4)?;
        // A route with several next hops has no link.
        found.retain(|route| route.link.is_none_or(|link| link == inside.index));
        for ip in ips {
            if !leads_to_network(ip, &found) {
                let gateway = ip.gateway.map_or_else(nil, |gateway| gateway.to_string());
                return differs(format!("Failed to find Gateway {gateway} for interface {}", inside.name));
            }
        }
        for route in expected {
            if !found.iter().any(|found| is_route(route, found)) {
                return differs(format!("Expected Route {} not found in routing table", shown(route)));
            }
        }
    }
    Ok(())
}

/// A single-address network needs no route to itself.
fn leads_to_network(ip: &IpConfig, found: &[linux::netlink::Route]) -> bool {
    let network = (ip.address.network(), ip.address.prefix());
    let whole = if ip.address.is_ipv4() { 32 } else { 128 };
    network.1 == whole || found.iter().any(|route| route.destination == network)
}

fn is_route(expected: &Route, found: &linux::netlink::Route) -> bool {
    // The reference does not compare the gateway of a default route.
    let gateway = expected.gw.filter(|_| expected.dst.prefix() > 0);
    found.destination == (expected.dst.network(), expected.dst.prefix())
        && (gateway.is_none() || found.link.is_none() || found.gateway == gateway)
        && expected.table.is_none_or(|table| table == found.table)
}

fn nil() -> String {
    "<nil>".to_owned()
}

/// In the reference's notation: `{Dst:{IP:10.8.0.0 Mask:ffff0000} GW:<nil> MTU:0 ...}`.
fn shown(route: &Route) -> String {
    let mask = match route.dst.mask() {
        std::net::IpAddr::V4(mask) => format!("{:08x}", mask.to_bits()),
        std::net::IpAddr::V6(mask) => format!("{:032x}", mask.to_bits()),
    };
    format!(
        "{{Dst:{{IP:{} Mask:{mask}}} GW:{} MTU:{} AdvMSS:{} Priority:{} Table:{} Scope:{}}}",
        route.dst.ip(),
        route.gw.map_or_else(nil, |gateway| gateway.to_string()),
        route.mtu,
        route.adv_mss,
        route.priority,
        route.table.map_or_else(nil, |table| table.to_string()),
        route.scope.map_or_else(nil, |scope| scope.to_string()),
    )
}

fn found(link: Option<Link>, name: &str) -> Result<Link, Error> {
    link.ok_or_else(|| Error::Differs(format!("Interface name {name} not found")))
}

/// A result without a MAC accepts any.
fn has_mac(expected: &Interface, found: Option<Mac>) -> bool {
    expected.mac.is_empty() || expected.mac.eq_ignore_ascii_case(&format_mac(found))
}

fn differs<T>(sentence: String) -> Result<T, Error> {
    Err(Error::Differs(sentence))
}
