//! Links, addresses and routes by rtnetlink: one blocking socket per network
//! namespace, no process started, no event loop needed.
//!
//! Invariant: a [`Netlink`] speaks to the namespace it was opened in, whatever
//! thread uses it later.

mod changes;
mod lookup;
mod messages;
mod socket;

use std::fmt::Display;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::netns::NetNs;
use crate::wire::{ACK, CREATE, DUMP, ECHO, EXCL};
use crate::{Error, Result};

pub use changes::{Changes, Watch};
use messages::Request;
use socket::Socket;

/// A dump during which the tables changed is repeated this often before it is
/// taken as it is.
const DUMP_ATTEMPTS: usize = 5;

/// A MAC address as the kernel stores it.
pub type Mac = [u8; 6];

/// What the kernel says about a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    /// `None` for links without an Ethernet address.
    pub mac: Option<Mac>,
    /// `bridge`, `veth`, ...; `None` for hardware and `lo`.
    pub kind: Option<String>,
    /// Bytes.
    pub mtu: u32,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    pub promiscuous: bool,
    pub oper_state: OperState,
    /// Index of the bridge (or other master) it is a port of.
    pub master: Option<u32>,
    /// `IFLA_IFALIAS`.
    pub alias: Option<String>,
    /// Index of the other end of a veth (`IFLA_LINK`), in that end's namespace.
    pub peer: Option<u32>,
    /// What it is set to as a port of a bridge.
    pub port: Option<PortFlags>,
    /// Whether it takes routes from IPv6 routers (`accept_ra`, 0: never);
    /// `None` without IPv6.
    pub accept_ra: Option<i32>,
}

/// Settings of a bridge port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortFlags {
    /// Frames may leave through the port they came from.
    pub hairpin: bool,
    /// No traffic between isolated ports.
    pub isolated: bool,
}

/// Operational state (RFC 2863), printed with the kernel's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperState {
    Unknown,
    NotPresent,
    Down,
    LowerLayerDown,
    Testing,
    Dormant,
    Up,
}

impl std::fmt::Display for OperState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unknown => "unknown",
            Self::NotPresent => "not-present",
            Self::Down => "down",
            Self::LowerLayerDown => "lower-layer-down",
            Self::Testing => "testing",
            Self::Dormant => "dormant",
            Self::Up => "up",
        })
    }
}

/// An address of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    pub ip: IpAddr,
    pub prefix_len: u8,
    /// Duplicate address detection still runs: not usable yet.
    pub tentative: bool,
    /// Somebody else has this address: never usable.
    pub dad_failed: bool,
}

/// A unicast route as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination network.
    pub destination: (IpAddr, u8),
    pub gateway: Option<IpAddr>,
    /// `None`: a route of several next hops.
    pub link: Option<u32>,
    pub table: u32,
}

/// A bridge to be created, down.
#[derive(Clone, Debug)]
pub struct BridgeSpec<'a> {
    pub name: &'a str,
    /// Given at creation, so that ports coming and going never change it.
    pub mac: Mac,
    /// `None`: the kernel's default.
    pub mtu: Option<u32>,
}

/// A veth pair to be created, both ends down: one in the socket's namespace as
/// a port of `master`, its peer in another namespace. Each end has one queue in
/// each direction: asked for none, the kernel makes one for each processor,
/// switches all but the first off, and waits for a grace period of RCU, twice.
#[derive(Clone, Debug)]
pub struct VethSpec<'a> {
    pub name: &'a str,
    pub master: u32,
    pub mtu: Option<u32>,
    pub peer_name: &'a str,
    pub peer_mac: Option<Mac>,
    pub peer_netns: BorrowedFd<'a>,
}

/// What a bridge port gets when it goes up.
#[derive(Clone, Debug)]
pub struct PortSpec<'a> {
    pub index: u32,
    /// At most 255 bytes.
    pub alias: Option<&'a str>,
    pub flags: PortFlags,
}

/// Whether the kernel checks that nobody else uses an IPv6 address first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DuplicateDetection {
    Off,
    On,
}

