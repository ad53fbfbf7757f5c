//! Changes that the kernel applies together or not at all.

use super::expression::{self, Expression};
use super::refusal::Needs;
use super::{
    BaseChain, CHAIN_HOOK, CHAIN_NAME, CHAIN_POLICY, CHAIN_TABLE, CHAIN_TYPE, CHAIN_USERDATA, Family,
    HOOK_NUMBER, HOOK_PRIORITY, RULE_CHAIN, RULE_EXPRESSIONS, RULE_HANDLE, RULE_TABLE, RULE_USERDATA,
    TABLE_FLAGS, TABLE_NAME, userdata,
};
use crate::attributes::{find, find_text, find_u64, nest, put, put_text, put_u32, put_u64};
use crate::socket::{Message, Messages};

const NEWTABLE: u16 = 0xa00;
const DELTABLE: u16 = 0xa02;
const NEWCHAIN: u16 = 0xa03;
const DELCHAIN: u16 = 0xa05;
const NEWRULE: u16 = 0xa06;
const DELRULE: u16 = 0xa08;

const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;

/// `NFTA_TABLE_USERDATA`.
const TABLE_USERDATA: u16 = 6;

/// Changes in their order, committed by [`NfTables::update`](super::NfTables::update).
///
/// Names have at most 255 bytes, comments 254 (nft writes at most 128). The commit refuses longer
/// ones (`ENAMETOOLONG`).
#[derive(Debug, Default, Clone)]
pub struct Batch {
    pub(super) messages: Messages,
    /// The first text that is too long, with its object.
    pub(super) too_long: Option<String>,
    /// Chains that are added or required.
    pub(super) wanted: Vec<WantedChain>,
    /// One of them may be in `wanted`.
    pub(super) deletes_chains: bool,
}

/// The chain of [`Batch::add_chain`] or [`Batch::expect_base`].
#[derive(Debug, Clone)]
pub(super) struct WantedChain {
    /// The message that adds it, if any.
    pub(super) message: Option<usize>,
    pub(super) family: Family,
    pub(super) table: String,
    pub(super) name: String,
    pub(super) base: Option<BaseChain>,
}

/// What the kernel keeps with a rule, unread.
struct Userdata<'a> {
    comment: Option<&'a str>,
    tag: &'a [u8],
}

impl Batch {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Creates the table if it is missing; an existing one keeps its comment.
    pub fn add_table(&mut self, family: Family, name: &str, comment: Option<&str>) -> &mut Self {
        self.check(&[name], comment);
        self.messages.push(NEWTABLE, NLM_F_CREATE, family.number(), |bytes| {
            put_text(bytes, TABLE_NAME, name);
            put_u32(bytes, TABLE_FLAGS, 0);
            put_userdata(bytes, TABLE_USERDATA, &comment.map(userdata::comment).unwrap_or_default());
        });
        self
    }

    /// Creates the chain if it is missing. An existing one keeps its comment and its policy. It
    /// must have the hook `base`, or none if that is `None`, and the table of a base chain must be
    /// active ([`Unreached`](super::Unreached)). The commit looks for existing chains and does not
    /// send them: for the kernel, adding one is a change as slow as a deletion.
    pub fn add_chain(
        &mut self,
        family: Family,
        table: &str,
        name: &str,
        base: Option<&BaseChain>,
        comment: Option<&str>,
    ) -> &mut Self {
        self.check(&[table, name], comment);
        self.want(Some(self.messages.len()), family, table, name, base);
        self.messages.push(NEWCHAIN, NLM_F_CREATE, family.number(), |bytes| {
            put_text(bytes, CHAIN_TABLE, table);
            put_text(bytes, CHAIN_NAME, name);
            if let Some(base) = base {
                nest(bytes, CHAIN_HOOK, |bytes| {
                    put_u32(bytes, HOOK_NUMBER, base.hook.number());
                    put(bytes, HOOK_PRIORITY, &base.priority.to_be_bytes());
                });
                put_u32(bytes, CHAIN_POLICY, base.policy.number());
                put_text(bytes, CHAIN_TYPE, base.kind.name());
            }
            put_userdata(bytes, CHAIN_USERDATA, &comment.map(userdata::comment).unwrap_or_default());
        });
        self
    }

    /// The table must be active and the chain, if it exists, must have the hook `base`; otherwise
    /// the commit changes nothing ([`Unreached`](super::Unreached)). The rules alone do not show
    /// that. Takes two requests to the kernel, except in a batch that deletes chains.
    pub fn expect_base(&mut self, family: Family, table: &str, name: &str, base: &BaseChain) -> &mut Self {
        self.want(None, family, table, name, Some(base));
        self
    }

    fn want(
        &mut self,
        message: Option<usize>,
        family: Family,
        table: &str,
        name: &str,
        base: Option<&BaseChain>,
    ) {
        let (table, name) = (table.to_owned(), name.to_owned());
        self.wanted.push(WantedChain { message, family, table, name, base: base.copied() });
    }

    /// Appends a rule to the chain.
    pub fn append_rule(
        &mut self,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        comment: Option<&str>,
    ) -> &mut Self {
        self.rule(
            NLM_F_CREATE | NLM_F_APPEND,
            family,
            table,
            chain,
            expressions,
            Userdata { comment, tag: &[] },
        )
    }

    /// [`Self::append_rule`] with a [`Rule::tag`](super::Rule::tag). Tag and comment together have
    /// at most 251 bytes (`NFT_USERDATA_MAXLEN`).
    pub fn append_tagged_rule(
        &mut self,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        comment: Option<&str>,
        tag: &[u8],
    ) -> &mut Self {
        self.rule(NLM_F_CREATE | NLM_F_APPEND, family, table, chain, expressions, Userdata { comment, tag })
    }

