//! The links of an attachment: the bridge, the veth pair between it and the
//! container, and the container's end with its addresses and routes.

use std::io::Read;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use cni_plugin::Invocation;
use linux::netlink::{
    BridgeSpec, Changes, DuplicateDetection, Link, Mac, Netlink, OperState, PortSpec, RouteSpec, VethSpec,
    Watch,
};
use linux::netns::NetNs;
use linux::sysctl;
use nix::errno::Errno;

use crate::bridge_lock::BridgeLock;
use crate::config::Config;
use crate::error::{Error, NetnsError};
use crate::plan::Plan;
use crate::undo::{Step, Undo};

/// As often as the reference tries.
const VETH_NAME_ATTEMPTS: usize = 10;
/// The sum of the reference's sleeps.
const PORT_UP_TIMEOUT: Duration = Duration::from_millis(2550);
/// The reference's.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);
/// IFALIASZ without the final zero.
const ALIAS_MAX: usize = 255;

/// The two ends of the work; both sockets are open before anything is changed.
#[derive(Debug)]
pub(crate) struct Ends {
    pub(crate) host: Netlink,
    pub(crate) container: Netlink,
    pub(crate) netns: NetNs,
}

/// What [`Ends::connect`] made or found.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) bridge: Link,
    pub(crate) host_veth: Link,
    pub(crate) container_veth: Link,
}

impl Ends {
    pub(crate) fn open(call: &Invocation) -> Result<Self, Error> {
        let path = call.netns.clone().unwrap_or_default();
        let netns = NetNs::open(&path)
            .map_err(|e| Error::OpenNetns { cause: NetnsError::of(&path, e), path: path.clone() })?;
        Ok(Self { host: Netlink::open()?, container: Netlink::open_in(&netns)?, netns })
    }

    /// The bridge, and a port of it whose other end is the container's
    /// interface (still down). Steps that make something are recorded.
    pub(crate) fn connect(
        &self,
        config: &Config,
        call: &Invocation,
        undo: &mut Undo,
    ) -> Result<Connection, Error> {
        let _lock = BridgeLock::take(&config.bridge)?;
        let bridge = self.ensure_bridge(config, undo)?;
        let name = self.create_veth(config, call, &bridge, undo)?;
        let host_veth = self.host.link_by_name(&name)?.ok_or(Error::LinkVanished { name })?;
        let container_veth = self.container.link_by_name(&call.ifname)?;
        let container_veth =
            container_veth.ok_or_else(|| Error::LinkVanished { name: call.ifname.clone() })?;

        ignore_router_advertisements(&host_veth.name);
        let alias = alias(call);
        let port = PortSpec {
            index: host_veth.index,
            alias: alias.as_deref(),
            hairpin: config.hairpin,
            isolated: config.isolated,
        };
        self.host.bring_port_up(&port).map_err(|source| Error::ConnectPort {
            veth: host_veth.name.clone(),
            bridge: bridge.name.clone(),
            source,
        })?;
        Ok(Connection { bridge, host_veth, container_veth })
    }

    fn ensure_bridge(&self, config: &Config, undo: &mut Undo) -> Result<Link, Error> {
        let failed = |source| Error::EnsureBridge { name: config.bridge.clone(), source };
        let spec = BridgeSpec { name: &config.bridge, mac: random_mac()?, mtu: config.mtu };
        let created = match self.host.link_by_name(&config.bridge).map_err(failed)? {
            Some(_) => false,
            // The reference does not take our lock: EEXIST is possible.
            None => match self.host.create_bridge(&spec) {
                Ok(()) => true,
                Err(e) if e.errno() == Errno::EEXIST => false,
                Err(e) => return Err(failed(e)),
            },
        };
        let bridge = self.host.link_by_name(&config.bridge).map_err(failed)?;
        let bridge = bridge.ok_or_else(|| Error::LinkVanished { name: config.bridge.clone() })?;
        if created {
            undo.push(Step::DeleteBridge { index: bridge.index });
        }
        if bridge.kind.as_deref() != Some("bridge") {
            return Err(Error::NotABridge { name: config.bridge.clone() });
        }
        if config.promiscuous && !bridge.promiscuous {
            self.host.set_promiscuous(bridge.index).map_err(failed)?;
        }
        ignore_router_advertisements(&bridge.name);
        if !bridge.up {
            self.host.set_up(bridge.index).map_err(failed)?;
        }
        Ok(bridge)
    }

