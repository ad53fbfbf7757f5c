//! nf_tables of the calling thread's network namespace, by netlink, without
//! any process.
//!
//! Reads and changes go together: [`NfTables::update`] reads, makes a [`Batch`]
//! and commits it against the generation that was read, and starts over when
//! somebody else committed in between. A batch is taken whole or not at all.
//!
//! Built on the attribute codecs of `netlink-bindings`, with a socket of our
//! own: `netlink-socket2` 0.3 reads dumps through 8 KiB, passes over
//! `NLM_F_DUMP_INTR`, cannot raise its send buffer (a batch of 2 000 rules does
//! not fit into the default one) and makes its error of the wrong number when
//! there is no socket. The bindings know `masq` only as attributes, not as an
//! expression; so expressions are chosen by name here.

use std::fs::File;
use std::io;

use netlink_bindings::nftables::{
    ChainAttrs, PushChainAttrs, PushRuleAttrs, PushTableAttrs, RuleAttrs, TableAttrs,
};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::{Error, Result};

pub(crate) mod attributes;
mod batch;
mod body;
mod expression;
pub(crate) mod socket;
#[cfg(test)]
mod tests;
mod userdata;
mod xt;

pub use batch::Batch;
pub use body::{Is, Protocol, RuleBody};
pub use expression::{CmpOp, Expression, MetaKey, NatKind, PayloadBase, Verdict};

use socket::{DUMP, ONE, Refusal, Socket};

const SUBSYSTEM: u16 = 10;
const GETTABLE: u16 = 0xa01;
const GETCHAIN: u16 = 0xa04;
const GETRULE: u16 = 0xa07;
const GETGEN: u16 = 0xa10;

/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;

/// `NFTA_CHAIN_USERDATA`; `netlink-bindings` counts one less, without `NFTA_CHAIN_PAD`.
const CHAIN_USERDATA: u16 = 12;

/// How often [`NfTables::update`] starts over, and a read is read again.
const ATTEMPTS: usize = 50;

/// `NFT_NAME_MAXLEN`, without the final zero.
const NAME_MAX: usize = 255;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4 and IPv6.
    Inet,
    Ipv4,
    Ipv6,
    Bridge,
}

/// A chain, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    pub name: String,
    pub handle: u64,
    pub base: Option<BaseChain>,
    /// How many rules it has, and rules and sets that go to it.
    pub uses: u32,
    pub comment: Option<String>,
}

/// Where a chain hooks into the kernel's packet path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseChain {
    pub kind: ChainKind,
    pub hook: Hook,
    pub priority: i32,
    pub policy: Policy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainKind {
    Filter,
    Nat,
    Route,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
    /// `ingress` and later ones.
    Other(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Accept,
    Drop,
}

/// A rule, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    pub chain: String,
    pub handle: u64,
    /// nft's comment; where there is none, that of an xtables `comment` match,
    /// as iptables-nft writes it.
    pub comment: Option<String>,
    /// What its maker kept with it beside the comment, invisible to nft.
    pub tag: Option<Vec<u8>>,
    pub expressions: Vec<Expression>,
}

impl Rule {
    /// The chain that it jumps or goes to.
    pub fn target_chain(&self) -> Option<&str> {
        self.expressions.iter().find_map(Expression::target_chain)
    }

    /// Whether it does what `expressions` do; counters do not matter.
    pub fn does(&self, expressions: &[Expression]) -> bool {
        let counts = |e: &&Expression| !matches!(e, Expression::Counter { .. });
        self.expressions.iter().filter(counts).eq(expressions.iter().filter(counts))
    }
}

/// Whether the kernel has nf_tables, and this process may use it. Changes
/// nothing (where nf_tables is a module, the kernel loads it).
pub fn is_available() -> Result<bool> {
    match NfTables::open().and_then(|nf| nf.generation()) {
        Ok(_) => Ok(true),
        // No netfilter netlink at all; no such subsystem in it.
        Err(e) if [Errno::EPROTONOSUPPORT, Errno::EINVAL, Errno::EOPNOTSUPP].contains(&e.errno()) => {
            Ok(false)
        }
        Err(e) => Err(e),
    }
}

