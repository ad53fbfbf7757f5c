//! The least that the kernel has to do for one call of a bridge plugin, as a
//! program: what `cargo xtask bench cni` compares the plugins with. It reads
//! nothing, checks nothing and undoes nothing.
//!
//! `netlink_floor prepare|add|del NETNS [v4] [v6] [nft]` in the host's
//! namespace. `prepare` makes the bridge, up, with a first port in NETNS.

use std::error::Error;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::Path;

use linux::netlink::{BridgeSpec, DuplicateDetection, Netlink, PortFlags, PortSpec, RouteSpec, VethSpec};
use linux::netns::NetNs;

const BRIDGE: &str = "bench0";
const IFNAME: &str = "eth0";
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

type Address = (IpAddr, u8);

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let [verb, netns, what @ ..] = words.as_slice() else { return Err("prepare|add|del NETNS [...]".into()) };
    let container = NetNs::open(Path::new(netns))?;
    match *verb {
        "prepare" => {
            let host = Netlink::open()?;
            let bridge = host.create_bridge(&BridgeSpec { name: BRIDGE, mac: MAC, mtu: None })?;
            host.set_up(bridge.index)?;
            add(&container, what)
        }
        "add" => add(&container, what),
        "del" => {
            container.enter()?;
            let inside = Netlink::open()?;
            let link = inside.link_by_name(IFNAME)?.ok_or("no link")?;
            Ok(inside.delete_link(link.index)?)
        }
        other => Err(format!("unknown verb {other}").into()),
    }
}

fn add(container: &NetNs, what: &[&str]) -> Result<(), Box<dyn Error>> {
    let host = Netlink::open()?;
    let bridge = host.link_by_name(BRIDGE)?.ok_or("no bridge")?;
    let name = format!("veth{:08x}", std::process::id());
    let spec = VethSpec {
        name: &name,
        master: bridge.index,
        mtu: None,
        peer_name: IFNAME,
        peer_mac: None,
        peer_netns: container.as_fd(),
    };
    let port = host.create_veth(&spec)?;
    host.bring_port_up(&PortSpec { index: port.index, alias: None, flags: PortFlags::default() })?;

    container.enter()?;
    let inside = Netlink::open()?;
    let eth0 = inside.link_by_name(IFNAME)?.ok_or("no link")?;
    let families: Vec<(Address, Address)> = what
        .iter()
        .filter_map(|word| match *word {
            "v4" => Some((([10, 77, 0, 9].into(), 16), ([0, 0, 0, 0].into(), 0))),
            "v6" => Some((([0xfd77, 0, 0, 0, 0, 0, 0, 9].into(), 64), ([0u16; 8].into(), 0))),
            _ => None,
        })
        .collect();
    for (address, _) in &families {
        inside.add_address(eth0.index, *address, DuplicateDetection::Off)?;
    }
    inside.set_up(eth0.index)?;
    for ((ip, _), default) in &families {
        let gateway = match ip {
            IpAddr::V4(_) => [10, 77, 0, 1].into(),
            IpAddr::V6(_) => [0xfd77, 0, 0, 0, 0, 0, 0, 1].into(),
        };
        inside.add_route(&RouteSpec {
            destination: *default,
            gateway: Some(gateway),
            link: eth0.index,
            priority: 0,
            table: None,
            scope: None,
            mtu: 0,
            adv_mss: 0,
        })?;
    }
    Ok(())
}
