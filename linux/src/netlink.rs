//! Links, addresses and routes by rtnetlink: one blocking socket per network
//! namespace, no process started, no event loop needed.
//!
//! Invariant: a [`Netlink`] uses the namespace in which it was opened, whichever thread uses it
//! later.

mod changes;
mod lookup;
mod messages;
mod socket;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_ECHO, NLM_F_EXCL, NLM_F_REQUEST};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{
    AfSpecInet, AfSpecUnspec, BridgeBooleanOptionFlags, BridgeBooleanOptions, InetDevConf, InfoBridge,
    InfoBridgePort, InfoData, InfoKind, InfoPortData, InfoPortKind, InfoVeth, LinkAttribute, LinkExtentMask,
    LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::netns::NetNs;
use crate::{Error, Result};

pub use changes::{Changes, Watch};
use messages::{
    address_message, address_of, broadcast, link_message, link_of, route_message, route_of, up_message,
};
use socket::{Socket, Undecodable};

/// A dump during which the tables changed is repeated this often; then the last result is used.
const DUMP_ATTEMPTS: usize = 5;
/// As [`DUMP_ATTEMPTS`], for dumps of links. Links may be missing from the last result, so there is none.
const LINK_DUMP_ATTEMPTS: usize = 20;
/// Limit of a bridge's learned addresses, each about 125 bytes that the kernel charges to no
/// control group. Frames to further addresses go to all ports.
pub const MOST_LEARNED_ADDRESSES: u32 = 65_536;

/// In each direction.
const ONE_QUEUE: [LinkAttribute; 2] = [LinkAttribute::NumTxQueues(1), LinkAttribute::NumRxQueues(1)];

/// A MAC address as the kernel stores it.
pub type Mac = [u8; 6];

/// The kernel's description of a link.
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
    /// `IFLA_IFALIAS`; if it is not UTF-8, a `?` for each byte.
    pub alias: Option<String>,
    /// Index of the other end of a veth (`IFLA_LINK`), in that end's namespace.
    pub peer: Option<u32>,
    /// Its settings as a port of a bridge.
    pub port: Option<PortFlags>,
    /// Whether it takes routes from IPv6 routers (`accept_ra`, 0: never);
    /// `None` without IPv6.
    pub accept_ra: Option<i32>,
    /// Whether it is a bridge that snoops multicast.
    pub snoops: bool,
}

/// Settings of a bridge port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortFlags {
    /// Frames may leave through the port they came from.
    pub hairpin: bool,
    /// No traffic between isolated ports.
    pub isolated: bool,
}

/// Operational state (RFC 2863), printed in the kernel's words.
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
    /// Duplicate address detection is still running: not usable yet.
    pub tentative: bool,
    /// Another host has this address: never usable.
    pub dad_failed: bool,
}

/// A unicast route in the kernel's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Destination network.
    pub destination: (IpAddr, u8),
    pub gateway: Option<IpAddr>,
    /// `None`: a route with several next hops.
    pub link: Option<u32>,
    pub table: u32,
}

/// A bridge to be created, down, without multicast snooping. A bridge that snoops
/// trusts any port to be the MLD querier. One forged query that hosts ignore makes
/// all groups expire, and neighbour solicitations then reach no port.
#[derive(Clone, Debug)]
pub struct BridgeSpec<'a> {
    pub name: &'a str,
    /// `None`: the kernel chooses a random one. A bridge with a given MAC has no carrier until a
    /// port is up, and so no IPv6 link-local address (net/bridge/br_netlink.c, `br_dev_newlink`).
    pub mac: Option<Mac>,
    /// `None`: the kernel's default.
    pub mtu: Option<u32>,
}

/// A veth pair to be created with both links down: one in the socket's namespace as a port of
/// `master`, its peer in another namespace. Each link has one queue in each direction. By default,
/// the kernel makes one for each processor, disables all but the first, and waits for an RCU grace
/// period, twice.
#[derive(Clone, Debug)]
pub struct VethSpec<'a> {
    pub name: &'a str,
    pub master: u32,
    pub mtu: Option<u32>,
    pub peer_name: &'a str,
    pub peer_mac: Option<Mac>,
    pub peer_netns: BorrowedFd<'a>,
}

