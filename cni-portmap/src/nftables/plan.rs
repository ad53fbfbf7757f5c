//! From what is there and what is wanted to what has to be changed. No I/O.

use std::collections::BTreeSet;
use std::net::IpAddr;

use netfilter::nftables::{BaseChain, Batch, Expression, Rule, do_the_same};

use super::rules::{
    CONTAINER_CHAINS, Deed, HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, LOCALNET_GUARD, MASQUERADING, OUTPUT,
    Owner, PREROUTING, TABLE, TABLE_COMMENT, Wanted, all_rules, base, family_of, guard_rules, interface_in,
};
use crate::family::Family;

/// The tables' rules as far as they concern a call: all of the shared chains,
/// the container's own.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) rules: Vec<Rule>,
    /// A rule of any container proves that the chain is there.
    pub(super) has_masquerading: bool,
}

impl Found {
    /// Whether a rule that the kernel lists is to be remembered.
    pub(super) fn keep(&mut self, owner: &Owner, rule: &Rule) -> bool {
        self.has_masquerading |= rule.chain == MASQUERADING;
        !CONTAINER_CHAINS.contains(&rule.chain.as_str()) || owner.owns(rule) != Some(false)
    }

    pub(super) fn in_chain(&self, chain: &str) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.chain == chain)
    }

    /// What rules of this container do, its own and the reference's.
    pub(super) fn deeds(&self, owner: &Owner) -> Deeds<'_> {
        let mut deeds = Deeds::default();
        for rule in self.rules.iter().filter(|rule| owner.owns(rule) != Some(false)) {
            deeds.note(&rule.chain, Deed::of(rule), &rule.expressions);
        }
        deeds
    }

    /// Whether rules of the attachment carry its tag.
    pub(super) fn is_made_by_us(&self, owner: &Owner) -> bool {
        self.rules.iter().any(|rule| owner.owns(rule) == Some(true))
    }

    /// Own rules that are not wanted any more: those of an ADD that no DEL
    /// followed, with another address.
    pub(super) fn outdated(&self, owner: &Owner, wanted: &[Wanted]) -> impl Iterator<Item = &Rule> {
        let mut deeds = Deeds::default();
        for wanted in wanted {
            deeds.note(wanted.chain, Some(wanted.deed), &wanted.expressions);
        }
        let own = self.rules.iter().filter(|rule| owner.owns(rule) == Some(true));
        own.filter(move |rule| !deeds.has(&rule.chain, Deed::of(rule), &rule.expressions))
    }
}

/// What rules do, by their chain. Forwarded ports may be thousands, and are
/// looked for by what they mean: bytecode differs between versions of nft.
#[derive(Debug, Default)]
pub(super) struct Deeds<'a> {
    forwards: BTreeSet<(&'a str, Deed)>,
    others: Vec<(&'a str, &'a [Expression])>,
}

impl<'a> Deeds<'a> {
    fn note(&mut self, chain: &'a str, deed: Option<Deed>, expressions: &'a [Expression]) {
        match deed {
            Some(forward @ Deed::Forward { .. }) => drop(self.forwards.insert((chain, forward))),
            _ => self.others.push((chain, expressions)),
        }
    }

    fn has(&self, chain: &str, deed: Option<Deed>, expressions: &[Expression]) -> bool {
        match deed {
            Some(forward @ Deed::Forward { .. }) => self.forwards.contains(&(chain, forward)),
            _ => self.others.iter().any(|(of, body)| *of == chain && do_the_same(body, expressions)),
        }
    }

    /// Whether one of the rules does it.
    pub(super) fn include(&self, wanted: &Wanted) -> bool {
        self.has(wanted.chain, Some(wanted.deed), &wanted.expressions)
    }
}

/// What ADD wants of the chains that all containers share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared<'a> {
    /// Of `prerouting` and `output`.
    pub(super) hook_rules: &'a [Vec<Expression>],
    /// See [`guard_rules`].
    pub(super) guarded: bool,
}

/// Everything of one family that ADD wants and that is not there.
pub(super) fn add(
    batch: &mut Batch,
    family: Family,
    found: &Found,
    owner: &Owner,
    shared: Shared<'_>,
    wanted: &[Wanted],
) {
    let nf_family = family_of(family);
    for rule in found.outdated(owner, wanted) {
        batch.delete_rule(nf_family, TABLE, &rule.chain, rule.handle);
    }
    add_skeleton(batch, family, found, shared.hook_rules);
    if shared.guarded {
        add_guard(batch, family, found);
    }
    if wanted.iter().any(|wanted| wanted.chain == MASQUERADING) {
        ensure_base(batch, family, MASQUERADING, found.has_masquerading);
    }
    let there = found.deeds(owner);
    for wanted in wanted.iter().filter(|wanted| !there.include(wanted)) {
        let (chain, comment) = (wanted.chain, Some(owner.container_id.as_str()));
        batch.append_tagged_rule(nf_family, TABLE, chain, &wanted.expressions, comment, &owner.tag);
    }
}

