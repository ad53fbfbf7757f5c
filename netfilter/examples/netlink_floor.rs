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
use netfilter::nftables::{Batch, Family, Is, NfTables, RuleBody};

const BRIDGE: &str = "bench0";
const IFNAME: &str = "eth0";
const TABLE: &str = "netlink_floor";
const CHAIN: &str = "masquerade";
const COMMENT: &str = "netlink_floor";
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

type Address = (IpAddr, u8);

/// The plugins'.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: linux::bare_start::Allocator = linux::bare_start::Allocator;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let [verb, netns, what @ ..] = words.as_slice() else { return Err("prepare|add|del NETNS [...]".into()) };
    let container = NetNs::open(Path::new(netns))?;
    match *verb {
        "prepare" => {
            let host = Netlink::open()?;
            let bridge = host.create_bridge(&BridgeSpec { name: BRIDGE, mac: Some(MAC), mtu: None })?;
            host.set_up(bridge.index)?;
            let mut batch = Batch::new();
            batch.add_table(Family::Inet, TABLE, None).add_chain(Family::Inet, TABLE, CHAIN, None, None);
            NfTables::open()?.update(|_| Ok::<_, linux::Error>((std::mem::take(&mut batch), ())))?;
            add(&container, what)
        }
        "add" => add(&container, what),
        "del" => {
            if what.contains(&"nft") {
                remove_rules()?;
            }
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
    if what.contains(&"nft") {
        add_rules(what)?;
    }
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
    let flags = PortFlags::default();
    host.bring_port_up(&PortSpec { index: port.index, alias: None, flags, locked: false })?;

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

/// One masquerading rule for each family.
fn add_rules(what: &[&str]) -> Result<(), linux::Error> {
    let rule = |address: IpAddr, prefix| {
        let to_others = RuleBody::new(Family::Inet).saddr(Is::Equal, address, 8 * octets(address));
        to_others.daddr(Is::Not, address, prefix).masquerade().build()
    };
    NfTables::open()?.update(|_| {
        let mut batch = Batch::new();
        if what.contains(&"v4") {
            let body = rule([10, 77, 0, 9].into(), 16);
            batch.append_rule(Family::Inet, TABLE, CHAIN, &body, Some(COMMENT));
        }
        if what.contains(&"v6") {
            let body = rule([0xfd77, 0, 0, 0, 0, 0, 0, 9].into(), 64);
            batch.append_rule(Family::Inet, TABLE, CHAIN, &body, Some(COMMENT));
        }
        Ok((batch, ()))
    })
}

fn octets(address: IpAddr) -> u8 {
    if address.is_ipv4() { 4 } else { 16 }
}

fn remove_rules() -> Result<(), linux::Error> {
    NfTables::open()?.update(|nftables| {
        let mut batch = Batch::new();
        for rule in nftables.rules(Family::Inet, TABLE, Some(CHAIN))? {
            if rule.comment.as_deref() == Some(COMMENT) {
                batch.delete_rule(Family::Inet, TABLE, CHAIN, rule.handle);
            }
        }
        Ok((batch, ()))
    })
}