/// The settings of a bridge port when it goes up.
#[derive(Clone, Debug)]
pub struct PortSpec<'a> {
    pub index: u32,
    /// At most 255 bytes.
    pub alias: Option<&'a str>,
    pub flags: PortFlags,
    /// The bridge drops all frames that arrive through the port until [`Netlink::unlock_port`]
    /// (`IFLA_BRPORT_LOCKED`). Kernels before 5.18 ignore it.
    pub locked: bool,
}

/// Whether the kernel first checks that no other host uses an IPv6 address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DuplicateDetection {
    Off,
    On,
}

/// A unicast route through one link.
#[derive(Clone, Debug)]
pub struct RouteSpec {
    /// Destination network; the host bits must be clear, as the kernel requires.
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

    /// The link called `name`, if there is one. Fails with `InvalidData` if the link's first name is not
    /// UTF-8 and `name` is an alternative one.
    pub fn link_by_name(&self, name: &str) -> Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.find_link(message, name)
    }

    pub fn link_by_index(&self, index: u32) -> Result<Option<Link>> {
        let message = link_message(index);
        self.find_link(message, &index.to_string())
    }

    /// All links of the namespace, except those with texts that are not UTF-8: one such link, of any
    /// program, must not hide all others. `EINTR` if links always change meanwhile.
    pub fn links(&self) -> Result<Vec<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let answers =
            self.dump_links(message, Undecodable::LeftOut).map_err(|e| Error::new("list links", "all", e))?;
        Ok(answers.into_iter().filter_map(link_of).collect())
    }

    /// The ports of the bridge (or other master) `master`. Fails if one of them has a text that is not
    /// UTF-8: without it, the bridge would look unused. `EINTR` if links always change meanwhile.
    pub fn ports_of(&self, master: u32) -> Result<Vec<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::Controller(master));
        message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        let answers = self
            .dump_links(message, Undecodable::Refused)
            .map_err(|e| Error::new("list ports of link", master, e))?;
        // Without strict checking the kernel may send all links.
        let links = answers.into_iter().filter_map(link_of);
        Ok(links.filter(|link| link.master == Some(master)).collect())
    }

    /// `EEXIST` if a link has that name. The bridge learns at most [`MOST_LEARNED_ADDRESSES`]
    /// (Linux 6.7; earlier kernels have no limit).
    pub fn create_bridge(&self, want: &BridgeSpec<'_>) -> Result<Link> {
        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(want.name.to_owned()));
        message.attributes.extend(want.mac.map(|mac| LinkAttribute::Address(mac.to_vec())));
        message.attributes.extend(want.mtu.map(LinkAttribute::Mtu));
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bridge),
            LinkInfo::Data(InfoData::Bridge(vec![
                InfoBridge::MulticastSnooping(false),
                InfoBridge::FdbMaxLearned(MOST_LEARNED_ADDRESSES),
            ])),
        ]));
        let created = self.create_link(message, want.name);
        created.map_err(|e| Error::new("create bridge", want.name, e))
    }

    /// Returns the link in the socket's namespace, as created: without `master`. `EEXIST` if either
    /// name is in use in its namespace.
    pub fn create_veth(&self, want: &VethSpec<'_>) -> Result<Link> {
        let mut peer = LinkMessage::default();
        peer.attributes.push(LinkAttribute::IfName(want.peer_name.to_owned()));
        peer.attributes.push(LinkAttribute::NetNsFd(want.peer_netns.as_raw_fd()));
        peer.attributes.extend(want.mtu.map(LinkAttribute::Mtu));
        peer.attributes.extend(ONE_QUEUE);
        peer.attributes.extend(want.peer_mac.map(|mac| LinkAttribute::Address(mac.to_vec())));

        let mut message = LinkMessage::default();
        message.attributes.push(LinkAttribute::IfName(want.name.to_owned()));
        message.attributes.push(LinkAttribute::Controller(want.master));
        message.attributes.extend(want.mtu.map(LinkAttribute::Mtu));
        message.attributes.extend(ONE_QUEUE);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]));
        let created = self.create_link(message, want.name);
        created.map_err(|e| Error::new("create veth", format_args!("{} - {}", want.name, want.peer_name), e))
    }

    /// Labels a bridge port, sets its flags and brings it up, in one request.
    pub fn bring_port_up(&self, want: &PortSpec<'_>) -> Result<()> {
        let mut message = up_message(want.index);
        message.attributes.extend(want.alias.map(|alias| LinkAttribute::IfAlias(alias.to_owned())));
        let settings = vec![
            InfoBridgePort::HairpinMode(want.flags.hairpin),
            InfoBridgePort::Isolated(want.flags.isolated),
            InfoBridgePort::Locked(want.locked),
        ];
        self.set_port("bring up bridge port", message, settings)
    }

    /// Forwards the frames that arrive through a port made with [`PortSpec::locked`].
    pub fn unlock_port(&self, index: u32) -> Result<()> {
        self.set_port("unlock bridge port", link_message(index), vec![InfoBridgePort::Locked(false)])
    }

    /// Sets IFF_UP by RTM_SETLINK. A link that is up stays so.
    pub fn set_up(&self, index: u32) -> Result<()> {
        self.set_link("set link up", up_message(index))
    }

    /// Sets a link up, and sets its MAC. A bridge whose MAC was set explicitly keeps it when ports
    /// come and go, even if it is the MAC that it had.
    pub fn set_up_with_mac(&self, index: u32, mac: Mac) -> Result<()> {
        let mut message = up_message(index);
        message.attributes.push(LinkAttribute::Address(mac.to_vec()));
        self.set_link("set link up", message)
    }

    /// Sets a link up with this MAC, and its `arp_notify` after that: the kernel announces later
    /// changes by gratuitous ARP, but not the addresses that the link already has.
    pub fn set_up_unannounced(&self, index: u32, mac: Mac) -> Result<()> {
        let mut message = up_message(index);
        message.attributes.push(LinkAttribute::Address(mac.to_vec()));
        let mut settings = InetDevConf::default();
        settings.arp_notify = 1;
        message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet(vec![
            AfSpecInet::DevConfRequest(settings),
        ])]));
        self.set_link("set link up", message)
    }

    /// Clears IFF_UP by RTM_SETLINK. A link that is down stays so.
    pub fn set_down(&self, index: u32) -> Result<()> {
        let mut message = link_message(index);
        message.header.change_mask = LinkFlags::Up;
        self.set_link("set link down", message)
    }

    /// Sets or clears IFF_PROMISC by RTM_SETLINK. The kernel counts at most one such request for each
    /// link: to repeat it changes nothing, and to clear it leaves the requests of others.
    pub fn set_promiscuous(&self, index: u32, on: bool) -> Result<()> {
        let mut message = link_message(index);
        message.header.flags = if on { LinkFlags::Promisc } else { LinkFlags::empty() };
        message.header.change_mask = LinkFlags::Promisc;
        self.set_link("set link promiscuous", message)
    }

    /// Makes the bridge `index` learn no source addresses from frames to 01:80:c2:00:00:00 to 0f.
    /// It handles these before any nf_tables rule (net/bridge/br_input.c).
    pub fn ignore_link_local_sources(&self, index: u32) -> Result<()> {
        let option = BridgeBooleanOptionFlags::NoLinkLocalLearn;
        let options = BridgeBooleanOptions { value: option, mask: option };
        let mut message = link_message(index);
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bridge),
            LinkInfo::Data(InfoData::Bridge(vec![InfoBridge::MultiBoolOpt(options)])),
        ]));
        // RTM_NEWLINK on an existing index: RTM_SETLINK ignores the data of its kind.
        self.change(RouteNetlinkMessage::NewLink(message), 0)
            .map_err(|e| Error::new("set no_linklocal_learn of bridge", index, e))
    }

    /// Sets IFLA_ADDRESS by RTM_SETLINK, also to the MAC that the link has. `EBUSY` for a link that is up
    /// and cannot change it then (net/ethernet/eth.c, `eth_prepare_mac_addr_change`).
    pub fn set_mac(&self, index: u32, mac: Mac) -> Result<()> {
        let mut message = link_message(index);
        message.attributes.push(LinkAttribute::Address(mac.to_vec()));
        self.set_link("set link address", message)
    }

    /// `ENODEV` if it is gone already. Deleting a veth deletes its peer too.
    pub fn delete_link(&self, index: u32) -> Result<()> {
        let message = link_message(index);
        self.change(RouteNetlinkMessage::DelLink(message), 0).map_err(|e| Error::new("delete link", index, e))
    }

    /// The IPv4 and IPv6 addresses of one link.
    pub fn addresses(&self, index: u32) -> Result<Vec<Address>> {
        let mut message = AddressMessage::default();
        message.header.index = index;
        let answers = self
            .dump(RouteNetlinkMessage::GetAddress(message), Undecodable::Refused)
            .map_err(|e| Error::new("list addresses of link", index, e))?;
        // Without strict checking the kernel ignores the index and sends all addresses.
        Ok(answers.into_iter().filter_map(|answer| address_of(answer, index)).collect())
    }

    /// `EEXIST` if the link has it. IPv4 networks larger than /31 get a broadcast address.
    pub fn add_address(
        &self,
        index: u32,
        (ip, prefix_len): (IpAddr, u8),
        detection: DuplicateDetection,
    ) -> Result<()> {
        let mut message = address_message(index, ip, prefix_len);
        match (ip, detection) {
            (IpAddr::V4(v4), _) => {
                message.attributes.extend(broadcast(v4, prefix_len).map(AddressAttribute::Broadcast));
            }
            (IpAddr::V6(_), DuplicateDetection::Off) => {
                message.attributes.push(AddressAttribute::Flags(AddressFlags::Nodad));
            }
            (IpAddr::V6(_), DuplicateDetection::On) => {}
        }
        self.change(RouteNetlinkMessage::NewAddress(message), NLM_F_CREATE | NLM_F_EXCL)
            .map_err(|e| Error::new("add address", format_args!("{ip}/{prefix_len}"), e))
    }

    /// `EADDRNOTAVAIL` if the link does not have it.
    pub fn delete_address(&self, index: u32, (ip, prefix_len): (IpAddr, u8)) -> Result<()> {
        self.change(RouteNetlinkMessage::DelAddress(address_message(index, ip, prefix_len)), 0)
            .map_err(|e| Error::new("delete address", format_args!("{ip}/{prefix_len}"), e))
    }

    /// Adds a route beside existing ones (IPv6 gateways to one destination become one multipath
    /// route). `EEXIST` for an identical one.
    pub fn add_route(&self, want: &RouteSpec) -> Result<()> {
        self.change(RouteNetlinkMessage::NewRoute(route_message(want)), NLM_F_CREATE).map_err(|e| {
            let (ip, prefix_len) = want.destination;
            Error::new("add route", format_args!("{ip}/{prefix_len}"), e)
        })
    }

    /// The unicast routes of one family, in all tables.
    pub fn routes(&self, is_v4: bool) -> Result<Vec<Route>> {
        let mut message = RouteMessage::default();
        message.header.address_family = if is_v4 { AddressFamily::Inet } else { AddressFamily::Inet6 };
        let answers = self
            .dump(RouteNetlinkMessage::GetRoute(message), Undecodable::Refused)
            .map_err(|e| Error::new("list routes", if is_v4 { "IPv4" } else { "IPv6" }, e))?;
        Ok(answers.into_iter().filter_map(route_of).collect())
    }

    /// Creates a link and returns it: the kernel echoes it (since 6.2), otherwise it is queried.
    fn create_link(&self, message: LinkMessage, name: &str) -> io::Result<Link> {
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL | NLM_F_ECHO;
        let answers = self.socket.request(RouteNetlinkMessage::NewLink(message), flags)?;
        match answers.into_iter().filter_map(link_of).find(|link| link.name == name) {
            Some(link) => Ok(link),
            None => {
                let found = self.link_by_name(name).map_err(|e| e.source)?;
                found.ok_or_else(|| io::Error::from_raw_os_error(nix::libc::ENODEV))
            }
        }
    }

    fn find_link(&self, mut message: LinkMessage, object: &str) -> Result<Option<Link>> {
        message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
        match self.socket.request(RouteNetlinkMessage::GetLink(message), NLM_F_REQUEST) {
            Ok(answers) => Ok(answers.into_iter().find_map(link_of)),
            Err(e) if e.raw_os_error() == Some(nix::libc::ENODEV) => Ok(None),
            Err(e) => Err(Error::new("look up link", object, e)),
        }
    }

    fn set_port(
        &self,
        op: &'static str,
        mut message: LinkMessage,
        settings: Vec<InfoBridgePort>,
    ) -> Result<()> {
        let index = message.header.index;
        message.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::PortKind(InfoPortKind::Bridge),
            LinkInfo::PortData(InfoPortData::BridgePort(settings)),
        ]));
        // RTM_NEWLINK on an existing index: RTM_SETLINK ignores the port's data.
        self.change(RouteNetlinkMessage::NewLink(message), 0).map_err(|e| Error::new(op, index, e))
    }

    fn set_link(&self, op: &'static str, message: LinkMessage) -> Result<()> {
        let index = message.header.index;
        self.change(RouteNetlinkMessage::SetLink(message), 0).map_err(|e| Error::new(op, index, e))
    }

    fn change(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.socket.request(message, NLM_F_REQUEST | NLM_F_ACK | flags).map(drop)
    }

    fn dump(
        &self,
        message: RouteNetlinkMessage,
        undecodable: Undecodable,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        let dump = || self.socket.dump(message.clone(), undecodable);
        until_consistent(DUMP_ATTEMPTS, dump).map(|(answers, _)| answers)
    }

    fn dump_links(
        &self,
        message: LinkMessage,
        undecodable: Undecodable,
    ) -> io::Result<Vec<RouteNetlinkMessage>> {
        let message = RouteNetlinkMessage::GetLink(message);
        let dump = || self.socket.dump(message.clone(), undecodable);
        until_consistent(LINK_DUMP_ATTEMPTS, dump).and_then(refuse_inconsistent)
    }
}

