//! Connection tracking of the calling thread's network namespace, by netlink.
//!
//! Source: `include/uapi/linux/netfilter/nfnetlink_conntrack.h`,
//! `net/netfilter/nf_conntrack_netlink.c`.

use std::io;
use std::net::IpAddr;

use nix::errno::Errno;

use crate::attributes::{find, find_u32, nest, put, put_u32};
use crate::socket::{DUMP, ONE, Refusal, Socket};
use linux::{Error, Result};

/// `IPCTNL_MSG_CT_GET`, `IPCTNL_MSG_CT_DELETE`, `IPCTNL_MSG_CT_GET_STATS`, of subsystem 1.
const GET: u16 = 0x101;
const DELETE: u16 = 0x102;
const GET_STATS: u16 = 0x105;

/// The number of entries, in the numbering of `GET_STATS`.
const CTA_STATS_GLOBAL_ENTRIES: u16 = 1;

const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_DST_PORT: u16 = 3;

/// The parts of a tuple that a filter compares (`CTA_FILTER_F_*`, `nf_internals.h`).
const FILTER_SOURCE: u32 = 1 << 0;
const FILTER_DESTINATION: u32 = 1 << 1;
const FILTER_PROTOCOL: u32 = 1 << 3;
const FILTER_DESTINATION_PORT: u32 = 1 << 5;

const UDP: u8 = 17;
const NFPROTO_UNSPEC: u8 = 0;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;

/// Selects flows that satisfy all conditions; without conditions, all flows.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Flows {
    /// UDP flows whose first packet was sent to this port, before any translation.
    pub udp_port: Option<u16>,
    /// The source and destination of the first packet, before any translation.
    pub source: Option<IpAddr>,
    pub destination: Option<IpAddr>,
    /// The source of answers: behind a DNAT, the container's address.
    pub reply_source: Option<IpAddr>,
}

/// Deletes the entries of all flows that match one of `flows`, IPv4 and IPv6 (without an address:
/// both), and returns their number. The next packet of such a flow is translated by the rules at
/// that time.
///
/// For a dump, the kernel visits each bucket of its table (5 to 10 ms for 262,144 buckets). Without
/// entries there is no dump, with few entries one, and otherwise one for each address family, for
/// any number of `flows`. If an entry cannot be deleted, the others are, and the first error is
/// returned. The kernel filters what all of them exclude (since 5.8; before, it is
/// done here).
pub fn delete(flows: &[Flows]) -> Result<usize> {
    const OP: &str = "open netlink socket";
    let is_wanted = |family: &u8| flows.iter().any(|flow| flow.may_be(*family));
    let mut families: Vec<u8> = [NFPROTO_IPV4, NFPROTO_IPV6].into_iter().filter(is_wanted).collect();
    if families.is_empty() {
        return Ok(0);
    }
    let socket = &Socket::open().map_err(|e| Error::new(OP, "netfilter", e))?;
    match entries(socket)? {
        0 => families.clear(),
        1..=FEW if families.len() > 1 => families = vec![NFPROTO_UNSPEC],
        _ => {}
    }
    let (mut deleted, mut first_error) = (0, None);
    for family in families {
        let flows: Vec<Flows> = flows.iter().copied().filter(|flow| flow.may_be(family)).collect();
        for (family, name) in list(socket, family, &flows)? {
            // Kernels before 6.4 keep the entry of an offloaded flow (EBUSY).
            match delete_entry(socket, family, &name) {
                Ok(was_there) => deleted += usize::from(was_there),
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
    }
    first_error.map_or(Ok(deleted), Err)
}

/// Listing this many entries is faster than visiting the table twice.
const FEW: u32 = 4096;

/// The number of entries in the namespace, of both families.
fn entries(socket: &Socket) -> Result<u32> {
    let mut count = None;
    socket
        .request(
            GET_STATS,
            ONE,
            NFPROTO_UNSPEC,
            |_| {},
            |_, answer| {
                count = find_u32(answer, CTA_STATS_GLOBAL_ENTRIES);
                Ok(())
            },
        )
        .and_then(|_| count.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData).into()))
        .map_err(|refused| Error::new("count", "connections", refused.error))
}

/// An entry's family and its identity: its tuple and id, as attributes.
type Name = (u8, Vec<u8>);

fn list(socket: &Socket, family: u8, flows: &[Flows]) -> Result<Vec<Name>> {
    let filter = |bytes: &mut Vec<u8>| {
        // Without a family, the kernel does not filter.
        if family != NFPROTO_UNSPEC {
            filter(bytes, family, flows);
        }
    };
    match list_by(socket, family, flows, filter) {
        // Kernels before 5.8 ignore a filter; some may refuse this one.
        Err(refused) if matches!(refused.errno(), Some(Errno::EINVAL | Errno::EOPNOTSUPP)) => {
            list_by(socket, family, flows, |_| {})
        }
        answered => answered,
    }
    .map_err(|refused| Error::new("list connections", family_name(family), refused.error))
}

/// A dump during changes may list an entry twice, or miss a new one: both are as if it ran a moment
/// earlier or later.
fn list_by(
    socket: &Socket,
    family: u8,
    flows: &[Flows],
    filter: impl FnOnce(&mut Vec<u8>),
) -> std::result::Result<Vec<Name>, Refusal> {
    let mut found = Vec::new();
    socket.request(GET, DUMP, family, filter, |family, entry| {
        if flows.iter().any(|flow| flow.means(entry)) {
            found.push((family, name(entry).ok_or(io::ErrorKind::InvalidData)?));
        }
        Ok(())
    })?;
    Ok(found)
}

