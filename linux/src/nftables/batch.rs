//! Changes that the kernel takes all together or not at all.

use netlink_bindings::nftables::{ChainAttrs, PushChainAttrs, PushRuleAttrs, PushTableAttrs, RuleAttrs};
use netlink_bindings::utils::{finalize_nested_header, push_header, push_nested_header};

use super::expression::{self, Expression, text};
use super::socket::Messages;
use super::{BaseChain, Family, kept, userdata};

const NEWTABLE: u16 = 0xa00;
const DELTABLE: u16 = 0xa02;
const NEWCHAIN: u16 = 0xa03;
const DELCHAIN: u16 = 0xa05;
const NEWRULE: u16 = 0xa06;
const DELRULE: u16 = 0xa08;

const NLM_F_CREATE: u16 = 0x400;
const NLM_F_APPEND: u16 = 0x800;

/// `NFTA_RULE_EXPRESSIONS`.
const RULE_EXPRESSIONS: u16 = 4;

/// Changes in their order; committed by [`NfTables::update`](super::NfTables::update).
///
/// Names are at most 255 bytes, comments 254 (nft itself writes 128 at most);
/// longer ones are refused by the commit (`ENAMETOOLONG`).
#[derive(Debug, Default, Clone)]
pub struct Batch {
    pub(super) messages: Messages,
    /// The first text that is too long, and what it is of.
    pub(super) too_long: Option<String>,
}

impl Batch {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Makes the table if it is missing; an existing one keeps its comment.
    pub fn add_table(&mut self, family: Family, name: &str, comment: Option<&str>) -> &mut Self {
        self.check(&[name], comment);
        self.messages.push(NEWTABLE, NLM_F_CREATE, family.number(), |bytes| {
            // The flags are there, and 0, as in nft's own message.
            let table = PushTableAttrs::new(bytes).push_name_bytes(kept(name).as_bytes()).push_flags(0);
            if let Some(comment) = comment {
                table.push_userdata(&userdata::comment(comment));
            }
        });
        self
    }

    /// Makes the chain if it is missing. An existing one keeps its comment; it
    /// must hook in as `base` says (`EEXIST`), if that says anything.
    pub fn add_chain(
        &mut self,
        family: Family,
        table: &str,
        name: &str,
        base: Option<&BaseChain>,
        comment: Option<&str>,
    ) -> &mut Self {
        self.check(&[table, name], comment);
        self.messages.push(NEWCHAIN, NLM_F_CREATE, family.number(), |bytes| {
            let mut chain = PushChainAttrs::new(&mut *bytes)
                .push_table_bytes(kept(table).as_bytes())
                .push_name_bytes(kept(name).as_bytes());
            if let Some(base) = base {
                chain = chain
                    .nested_hook()
                    .push_num(base.hook.number())
                    .push_priority(base.priority)
                    .end_nested()
                    .push_policy(base.policy.number())
                    .push_type_bytes(base.kind.name().as_bytes());
            }
            drop(chain);
            if let Some(comment) = comment {
                let data = userdata::comment(comment);
                push_header(bytes, super::CHAIN_USERDATA, super::attribute_length(data.len()));
                bytes.extend(data);
            }
        });
        self
    }

    /// At the end of the chain.
    pub fn append_rule(
        &mut self,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        comment: Option<&str>,
    ) -> &mut Self {
        self.rule(NLM_F_CREATE | NLM_F_APPEND, family, table, chain, expressions, (comment, &[]))
    }

    /// The same with a [`Rule::tag`](super::Rule::tag). It and the comment
    /// together are at most 251 bytes (`NFT_USERDATA_MAXLEN`).
    pub fn append_tagged_rule(
        &mut self,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        comment: Option<&str>,
        tag: &[u8],
    ) -> &mut Self {
        self.rule(NLM_F_CREATE | NLM_F_APPEND, family, table, chain, expressions, (comment, tag))
    }

    /// At the head of the chain.
    pub fn insert_rule(
        &mut self,
        family: Family,
        table: &str,
        chain: &str,
        expressions: &[Expression],
        comment: Option<&str>,
    ) -> &mut Self {
        self.rule(NLM_F_CREATE, family, table, chain, expressions, (comment, &[]))
    }

