//! nf_tables of the calling thread's network namespace, by netlink, without any process.
//!
//! Reads and changes go together: [`NfTables::update`] reads, fills a [`Batch`] and commits it for
//! the generation that it has read. If another program has committed in between, it starts over. A
//! batch is applied completely or not at all.
//!
//! Costs on Linux 6.18: reading few rules and a commit take 60 µs. The kernel frees deleted objects
//! 5 to 16 ms later; closing any netfilter socket of the namespace waits for that, and other
//! commits wait behind it. Dropping an [`NfTables`] does not wait (the kernel closes it; see
//! `socket.rs`). Adding an existing chain is also a change to be freed, so existing chains are not
//! sent. A dump of 20 000 rules takes 230 ms, mostly in the kernel, which walks the chain again for
//! every 32 KiB.
//!
//! Attributes are read and written here, without `netlink-bindings` and `netlink-socket2` 0.3.5.
//! These lack the `masq` expression and number the userdata of chains and the ids of rules wrongly
//! (both tables omit the padding attribute). They read dumps through 8 KiB, ignore
//! `NLM_F_DUMP_INTR`, request an answer to every message of a batch, and cannot raise the send
//! buffer, which a batch of 2 000 rules needs.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use nix::errno::Errno;

use linux::{Error, Result};
mod batch;
mod body;
#[cfg(test)]
mod codec_tests;
mod expression;
mod lock;
mod refusal;
#[cfg(test)]
mod tests;
mod userdata;
mod xt;

pub use batch::Batch;
pub use body::{Is, Protocol, RuleBody};
pub use expression::{CmpOp, Expression, MetaKey, NatKind, PayloadBase, Verdict};
pub use lock::NamespaceLock;
use lock::TIMEOUT as LOCK_TIMEOUT;
pub use refusal::{Unreached, WrongHook, is_unsupported, is_wrong_hook};

use crate::attributes::{self, each, find, find_text, find_u32, find_u64, put_text};
use crate::socket::{DUMP, Messages, ONE, Refusal, Socket};

const SUBSYSTEM: u16 = 10;
const GETTABLE: u16 = 0xa01;
const GETCHAIN: u16 = 0xa04;
const GETRULE: u16 = 0xa07;
const GETGEN: u16 = 0xa10;

/// `NFTA_GEN_ID`.
const GENERATION_ID: u16 = 1;

// NFTA_TABLE_*, NFTA_CHAIN_*, NFTA_HOOK_*, NFTA_RULE_*.
const TABLE_NAME: u16 = 1;
const TABLE_FLAGS: u16 = 2;
const CHAIN_TABLE: u16 = 1;
const CHAIN_HANDLE: u16 = 2;
const CHAIN_NAME: u16 = 3;
const CHAIN_HOOK: u16 = 4;
const CHAIN_POLICY: u16 = 5;
const CHAIN_USES: u16 = 6;
const CHAIN_TYPE: u16 = 7;
const CHAIN_USERDATA: u16 = 12;
const HOOK_NUMBER: u16 = 1;
const HOOK_PRIORITY: u16 = 2;
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_HANDLE: u16 = 3;
const RULE_EXPRESSIONS: u16 = 4;
const RULE_USERDATA: u16 = 7;

/// `NFT_TABLE_F_DORMANT`.
const DORMANT: u32 = 1;

/// How often an inconsistent read is repeated.
const ATTEMPTS: usize = 50;

/// How often [`NfTables::update`] starts over. Of n concurrent writers one succeeds in each round,
/// and on a loaded node others keep coming: one may need many times n rounds.
const UPDATE_ATTEMPTS: usize = 2000;

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
    /// Number of its rules, and of rules and sets that lead to it.
    pub uses: u32,
    pub comment: Option<String>,
}

/// The hook of a chain in the kernel's packet path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BaseChain {
    pub kind: ChainKind,
    pub hook: Hook,
    pub priority: i32,
    pub policy: Policy,
}

impl Chain {
    fn wrong_hook(&self, family: Family, table: &str, needed: Option<BaseChain>) -> Option<WrongHook> {
        let place = |base: &BaseChain| (base.kind, base.hook, base.priority);
        if self.base.as_ref().map(place) == needed.as_ref().map(place) {
            return None;
        }
        let (table, name) = (table.to_owned(), self.name.clone());
        Some(WrongHook { family, table, name, found: self.base, needed })
    }
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
    /// nft's comment or, without one, that of an xtables `comment` match, as written by
    /// iptables-nft.
    pub comment: Option<String>,
    /// Further data that the rule's creator stored with the comment; nft does not show it.
    pub tag: Option<Vec<u8>>,
    pub expressions: Vec<Expression>,
}