/// One socket. `ENOENT` never comes of reading: what is missing is empty.
#[derive(Debug)]
pub struct NfTables {
    socket: Socket,
    /// The namespace itself, to lock; `None` where there is no /proc.
    namespace: Option<File>,
}

impl NfTables {
    /// In the calling thread's network namespace, for good.
    pub fn open() -> Result<Self> {
        let socket = Socket::open().map_err(|e| Error::new("open netlink socket", "netfilter", e))?;
        Ok(Self { socket, namespace: File::open("/proc/thread-self/ns/net").ok() })
    }

    /// Of the four families.
    pub fn tables(&mut self) -> Result<Vec<(Family, String)>> {
        let query = Query { op: "list nf_tables tables", object: "", kind: GETTABLE, flags: DUMP, family: 0 };
        self.read(
            &query,
            |_| {},
            |family, attributes| {
                let name =
                    TableAttrs::new(attributes).get_name().map(|name| name.to_string_lossy().into_owned());
                Ok(Family::from_number(family).zip(name.ok()))
            },
        )
    }

    pub fn has_table(&mut self, family: Family, table: &str) -> Result<bool> {
        let query = Query {
            op: "look up nf_tables table",
            object: table,
            kind: GETTABLE,
            flags: ONE,
            family: family.number(),
        };
        let found = self.read(
            &query,
            |bytes| {
                PushTableAttrs::new(bytes).push_name_bytes(kept(table).as_bytes());
            },
            |_, _| Ok(Some(())),
        )?;
        Ok(!found.is_empty())
    }

    /// All chains of a table. (The kernel lists those of every table of the
    /// family; [`NfTables::chain`] asks for one.)
    pub fn chains(&mut self, family: Family, table: &str) -> Result<Vec<Chain>> {
        let query = Query {
            op: "list nf_tables chains",
            object: table,
            kind: GETCHAIN,
            flags: DUMP,
            family: family.number(),
        };
        self.read(
            &query,
            |bytes| {
                PushChainAttrs::new(bytes).push_table_bytes(kept(table).as_bytes());
            },
            |_, attributes| {
                let of =
                    ChainAttrs::new(attributes).get_table().is_ok_and(|t| t.to_bytes() == table.as_bytes());
                if of { decode_chain(attributes).map(Some) } else { Ok(None) }
            },
        )
    }

    pub fn chain(&mut self, family: Family, table: &str, name: &str) -> Result<Option<Chain>> {
        let query = Query {
            op: "look up nf_tables chain",
            object: name,
            kind: GETCHAIN,
            flags: ONE,
            family: family.number(),
        };
        let found = self.read(
            &query,
            |bytes| {
                PushChainAttrs::new(bytes)
                    .push_table_bytes(kept(table).as_bytes())
                    .push_name_bytes(kept(name).as_bytes());
            },
            |_, attributes| decode_chain(attributes).map(Some),
        )?;
        Ok(found.into_iter().next())
    }

    /// The rules of one chain, or of all chains of the table, in their order.
    pub fn rules(&mut self, family: Family, table: &str, chain: Option<&str>) -> Result<Vec<Rule>> {
        self.rules_where(family, table, chain, |_| true)
    }

    /// Those of them that `keep` wants: of a long chain never more than these
    /// are in memory.
    pub fn rules_where(
        &mut self,
        family: Family,
        table: &str,
        chain: Option<&str>,
        mut keep: impl FnMut(&Rule) -> bool,
    ) -> Result<Vec<Rule>> {
        let query = Query {
            op: "list nf_tables rules",
            object: chain.unwrap_or(table),
            kind: GETRULE,
            flags: DUMP,
            family: family.number(),
        };
        self.read(
            &query,
            |bytes| {
                let rule = PushRuleAttrs::new(bytes).push_table_bytes(kept(table).as_bytes());
                if let Some(chain) = chain {
                    rule.push_chain_bytes(kept(chain).as_bytes());
                }
            },
            |_, attributes| Ok(Some(decode_rule(attributes)?).filter(&mut keep)),
        )
    }

