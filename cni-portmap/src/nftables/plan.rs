//! Plans changes from the existing and the wanted rules. No I/O.

use std::collections::BTreeMap;
use std::net::IpAddr;

use netfilter::nftables::{BaseChain, Batch, Expression, Rule, do_the_same};

use super::rules::{
    CONTAINER_CHAINS, Effect, HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, LOCALNET_GUARD, MASQUERADING,
    OUTPUT, Owner, PREROUTING, TABLE, TABLE_COMMENT, Wanted, all_rules, base, family_of, guard_rules,
    interface_in,
};
use crate::family::Family;

/// The rules that a call needs: all in the shared chains, and the container's own.
#[derive(Clone, Debug, Default)]
pub(super) struct Found {
    pub(super) rules: Vec<Rule>,
    /// A rule of any container shows that the chain exists.
    pub(super) has_masquerading: bool,
}

impl Found {
    /// Whether to keep a rule that the kernel lists.
    pub(super) fn keep(&mut self, owner: &Owner, rule: &Rule) -> bool {
        self.has_masquerading |= rule.chain == MASQUERADING;
        !CONTAINER_CHAINS.contains(&rule.chain.as_str()) || owner.owns(rule) != Some(false)
    }

    pub(super) fn in_chain(&self, chain: &str) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.chain == chain)
    }

    /// The effects of this container's rules, ours and the reference's.
    pub(super) fn effects(&self, owner: &Owner) -> Effects<'_> {
        let mut effects = Effects::default();
        for rule in self.rules.iter().filter(|rule| owner.owns(rule) != Some(false)) {
            effects.note(&rule.chain, Effect::of(rule), &rule.expressions);
        }
        effects
    }

    /// Whether the attachment has rules with its tag.
    pub(super) fn is_made_by_us(&self, owner: &Owner) -> bool {
        self.rules.iter().any(|rule| owner.owns(rule) == Some(true))
    }

    /// The attachment's rules that are no longer wanted: from an earlier ADD without DEL, with
    /// another address.
    pub(super) fn outdated(&self, owner: &Owner, wanted: &[Wanted]) -> impl Iterator<Item = &Rule> {
        let mut effects = Effects::default();
        for wanted in wanted {
            effects.note(wanted.chain, Some(wanted.effect), &wanted.expressions);
        }
        let own = self.rules.iter().filter(|rule| owner.owns(rule) == Some(true));
        own.filter(move |rule| !effects.has(&rule.chain, Effect::of(rule), &rule.expressions))
    }
}

/// The rules of chains, by chain and effect. There may be thousands, so they are looked up in a map.
/// Forwards are compared by effect alone, since bytecode differs between versions of nft.
#[derive(Debug, Default)]
pub(super) struct Effects<'a> {
    bodies: BTreeMap<(&'a str, Option<Effect>), Vec<&'a [Expression]>>,
}

impl<'a> Effects<'a> {
    fn note(&mut self, chain: &'a str, effect: Option<Effect>, expressions: &'a [Expression]) {
        self.bodies.entry((chain, effect)).or_default().push(expressions);
    }

    fn has(&self, chain: &str, effect: Option<Effect>, expressions: &[Expression]) -> bool {
        let Some(bodies) = self.bodies.get(&(chain, effect)) else { return false };
        matches!(effect, Some(Effect::Forward { .. }))
            || bodies.iter().any(|body| do_the_same(body, expressions))
    }

    /// Whether one of the rules has this effect.
    pub(super) fn include(&self, wanted: &Wanted) -> bool {
        self.has(wanted.chain, Some(wanted.effect), &wanted.expressions)
    }

    /// The chain with a rule of this effect: its own, or where old versions of the reference put it.
    pub(super) fn chain_with(&self, wanted: &Wanted) -> Option<&'static str> {
        let chains: &[&'static str] =
            if wanted.chain == HOSTPORTS { &[HOSTPORTS, HOSTIP_HOSTPORTS] } else { &[wanted.chain] };
        let has = |chain: &&&'static str| self.has(chain, Some(wanted.effect), &wanted.expressions);
        chains.iter().find(has).copied()
    }
}

/// The wanted content of the shared chains.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shared<'a> {
    /// The rules of `prerouting` and `output`.
    pub(super) hook_rules: &'a [Vec<Expression>],
    /// See [`guard_rules`].
    pub(super) guarded: bool,
}

