//! The nf_tables rules that masquerade an attachment, in the table of the reference's nftables
//! backend. No I/O.
//!
//! A rule's comment starts with two hashes that identify its owner, so it is found without any
//! address. The rest is for administrators, and truncated at 128 bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use cni_plugin::{Invocation, ValidAttachments, sha512_hex};
use ipnetwork::IpNetwork;
use netfilter::nftables::{
    BaseChain, Batch, ChainKind, CmpOp, Expression, Family, Hook, Is, Policy, Rule, RuleBody,
};

pub(crate) const FAMILY: Family = Family::Inet;
pub(crate) const TABLE: &str = "cni_plugins_masquerade";
pub(crate) const CHECKS: &str = "masq_checks";
pub(crate) const POSTROUTING: &str = "postrouting";

const TABLE_COMMENT: &str = "Masquerading for plugins from github.com/containernetworking/plugins";
const CHECKS_COMMENT: &str =
    "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet";

/// `postrouting`: nat, hook postrouting, priority srcnat.
pub(crate) const BASE: BaseChain =
    BaseChain { kind: ChainKind::Nat, hook: Hook::Postrouting, priority: 100, policy: Policy::Accept };

const COMMENT_MAX: usize = 128;
const HASH_DIGITS: usize = 16;

/// The common start of all comments of an attachment's rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    network: String,
    interface: String,
}

impl Owner {
    pub(crate) fn of(call: &Invocation) -> Self {
        Self::new(&call.conf.name, &call.container_id, &call.ifname)
    }

    fn new(network: &str, container_id: &str, ifname: &str) -> Self {
        Self {
            network: sha512_hex(network, HASH_DIGITS),
            interface: sha512_hex(&format!("{ifname}:{container_id}"), HASH_DIGITS),
        }
    }

    fn read(comment: &str) -> Option<Self> {
        let (network, rest) = comment.split_once('-')?;
        let (interface, _) = rest.split_once(',')?;
        let hash = |text: &str| text.len() == HASH_DIGITS && text.bytes().all(|b| b.is_ascii_hexdigit());
        let both = hash(network) && hash(interface);
        both.then(|| Self { network: network.to_owned(), interface: interface.to_owned() })
    }

    pub(crate) fn owns(&self, rule: &Rule) -> bool {
        rule.comment.as_deref().and_then(Self::read).as_ref() == Some(self)
    }
}

/// Whether a rule belongs to an attachment of `network` that is not in `valid`.
pub(crate) fn is_stale<'a>(network: &'a str, valid: &ValidAttachments) -> impl Fn(&Rule) -> bool + use<'a> {
    let in_use: Vec<Owner> = valid.iter().map(|(id, ifname)| Owner::new(network, id, ifname)).collect();
    let network = sha512_hex(network, HASH_DIGITS);
    move |rule| {
        let owner = rule.comment.as_deref().and_then(Owner::read);
        owner.is_some_and(|owner| owner.network == network && !in_use.contains(&owner))
    }
}

fn comment(call: &Invocation) -> String {
    let Owner { network, interface } = Owner::of(call);
    let (name, ifname, id) = (&call.conf.name, &call.ifname, &call.container_id);
    let mut comment = format!("{network}-{interface}, net: {name}, if: {ifname}, id: {id}");
    // Interface names may contain almost any bytes: truncated between characters.
    let end = (0..=COMMENT_MAX.min(comment.len())).rev().find(|at| comment.is_char_boundary(*at));
    comment.truncate(end.unwrap_or(0));
    comment
}

/// Whether [`plan`] needs the rule.
pub(crate) fn concerns(call: &Invocation) -> impl Fn(&Rule) -> bool + use<> {
    let owner = Owner::of(call);
    move |rule| rule.chain == POSTROUTING || rule.chain == CHECKS && owner.owns(rule)
}

/// Adds to `batch` the rules that `found` lacks to masquerade `addresses` (with their networks'
/// prefix lengths), and removes this attachment's other rules.
pub(crate) fn plan(call: &Invocation, addresses: &[IpNetwork], found: &[Rule], batch: &mut Batch) {
    plan_base(found, batch);
    let comment = comment(call);
    let mut stale: Vec<&Rule> = found.iter().filter(|rule| rule.chain == CHECKS).collect();
    for address in addresses {
        let wanted = rule_of(address);
        match stale.iter().position(|rule| rule.does(&wanted)) {
            Some(at) => drop(stale.swap_remove(at)),
            None => drop(batch.append_rule(FAMILY, TABLE, CHECKS, &wanted, Some(&comment))),
        }
    }
    for rule in stale {
        batch.delete_rule(FAMILY, TABLE, CHECKS, rule.handle);
    }
}