/// A unicast route through one link.
#[derive(Clone, Debug)]
pub struct RouteSpec {
    /// Destination network; host bits are ignored by the kernel's rules, so
    /// they must be clear.
    pub destination: (IpAddr, u8),
    pub gateway: Option<IpAddr>,
    pub link: u32,
    /// Metric; 0 means the kernel's default.
    pub priority: u32,
    /// `None`: the main table.
    pub table: Option<u32>,
    /// `None`: global.
    pub scope: Option<u8>,
    /// Bytes; 0 means none.
    pub mtu: u32,
    /// Bytes; 0 means none.
    pub adv_mss: u32,
}

/// A routing socket of one network namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
}

impl Netlink {
    /// A socket of the calling thread's namespace.
    pub fn open() -> Result<Self> {
        let socket = Socket::open().map_err(|e| Error::new("open netlink socket", "host", e))?;
        Ok(Self { socket })
    }

    /// A socket of `netns`, opened by a short-lived thread there.
    pub fn open_in(netns: &NetNs) -> Result<Self> {
        let socket =
            netns.run(Socket::open)?.map_err(|e| Error::at("open netlink socket", netns.path(), e))?;
        Ok(Self { socket })
    }

    /// The link called `name`, if there is one.
    pub fn link_by_name(&self, name: &str) -> Result<Option<Link>> {
        self.find_link(&messages::link_called(name), name)
    }

    pub fn link_by_index(&self, index: u32) -> Result<Option<Link>> {
        self.find_link(&messages::link_numbered(index), index)
    }

    /// All links of the namespace.
    pub fn links(&self) -> Result<Vec<Link>> {
        let links = self.dump(&messages::all_links(None), messages::link_of);
        links.map_err(|e| Error::new("list links", "all", e))
    }

    /// The ports of the bridge (or other master) `master`.
    pub fn ports_of(&self, master: u32) -> Result<Vec<Link>> {
        // Without strict checking the kernel may send all.
        let port_of = |kind, message: &[u8]| {
            messages::link_of(kind, message).filter(|link| link.master == Some(master))
        };
        let ports = self.dump(&messages::all_links(Some(master)), port_of);
        ports.map_err(|e| Error::new("list ports of link", master, e))
    }

    /// `EEXIST` when there is a link of that name.
    pub fn create_bridge(&self, want: &BridgeSpec<'_>) -> Result<Link> {
        let created = self.create_link(&messages::new_bridge(want), want.name);
        created.map_err(|e| Error::new("create bridge", want.name, e))
    }

    /// The end in the socket's namespace, as it was made: without `master` yet.
    /// `EEXIST` when either name is taken in its namespace.
    pub fn create_veth(&self, want: &VethSpec<'_>) -> Result<Link> {
        let request = messages::new_veth(want, want.peer_netns.as_raw_fd());
        let created = self.create_link(&request, want.name);
        created.map_err(|e| Error::new("create veth", format_args!("{} - {}", want.name, want.peer_name), e))
    }

    /// Labels a bridge port, sets its flags and brings it up, in one request.
    pub fn bring_port_up(&self, want: &PortSpec<'_>) -> Result<()> {
        self.change(&messages::port_up(want), 0)
            .map_err(|e| Error::new("bring up bridge port", want.index, e))
    }

    pub fn set_up(&self, index: u32) -> Result<()> {
        self.change(&messages::set_up(index, true), 0).map_err(|e| Error::new("set link up", index, e))
    }

    pub fn set_down(&self, index: u32) -> Result<()> {
        self.change(&messages::set_up(index, false), 0).map_err(|e| Error::new("set link down", index, e))
    }

    pub fn set_promiscuous(&self, index: u32, on: bool) -> Result<()> {
        let changed = self.change(&messages::set_promiscuous(index, on), 0);
        changed.map_err(|e| Error::new("set link promiscuous", index, e))
    }

    pub fn set_mac(&self, index: u32, mac: Mac) -> Result<()> {
        self.change(&messages::set_mac(index, mac), 0).map_err(|e| Error::new("set link address", index, e))
    }

    /// `ENODEV` when it is gone already. A veth takes its peer with it.
    pub fn delete_link(&self, index: u32) -> Result<()> {
        self.change(&messages::delete_link(index), 0).map_err(|e| Error::new("delete link", index, e))
    }

    /// The IPv4 and IPv6 addresses of one link.
    pub fn addresses(&self, index: u32) -> Result<Vec<Address>> {
        // Without strict checking the kernel ignores the index and sends all.
        let of_link = |kind, message: &[u8]| {
            messages::address_of(kind, message).filter(|(of, _)| *of == index).map(|(_, address)| address)
        };
        let addresses = self.dump(&messages::addresses_of(index), of_link);
        addresses.map_err(|e| Error::new("list addresses of link", index, e))
    }