impl Rule {
    /// Decodes one rule's attributes (`NFTA_RULE_*`). Unknown parts become [`Expression::Unknown`].
    pub fn decode(attributes: &[u8]) -> io::Result<Self> {
        decode_rule(attributes)
    }

    /// The chain that it jumps or goes to.
    pub fn target_chain(&self) -> Option<&str> {
        self.expressions.iter().find_map(Expression::target_chain)
    }

    /// The destination, if it is a DNAT to one address and port: nft's, or the xtables target
    /// `DNAT` of iptables-nft.
    pub fn dnat_target(&self) -> Option<SocketAddr> {
        let native = || expression::dnat_target(&self.expressions);
        native().or_else(|| self.expressions.iter().find_map(xt::dnat_target))
    }

    /// Whether its effect is that of `expressions`; counters are ignored.
    pub fn does(&self, expressions: &[Expression]) -> bool {
        do_the_same(&self.expressions, expressions)
    }
}

/// Whether two rules' bodies are the same; counters are ignored.
pub fn do_the_same(one: &[Expression], other: &[Expression]) -> bool {
    let counts = |e: &&Expression| !matches!(e, Expression::Counter { .. });
    one.iter().filter(counts).eq(other.iter().filter(counts))
}

/// Whether [`NfTables::open_if_available`] can open nf_tables.
pub fn is_available() -> Result<bool> {
    Ok(NfTables::open_if_available()?.is_some())
}

/// One socket. Reading never fails with `ENOENT`: a missing object is empty, and so is one whose
/// name exceeds 255 bytes.
#[derive(Debug)]
pub struct NfTables {
    socket: Socket,
    /// The namespace's lock; `None` without /proc.
    lock: Option<PathBuf>,
    /// How long to wait for the lock, and how often to start over.
    lock_timeout: Duration,
    attempts: usize,
}