    /// Reads with `plan`, commits its batch against the generation that was
    /// read, and starts over when somebody else committed in between: at most
    /// 50 times (`ERESTART`). An empty batch commits nothing; then too,
    /// what was read is one state.
    ///
    /// `plan` and commit run under a lock on the namespace that all users of
    /// this function share, so that only others' commits can come in between.
    /// `plan` should do nothing but read and decide.
    pub fn update<T, E: From<Error>>(
        &mut self,
        mut plan: impl FnMut(&mut Self) -> std::result::Result<(Batch, T), E>,
    ) -> std::result::Result<T, E> {
        let lock = self.lock();
        let done = (0..ATTEMPTS).find_map(|_| self.attempt(&mut plan).transpose());
        drop(lock);
        done.unwrap_or_else(|| {
            let rounds = format!("{ATTEMPTS} times another change came first");
            Err(Error::new("commit nf_tables batch", rounds, Errno::ERESTART).into())
        })
    }

    /// `None`: somebody else came first.
    fn attempt<T, E: From<Error>>(
        &mut self,
        plan: &mut impl FnMut(&mut Self) -> std::result::Result<(Batch, T), E>,
    ) -> std::result::Result<Option<T>, E> {
        let generation = self.generation()?;
        let (batch, value) = plan(self)?;
        if batch.is_empty() {
            return Ok((self.generation()? == generation).then_some(value));
        }
        if let Some(text) = &batch.too_long {
            return Err(Error::new("commit nf_tables batch", text, Errno::ENAMETOOLONG).into());
        }
        match self.socket.transact(SUBSYSTEM, generation, &batch.messages) {
            Ok(()) => Ok(Some(value)),
            Err(refused) if refused.message.is_none() && refused.errno() == Some(Errno::ERESTART) => Ok(None),
            Err(refused) => Err(refused_change(&batch, refused).into()),
        }
    }

    /// Counts the commits to this namespace's rule set.
    fn generation(&self) -> Result<u32> {
        let mut generation = None;
        self.socket
            .request(
                GETGEN,
                ONE,
                0,
                |_| {},
                |_, attributes| {
                    generation = netlink_bindings::utils::find_attr(attributes, GENERATION_ID)
                        .and_then(|id| id.first_chunk())
                        .map(|id| u32::from_be_bytes(*id));
                    Ok(())
                },
            )
            .map_err(|refused| refused_read("read generation", "nf_tables", refused))?;
        generation.ok_or_else(|| Error::new("read generation", "nf_tables", io::ErrorKind::InvalidData))
    }

    /// All `each` made of the answers; read again when they were not one state.
    fn read<T>(
        &self,
        query: &Query<'_>,
        attributes: impl Fn(&mut Vec<u8>),
        mut each: impl FnMut(u8, &[u8]) -> io::Result<Option<T>>,
    ) -> Result<Vec<T>> {
        let Query { op, object, kind, flags, family } = *query;
        for _ in 0..ATTEMPTS {
            let mut found = Vec::new();
            let answered = self.socket.request(kind, flags, family, &attributes, |family, answer| {
                found.extend(each(family, answer)?);
                Ok(())
            });
            match answered {
                Ok(true) => return Ok(found),
                Ok(false) => {}
                Err(refused) if refused.errno() == Some(Errno::EINTR) => {}
                Err(refused) if refused.errno() == Some(Errno::ENOENT) => return Ok(Vec::new()),
                Err(refused) => return Err(refused_read(op, object, refused)),
            }
        }
        let object = format!("{object}: it changed {ATTEMPTS} times while being read");
        Err(Error::new(op, object, Errno::EINTR))
    }

    /// flock(2) on the namespace's own inode: no file on disk, and the kernel
    /// releases it when the holder dies. Without /proc there is none, and
    /// commits only conflict more often.
    fn lock(&self) -> Option<Flock<File>> {
        let mut file = self.namespace.as_ref()?.try_clone().ok()?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusive) {
                Ok(lock) => return Some(lock),
                Err((back, Errno::EINTR)) => file = back,
                Err(_) => return None,
            }
        }
    }
}

/// A read: what for, of what, and the kernel's numbers for it.
struct Query<'a> {
    op: &'static str,
    object: &'a str,
    kind: u16,
    flags: u16,
    /// `NFPROTO_*`; 0 for all.
    family: u8,
}

fn refused_read(op: &'static str, object: &str, refused: Refusal) -> Error {
    match refused.words {
        Some(words) => Error::new(op, format!("{object} ({words})"), refused.error),
        None => Error::new(op, object, refused.error),
    }
}

