//! The kernel's own word on links and nf_tables, asked of netlink directly: an
//! independent witness that needs no `ip` and no `nft` on the machine.
//!
//! Everything here speaks of the calling *thread's* network namespace.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, send, socket,
};

const NLM_F_REQUEST: u16 = 0x1;
const NLM_F_ACK: u16 = 0x4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_DELLINK: u16 = 17;
const RTM_GETLINK: u16 = 18;
const NFT_MSG_NEWTABLE: u16 = 10 << 8;
const NFT_MSG_GETTABLE: u16 = (10 << 8) | 1;
const NFT_MSG_DELTABLE: u16 = (10 << 8) | 2;
const NFT_MSG_NEWCHAIN: u16 = (10 << 8) | 3;
const NFT_MSG_GETCHAIN: u16 = (10 << 8) | 4;
const NFT_MSG_NEWRULE: u16 = (10 << 8) | 6;
const NFT_MSG_GETRULE: u16 = (10 << 8) | 7;
const RTM_GETADDR: u16 = 22;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_IFALIAS: u16 = 20;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFA_LOCAL: u16 = 2;
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_CHAIN_TABLE: u16 = 1;
const NFTA_CHAIN_NAME: u16 = 3;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_RULE_USERDATA: u16 = 7;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
/// libnftnl's: the comment of a rule within its user data.
const UDATA_RULE_COMMENT: u8 = 0;
const IFA_ADDRESS: u16 = 1;
const IFF_UP: u32 = 1;
const AF_INET: u8 = 2;
const NFPROTO_IPV4: u8 = 2;
const LO_INDEX: i32 = 1;

/// A link of the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub index: i32,
    pub name: String,
    /// IFLA_INFO_KIND, such as `bridge`; empty for a device.
    pub kind: String,
    /// The bridge that it is a port of.
    pub master: Option<i32>,
    pub mtu: u32,
    /// IFLA_IFALIAS; empty when there is none.
    pub alias: String,
    pub is_up: bool,
}

/// A chain or a rule of nf_tables.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct NftLine {
    /// NFPROTO_*: 1 inet, 2 ip, 7 bridge, 10 ip6.
    pub family: u8,
    pub table: String,
    pub chain: String,
    /// `None` for a chain; for a rule the name of each expression with a digest of
    /// what the kernel says about it, counters' counts excepted.
    pub expressions: Option<String>,
    pub comment: String,
}

pub fn links() -> Result<Vec<Link>> {
    let replies = Netlink::open(SockProtocol::NetlinkRoute)?.dump(RTM_GETLINK, &[0; 16])?;
    let links = replies.iter().filter(|reply| reply.kind == RTM_NEWLINK).map(|reply| {
        let index = i32::from_ne_bytes(field(&reply.body, 4)?);
        let of_link = attributes(&reply.body, 16);
        let value = |wanted| of_link.iter().find(|(kind, _)| *kind == wanted).map(|(_, value)| *value);
        let name = value(IFLA_IFNAME).map(text).with_context(|| format!("link {index} has no name"))?;
        let master = value(IFLA_MASTER).map(|raw| field(raw, 0)).transpose()?.map(i32::from_ne_bytes);
        let mtu = value(IFLA_MTU).map(|raw| field(raw, 0)).transpose()?.map_or(0, u32::from_ne_bytes);
        let info = attributes(value(IFLA_LINKINFO).unwrap_or_default(), 0);
        let kind = info.iter().find(|(kind, _)| *kind == IFLA_INFO_KIND).map(|(_, value)| text(value));
        let kind = kind.unwrap_or_default();
        let alias = value(IFLA_IFALIAS).map(text).unwrap_or_default();
        let is_up = u32::from_ne_bytes(field(&reply.body, 8)?) & IFF_UP != 0;
        Ok(Link { index, name, kind, master, mtu, alias, is_up })
    });
    links.collect()
}