    /// Returns the name of the host's end.
    fn create_veth(
        &self,
        config: &Config,
        call: &Invocation,
        bridge: &Link,
        undo: &mut Undo,
    ) -> Result<String, Error> {
        for _ in 0..VETH_NAME_ATTEMPTS {
            let name = random_veth_name()?;
            let spec = VethSpec {
                name: &name,
                master: bridge.index,
                mtu: config.mtu,
                peer_name: &call.ifname,
                peer_mac: config.container_mac,
                peer_netns: self.netns.as_fd(),
            };
            match self.host.create_veth(&spec) {
                Ok(()) => {
                    undo.push(Step::DeleteVeth { name: name.clone() });
                    return Ok(name);
                }
                Err(e) if e.errno() == Errno::EEXIST => {
                    self.refuse_existing(call, &name)?;
                }
                Err(source) => return Err(Error::CreateVeth { source }),
            }
        }
        Err(Error::NoVethName)
    }

    /// An error when the container already has an interface of that name.
    pub(crate) fn refuse_existing(&self, call: &Invocation, peer: &str) -> Result<(), Error> {
        match self.container.link_by_name(&call.ifname)? {
            Some(_) => Err(Error::ContainerLinkExists { ifname: call.ifname.clone(), peer: peer.to_owned() }),
            None => Ok(()),
        }
    }