/// What all containers share. Rules are replaced only where they differ: an
/// unneeded deletion would make the caller wait for the kernel.
fn add_skeleton(batch: &mut Batch, family: Family, found: &Found, hook_rules: &[Vec<Expression>]) {
    let nf_family = family_of(family);
    let jumps = all_rules();
    let jumps_missing: Vec<&Vec<Expression>> =
        jumps.iter().filter(|jump| !found.in_chain(HOSTPORTS_ALL).any(|rule| rule.does(jump))).collect();
    let hooks: Vec<&str> =
        [PREROUTING, OUTPUT].into_iter().filter(|chain| !found.is(chain, hook_rules)).collect();
    // Rules prove the chains that they are in and those that they lead to.
    let known = |chain: &str| found.in_chain(chain).next().is_some();
    if !jumps_missing.is_empty() || !hooks.iter().all(|chain| known(chain)) {
        batch.add_table(nf_family, TABLE, Some(TABLE_COMMENT));
        for chain in [HOSTPORTS, HOSTIP_HOSTPORTS, HOSTPORTS_ALL] {
            batch.add_chain(nf_family, TABLE, chain, None, None);
        }
    }
    for chain in [PREROUTING, OUTPUT] {
        ensure_base(batch, family, chain, known(chain));
    }
    for jump in jumps_missing {
        batch.append_rule(nf_family, TABLE, HOSTPORTS_ALL, jump, None);
    }
    for chain in hooks {
        if known(chain) {
            batch.flush_chain(nf_family, TABLE, chain);
        }
        for rule in hook_rules {
            batch.append_rule(nf_family, TABLE, chain, rule, None);
        }
    }
}

/// Behind what is in the chain: an administrator's exceptions stay before it.
fn add_guard(batch: &mut Batch, family: Family, found: &Found) {
    ensure_base(batch, family, LOCALNET_GUARD, found.in_chain(LOCALNET_GUARD).next().is_some());
    for (rule, _) in found.missing_guard() {
        batch.append_rule(family_of(family), TABLE, LOCALNET_GUARD, &rule, None);
    }
}

/// The rules in a chain do not tell that packets come by.
fn ensure_base(batch: &mut Batch, family: Family, chain: &str, known: bool) {
    let Some(base) = base(chain) else { return };
    let family = family_of(family);
    if known {
        batch.expect_base(family, TABLE, chain, &base);
    } else {
        batch.add_chain(family, TABLE, chain, Some(&base), None);
    }
}

impl Found {
    /// Whether the chain holds just these rules.
    fn is(&self, chain: &str, rules: &[Vec<Expression>]) -> bool {
        let mut there = self.in_chain(chain);
        rules.iter().all(|rule| there.next().is_some_and(|found| found.does(rule))) && there.next().is_none()
    }

    /// Rules of the guard, with their text.
    pub(super) fn missing_guard(&self) -> impl Iterator<Item = (Vec<Expression>, &'static str)> {
        guard_rules()
            .into_iter()
            .filter(|(rule, _)| !self.in_chain(LOCALNET_GUARD).any(|found| found.does(rule)))
    }
}

/// The base chains that `wanted` needs, and the guard's.
pub(super) fn base_chains(
    wanted: &[Wanted],
    guarded: bool,
) -> impl Iterator<Item = (&'static str, BaseChain)> {
    let forwards = !wanted.is_empty();
    let masquerades = wanted.iter().any(|wanted| wanted.chain == MASQUERADING);
    let needed =
        [(PREROUTING, forwards), (OUTPUT, forwards), (MASQUERADING, masquerades), (LOCALNET_GUARD, guarded)];
    needed.into_iter().filter_map(|(chain, needed)| base(chain).filter(|_| needed).map(|base| (chain, base)))
}

/// Whether DEL of `owner` takes `rule`. Rules of the reference do not tell
/// their network: where the attachment's addresses are known, they decide.
pub(super) fn is_removed(owner: &Owner, known_addresses: &[IpAddr], rule: &Rule) -> bool {
    let by_address = || {
        let deed = Deed::of(rule);
        known_addresses.is_empty() || deed.is_none_or(|deed| known_addresses.contains(&deed.container()))
    };
    CONTAINER_CHAINS.contains(&rule.chain.as_str()) && owner.owns(rule).unwrap_or_else(by_address)
}

/// Whether GC for `network` takes `rule`, where `is_valid` knows the
/// attachments in use. Rules of the reference stay: nothing tells their network.
pub(super) fn is_stale(network: &str, is_valid: impl Fn(&str, &str) -> bool, rule: &Rule) -> bool {
    let Some(container_id) = &rule.comment else { return false };
    let ifname = rule.tag.as_deref().and_then(|tag| interface_in(tag, network));
    CONTAINER_CHAINS.contains(&rule.chain.as_str())
        && ifname.is_some_and(|ifname| !is_valid(container_id, ifname))
}

impl Found {
    /// A chain from which packets do not get on to `hostports`, and where they
    /// should go.
    pub(super) fn broken_path(&self) -> Option<(&'static str, &'static str)> {
        let path = [(PREROUTING, HOSTPORTS_ALL), (OUTPUT, HOSTPORTS_ALL), (HOSTPORTS_ALL, HOSTPORTS)];
        path.into_iter()
            .find(|(chain, next)| !self.in_chain(chain).any(|rule| rule.target_chain() == Some(next)))
    }
}