impl NfTables {
    /// `None` if the kernel lacks nf_tables. Changes nothing (except that the kernel may load the
    /// module).
    pub fn open_if_available() -> Result<Option<Self>> {
        const ABSENT: [Errno; 3] = [
            // No netfilter in netlink; no nf_tables in netfilter.
            Errno::EPROTONOSUPPORT,
            Errno::EINVAL,
            Errno::EOPNOTSUPP,
        ];
        let opened = Self::open().and_then(|nf| {
            nf.generation()?;
            Ok(nf)
        });
        match opened {
            Ok(nf) => Ok(Some(nf)),
            Err(e) if ABSENT.contains(&e.errno()) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Stays in the calling thread's network namespace.
    pub fn open() -> Result<Self> {
        let socket = Socket::open().map_err(|e| Error::new("open netlink socket", "netfilter", e))?;
        Ok(Self { socket, lock: lock::path(), lock_timeout: LOCK_TIMEOUT, attempts: UPDATE_ATTEMPTS })
    }

    /// The tables of the four families.
    pub fn tables(&mut self) -> Result<Vec<(Family, String)>> {
        let query = Query { op: "list nf_tables tables", object: "", kind: GETTABLE, flags: DUMP, family: 0 };
        self.read(&query, &[], |family, table| {
            Ok(Family::from_number(family).zip(find_text(table, TABLE_NAME)))
        })
    }

    pub fn has_table(&mut self, family: Family, table: &str) -> Result<bool> {
        Ok(self.table_flags(family, table)?.is_some())
    }

    /// Whether the table exists and is dormant, so that its chains have no effect.
    fn is_dormant(&mut self, family: Family, table: &str) -> Result<bool> {
        Ok(self.table_flags(family, table)?.is_some_and(|flags| flags & DORMANT != 0))
    }

    /// `NFT_TABLE_F_*`; `None` if the table does not exist.
    fn table_flags(&mut self, family: Family, table: &str) -> Result<Option<u32>> {
        let query = Query {
            op: "look up nf_tables table",
            object: table,
            kind: GETTABLE,
            flags: ONE,
            family: family.number(),
        };
        let found = self.read(&query, &[(TABLE_NAME, table)], |_, table| {
            Ok(Some(find_u32(table, TABLE_FLAGS).unwrap_or_default()))
        })?;
        Ok(found.into_iter().next())
    }

    /// All chains of a table. (The kernel lists those of all tables of the family;
    /// [`NfTables::chain`] requests one.)
    pub fn chains(&mut self, family: Family, table: &str) -> Result<Vec<Chain>> {
        let query = Query {
            op: "list nf_tables chains",
            object: table,
            kind: GETCHAIN,
            flags: DUMP,
            family: family.number(),
        };
        self.read(&query, &[(CHAIN_TABLE, table)], |_, chain| {
            let of = find_text(chain, CHAIN_TABLE);
            if of.as_deref() == Some(table) { decode_chain(chain).map(Some) } else { Ok(None) }
        })
    }

    pub fn chain(&mut self, family: Family, table: &str, name: &str) -> Result<Option<Chain>> {
        let query = Query {
            op: "look up nf_tables chain",
            object: name,
            kind: GETCHAIN,
            flags: ONE,
            family: family.number(),
        };
        let which = [(CHAIN_TABLE, table), (CHAIN_NAME, name)];
        let found = self.read(&query, &which, |_, chain| decode_chain(chain).map(Some))?;
        Ok(found.into_iter().next())
    }

    /// Why packets do not reach a chain; `None` if they do, or if it is missing in an active table.
    /// The policy of a base chain is not checked.
    pub fn unreached(
        &mut self,
        family: Family,
        table: &str,
        name: &str,
        needed: &BaseChain,
    ) -> Result<Option<Unreached>> {
        if self.is_dormant(family, table)? {
            return Ok(Some(Unreached::Dormant { family, table: table.to_owned() }));
        }
        let there = self.chain(family, table, name)?;
        Ok(there.and_then(|there| there.wrong_hook(family, table, Some(*needed))).map(Unreached::from))
    }

    /// The rules of one chain, or of all chains of the table, in their order.
    pub fn rules(&mut self, family: Family, table: &str, chain: Option<&str>) -> Result<Vec<Rule>> {
        self.rules_where(family, table, chain, |_| true)
    }

    /// [`Self::rules`] filtered by `keep`: of a long chain, only the selected rules are in memory.
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
        let which = [(RULE_TABLE, table), (RULE_CHAIN, chain.unwrap_or_default())];
        let which = if chain.is_some() { &which[..] } else { &which[..1] };
        self.read(&query, which, |_, rule| Ok(Some(decode_rule(rule)?).filter(&mut keep)))
    }

    /// Reads with `plan`, and commits its batch for the generation that was read. Starts over, at
    /// most 2000 times (`ERESTART`), if another program has committed in between. An empty batch
    /// commits nothing; even then, the reads saw one state.
    ///
    /// Takes the namespace's lock first: without it, fifty concurrent plugins lose most of their
    /// rounds and take ten times as long. `plan` should only read and decide.
    pub fn update<T, E: From<Error>>(
        &mut self,
        mut plan: impl FnMut(&mut Self) -> std::result::Result<(Batch, T), E>,
    ) -> std::result::Result<T, E> {
        let lock = self.lock.as_ref().and_then(|path| NamespaceLock::at(path, self.lock_timeout));
        let done = (0..self.attempts).find_map(|_| self.attempt(&mut plan).transpose());
        drop(lock);
        done.unwrap_or_else(|| {
            let rounds = format!("{} times another change came first", self.attempts);
            Err(Error::new("commit nf_tables batch", rounds, Errno::ERESTART).into())
        })
    }

    /// `None`: another program has committed first.
    fn attempt<T, E: From<Error>>(
        &mut self,
        plan: &mut impl FnMut(&mut Self) -> std::result::Result<(Batch, T), E>,
    ) -> std::result::Result<Option<T>, E> {
        let generation = self.generation()?;
        let (batch, value) = plan(self)?;
        if let Some(text) = &batch.too_long {
            return Err(Error::new("commit nf_tables batch", text, Errno::ENAMETOOLONG).into());
        }
        let messages = self.needed(batch)?;
        if messages.is_empty() {
            return Ok((self.generation()? == generation).then_some(value));
        }
        match self.socket.transact(SUBSYSTEM, generation, &messages) {
            Ok(()) => Ok(Some(value)),
            Err(refused) if refused.message.is_none() && refused.errno() == Some(Errno::ERESTART) => Ok(None),
            Err(refused) => Err(refused_change(&messages, refused).into()),
        }
    }

    /// The batch without the chains that exist already, each at its hook and in an active table.
    fn needed(&mut self, batch: Batch) -> Result<Messages> {
        let (mut known, mut awake) = (Vec::new(), Vec::new());
        if !batch.deletes_chains {
            for batch::WantedChain { message, family, table, name, base } in &batch.wanted {
                if base.is_some() && !awake.contains(&(*family, table)) {
                    if self.is_dormant(*family, table)? {
                        return Err(refused_for(Unreached::Dormant {
                            family: *family,
                            table: table.clone(),
                        }));
                    }
                    awake.push((*family, table));
                }
                let Some(there) = self.chain(*family, table, name)? else { continue };
                if let Some(wrong) = there.wrong_hook(*family, table, *base) {
                    return Err(refused_for(wrong.into()));
                }
                known.extend(message);
            }
        }
        Ok(if known.is_empty() { batch.messages } else { batch.messages.without(&known) })
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
                    generation = find_u32(attributes, GENERATION_ID);
                    Ok(())
                },
            )
            .map_err(|refused| refused_read("read generation", "nf_tables", refused))?;
        generation.ok_or_else(|| Error::new("read generation", "nf_tables", io::ErrorKind::InvalidData))
    }

    /// Everything that `make` returned for the answers; repeated if they were not one state.
    fn read<T>(
        &self,
        query: &Query<'_>,
        which: &[(u16, &str)],
        mut make: impl FnMut(u8, &[u8]) -> io::Result<Option<T>>,
    ) -> Result<Vec<T>> {
        let Query { op, object, kind, flags, family } = *query;
        // The kernel returns ERANGE, but no object can have such a name.
        if which.iter().any(|(_, name)| name.len() > NAME_MAX) {
            return Ok(Vec::new());
        }
        let ask = |bytes: &mut Vec<u8>| which.iter().for_each(|(kind, name)| put_text(bytes, *kind, name));
        for _ in 0..ATTEMPTS {
            let mut found = Vec::new();
            let answered = self.socket.request(kind, flags, family, ask, |family, answer| {
                found.extend(make(family, answer)?);
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
}

/// A read: its purpose, its object, and the kernel's numbers for it.
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

/// The error before anything is sent.
fn refused_for(unreached: Unreached) -> Error {
    let source = io::Error::new(io::ErrorKind::AlreadyExists, unreached);
    Error::new("commit nf_tables batch", "as a whole", source)
}

fn refused_change(messages: &Messages, refused: Refusal) -> Error {
    match refused.message {
        Some(index) => {
            let (op, object) = batch::describe(messages, index);
            let error = refusal::explain(refused.error, batch::needs(messages, index));
            refused_read(op, &object, Refusal { error, ..refused })
        }
        None => refused_read("commit nf_tables batch", "as a whole", refused),
    }
}

fn decode_chain(chain: &[u8]) -> io::Result<Chain> {
    let base = find(chain, CHAIN_HOOK).and_then(|hook| {
        Some(BaseChain {
            kind: ChainKind::from_name(&find_text(chain, CHAIN_TYPE)?)?,
            hook: Hook::from_number(find_u32(hook, HOOK_NUMBER)?),
            priority: find_u32(hook, HOOK_PRIORITY)?.cast_signed(),
            policy: Policy::from_number(find_u32(chain, CHAIN_POLICY)?),
        })
    });
    Ok(Chain {
        name: find_text(chain, CHAIN_NAME).ok_or(io::ErrorKind::InvalidData)?,
        handle: find_u64(chain, CHAIN_HANDLE).ok_or(io::ErrorKind::InvalidData)?,
        base,
        uses: find_u32(chain, CHAIN_USES).unwrap_or(0),
        comment: find(chain, CHAIN_USERDATA).and_then(userdata::find_comment),
    })
}

fn decode_rule(answer: &[u8]) -> io::Result<Rule> {
    let mut rule =
        Rule { chain: String::new(), handle: 0, comment: None, tag: None, expressions: Vec::new() };
    for (kind, value) in each(answer) {
        match kind {
            RULE_CHAIN => rule.chain = attributes::text(value),
            RULE_HANDLE => {
                let handle = value.first_chunk().ok_or(io::ErrorKind::InvalidData)?;
                rule.handle = u64::from_be_bytes(*handle);
            }
            RULE_EXPRESSIONS => rule.expressions = expression::decode(value),
            RULE_USERDATA => {
                rule.comment = userdata::find_comment(value);
                rule.tag = userdata::find_tag(value);
            }
            _ => {}
        }
    }
    // The kernel counts handles from 1.
    if rule.handle == 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    rule.comment = rule.comment.or_else(|| rule.expressions.iter().find_map(xt::comment));
    Ok(rule)
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

    fn from_name(name: &str) -> Option<Self> {
        [Self::Filter, Self::Nat, Self::Route].into_iter().find(|kind| kind.name() == name)
    }
}

/// As nft writes it, without the policy.
impl fmt::Display for BaseChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, hook, priority, policy: _ } = self;
        write!(f, "type {} hook {hook} priority {priority}", kind.name())
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prerouting => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
            Self::Other(number) => return write!(f, "{number}"),
        })
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
