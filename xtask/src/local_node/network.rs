//! The network of the node's pods: its configuration, and the removal of everything that the CNI
//! plugins leave on the machine.

use std::net::IpAddr;
use std::process::Command;
use std::time::Duration;

use ::tests::netlink;
use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};
use xtask::progress::say;

use super::helper;
use super::place::Place;
use super::record::Record;

/// Not that of the examples, whose network may be in use on this machine too.
const BRIDGE: &str = "hawser-up0";
const NAME: &str = "hawser-up";
const VERSION: &str = "1.1.0";
const SUBNETS: [&str; 2] = ["10.244.8.0/24", "fd00:10:244:8::/64"];
/// For the removal of what a plugin has left.
const GC_TIMEOUT: Duration = Duration::from_secs(60);
/// Tables that the plugins share with other networks, and never delete; families inet, ip and ip6.
const SHARED_TABLES: [&str; 3] = ["1 cni_plugins_masquerade", "2 cni_hostport", "10 cni_hostport"];

/// In the order in which an ADD calls them.
fn plugins(place: &Place) -> [Value; 2] {
    let ranges = SUBNETS.map(|subnet| json!([{ "subnet": subnet }]));
    let ipam = json!({
        "type": "host-local",
        "dataDir": place.leases(),
        "ranges": ranges,
        "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
    });
    let bridge = json!({
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": true,
        "hairpinMode": true,
        "ipMasq": true,
        "ipMasqBackend": "nftables",
        "ipam": ipam,
    });
    let portmap =
        json!({ "type": "portmap", "backend": "nftables", "capabilities": { "portMappings": true } });
    [bridge, portmap]
}

/// The configuration, as a conflist.
pub(super) fn conflist(place: &Place) -> Value {
    json!({ "cniVersion": VERSION, "name": NAME, "plugins": plugins(place) })
}

/// An error if the machine has the bridge or an address of the pods' subnets already.
pub(super) fn require_free() -> Result<()> {
    let taken = netlink::links()?.into_iter().any(|link| link.name == BRIDGE);
    ensure!(
        !taken,
        "this machine has a link {BRIDGE} already: remove its node with cargo xtask down, or the link with \
         `ip link delete {BRIDGE}`"
    );
    for (_link, address) in netlink::addresses()? {
        ensure!(
            !is_in_subnets(&address),
            "this machine has the address {address}, which the pods would need"
        );
    }
    Ok(())
}

/// Whether an address, such as `10.244.8.1/24`, is the pods'.
fn is_in_subnets(address: &str) -> bool {
    let ip = address.split('/').next().and_then(|ip| ip.parse::<IpAddr>().ok());
    ip.is_some_and(|ip| match ip {
        IpAddr::V4(ip) => ip.octets().starts_with(&[10, 244, 8]),
        IpAddr::V6(ip) => ip.segments().starts_with(&[0xfd00, 0x10, 0x244, 0x8]),
    })
}

/// Removes links, routes, rules, tables and forwarding, after the last process of a pod has ended.
pub(super) fn remove(place: &Place, record: &Record) -> Result<()> {
    for plugin in plugins(place).iter().rev() {
        collect_garbage(place, plugin)?;
    }
    let links = netlink::links()?;
    let mut ours = Vec::new();
    // Its routes and addresses go with it.
    if let Some(bridge) = links.iter().find(|link| link.name == BRIDGE) {
        let ports = links.iter().filter(|link| link.master == Some(bridge.index));
        ours.extend(ports.map(|port| port.name.clone()));
        netlink::delete_link(BRIDGE)?;
    }
    remove_tables(record)?;
    if let Some(newcomer) = record.newcomer(&ours)? {
        say(&format!("                  IP forwarding stays as it is: {newcomer} has come meanwhile"));
        return Ok(());
    }
    for file in record.write_forwarding_back()? {
        say(&format!("                  {file} is as it was before"));
    }
    Ok(())
}

/// Has a plugin remove all that belongs to the network (CNI specification, GC: no attachment is valid).
fn collect_garbage(place: &Place, plugin: &Value) -> Result<()> {
    let kind = plugin["type"].as_str().unwrap_or_default();
    let program = place.program(kind);
    // An interrupted `up` has started nothing without its programs.
    if !program.is_file() {
        return Ok(());
    }
    let mut config: Map<String, Value> = plugin.as_object().cloned().unwrap_or_default();
    config.insert("cniVersion".to_owned(), VERSION.into());
    config.insert("name".to_owned(), NAME.into());
    config.insert("cni.dev/valid-attachments".to_owned(), json!([]));
    let mut command = Command::new(&program);
    command.env_clear().env("CNI_COMMAND", "GC").env("CNI_PATH", place.programs());
    let config = serde_json::to_vec(&config).context("write the configuration")?;
    let output = helper::output(&mut command, &config, GC_TIMEOUT)?;
    let printed = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success(),
        "{kind} GC: {}: {}",
        output.status,
        String::from_utf8_lossy(&printed).trim()
    );
    Ok(())
}

/// Removes the shared tables that were not there before, unless another network uses them meanwhile.
fn remove_tables(record: &Record) -> Result<()> {
    let lines = netlink::nft_chains_and_rules()?;
    for table in netlink::nft_tables()? {
        if record.nft_tables.contains(&table) || !SHARED_TABLES.contains(&table.as_str()) {
            continue;
        }
        // Rules of an attachment have a comment that names it; the table's own rules have none.
        let is_attachments = |line: &&netlink::NftLine| {
            format!("{} {}", line.family, line.table) == table && !line.comment.is_empty()
        };
        match lines.iter().find(is_attachments) {
            None => netlink::delete_nft_table(&table)?,
            Some(rule) => say(&format!("table {table} stays: another network uses it ({})", rule.comment)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_the_pods_is_known() {
        for (address, is_theirs) in [
            ("10.244.8.1/24", true),
            ("10.244.80.1/24", false),
            ("fd00:10:244:8::1/64", true),
            ("fd00:10:244:80::1/64", false),
            ("192.168.0.2/24", false),
        ] {
            assert_eq!(is_in_subnets(address), is_theirs, "{address}");
        }
    }
}
