//! The bridge as gateway: its addresses, its MAC, and the host's forwarding.

use cni_plugin::CniResult;
use ipnetwork::IpNetwork;
use linux::netlink::{Mac, Netlink};
use linux::sysctl::Settings;
use nix::errno::Errno;

use crate::attach::{Connection, Sockets};
use crate::bridge_lock::BridgeLock;
use crate::config::Config;
use crate::error::Error;
use crate::plan::{GatewayChange, Plan, gateway_change};
use crate::undo::{AddressChange, Step, Undo};

/// Gives the bridge the plan's gateway addresses, and enables the host's forwarding for their
/// families.
pub(crate) fn ensure(
    sockets: &Sockets,
    config: &Config,
    plan: &Plan,
    connection: &Connection,
    undo: &mut Undo,
) -> Result<(), Error> {
    let missing = |wanted: &&IpNetwork| {
        gateway_change(&connection.bridge_addresses, **wanted, config.force_address)
            != Ok(GatewayChange::None)
    };
    let missing: Vec<IpNetwork> = plan.gateways.iter().filter(missing).copied().collect();
    if !missing.is_empty() {
        let _lock = BridgeLock::take(&config.bridge)?;
        for wanted in missing {
            ensure_address(&sockets.host, config, connection, wanted, undo)?;
        }
    }
    if plan.gateways.is_empty() { Ok(()) } else { enable_forwarding(&sockets.settings, &plan.result) }
}

/// The MAC of a bridge that has lost its last port.
const NO_MAC: Mac = [0; 6];

fn ensure_address(
    host: &Netlink,
    config: &Config,
    connection: &Connection,
    wanted: IpNetwork,
    undo: &mut Undo,
) -> Result<(), Error> {
    let bridge = &connection.bridge;
    let existing = host.addresses(bridge.index)?;
    let change = gateway_change(&existing, wanted, config.force_address)
        .map_err(|found| Error::BridgeHasOtherAddress { bridge: bridge.name.clone(), wanted, found })?;
    let GatewayChange::Add { replacing } = change else { return Ok(()) };
    let step = |address, change| Step::BridgeAddress {
        bridge: bridge.index,
        own_port: connection.host_veth.index,
        address,
        change,
    };
    let added = if replacing.is_empty() { AddressChange::Added } else { AddressChange::AddedInstead };
    // The last ones first: deleting an address may delete its secondaries.
    for old in replacing.into_iter().rev() {
        undo.push(step(old, AddressChange::Removed));
        match host.delete_address(bridge.index, (old.ip(), old.prefix())) {
            Err(e) if e.errno() != Errno::EADDRNOTAVAIL => return Err(e.into()),
            _ => {}
        }
    }
    let address = (wanted.ip(), wanted.prefix());
    match host.add_address(bridge.index, address, config.duplicate_detection) {
        Ok(()) => undo.push(step(wanted, added)),
        Err(e) if e.errno() == Errno::EEXIST => return Ok(()),
        Err(source) => {
            return Err(Error::BridgeAddress { bridge: bridge.name.clone(), address: wanted, source });
        }
    }
    // A bridge of another program may still take the lowest MAC of its ports; a MAC that is set
    // stays. (Ours are made with one.) Uses the MAC from before our port joined: a port's MAC
    // disappears with its container.
    let before = connection.bridge.mac.filter(|mac| *mac != NO_MAC);
    let mac = match before {
        Some(mac) => Some(mac),
        None => host.link_by_index(bridge.index)?.and_then(|link| link.mac),
    };
    match mac {
        Some(mac) => host.set_mac(bridge.index, mac).map_err(|source| Error::PinMac { source }),
        None => Ok(()),
    }
}

fn enable_forwarding(settings: &Settings, result: &CniResult) -> Result<(), Error> {
    let has = |is_v4: bool| result.ips.iter().any(|ip| ip.address.is_ipv4() == is_v4);
    if has(true) {
        settings.ensure("net/ipv4/ip_forward", "1").map_err(|source| Error::Forwarding { source })?;
    }
    if has(false) {
        settings
            .ensure("net/ipv6/conf/all/forwarding", "1")
            .map_err(|source| Error::Forwarding { source })?;
    }
    Ok(())
}