    /// Addresses, link up, routes, in an order that needs no waiting: IPv4
    /// addresses first, so that going up announces them (arp_notify); IPv6 ones
    /// after, since their prefix routes need the link.
    pub(crate) fn configure(
        &self,
        config: &Config,
        call: &Invocation,
        plan: &Plan,
        veth: &Link,
    ) -> Result<(), Error> {
        self.set_sysctls(config, &call.ifname, plan)?;
        self.add_addresses(config, call, plan, veth, true)?;
        self.set_up(call, veth)?;
        self.add_addresses(config, call, plan, veth, false)?;
        let v6_gateway = plan.result.ips.iter().any(|ip| ip.gateway.is_some_and(|gateway| gateway.is_ipv6()));
        if config.duplicate_detection == DuplicateDetection::On && v6_gateway {
            self.settle(call, veth)?;
        }
        for route in &plan.result.routes {
            let gateway = plan.gateway_of(route);
            let spec = RouteSpec {
                destination: (route.dst.ip(), route.dst.prefix()),
                gateway,
                link: veth.index,
                priority: route.priority,
                table: route.table,
                scope: route.scope,
                mtu: route.mtu,
                adv_mss: route.adv_mss,
            };
            self.container.add_route(&spec).map_err(|source| Error::AddRoute {
                dst: route.dst,
                gateway,
                ifname: call.ifname.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// The container's end of a layer-2 attachment.
    pub(crate) fn set_up(&self, call: &Invocation, veth: &Link) -> Result<(), Error> {
        let failed = |source| Error::SetUp { ifname: call.ifname.clone(), source };
        self.container.set_up(veth.index).map_err(failed)
    }

    fn add_addresses(
        &self,
        config: &Config,
        call: &Invocation,
        plan: &Plan,
        veth: &Link,
        is_v4: bool,
    ) -> Result<(), Error> {
        for ip in plan.result.ips.iter().filter(|ip| ip.address.is_ipv4() == is_v4) {
            let address = (ip.address.ip(), ip.address.prefix());
            let added = self.container.add_address(veth.index, address, config.duplicate_detection);
            added.map_err(|source| Error::AddAddress {
                address: ip.address,
                ifname: call.ifname.clone(),
                source,
            })?;
        }
        Ok(())
    }

    fn set_sysctls(&self, config: &Config, ifname: &str, plan: &Plan) -> Result<(), Error> {
        let detect = config.duplicate_detection == DuplicateDetection::On;
        let has_ipv6 = plan.has_ipv6();
        let set = || -> Result<(), Error> {
            if detect {
                tolerate(sysctl::write(&format!("net/ipv6/conf/{ifname}/enhanced_dad"), "1"));
            }
            let accept_dad = if detect { "1" } else { "0" };
            tolerate(sysctl::write(&format!("net/ipv6/conf/{ifname}/accept_dad"), accept_dad));
            tolerate(sysctl::write(&format!("net/ipv4/conf/{ifname}/arp_notify"), "1"));
            if has_ipv6 {
                enable_ipv6("lo")?;
                enable_ipv6(ifname)?;
                let keep = sysctl::write(&format!("net/ipv6/conf/{ifname}/keep_addr_on_down"), "1");
                keep.map_err(|source| Error::EnableIpv6 { ifname: ifname.to_owned(), source })?;
            }
            Ok(())
        };
        self.netns.run(set)?
    }

    /// Waits until duplicate detection has judged all addresses.
    fn settle(&self, call: &Invocation, veth: &Link) -> Result<(), Error> {
        let mut changes = Changes::watch(Some(&self.netns), Watch::Ipv6Addresses)?;
        let judged = changes.until(SETTLE_TIMEOUT, || {
            let addresses = self.container.addresses(veth.index)?;
            let failed: Option<IpAddr> = addresses.iter().find(|a| a.dad_failed).map(|a| a.ip);
            Ok(if failed.is_some() || !addresses.iter().any(|a| a.tentative) { Some(failed) } else { None })
        });
        let ifname = call.ifname.clone();
        match judged? {
            Some(None) => Ok(()),
            Some(Some(address)) => Err(Error::DuplicateAddress { ifname, address }),
            None => Err(Error::AddressesUnsettled { ifname, seconds: SETTLE_TIMEOUT.as_secs() }),
        }
    }

    /// The port once it forwards. Asking makes new kernels settle the state at
    /// once; with older ones the answer is an event away.
    pub(crate) fn port_when_up(&self, host_veth: &Link) -> Result<Link, Error> {
        let port = self.port(host_veth)?;
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
            None => Err(Error::PortNotUp { state: self.port(host_veth)?.oper_state }),
        }
    }

    pub(crate) fn port(&self, host_veth: &Link) -> Result<Link, Error> {
        let found = self.host.link_by_index(host_veth.index)?;
        found.ok_or_else(|| Error::LinkVanished { name: host_veth.name.clone() })
    }
}

/// `cni:<network>:<container id>:<ifname>` marks a veth as ours and says whose
/// it is. `None` when it does not fit: such a veth is found by its namespace
/// only.
pub(crate) fn alias(call: &Invocation) -> Option<String> {
    let alias = format!("cni:{}:{}:{}", call.conf.name, call.container_id, call.ifname);
    (alias.len() <= ALIAS_MAX).then_some(alias)
}

/// Routes of our links are ours to set, not a router's.
fn ignore_router_advertisements(link: &str) {
    tolerate(sysctl::write(&format!("net/ipv6/conf/{link}/accept_ra"), "0"));
}

fn enable_ipv6(link: &str) -> Result<(), Error> {
    let name = format!("net/ipv6/conf/{link}/disable_ipv6");
    match sysctl::ensure(&name, "0") {
        Ok(_) => Ok(()),
        // A kernel without IPv6: adding the address will say so.
        Err(e) if e.errno() == Errno::ENOENT => Ok(()),
        Err(source) => Err(Error::EnableIpv6 { ifname: link.to_owned(), source }),
    }
}

/// For settings that the reference sets without looking at the outcome: a host
/// without IPv6 has none of them.
fn tolerate(outcome: linux::Result<()>) {
    if let Err(e) = outcome
        && e.errno() != Errno::ENOENT
    {
        cni_plugin::warn("bridge", format_args!("{e}: {}", e.source));
    }
}

pub(crate) fn random_veth_name() -> Result<String, Error> {
    let bytes: [u8; 4] = random()?;
    Ok(format!("veth{:08x}", u32::from_be_bytes(bytes)))
}

/// A locally administered unicast address.
fn random_mac() -> Result<Mac, Error> {
    let mut mac: Mac = random()?;
    mac[0] = (mac[0] & 0xfc) | 0x02;
    Ok(mac)
}

fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    let mut source = std::fs::File::open("/dev/urandom");
    let read = source
        .as_mut()
        .map_err(|e| std::io::Error::from(e.kind()))
        .and_then(|file| file.read_exact(&mut bytes));
    read.map_err(|e| linux::Error::new("read", "/dev/urandom", e))?;
    Ok(bytes)
}
