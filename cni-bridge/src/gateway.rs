//! The bridge as gateway: its addresses, its MAC, and the host's forwarding.

use cni_plugin::CniResult;
use ipnetwork::IpNetwork;
use linux::netlink::{Link, Netlink};
use linux::sysctl;
use nix::errno::Errno;

use crate::attach::Connection;
use crate::bridge_lock::BridgeLock;
use crate::config::Config;
use crate::error::Error;
use crate::plan::{GatewayChange, Plan, gateway_change};
use crate::undo::{Step, Undo};

/// Gives the bridge the plan's gateway addresses and lets the host forward
/// their families.
pub(crate) fn ensure(
    host: &Netlink,
    config: &Config,
    plan: &Plan,
    connection: &Connection,
    undo: &mut Undo,
) -> Result<(), Error> {
    if plan.gateways.is_empty() {
        return Ok(());
    }
    {
        let _lock = BridgeLock::take(&config.bridge)?;
        for wanted in &plan.gateways {
            if ensure_address(host, config, &connection.bridge, *wanted)? == Ensured::Added {
                undo.push(Step::RemoveGateway {
                    bridge: connection.bridge.index,
                    own_port: connection.host_veth.index,
                    address: *wanted,
                });
            }
        }
    }
    enable_forwarding(&plan.result)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ensured {
    Added,
    AlreadyThere,
}

fn ensure_address(
    host: &Netlink,
    config: &Config,
    bridge: &Link,
    wanted: IpNetwork,
) -> Result<Ensured, Error> {
    let existing = host.addresses(bridge.index)?;
    let change = gateway_change(&existing, wanted, config.force_address)
        .map_err(|found| Error::BridgeHasOtherAddress { bridge: bridge.name.clone(), wanted, found })?;
    let GatewayChange::Add { replacing } = change else { return Ok(Ensured::AlreadyThere) };
    for old in replacing {
        host.delete_address(bridge.index, (old.ip(), old.prefix()))?;
    }
    let address = (wanted.ip(), wanted.prefix());
    match host.add_address(bridge.index, address, config.duplicate_detection) {
        Ok(()) => {}
        Err(e) if e.errno() == Errno::EEXIST => return Ok(Ensured::AlreadyThere),
        Err(source) => {
            return Err(Error::BridgeAddress { bridge: bridge.name.clone(), address: wanted, source });
        }
    }
    // A bridge made by others may still take its ports' lowest MAC; set once,
    // an address stays. (Ours were made with one.)
    let now = host.link_by_index(bridge.index)?;
    if let Some(mac) = now.and_then(|link| link.mac) {
        host.set_mac(bridge.index, mac).map_err(|source| Error::PinMac { source })?;
    }
    Ok(Ensured::Added)
}

fn enable_forwarding(result: &CniResult) -> Result<(), Error> {
    let has = |is_v4: bool| result.ips.iter().any(|ip| ip.address.is_ipv4() == is_v4);
    for (needed, name) in [(has(true), "net/ipv4/ip_forward"), (has(false), "net/ipv6/conf/all/forwarding")] {
        if needed {
            sysctl::ensure(name, "1").map_err(|source| Error::Forwarding { source })?;
        }
    }
    Ok(())
}