/// Index of the link and address with prefix length, as `10.0.0.1/24`; IPv6 link-local ones excepted.
pub fn addresses() -> Result<Vec<(i32, String)>> {
    let replies = Netlink::open(SockProtocol::NetlinkRoute)?.dump(RTM_GETADDR, &[0; 8])?;
    let mut found = Vec::new();
    for reply in replies.iter().filter(|reply| reply.kind == RTM_NEWADDR) {
        let length = reply.body.get(1).copied().context("an address without a prefix")?;
        let index = i32::from_ne_bytes(field(&reply.body, 4)?);
        let attributes = attributes(&reply.body, 8);
        let raw = attributes.iter().find(|(kind, _)| *kind == IFA_ADDRESS).map(|(_, raw)| *raw);
        let raw = raw.context("an address without its address")?;
        let ip = match raw.len() {
            4 => IpAddr::from(field::<4>(raw, 0)?),
            _ => IpAddr::from(field::<16>(raw, 0)?),
        };
        if !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local()) {
            found.push((index, format!("{ip}/{length}")));
        }
    }
    Ok(found)
}

/// Every chain and every rule of nf_tables, chains first.
pub fn nft_chains_and_rules() -> Result<Vec<NftLine>> {
    let netlink = Netlink::open(SockProtocol::NetlinkNetFilter)?;
    let chains = netlink.dump(NFT_MSG_GETCHAIN, &[0; 4])?;
    let rules = netlink.dump(NFT_MSG_GETRULE, &[0; 4])?;
    let line = |reply: &Reply| {
        let attributes = attributes(&reply.body, 4);
        let value = |wanted| attributes.iter().find(|(kind, _)| *kind == wanted).map(|(_, value)| *value);
        let name = |wanted| value(wanted).map(text).unwrap_or_default();
        let family = reply.body.first().copied().unwrap_or_default();
        if reply.kind == NFT_MSG_NEWCHAIN {
            let (table, chain) = (name(NFTA_CHAIN_TABLE), name(NFTA_CHAIN_NAME));
            return NftLine { family, table, chain, expressions: None, comment: String::new() };
        }
        NftLine {
            family,
            table: name(NFTA_RULE_TABLE),
            chain: name(NFTA_RULE_CHAIN),
            expressions: Some(expressions(value(NFTA_RULE_EXPRESSIONS).unwrap_or_default())),
            comment: value(NFTA_RULE_USERDATA).and_then(comment).unwrap_or_default(),
        }
    };
    let wanted = chains.iter().chain(&rules);
    Ok(wanted.filter(|r| matches!(r.kind, NFT_MSG_NEWCHAIN | NFT_MSG_NEWRULE)).map(line).collect())
}

/// User data is a list of (type, length, value), a byte each for the first two.
fn comment(mut userdata: &[u8]) -> Option<String> {
    while let [kind, length, rest @ ..] = userdata {
        let value = rest.get(..usize::from(*length))?;
        if *kind == UDATA_RULE_COMMENT {
            return Some(text(value));
        }
        userdata = rest.get(usize::from(*length)..)?;
    }
    None
}