fn refused_change(batch: &Batch, refused: Refusal) -> Error {
    match refused.message {
        Some(index) => {
            let (op, object) = batch.describe(index);
            refused_read(op, &object, refused)
        }
        None => refused_read("commit nf_tables batch", "as a whole", refused),
    }
}

fn decode_chain(attributes: &[u8]) -> io::Result<Chain> {
    let chain = ChainAttrs::new(attributes);
    let base = chain.get_hook().ok().and_then(|hook| {
        Some(BaseChain {
            kind: ChainKind::from_name(chain.get_type().ok()?.to_bytes())?,
            hook: Hook::from_number(hook.get_num().ok()?),
            priority: hook.get_priority().ok()?,
            policy: Policy::from_number(chain.get_policy().unwrap_or(1)),
        })
    });
    Ok(Chain {
        name: chain.get_name().map_err(unexpected)?.to_string_lossy().into_owned(),
        handle: chain.get_handle().map_err(unexpected)?,
        base,
        uses: chain.get_use().unwrap_or(0),
        comment: netlink_bindings::utils::find_attr(attributes, CHAIN_USERDATA)
            .and_then(userdata::find_comment),
    })
}

fn decode_rule(attributes: &[u8]) -> io::Result<Rule> {
    let (mut chain, mut handle, mut comment, mut tag, mut expressions) = (None, None, None, None, Vec::new());
    for attribute in RuleAttrs::new(attributes).flatten() {
        match attribute {
            RuleAttrs::Chain(name) => chain = Some(name.to_string_lossy().into_owned()),
            RuleAttrs::Handle(number) => handle = Some(number),
            RuleAttrs::Userdata(data) => {
                (comment, tag) = (userdata::find_comment(data), userdata::find_tag(data));
            }
            RuleAttrs::Expressions(list) => expressions = expression::decode(list.get_buf()),
            _ => {}
        }
    }
    let (Some(chain), Some(handle)) = (chain, handle) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let comment = comment.or_else(|| expressions.iter().find_map(xt::comment));
    Ok(Rule { chain, handle, comment, tag, expressions })
}

fn unexpected(_: netlink_bindings::utils::ErrorContext) -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// Of what was checked, or cannot be longer: lengths on the wire have 16 bits.
fn attribute_length(length: usize) -> u16 {
    u16::try_from(length).unwrap_or(u16::MAX)
}

/// What is too long to be a name is refused before it is sent; until then it
/// must not break the message.
fn kept(name: &str) -> &str {
    name.get(..NAME_MAX).unwrap_or(name)
}

impl Family {
    /// As nft writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inet => "inet",
            Self::Ipv4 => "ip",
            Self::Ipv6 => "ip6",
            Self::Bridge => "bridge",
        }
    }

    /// `NFPROTO_*`.
    fn number(self) -> u8 {
        match self {
            Self::Inet => 1,
            Self::Ipv4 => 2,
            Self::Bridge => 7,
            Self::Ipv6 => 10,
        }
    }

    fn from_number(number: u8) -> Option<Self> {
        [Self::Inet, Self::Ipv4, Self::Ipv6, Self::Bridge].into_iter().find(|f| f.number() == number)
    }
}

impl ChainKind {
    fn name(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Nat => "nat",
            Self::Route => "route",
        }
    }

    fn from_name(name: &[u8]) -> Option<Self> {
        [Self::Filter, Self::Nat, Self::Route].into_iter().find(|kind| kind.name().as_bytes() == name)
    }
}

impl Hook {
    /// `NF_INET_*`; the bridge family has the same numbers.
    fn number(self) -> u32 {
        match self {
            Self::Prerouting => 0,
            Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
            Self::Postrouting => 4,
            Self::Other(number) => number,
        }
    }

    fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Prerouting,
            1 => Self::Input,
            2 => Self::Forward,
            3 => Self::Output,
            4 => Self::Postrouting,
            _ => Self::Other(number),
        }
    }
}

impl Policy {
    fn number(self) -> u32 {
        match self {
            Self::Drop => 0,
            Self::Accept => 1,
        }
    }

    fn from_number(number: u32) -> Self {
        if number == 0 { Self::Drop } else { Self::Accept }
    }
}