/// Repeats `dump`, which returns a result and whether that is one consistent state. Returns the last of
/// them.
fn until_consistent<T>(
    attempts: usize,
    mut dump: impl FnMut() -> io::Result<(T, bool)>,
) -> io::Result<(T, bool)> {
    let mut last = dump()?;
    for _ in 1..attempts {
        if last.1 {
            break;
        }
        last = dump()?;
    }
    Ok(last)
}

fn refuse_inconsistent<T>((answers, consistent): (T, bool)) -> io::Result<T> {
    if consistent { Ok(answers) } else { Err(io::Error::from_raw_os_error(nix::libc::EINTR)) }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::fd::AsFd;
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;
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

    /// Kernels before 6.7 do not answer with the attribute.
    fn assert_learns_no_more_than(host: &Netlink, most: u32) {
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let answers = host.dump(request, Undecodable::Refused).unwrap();
        let has_limit =
            |data: &InfoBridge| matches!(data, InfoBridge::FdbMaxLearned(found) if *found == most);
        let is_limited = answers.iter().any(|answer| {
            let RouteNetlinkMessage::NewLink(link) = answer else { return false };
            link.attributes.iter().any(|attribute| {
                let LinkAttribute::LinkInfo(infos) = attribute else { return false };
                let bridge = |info: &LinkInfo| {
                    matches!(info, LinkInfo::Data(InfoData::Bridge(data)) if data.iter().any(has_limit))
                };
                infos.iter().any(bridge)
            })
        });
        assert_eq!(is_limited, kernel_version() >= (6, 7), "{answers:?}");
    }

    fn kernel_version() -> (u32, u32) {
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap());
        (numbers.next().unwrap(), numbers.next().unwrap())
    }

    const MAC: Mac = [0x02, 1, 2, 3, 4, 5];

    #[test]
    fn a_dump_is_repeated_until_nothing_changes_meanwhile() {
        let dump_until = |consistent: usize| {
            let mut calls = 0;
            let dumped = until_consistent(5, || {
                calls += 1;
                Ok((calls, calls == consistent))
            });
            dumped.unwrap()
        };
        assert_eq!(dump_until(1), (1, true));
        assert_eq!(dump_until(3), (3, true));
        assert_eq!(dump_until(9), (5, false));
        assert_eq!(refuse_inconsistent(dump_until(3)).ok(), Some(3));
        let refused = refuse_inconsistent(dump_until(9)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(nix::libc::EINTR));
    }

    #[test]
    fn a_veth_joins_a_bridge_and_its_peer_gets_addresses_and_routes() {
        in_fresh_namespaces(|container| {
            let host = Netlink::open().unwrap();
            let inside = Netlink::open_in(&container).unwrap();

            let spec = BridgeSpec { name: "br", mac: Some(MAC), mtu: Some(1400) };
            let created = host.create_bridge(&spec).unwrap();
            assert_eq!(host.create_bridge(&spec).unwrap_err().errno(), Errno::EEXIST);
            let bridge = host.link_by_name("br").unwrap().unwrap();
            assert_eq!((bridge.mac, bridge.mtu, bridge.kind.as_deref()), (Some(MAC), 1400, Some("bridge")));
            assert_eq!(created, bridge);
            assert_learns_no_more_than(&host, MOST_LEARNED_ADDRESSES);
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
            host.bring_port_up(&PortSpec { index: port.index, alias, flags, locked: false }).unwrap();
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

    #[test]
    fn a_link_with_a_text_that_is_not_utf_8_hides_no_other() {
        in_fresh_namespaces(|_container| {
            let ip = |words: &[&[u8]]| {
                let words = words.iter().map(|word| OsStr::from_bytes(word));
                let output = Command::new("ip").args(words).output().unwrap();
                assert!(output.status.success(), "{output:?}");
            };
            let host = Netlink::open().unwrap();
            let bridge = host.create_bridge(&BridgeSpec { name: "br", mac: None, mtu: None }).unwrap();
            let text = b"B\xfcro";
            let given: [&[&[u8]]; 3] = [
                &[b"link", b"set", b"port0", b"alias", text],
                &[b"link", b"property", b"add", b"dev", b"port0", b"altname", text],
                &[b"link", b"set", b"port0", b"name", text],
            ];
            for words in given {
                ip(&[b"link", b"add", b"port0", b"master", b"br", b"type", b"veth", b"peer", b"port1"]);
                let port = host.ports_of(bridge.index).unwrap().remove(0);
                ip(words);
                let names: Vec<String> = host.links().unwrap().into_iter().map(|link| link.name).collect();
                assert_eq!(names, ["lo", "br", "port1"]);
                let invalid = |refused: Error| {
                    assert_eq!(refused.source.kind(), io::ErrorKind::InvalidData, "{refused:?}");
                };
                invalid(host.ports_of(bridge.index).unwrap_err());
                match host.link_by_index(port.index) {
                    Err(refused) if words.contains(&&b"name"[..]) => invalid(refused),
                    found => {
                        let alias = words.contains(&&b"alias"[..]).then(|| "????".to_owned());
                        assert_eq!(found.unwrap(), Some(Link { alias, ..port.clone() }));
                    }
                }
                // Nothing of the failed requests is left to read.
                assert_eq!(host.link_by_name("br").unwrap().map(|link| link.index), Some(bridge.index));
                host.delete_link(port.index).unwrap();
            }

            // So many ports need several datagrams. The failed request leaves no dump unfinished.
            for port in 0..60 {
                let [name, peer] = ["port", "peer"].map(|kind| format!("{kind}{port}").into_bytes());
                ip(&[b"link", b"add", &name, b"master", b"br", b"type", b"veth", b"peer", &peer]);
            }
            ip(&[b"link", b"set", b"port0", b"alias", text]);
            for _ in 0..2 {
                let refused = host.ports_of(bridge.index).unwrap_err();
                assert_eq!(refused.source.kind(), io::ErrorKind::InvalidData, "{refused:?}");
            }
            assert_eq!(host.links().unwrap().len(), 2 + 2 * 60 - 1);
        });
    }
}