    /// `EEXIST` when the link has it. IPv4 networks larger than /31 get their
    /// broadcast address.
    pub fn add_address(
        &self,
        index: u32,
        (ip, prefix_len): (IpAddr, u8),
        detection: DuplicateDetection,
    ) -> Result<()> {
        let detect = detection == DuplicateDetection::On;
        self.change(&messages::new_address(index, ip, prefix_len, detect), CREATE | EXCL)
            .map_err(|e| Error::new("add address", format_args!("{ip}/{prefix_len}"), e))
    }

    /// `EADDRNOTAVAIL` when the link does not have it.
    pub fn delete_address(&self, index: u32, (ip, prefix_len): (IpAddr, u8)) -> Result<()> {
        self.change(&messages::delete_address(index, ip, prefix_len), 0)
            .map_err(|e| Error::new("delete address", format_args!("{ip}/{prefix_len}"), e))
    }

    /// Adds a route beside what is there (IPv6 gateways to one destination
    /// become one multipath route); `EEXIST` for an identical one.
    pub fn add_route(&self, want: &RouteSpec) -> Result<()> {
        self.change(&messages::new_route(want), CREATE).map_err(|e| {
            let (ip, prefix_len) = want.destination;
            Error::new("add route", format_args!("{ip}/{prefix_len}"), e)
        })
    }

    /// The unicast routes of one family, of all tables.
    pub fn routes(&self, is_v4: bool) -> Result<Vec<Route>> {
        let routes = self.dump(&messages::routes(is_v4), messages::route_of);
        routes.map_err(|e| Error::new("list routes", if is_v4 { "IPv4" } else { "IPv6" }, e))
    }

    /// Creates a link and returns it: the kernel echoes what it made (since
    /// 6.2), or is asked.
    fn create_link(&self, request: &Request, name: &str) -> io::Result<Link> {
        let mut made = None;
        self.socket.request(request, ACK | CREATE | EXCL | ECHO, |kind, message| {
            made = messages::link_of(kind, message).filter(|link| link.name == name).or(made.take());
        })?;
        match made {
            Some(link) => Ok(link),
            None => {
                let found = self.link_by_name(name).map_err(|e| e.source)?;
                found.ok_or_else(|| io::Error::from_raw_os_error(nix::libc::ENODEV))
            }
        }
    }

    fn find_link(&self, request: &Request, object: impl Display) -> Result<Option<Link>> {
        match self.ask(request, messages::link_of) {
            Err(e) if e.raw_os_error() == Some(nix::libc::ENODEV) => Ok(None),
            found => found.map_err(|e| Error::new("look up link", object, e)),
        }
    }

    /// What `read` makes of the only answer.
    fn ask<T>(&self, request: &Request, read: impl Fn(u16, &[u8]) -> Option<T>) -> io::Result<Option<T>> {
        let mut found = None;
        self.socket.request(request, 0, |kind, message| found = read(kind, message))?;
        Ok(found)
    }

    fn change(&self, request: &Request, flags: u16) -> io::Result<()> {
        self.socket.request(request, ACK | flags, |_, _| {}).map(drop)
    }