/// The chains, and the three rules that lead to the per-address rules. Other programs' rules in the
/// base chain stay.
fn plan_base(found: &[Rule], batch: &mut Batch) {
    let wanted = base_rules();
    let ours: Vec<&Rule> = found
        .iter()
        .filter(|rule| rule.chain == POSTROUTING && wanted.iter().any(|body| rule.does(body)))
        .collect();
    if leads_to_checks(&ours, &wanted) {
        batch.expect_base(FAMILY, TABLE, POSTROUTING, &BASE);
        return;
    }
    batch
        .add_table(FAMILY, TABLE, Some(TABLE_COMMENT))
        .add_chain(FAMILY, TABLE, CHECKS, None, Some(CHECKS_COMMENT))
        .add_chain(FAMILY, TABLE, POSTROUTING, Some(&BASE), None);
    for rule in ours {
        batch.delete_rule(FAMILY, TABLE, POSTROUTING, rule.handle);
    }
    for body in &wanted {
        batch.append_rule(FAMILY, TABLE, POSTROUTING, body, None);
    }
}

fn leads_to_checks(ours: &[&Rule], wanted: &[Vec<Expression>]) -> bool {
    ours.len() >= wanted.len() && wanted.iter().zip(ours).all(|(body, rule)| rule.does(body))
}

/// Whether the rules masquerade packets from all `addresses`.
pub(crate) fn is_complete(addresses: &[IpNetwork], found: &[Rule]) -> bool {
    let base: Vec<&Rule> = found.iter().filter(|rule| rule.chain == POSTROUTING).collect();
    let wanted = base_rules();
    let base: Vec<&Rule> =
        base.into_iter().filter(|rule| wanted.iter().any(|body| rule.does(body))).collect();
    let has = |address: &IpNetwork| {
        let body = rule_of(address);
        found.iter().any(|rule| rule.chain == CHECKS && rule.does(&body))
    };
    leads_to_checks(&base, &wanted) && addresses.iter().all(has)
}

/// `ip daddr 224.0.0.0/4 return`, `ip6 daddr ff00::/8 return`, `goto masq_checks`.
fn base_rules() -> [Vec<Expression>; 3] {
    let multicast_v4 = IpAddr::V4(Ipv4Addr::new(224, 0, 0, 0));
    let multicast_v6 = IpAddr::V6(Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0));
    let body = || RuleBody::new(FAMILY);
    [
        body().daddr(Is::Equal, multicast_v4, 4).ret().build(),
        body().daddr(Is::Equal, multicast_v6, 8).ret().build(),
        body().goto(CHECKS).build(),
    ]
}

/// `ip saddr ADDRESS ip daddr != NETWORK masquerade`.
fn rule_of(address: &IpNetwork) -> Vec<Expression> {
    let whole = if address.is_ipv4() { 32 } else { 128 };
    RuleBody::new(FAMILY)
        .saddr(Is::Equal, address.ip(), whole)
        .daddr(Is::Not, address.network(), address.prefix())
        .masquerade()
        .build()
}

/// The address that the rule masquerades: among the values compared for equality, the only one of
/// this size.
pub(crate) fn source_of(rule: &Rule) -> Option<IpAddr> {
    rule.expressions.iter().find_map(|expression| match expression {
        Expression::Cmp { op: CmpOp::Eq, value, .. } => {
            let v4 = <[u8; 4]>::try_from(value.as_slice()).map(IpAddr::from);
            v4.or_else(|_| <[u8; 16]>::try_from(value.as_slice()).map(IpAddr::from)).ok()
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::keys::tests::call;

    #[test]
    fn a_comment_is_the_references() {
        let call = call("n", "cid1", "eth0", "{}");
        assert_eq!(comment(&call), "917148ec47923f2e-0b65a318f52e521b, net: n, if: eth0, id: cid1");
    }

    proptest! {
        #[test]
        fn a_comment_is_short_and_names_its_owner(
            network in "[a-z0-9][a-zA-Z0-9_.-]{0,80}",
            id in "[a-z0-9][a-zA-Z0-9_.-]{0,200}",
            ifname in "[^/:\\s\0]{1,5}",
        ) {
            let call = call(&network, &id, &ifname, "{}");
            let comment = comment(&call);
            prop_assert!(comment.len() <= COMMENT_MAX);
            prop_assert_eq!(Owner::read(&comment), Some(Owner::of(&call)));
        }

        #[test]
        fn foreign_comments_have_no_owner_or_any_but_do_not_stop_us(comment in ".*") {
            if let Some(owner) = Owner::read(&comment) {
                prop_assert_eq!(owner.network.len(), HASH_DIGITS);
            }
        }
    }
}
