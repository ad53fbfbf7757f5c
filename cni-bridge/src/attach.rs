//! The links of an attachment: the bridge, and the veth pair between it and the
//! container.

use std::os::fd::AsFd;
use std::time::Duration;

use cni_plugin::Invocation;
use linux::interface::Interfaces;
use linux::netlink::{
    Address, BridgeSpec, Changes, Link, Mac, Netlink, OperState, PortSpec, VethSpec, Watch,
};
use linux::netns::NetNs;
use linux::sysctl::Settings;
use nix::errno::Errno;

use crate::bridge_lock::BridgeLock;
use crate::config::Config;
use crate::error::{Error, NetnsError};
use crate::names::{alias, veth_name};
use crate::random;
use crate::undo::{Step, Undo};

/// IPv6's settings of each interface.
pub(crate) const IPV6: &str = "net/ipv6/conf";
/// As many attempts as the reference makes.
const VETH_NAME_ATTEMPTS: usize = 10;
/// The sum of the reference's sleeps.
const PORT_UP_TIMEOUT: Duration = Duration::from_millis(2550);

/// The host's socket and the container's; both are opened before anything is changed.
#[derive(Debug)]
pub(crate) struct Sockets {
    pub(crate) host: Netlink,
    pub(crate) container: Netlink,
    pub(crate) container_interfaces: Interfaces,
    pub(crate) netns: NetNs,
    /// The host's namespace, in which this process was started.
    pub(crate) home: NetNs,
    /// Of the namespace in which the thread is.
    pub(crate) settings: Settings,
}

/// What [`Sockets::connect`] made or found.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) bridge: Link,
    /// The bridge's addresses, read after the port had joined it: from then on no failing ADD of
    /// another container removes one.
    pub(crate) bridge_addresses: Vec<Address>,
    pub(crate) host_veth: Link,
    pub(crate) container_veth: ContainerVeth,
}

/// Who made the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// Made by this call.
    Made,
    Found,
}

/// The veth in the container.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ContainerVeth {
    /// Its index in the container's namespace.
    pub(crate) index: u32,
    pub(crate) mac: Mac,
}

impl Sockets {
    pub(crate) fn open(call: &Invocation) -> Result<Self, Error> {
        let path = call.netns.clone().unwrap_or_default();
        let netns = NetNs::open(&path)
            .map_err(|e| Error::OpenNetns { source: NetnsError::of(&path, e), path: path.clone() })?;
        let home = NetNs::current()?;
        let host = Netlink::open()?;
        let (container, interfaces) = netns.visit(&home, || (Netlink::open(), Interfaces::open()))?;
        let (container, container_interfaces) = (container?, interfaces?);
        Ok(Self { host, container, container_interfaces, netns, home, settings: Settings::open()? })
    }

    /// Makes the bridge and a port of it whose peer is the container's interface (still down).
    /// Records each step that makes something.
    pub(crate) fn connect(
        &self,
        config: &Config,
        call: &Invocation,
        undo: &mut Undo,
    ) -> Result<Connection, Error> {
        let _lock = BridgeLock::take(&config.bridge)?;
        let bridge = self.ensure_bridge(config, undo)?;
        let (host_veth, container_veth) = self.create_veth(config, call, &bridge, undo)?;

        self.switch_ipv6_off(&host_veth);
        let alias = alias(call);
        let locked = config.starts_locked();
        let port = PortSpec { index: host_veth.index, alias: Some(&alias), flags: config.port, locked };
        self.host.bring_port_up(&port).map_err(|e| not_connected(&host_veth, &bridge, e))?;
        let bridge_addresses = match config.is_gateway() {
            true => self.host.addresses(bridge.index)?,
            false => Vec::new(),
        };
        Ok(Connection { bridge, bridge_addresses, host_veth, container_veth })
    }

    /// Lets the frames of the container through.
    pub(crate) fn unlock(&self, connection: &Connection) -> Result<(), Error> {
        let Connection { bridge, host_veth, .. } = connection;
        self.host.unlock_port(host_veth.index).map_err(|e| not_connected(host_veth, bridge, e))
    }

    fn ensure_bridge(&self, config: &Config, undo: &mut Undo) -> Result<Link, Error> {
        let failed = |source| Error::EnsureBridge { name: config.bridge.clone(), source };
        let found = self.host.link_by_name(&config.bridge).map_err(failed)?;
        let (bridge, origin) = match found {
            Some(bridge) => (bridge, Origin::Found),
            None => self.create_bridge(config, undo)?,
        };
        if bridge.kind.as_deref() != Some("bridge") {
            return Err(Error::NotABridge { name: config.bridge.clone() });
        }
        let promiscuous = config.promiscuous && !bridge.promiscuous;
        if promiscuous || !bridge.up {
            undo.push(Step::RestoreBridge { was: bridge.clone() });
        }
        if promiscuous {
            self.host.set_promiscuous(bridge.index, true).map_err(failed)?;
        }
        if config.spoof_check {
            self.host.ignore_link_local_sources(bridge.index).map_err(failed)?;
        }
        self.ignore_router_advertisements(&bridge);
        if origin == Origin::Made {
            self.detect_no_duplicates(&bridge);
        }
        if !bridge.up {
            match bridge.mac {
                // Setting the kernel's random MAC keeps it: otherwise it would change with the
                // ports.
                Some(mac) if origin == Origin::Made => self.host.set_up_with_mac(bridge.index, mac),
                _ => self.host.set_up(bridge.index),
            }
            .map_err(failed)?;
        }
        Ok(bridge)
    }

