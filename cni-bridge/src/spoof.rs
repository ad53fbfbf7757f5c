//! The nf_tables rules that drop frames of a container with a source MAC that is not its own
//! (`macspoofchk`). Chains and comments are the reference's. No I/O.

use cni_plugin::{Invocation, ValidAttachments};
use linux::netlink::Mac;
use netfilter::nftables::{
    BaseChain, Batch, ChainKind, CmpOp, Expression, Family, Hook, Is, MetaKey, Policy, Rule, RuleBody,
};

pub(crate) const FAMILY: Family = Family::Bridge;
pub(crate) const TABLE: &str = "nat";
pub(crate) const PREROUTING: &str = "PREROUTING";
const CHAIN_PREFIX: &str = "cni-br-iface-";
const COMMENT_PREFIX: &str = "macspoofchk-";

/// `PREROUTING`: filter, hook prerouting, priority dstnat of the bridge family.
pub(crate) const BASE: BaseChain =
    BaseChain { kind: ChainKind::Filter, hook: Hook::Prerouting, priority: -300, policy: Policy::Accept };

/// The names that belong to one attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Names {
    /// Name of the chain for the port's frames.
    pub(crate) interface: String,
    /// Name of the chain that checks the source MAC.
    pub(crate) mac: String,
    comment: String,
}

impl Names {
    pub(crate) fn of(call: &Invocation) -> Self {
        Self::new(&format!("{}-{}", call.container_id, call.ifname))
    }

    fn new(attachment: &str) -> Self {
        let interface = format!("{CHAIN_PREFIX}{attachment}");
        Self { mac: format!("{interface}-mac"), interface, comment: format!("{COMMENT_PREFIX}{attachment}") }
    }

    /// Whether the rule is in these chains, leads to them, or has their comment.
    pub(crate) fn own(&self, rule: &Rule) -> bool {
        rule.chain == self.interface
            || rule.chain == self.mac
            || rule.target_chain() == Some(&self.interface)
            || rule.comment.as_ref() == Some(&self.comment)
    }
}

/// Adds to `batch` the rules that `found` (those of [`Names::own`]) lacks so that only `mac` may
/// send through the port `host_veth`, and removes the others.
pub(crate) fn plan(names: &Names, host_veth: &str, mac: Mac, found: &[Rule], batch: &mut Batch) {
    let wanted = wanted(names, host_veth, mac);
    if found.len() == wanted.len() && is_complete(names, host_veth, mac, found) {
        batch.expect_base(FAMILY, TABLE, PREROUTING, &BASE);
        return;
    }
    batch
        .add_table(FAMILY, TABLE, None)
        .add_chain(FAMILY, TABLE, PREROUTING, Some(&BASE), None)
        .add_chain(FAMILY, TABLE, &names.interface, None, None)
        .add_chain(FAMILY, TABLE, &names.mac, None, None);
    for rule in found {
        batch.delete_rule(FAMILY, TABLE, &rule.chain, rule.handle);
    }
    for (chain, body) in &wanted {
        batch.append_rule(FAMILY, TABLE, chain, body, Some(&names.comment));
    }
}

/// Whether the rules are in their chains, in the right order.
pub(crate) fn is_complete(names: &Names, host_veth: &str, mac: Mac, found: &[Rule]) -> bool {
    let wanted = wanted(names, host_veth, mac);
    [PREROUTING, &names.interface, &names.mac].into_iter().all(|chain| {
        let there = found.iter().filter(|rule| rule.chain == chain);
        let due: Vec<&Vec<Expression>> = wanted.iter().filter(|(c, _)| *c == chain).map(|(_, b)| b).collect();
        let there: Vec<&Rule> = there.collect();
        there.len() == due.len() && there.iter().zip(due).all(|(rule, body)| rule.does(body))
    })
}

/// Chain and body of each rule.
fn wanted<'a>(names: &'a Names, host_veth: &str, mac: Mac) -> [(&'a str, Vec<Expression>); 4] {
    let body = || RuleBody::new(FAMILY);
    [
        (PREROUTING, body().iifname(Is::Equal, host_veth).jump(&names.interface).build()),
        (&names.interface, body().jump(&names.mac).build()),
        (&names.mac, body().ether_saddr(Is::Equal, mac).ret().build()),
        (&names.mac, body().drop().build()),
    ]
}

/// Removes the existing rules and chains of the attachment.
pub(crate) fn plan_removal(found: &[Rule], chains: &[&str], batch: &mut Batch) {
    for rule in found {
        batch.delete_rule(FAMILY, TABLE, &rule.chain, rule.handle);
    }
    for chain in chains {
        batch.delete_chain(FAMILY, TABLE, chain);
    }
}

/// An attachment with a spoof check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    pub(crate) names: Names,
    /// The ports whose frames are checked: several if an attachment was made again under the same
    /// name.
    pub(crate) host_veths: Vec<String>,
}

/// The attachments of `rules` that are not valid. Their network is unknown here: an attachment's
/// name contains only the container id and the interface.
pub(crate) fn checked_but_not(valid: &ValidAttachments, rules: &[Rule]) -> Vec<Checked> {
    let in_use: Vec<Names> = valid.iter().map(|(id, ifname)| Names::new(&format!("{id}-{ifname}"))).collect();
    let entries = rules.iter().filter(|rule| rule.chain == PREROUTING);
    let named = entries.filter_map(|rule| {
        let attachment = rule.comment.as_ref()?.strip_prefix(COMMENT_PREFIX)?;
        Some((Names::new(attachment), input_interface(rule)?))
    });
    let mut checked: Vec<Checked> = Vec::new();
    for (names, host_veth) in named.filter(|(names, _)| !in_use.contains(names)) {
        match checked.iter_mut().find(|known| known.names == names) {
            Some(known) => known.host_veths.push(host_veth),
            None => checked.push(Checked { names, host_veths: vec![host_veth] }),
        }
    }
    checked
}

/// The name that `iifname` is compared with.
fn input_interface(rule: &Rule) -> Option<String> {
    let mut loaded = false;
    for expression in &rule.expressions {
        match expression {
            Expression::Meta { key: MetaKey::IifName, .. } => loaded = true,
            Expression::Cmp { op: CmpOp::Eq, value, .. } if loaded => {
                let name: Vec<u8> = value.iter().copied().take_while(|byte| *byte != 0).collect();
                return String::from_utf8(name).ok();
            }
            _ => {}
        }
    }
    None
}