fn expressions(list: &[u8]) -> String {
    let words = attributes(list, 0).into_iter().map(|(_, expression)| {
        let parts = attributes(expression, 0);
        let part = |wanted| parts.iter().find(|(kind, _)| *kind == wanted).map(|(_, value)| *value);
        let name = part(NFTA_EXPR_NAME).map(text).unwrap_or_default();
        if name == "counter" {
            return name;
        }
        let mut digest = DefaultHasher::new();
        part(NFTA_EXPR_DATA).hash(&mut digest);
        format!("{name}:{:08x}", digest.finish() & 0xffff_ffff)
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Names of all nf_tables tables, each with its family number: `2 hawser`.
pub fn nft_tables() -> Result<Vec<String>> {
    let replies = Netlink::open(SockProtocol::NetlinkNetFilter)?.dump(NFT_MSG_GETTABLE, &[0; 4])?;
    let tables = replies.iter().filter(|reply| reply.kind == NFT_MSG_NEWTABLE).map(|reply| {
        let family = reply.body.first().copied().context("a table without a family")?;
        let name = attributes(&reply.body, 4).into_iter().find(|(kind, _)| *kind == NFTA_TABLE_NAME);
        Ok(format!("{family} {}", text(name.context("a table without a name")?.1)))
    });
    tables.collect()
}

/// A fresh network namespace has its loopback down.
pub fn set_loopback_up() -> Result<()> {
    let message = ifinfomsg(LO_INDEX, IFF_UP, IFF_UP);
    Netlink::open(SockProtocol::NetlinkRoute)?.ask(RTM_NEWLINK, 0, &message).context("set lo up")
}

/// Creates a bridge, up, with the address `address`/24.
pub fn create_bridge(name: &str, address: Ipv4Addr) -> Result<()> {
    let mut message = ifinfomsg(0, IFF_UP, IFF_UP);
    message.extend(attribute(IFLA_IFNAME, name.as_bytes()));
    message.extend(attribute(IFLA_LINKINFO, &attribute(IFLA_INFO_KIND, b"bridge")));
    let netlink = Netlink::open(SockProtocol::NetlinkRoute)?;
    netlink.ask(RTM_NEWLINK, NLM_F_CREATE, &message).with_context(|| format!("create bridge {name}"))?;
    let mut message = vec![AF_INET, 24, 0, 0];
    message.extend(find(name)?.index.to_ne_bytes());
    message.extend(attribute(IFA_LOCAL, &address.octets()));
    netlink.ask(RTM_NEWADDR, NLM_F_CREATE, &message).with_context(|| format!("add {address} to {name}"))
}

/// Creates an empty nf_tables table of family ip.
pub fn create_nft_table(name: &str) -> Result<()> {
    let mut table = vec![NFPROTO_IPV4, 0, 0, 0];
    table.extend(attribute(NFTA_TABLE_NAME, format!("{name}\0").as_bytes()));
    change_nft(NFT_MSG_NEWTABLE, NLM_F_REQUEST | NLM_F_CREATE | NLM_F_ACK, &table)
        .with_context(|| format!("create table {name}"))
}

/// Deletes the table with all that is in it: `2 hawser`, as [`nft_tables`] names it.
pub fn delete_nft_table(table: &str) -> Result<()> {
    let (family, name) = table.split_once(' ').context("a table without a family")?;
    let mut body = vec![family.parse().context("the family of a table")?, 0, 0, 0];
    body.extend(attribute(NFTA_TABLE_NAME, format!("{name}\0").as_bytes()));
    change_nft(NFT_MSG_DELTABLE, NLM_F_REQUEST | NLM_F_ACK, &body)
        .with_context(|| format!("delete table {name}"))
}

/// One change of nf_tables, in a transaction of its own.
fn change_nft(kind: u16, flags: u16, body: &[u8]) -> Result<()> {
    let subsystem = NFNL_SUBSYS_NFTABLES.to_be_bytes();
    let batch_header = [0, 0, subsystem[0], subsystem[1]];
    let batch = [
        message(NFNL_MSG_BATCH_BEGIN, NLM_F_REQUEST, &batch_header)?,
        message(kind, flags, body)?,
        message(NFNL_MSG_BATCH_END, NLM_F_REQUEST, &batch_header)?,
    ];
    let netlink = Netlink::open(SockProtocol::NetlinkNetFilter)?;
    netlink.send(&batch.concat())?;
    netlink.acknowledged()
}

/// Deletes the link, which must be there.
pub fn delete_link(name: &str) -> Result<()> {
    let message = ifinfomsg(find(name)?.index, 0, 0);
    Netlink::open(SockProtocol::NetlinkRoute)?
        .ask(RTM_DELLINK, 0, &message)
        .with_context(|| format!("delete {name}"))
}

fn find(name: &str) -> Result<Link> {
    links()?.into_iter().find(|link| link.name == name).with_context(|| format!("no link {name}"))
}

fn ifinfomsg(index: i32, flags: u32, change: u32) -> Vec<u8> {
    let mut message = vec![0; 4];
    message.extend(index.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend(change.to_ne_bytes());
    message
}

struct Netlink(OwnedFd);

struct Reply {
    kind: u16,
    body: Vec<u8>,
}

impl Netlink {
    fn open(protocol: SockProtocol) -> Result<Self> {
        let fd = socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol);
        let fd = fd.context("open a netlink socket")?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, 0)).context("bind a netlink socket")?;
        Ok(Self(fd))
    }

    /// The replies to a dump request, up to NLMSG_DONE.
    fn dump(&self, kind: u16, body: &[u8]) -> Result<Vec<Reply>> {
        self.send(&message(kind, NLM_F_REQUEST | NLM_F_DUMP, body)?)?;
        let mut replies = Vec::new();
        loop {
            for reply in self.receive()? {
                match reply.kind {
                    NLMSG_DONE => return Ok(replies),
                    NLMSG_ERROR => bail!("netlink dump {kind}: {}", errno(&reply)?),
                    _ => replies.push(reply),
                }
            }
        }
    }

    fn ask(&self, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
        self.send(&message(kind, NLM_F_REQUEST | NLM_F_ACK | flags, body)?)?;
        self.acknowledged()
    }

    fn acknowledged(&self) -> Result<()> {
        let reply = self.receive()?.into_iter().next().context("netlink answered nothing")?;
        match (reply.kind, errno(&reply)?) {
            (NLMSG_ERROR, Errno::UnknownErrno) => Ok(()),
            (kind, errno) => bail!("netlink answered {kind}: {errno}"),
        }
    }

    fn send(&self, message: &[u8]) -> Result<()> {
        send(self.0.as_raw_fd(), message, MsgFlags::empty()).context("send to netlink")?;
        Ok(())
    }

    fn receive(&self) -> Result<Vec<Reply>> {
        let mut buffer = vec![0; 64 * 1024];
        let length =
            recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty()).context("receive from netlink")?;
        let mut rest = &buffer[..length];
        let mut replies = Vec::new();
        while rest.len() >= 16 {
            let length = usize::try_from(u32::from_ne_bytes(field(rest, 0)?)).context("length")?;
            let kind = u16::from_ne_bytes(field(rest, 4)?);
            let body = rest.get(16..length).context("a cut netlink message")?.to_vec();
            replies.push(Reply { kind, body });
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(replies)
    }
}

fn message(kind: u16, flags: u16, body: &[u8]) -> Result<Vec<u8>> {
    let length = u32::try_from(16 + body.len()).context("a netlink message of 4 GiB")?;
    let mut message = Vec::from(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]); // sequence and port: one request a socket
    message.extend(body);
    message.resize(message.len().next_multiple_of(4), 0);
    Ok(message)
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).expect("attributes here are a few bytes");
    let mut attribute = Vec::from(length.to_ne_bytes());
    attribute.extend(kind.to_ne_bytes());
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// The errno of an NLMSG_ERROR; 0, which means success, is `UnknownErrno`.
fn errno(reply: &Reply) -> Result<Errno> {
    Ok(Errno::from_raw(-i32::from_ne_bytes(field(&reply.body, 0)?)))
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let slice = bytes.get(at..at + N).with_context(|| format!("{N} bytes at {at} of {}", bytes.len()))?;
    Ok(slice.try_into().expect("the slice has N bytes"))
}

/// Attributes (type, value) behind a fixed header of `header` bytes.
fn attributes(body: &[u8], header: usize) -> Vec<(u16, &[u8])> {
    let mut rest = body.get(header..).unwrap_or_default();
    let mut found = Vec::new();
    while let (Ok(length), Ok(kind)) =
        (field(rest, 0).map(u16::from_ne_bytes), field(rest, 2).map(u16::from_ne_bytes))
    {
        let length = usize::from(length);
        let Some(value) = rest.get(4..length) else { break };
        found.push((kind & 0x3fff, value)); // without NLA_F_NESTED and NLA_F_NET_BYTEORDER
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn text(raw: &[u8]) -> String {
    String::from_utf8_lossy(raw).trim_end_matches('\0').to_owned()
}