    /// `ENOENT` when there is none of this handle.
    pub fn delete_rule(&mut self, family: Family, table: &str, chain: &str, handle: u64) -> &mut Self {
        self.check(&[table, chain], None);
        self.messages.push(DELRULE, 0, family.number(), |bytes| {
            PushRuleAttrs::new(bytes)
                .push_table_bytes(kept(table).as_bytes())
                .push_chain_bytes(kept(chain).as_bytes())
                .push_handle(handle);
        });
        self
    }

    /// Deletes all rules of the chain; `ENOENT` when it is missing.
    pub fn flush_chain(&mut self, family: Family, table: &str, chain: &str) -> &mut Self {
        self.check(&[table, chain], None);
        self.messages.push(DELRULE, 0, family.number(), |bytes| {
            PushRuleAttrs::new(bytes)
                .push_table_bytes(kept(table).as_bytes())
                .push_chain_bytes(kept(chain).as_bytes());
        });
        self
    }

    /// `EBUSY` while it has rules or is the target of one (the state counts
    /// that the batch has reached here), `ENOENT` when it is missing.
    pub fn delete_chain(&mut self, family: Family, table: &str, name: &str) -> &mut Self {
        self.check(&[table, name], None);
        self.messages.push(DELCHAIN, 0, family.number(), |bytes| {
            PushChainAttrs::new(bytes)
                .push_table_bytes(kept(table).as_bytes())
                .push_name_bytes(kept(name).as_bytes());
        });
        self
    }

    /// With all that is in it; `ENOENT` when it is missing.
    pub fn delete_table(&mut self, family: Family, name: &str) -> &mut Self {
        self.check(&[name], None);
        self.messages.push(DELTABLE, 0, family.number(), |bytes| {
            PushTableAttrs::new(bytes).push_name_bytes(kept(name).as_bytes());
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
        (comment, tag): (Option<&str>, &[u8]),
    ) -> &mut Self {
        self.check(&[table, chain], comment);
        let mut data = comment.map(userdata::comment).unwrap_or_default();
        if !tag.is_empty() {
            data.extend(userdata::tag(tag));
        }
        if data.len() > userdata::MAX && self.too_long.is_none() {
            self.too_long = comment.map(str::to_owned);
        }
        self.messages.push(NEWRULE, flags, family.number(), |bytes| {
            PushRuleAttrs::new(&mut *bytes)
                .push_table_bytes(kept(table).as_bytes())
                .push_chain_bytes(kept(chain).as_bytes());
            let list = push_nested_header(bytes, RULE_EXPRESSIONS);
            expression::encode(expressions, bytes);
            finalize_nested_header(bytes, list);
            if !data.is_empty() {
                PushRuleAttrs::new(bytes).push_userdata(&data);
            }
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

    /// What the `index`th message is to do, on what.
    pub(super) fn describe(&self, index: usize) -> (&'static str, String) {
        let Some((kind, family, attributes)) = self.messages.get(index) else {
            return ("commit nf_tables batch", String::new());
        };
        let family = Family::from_number(family).map_or("?", Family::name);
        let part =
            |number| netlink_bindings::utils::find_attr(attributes, number).map(text).unwrap_or_default();
        match kind {
            NEWTABLE | DELTABLE => {
                let op = if kind == NEWTABLE { "add nf_tables table" } else { "delete nf_tables table" };
                (op, format!("{family} {}", part(1)))
            }
            NEWCHAIN | DELCHAIN => {
                let op = if kind == NEWCHAIN { "add nf_tables chain" } else { "delete nf_tables chain" };
                let chain = ChainAttrs::new(attributes);
                let name = chain.get_name().map(|name| name.to_string_lossy().into_owned());
                (op, format!("{family} {} {}", part(1), name.unwrap_or_default()))
            }
            _ => {
                let rule = RuleAttrs::new(attributes);
                let op = match rule.get_handle() {
                    _ if kind == NEWRULE => "add nf_tables rule",
                    Ok(_) => "delete nf_tables rule",
                    Err(_) => "flush nf_tables chain",
                };
                let mut object = format!("{family} {} {}", part(1), part(2));
                if let Ok(handle) = rule.get_handle() {
                    object += &format!(" handle {handle}");
                }
                if let Some(comment) = rule.get_userdata().ok().and_then(userdata::find_comment) {
                    object += &format!(" comment {comment:?}");
                }
                (op, object)
            }
        }
    }
}