/// Deletes an entry, and returns whether it still existed. Never sent without a tuple: that would
/// delete all entries.
fn delete_entry(socket: &Socket, family: u8, name: &[u8]) -> Result<bool> {
    match socket.request(DELETE, ONE, family, |bytes| bytes.extend(name), |_, _| Ok(())) {
        Ok(_) => Ok(true),
        Err(refused) if refused.errno() == Some(Errno::ENOENT) => Ok(false),
        Err(refused) => Err(Error::new("delete connection", family_name(family), refused.error)),
    }
}

fn name(entry: &[u8]) -> Option<Vec<u8>> {
    let mut name = Vec::new();
    let tuple = find(entry, CTA_TUPLE_ORIG)?;
    nest(&mut name, CTA_TUPLE_ORIG, |bytes| bytes.extend(tuple));
    put_u32(&mut name, CTA_ID, find_u32(entry, CTA_ID)?);
    if let Some(zone) = find(entry, CTA_ZONE) {
        put(&mut name, CTA_ZONE, zone);
    }
    Some(name)
}

impl Flows {
    /// Flows of any protocol that `source` started.
    pub fn begun_by(source: IpAddr) -> Self {
        Self { source: Some(source), ..Self::default() }
    }

    fn may_be(&self, family: u8) -> bool {
        [self.source, self.destination, self.reply_source]
            .iter()
            .flatten()
            .all(|address| family == NFPROTO_UNSPEC || address.is_ipv4() == (family == NFPROTO_IPV4))
    }

    fn means(&self, entry: &[u8]) -> bool {
        let part = |tuple, part| find(entry, tuple).and_then(|tuple| find(tuple, part)).unwrap_or_default();
        let original = part(CTA_TUPLE_ORIG, CTA_TUPLE_IP);
        let reply = part(CTA_TUPLE_REPLY, CTA_TUPLE_IP);
        let protocol = part(CTA_TUPLE_ORIG, CTA_TUPLE_PROTO);
        let has = |addresses, kind, ip| find(addresses, kind) == Some(&octets(ip));
        let is_udp_to = |port: u16| {
            find(protocol, CTA_PROTO_NUM) == Some(&[UDP])
                && find(protocol, CTA_PROTO_DST_PORT) == Some(&port.to_be_bytes())
        };
        self.udp_port.is_none_or(is_udp_to)
            && self.source.is_none_or(|ip| has(original, source_kind(ip), ip))
            && self.destination.is_none_or(|ip| has(original, destination_kind(ip), ip))
            && self.reply_source.is_none_or(|ip| has(reply, source_kind(ip), ip))
    }
}

/// The conditions that all `flows` share, for the kernel to compare. Without IPv6 addresses: the
/// kernel accepts different ones as equal (`ctnetlink_filter_match_tuple`, seen on 6.18).
fn filter(bytes: &mut Vec<u8>, family: u8, flows: &[Flows]) {
    let address = |part: fn(&Flows) -> Option<IpAddr>| common(flows, part).filter(|_| family == NFPROTO_IPV4);
    let (source, destination) = (address(|flow| flow.source), address(|flow| flow.destination));
    let reply_source = address(|flow| flow.reply_source);
    let mut original = 0_u32;
    nest(bytes, CTA_TUPLE_ORIG, |bytes| {
        nest(bytes, CTA_TUPLE_IP, |bytes| {
            if let Some(ip) = source {
                original |= FILTER_SOURCE;
                put(bytes, source_kind(ip), &octets(ip));
            }
            if let Some(ip) = destination {
                original |= FILTER_DESTINATION;
                put(bytes, destination_kind(ip), &octets(ip));
            }
        });
        if flows.iter().all(|flow| flow.udp_port.is_some()) {
            nest(bytes, CTA_TUPLE_PROTO, |bytes| {
                original |= FILTER_PROTOCOL;
                put(bytes, CTA_PROTO_NUM, &[UDP]);
                if let Some(port) = common(flows, |flow| flow.udp_port) {
                    original |= FILTER_DESTINATION_PORT;
                    put(bytes, CTA_PROTO_DST_PORT, &port.to_be_bytes());
                }
            });
        }
    });
    if let Some(ip) = reply_source {
        nest(bytes, CTA_TUPLE_REPLY, |bytes| {
            nest(bytes, CTA_TUPLE_IP, |bytes| put(bytes, source_kind(ip), &octets(ip)));
        });
    }
    // The flags are in host byte order, unlike everything else.
    nest(bytes, CTA_FILTER, |bytes| {
        put(bytes, CTA_FILTER_ORIG_FLAGS, &original.to_ne_bytes());
        if reply_source.is_some() {
            put(bytes, CTA_FILTER_REPLY_FLAGS, &FILTER_SOURCE.to_ne_bytes());
        }
    });
}

fn common<T: PartialEq>(flows: &[Flows], part: impl Fn(&Flows) -> Option<T>) -> Option<T> {
    let (first, rest) = flows.split_first()?;
    part(first).filter(|value| rest.iter().all(|flow| part(flow).as_ref() == Some(value)))
}

fn family_name(family: u8) -> &'static str {
    match family {
        NFPROTO_IPV4 => "IPv4",
        NFPROTO_IPV6 => "IPv6",
        _ => "IPv4 and IPv6",
    }
}

/// `CTA_IP_V4_SRC`, `CTA_IP_V6_SRC`.
fn source_kind(ip: IpAddr) -> u16 {
    if ip.is_ipv4() { 1 } else { 3 }
}

fn destination_kind(ip: IpAddr) -> u16 {
    source_kind(ip) + 1
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}