    /// Inserts a rule at the head of the chain.
    pub fn insert_rule(
        &mut self,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        comment: Option<&str>,
    ) -> &mut Self {
        self.rule(NLM_F_CREATE, family, table, chain, expressions, Userdata { comment, tag: &[] })
    }

    /// Deletes a rule; `ENOENT` if no rule has this handle.
    pub fn delete_rule(&mut self, family: Family, table: &str, chain: &str, handle: u64) -> &mut Self {
        self.check(&[table, chain], None);
        self.messages.push(DELRULE, 0, family.number(), |bytes| {
            put_text(bytes, RULE_TABLE, table);
            put_text(bytes, RULE_CHAIN, chain);
            put_u64(bytes, RULE_HANDLE, handle);
        });
        self
    }

    /// Deletes all rules of the chain; `ENOENT` if it is missing.
    pub fn flush_chain(&mut self, family: Family, table: &str, chain: &str) -> &mut Self {
        self.check(&[table, chain], None);
        self.messages.push(DELRULE, 0, family.number(), |bytes| {
            put_text(bytes, RULE_TABLE, table);
            put_text(bytes, RULE_CHAIN, chain);
        });
        self
    }

    /// Deletes a chain. `EBUSY` if it has rules or is the target of one, at this point of the
    /// batch; `ENOENT` if it is missing.
    pub fn delete_chain(&mut self, family: Family, table: &str, name: &str) -> &mut Self {
        self.check(&[table, name], None);
        self.deletes_chains = true;
        self.messages.push(DELCHAIN, 0, family.number(), |bytes| {
            put_text(bytes, CHAIN_TABLE, table);
            put_text(bytes, CHAIN_NAME, name);
        });
        self
    }

    /// Deletes a table with its contents; `ENOENT` if it is missing.
    pub fn delete_table(&mut self, family: Family, name: &str) -> &mut Self {
        self.check(&[name], None);
        self.deletes_chains = true;
        self.messages.push(DELTABLE, 0, family.number(), |bytes| {
            put_text(bytes, TABLE_NAME, name);
        });
        self
    }

    fn rule(
        &mut self,
        flags: u16,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        Userdata { comment, tag }: Userdata<'_>,
    ) -> &mut Self {
        self.check(&[table, chain], comment);
        let mut data = comment.map(userdata::comment).unwrap_or_default();
        if !tag.is_empty() {
            data.extend(userdata::tag(tag));
        }
        if data.len() > userdata::MAX && self.too_long.is_none() {
            self.too_long = Some(comment.unwrap_or("a tag").to_owned());
        }
        self.messages.push(NEWRULE, flags, family.number(), |bytes| {
            put_text(bytes, RULE_TABLE, table);
            put_text(bytes, RULE_CHAIN, chain);
            nest(bytes, RULE_EXPRESSIONS, |bytes| expression::encode(expressions, bytes));
            put_userdata(bytes, RULE_USERDATA, &data);
        });
        self
    }

    fn check(&mut self, names: &[&str], comment: Option<&str>) {
        let name = names.iter().find(|name| name.len() > super::NAME_MAX).copied();
        let text = name.or(comment.filter(|comment| comment.len() > userdata::COMMENT_MAX));
        if let (None, Some(text)) = (&self.too_long, text) {
            self.too_long = Some(text.to_owned());
        }
    }
}

/// The operation and the object of message `index`.
pub(super) fn describe(messages: &Messages, index: usize) -> (&'static str, String) {
    let Some(Message { kind, family, attributes }) = messages.get(index) else {
        return ("commit nf_tables batch", String::new());
    };
    let family = Family::from_number(family).map_or("?", Family::name);
    let part = |kind| find_text(attributes, kind).unwrap_or_default();
    match kind {
        NEWTABLE => ("add nf_tables table", format!("{family} {}", part(TABLE_NAME))),
        DELTABLE => ("delete nf_tables table", format!("{family} {}", part(TABLE_NAME))),
        NEWCHAIN | DELCHAIN => {
            let op = if kind == NEWCHAIN { "add nf_tables chain" } else { "delete nf_tables chain" };
            (op, format!("{family} {} {}", part(CHAIN_TABLE), part(CHAIN_NAME)))
        }
        _ => {
            let handle = find_u64(attributes, RULE_HANDLE);
            let op = match handle {
                _ if kind == NEWRULE => "add nf_tables rule",
                Some(_) => "delete nf_tables rule",
                None => "flush nf_tables chain",
            };
            let mut object = format!("{family} {} {}", part(RULE_TABLE), part(RULE_CHAIN));
            if let Some(handle) = handle {
                object += &format!(" handle {handle}");
            }
            if let Some(comment) = find(attributes, RULE_USERDATA).and_then(userdata::find_comment) {
                object += &format!(" comment {comment:?}");
            }
            (op, object)
        }
    }
}

/// The optional parts of the kernel that message `index` needs.
pub(super) fn needs(messages: &Messages, index: usize) -> Option<Needs> {
    let Message { kind, family, attributes } = messages.get(index)?;
    let family = Family::from_number(family)?;
    match kind {
        NEWTABLE => Some(Needs::Family(family)),
        NEWCHAIN => find_text(attributes, CHAIN_TYPE).map(|kind| Needs::ChainType(family, kind)),
        NEWRULE => {
            let names = expression::optional(find(attributes, RULE_EXPRESSIONS)?);
            (!names.is_empty()).then_some(Needs::Expressions(family, names))
        }
        _ => None,
    }
}

fn put_userdata(bytes: &mut Vec<u8>, kind: u16, data: &[u8]) {
    if !data.is_empty() {
        put(bytes, kind, data);
    }
}