    fn create_bridge(&self, config: &Config, undo: &mut Undo) -> Result<(Link, Origin), Error> {
        let spec = BridgeSpec { name: &config.bridge, mac: None, mtu: config.mtu };
        match self.host.create_bridge(&spec) {
            Ok(bridge) => {
                undo.push(Step::DeleteBridge { index: bridge.index });
                Ok((bridge, Origin::Made))
            }
            // The reference does not take our lock and may have been faster.
            Err(e) if e.errno() == Errno::EEXIST => {
                let found = self.host.link_by_name(&config.bridge)?;
                let found = found.ok_or_else(|| Error::LinkVanished { name: config.bridge.clone() })?;
                Ok((found, Origin::Found))
            }
            Err(source) => {
                // It may exist although the kernel's answer was lost.
                undo.push(Step::DeleteUnfinishedBridge { name: config.bridge.clone() });
                Err(Error::CreateBridge { name: config.bridge.clone(), mtu: config.mtu, source })
            }
        }
    }

    fn create_veth(
        &self,
        config: &Config,
        call: &Invocation,
        bridge: &Link,
        undo: &mut Undo,
    ) -> Result<(Link, ContainerVeth), Error> {
        let mac = config.container_mac.map_or_else(random::mac, Ok)?;
        for attempt in 0..VETH_NAME_ATTEMPTS {
            let name = if attempt == 0 { veth_name(call) } else { random::veth_name()? };
            let spec = VethSpec {
                name: &name,
                master: bridge.index,
                mtu: config.mtu,
                peer_name: &call.ifname,
                peer_mac: Some(mac),
                peer_netns: self.netns.as_fd(),
            };
            match self.host.create_veth(&spec) {
                Ok(host_veth) => {
                    undo.push(Step::DeleteVeth { name });
                    let index = self.peer_index(&host_veth, call)?;
                    return Ok((host_veth, ContainerVeth { index, mac }));
                }
                Err(e) if e.errno() == Errno::EEXIST => {
                    self.refuse_existing(call, &name)?;
                }
                Err(source) => {
                    // It may exist although the kernel's answer was lost.
                    undo.push(Step::DeleteUnfinishedVeth { name });
                    return Err(Error::CreateVeth { mtu: config.mtu, mac: config.container_mac, source });
                }
            }
        }
        Err(Error::NoVethName)
    }

    fn peer_index(&self, host_veth: &Link, call: &Invocation) -> Result<u32, Error> {
        if let Some(index) = host_veth.peer {
            return Ok(index);
        }
        let found = self.container.link_by_name(&call.ifname)?;
        found.map(|link| link.index).ok_or_else(|| Error::LinkVanished { name: call.ifname.clone() })
    }

    /// An error if the container already has an interface with this name.
    pub(crate) fn refuse_existing(&self, call: &Invocation, peer: &str) -> Result<(), Error> {
        if self.container_interfaces.exists(&call.ifname)? {
            return Err(Error::ContainerLinkExists { ifname: call.ifname.clone(), peer: peer.to_owned() });
        }
        Ok(())
    }

    /// The port once it forwards. On new kernels the query itself updates the state; on older ones
    /// an event follows.
    pub(crate) fn port_when_up(&self, host_veth: &Link) -> Result<Link, Error> {
        let port = self.link(host_veth)?;
        if port.oper_state == OperState::Up {
            return Ok(port);
        }
        let mut changes = Changes::watch(None, Watch::Links)?;
        let up = changes.until(PORT_UP_TIMEOUT, || {
            let port = self.host.link_by_index(host_veth.index)?;
            Ok(port.filter(|port| port.oper_state == OperState::Up))
        });
        match up? {
            Some(port) => Ok(port),
            None => Err(Error::PortNotUp { state: self.link(host_veth)?.oper_state }),
        }
    }

    /// The current state of a link of the host.
    pub(crate) fn link(&self, link: &Link) -> Result<Link, Error> {
        let found = self.host.link_by_index(link.index)?;
        found.ok_or_else(|| Error::LinkVanished { name: link.name.clone() })
    }

    /// A port has no address: the bridge has. Otherwise the kernel would give it a link-local one, and look
    /// through the routes of all ports whenever a port changes (`fib6_clean_all`).
    fn switch_ipv6_off(&self, port: &Link) {
        tolerate(self.settings.write(&format!("{IPV6}/{}/disable_ipv6", port.name), "1"));
    }

    /// This plugin sets the routes of the bridge; routers must not.
    fn ignore_router_advertisements(&self, link: &Link) {
        if link.accept_ra != Some(0) {
            tolerate(self.settings.write(&format!("{IPV6}/{}/accept_ra", link.name), "0"));
        }
    }

    /// The bridge's link-local address comes from its random MAC. While the kernel checks for
    /// duplicates, a container that claims the address would remove it permanently
    /// (`addrconf_dad_failure`), and with it the source of neighbour solicitations for incoming
    /// traffic.
    fn detect_no_duplicates(&self, bridge: &Link) {
        tolerate(self.settings.write(&format!("{IPV6}/{}/accept_dad", bridge.name), "0"));
    }
}

fn not_connected(port: &Link, bridge: &Link, source: linux::Error) -> Error {
    Error::ConnectPort { veth: port.name.clone(), bridge: bridge.name.clone(), source }
}

/// Ignores failures of settings whose result the reference ignores too: a host without IPv6 has
/// none of them.
pub(crate) fn tolerate(outcome: linux::Result<()>) {
    if let Err(e) = outcome
        && e.errno() != Errno::ENOENT
    {
        cni_plugin::warn("bridge", format_args!("{e}: {}", e.reason()));
    }
}