    fn dump<T>(&self, request: &Request, read: impl Fn(u16, &[u8]) -> Option<T>) -> io::Result<Vec<T>> {
        let mut found = Vec::new();
        for _ in 0..DUMP_ATTEMPTS {
            found.clear();
            if self.socket.request(request, DUMP, |kind, message| found.extend(read(kind, message)))? {
                break;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Duration;

    use nix::errno::Errno;

    use super::*;
    use crate::netns;

    /// Runs `test` in two fresh namespaces: the thread's own and a container's.
    fn in_fresh_namespaces(test: impl FnOnce(NetNs) + Send) {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let host = netns::create_persistent(&dir.path().join("host")).unwrap();
        let container = netns::create_persistent(&dir.path().join("container")).unwrap();
        host.run(|| {
            test(container);
        })
        .unwrap();
        netns::remove_persistent(&dir.path().join("host")).unwrap();
        netns::remove_persistent(&dir.path().join("container")).unwrap();
    }

    const MAC: Mac = [0x02, 1, 2, 3, 4, 5];

    #[test]
    fn a_veth_joins_a_bridge_and_its_peer_gets_addresses_and_routes() {
        in_fresh_namespaces(|container| {
            let host = Netlink::open().unwrap();
            let inside = Netlink::open_in(&container).unwrap();

            let spec = BridgeSpec { name: "br", mac: MAC, mtu: Some(1400) };
            let created = host.create_bridge(&spec).unwrap();
            assert_eq!(host.create_bridge(&spec).unwrap_err().errno(), Errno::EEXIST);
            let bridge = host.link_by_name("br").unwrap().unwrap();
            assert_eq!((bridge.mac, bridge.mtu, bridge.kind.as_deref()), (Some(MAC), 1400, Some("bridge")));
            assert_eq!(created, bridge);
            host.set_up(bridge.index).unwrap();

            let veth = VethSpec {
                name: "vethhost",
                master: bridge.index,
                mtu: None,
                peer_name: "eth0",
                peer_mac: Some([2, 9, 9, 9, 9, 9]),
                peer_netns: container.as_fd(),
            };
            let created = host.create_veth(&veth).unwrap();
            let port = host.link_by_name("vethhost").unwrap().unwrap();
            assert_eq!((port.master, port.up), (Some(bridge.index), false));
            assert_eq!((created.index, created.mac, created.peer), (port.index, port.mac, port.peer));
            assert_eq!(port.peer, inside.link_by_name("eth0").unwrap().map(|link| link.index));
            let alias = Some("cni:net:id:eth0");
            let flags = PortFlags { hairpin: true, isolated: false };
            host.bring_port_up(&PortSpec { index: port.index, alias, flags }).unwrap();
            assert_eq!(host.ports_of(bridge.index).unwrap()[0].port, Some(flags));

            let eth0 = inside.link_by_name("eth0").unwrap().unwrap();
            assert_eq!(eth0.mac, Some([2, 9, 9, 9, 9, 9]));
            inside.set_up(eth0.index).unwrap();
            let v4: (IpAddr, u8) = ("10.1.0.2".parse().unwrap(), 24);
            let v6: (IpAddr, u8) = ("fd00::2".parse().unwrap(), 64);
            inside.add_address(eth0.index, v4, DuplicateDetection::Off).unwrap();
            inside.add_address(eth0.index, v6, DuplicateDetection::Off).unwrap();
            let found = inside.addresses(eth0.index).unwrap();
            assert!(found.iter().any(|a| (a.ip, a.prefix_len) == v4), "{found:?}");
            assert!(found.iter().any(|a| (a.ip, a.prefix_len) == v6 && !a.tentative), "{found:?}");

            let route = |dst: &str, gateway: &str| RouteSpec {
                destination: (dst.parse().unwrap(), 0),
                gateway: Some(gateway.parse().unwrap()),
                link: eth0.index,
                priority: 0,
                table: Some(300),
                scope: None,
                mtu: 1300,
                adv_mss: 1200,
            };
            inside.add_route(&route("0.0.0.0", "10.1.0.1")).unwrap();
            inside.add_route(&route("::", "fd00::1")).unwrap();
            assert_eq!(inside.add_route(&route("0.0.0.0", "10.1.0.1")).unwrap_err().errno(), Errno::EEXIST);
            for (is_v4, gateway) in [(true, "10.1.0.1"), (false, "fd00::1")] {
                let routes = inside.routes(is_v4).unwrap();
                let added = routes.iter().find(|route| route.table == 300).unwrap();
                assert_eq!((added.gateway, added.destination.1), (gateway.parse().ok(), 0));
                assert_eq!(added.link, Some(eth0.index));
            }

            let mut changes = Changes::watch(None, Watch::Links).unwrap();
            let up = changes.until(Duration::from_secs(5), || {
                let port = host.link_by_index(port.index)?;
                Ok(port.filter(|p| p.oper_state == OperState::Up))
            });
            let port = up.unwrap().unwrap();
            assert_eq!(port.alias.as_deref(), alias);

            inside.delete_link(eth0.index).unwrap();
            assert!(host.link_by_name("vethhost").unwrap().is_none());
            assert_eq!(inside.delete_link(eth0.index).unwrap_err().errno(), Errno::ENODEV);
            assert_eq!(host.links().unwrap().len(), 2, "lo and the bridge");
        });
    }
}