/// Adds the missing rules of one family, and deletes outdated ones.
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
    let there = found.effects(owner);
    for wanted in wanted.iter().filter(|wanted| !there.include(wanted)) {
        let (chain, comment) = (wanted.chain, Some(owner.container_id.as_str()));
        batch.append_tagged_rule(nf_family, TABLE, chain, &wanted.expressions, comment, &owner.tag);
    }
}

/// Adds the shared chains and rules. Replaces rules only if they differ: after a deletion, the
/// caller waits for the kernel.
fn add_skeleton(batch: &mut Batch, family: Family, found: &Found, hook_rules: &[Vec<Expression>]) {
    let nf_family = family_of(family);
    let jumps = all_rules();
    let jumps_missing: Vec<&Vec<Expression>> =
        jumps.iter().filter(|jump| !found.in_chain(HOSTPORTS_ALL).any(|rule| rule.does(jump))).collect();
    let hooks: Vec<&str> =
        [PREROUTING, OUTPUT].into_iter().filter(|chain| !found.is(chain, hook_rules)).collect();
    // A rule shows that its own chain and its target chain exist.
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

/// Appended to the chain, after an administrator's exceptions.
fn add_guard(batch: &mut Batch, family: Family, found: &Found) {
    ensure_base(batch, family, LOCALNET_GUARD, found.in_chain(LOCALNET_GUARD).next().is_some());
    for (rule, _) in found.missing_guard() {
        batch.append_rule(family_of(family), TABLE, LOCALNET_GUARD, &rule, None);
    }
}

/// Rules in a chain do not show that packets reach it.
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
    /// Whether the chain has exactly these rules.
    fn is(&self, chain: &str, rules: &[Vec<Expression>]) -> bool {
        let mut there = self.in_chain(chain);
        rules.iter().all(|rule| there.next().is_some_and(|found| found.does(rule))) && there.next().is_none()
    }

    /// The missing rules of the guard, with their text.
    pub(super) fn missing_guard(&self) -> impl Iterator<Item = (Vec<Expression>, &'static str)> {
        guard_rules()
            .into_iter()
            .filter(|(rule, _)| !self.in_chain(LOCALNET_GUARD).any(|found| found.does(rule)))
    }
}

/// The base chains that `wanted` and the guard need.
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

/// Whether DEL of `owner` removes `rule`. The reference's rules do not contain their network, so
/// the attachment's addresses decide, if they are known.
pub(super) fn is_removed(owner: &Owner, known_addresses: &[IpAddr], rule: &Rule) -> bool {
    let by_address = || {
        let effect = Effect::of(rule);
        known_addresses.is_empty()
            || effect.is_none_or(|effect| known_addresses.contains(&effect.container()))
    };
    CONTAINER_CHAINS.contains(&rule.chain.as_str()) && owner.owns(rule).unwrap_or_else(by_address)
}

/// Whether GC for `network` removes `rule`, given the attachments in use. The reference's rules
/// stay, since they do not contain their network.
pub(super) fn is_stale(network: &str, is_valid: impl Fn(&str, &str) -> bool, rule: &Rule) -> bool {
    let Some(container_id) = &rule.comment else { return false };
    let ifname = rule.tag.as_deref().and_then(|tag| interface_in(tag, network));
    CONTAINER_CHAINS.contains(&rule.chain.as_str())
        && ifname.is_some_and(|ifname| !is_valid(container_id, ifname))
}

impl Found {
    /// The chain from which packets do not reach `last`, and the chain that it should lead to. In old
    /// versions of the reference, `prerouting` and `output` lead to `last` directly.
    pub(super) fn broken_path(&self, last: &'static str) -> Option<(&'static str, &'static str)> {
        let leads = |from: &str, to: &str| self.in_chain(from).any(|rule| rule.target_chain() == Some(to));
        let indirect = [PREROUTING, OUTPUT].into_iter().filter(|hook| !leads(hook, last)).collect::<Vec<_>>();
        let path = indirect.iter().map(|hook| (*hook, HOSTPORTS_ALL));
        let path = path.chain((!indirect.is_empty()).then_some((HOSTPORTS_ALL, last)));
        path.into_iter().find(|(chain, next)| !leads(chain, next))
    }
}
