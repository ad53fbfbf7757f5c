//! Rules of the iptables backend in nf_tables (written by the program `iptables-nft`): found and
//! removed by netlink, without the program.

use netfilter::nftables::{Batch, Family, NfTables, Rule};

use super::rules::{
    DNAT_CHAIN, GUARD_TABLE, Gist, OLD_SNAT_CHAIN, Owner, TABLE, guard_rules, owner_of_comment,
};
use crate::nftables::Effect;

const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];

/// Adds to `batch` the removal of the container's chains and of the rules that lead to them.
/// Returns the effects of the rules.
pub(crate) fn remove(
    kernel: &mut NfTables,
    batch: &mut Batch,
    owner: &Owner<'_>,
) -> Result<Vec<Effect>, linux::Error> {
    let mut effects = Vec::new();
    let chains = [(owner.chain(), DNAT_CHAIN), (owner.old_snat_chain(), OLD_SNAT_CHAIN)];
    for family in FAMILIES {
        for (chain, entrance) in &chains {
            effects.extend(remove_chain(kernel, batch, family, chain, entrance)?);
        }
    }
    Ok(effects)
}

/// [`remove`] for all containers of `network` that are not in use.
pub(crate) fn remove_stale(
    kernel: &mut NfTables,
    batch: &mut Batch,
    network: &str,
    is_valid: impl Fn(&str) -> bool,
) -> Result<Vec<Effect>, linux::Error> {
    let mut effects = Vec::new();
    for family in FAMILIES {
        let mut chains = Vec::new();
        for rule in kernel.rules_where(family, TABLE, Some(DNAT_CHAIN), |_| true)? {
            if let Some(chain) = stale_chain(&rule, network, &is_valid).filter(|c| !chains.contains(c)) {
                effects.extend(remove_chain(kernel, batch, family, &chain, DNAT_CHAIN)?);
                chains.push(chain);
            }
        }
    }
    Ok(effects)
}

fn stale_chain(rule: &Rule, network: &str, is_valid: impl Fn(&str) -> bool) -> Option<String> {
    let owner = owner_of_comment(rule.comment.as_deref()?)?;
    owner.is_stale(network, is_valid, rule.target_chain()?).then(|| owner.chain())
}

fn remove_chain(
    kernel: &mut NfTables,
    batch: &mut Batch,
    family: Family,
    chain: &str,
    entrance: &str,
) -> Result<Vec<Effect>, linux::Error> {
    if kernel.chain(family, TABLE, chain)?.is_none() {
        return Ok(Vec::new());
    }
    let leads_there = |rule: &Rule| rule.target_chain() == Some(chain);
    for rule in kernel.rules_where(family, TABLE, Some(entrance), leads_there)? {
        batch.delete_rule(family, TABLE, entrance, rule.handle);
    }
    let rules = kernel.rules(family, TABLE, Some(chain))?;
    batch.flush_chain(family, TABLE, chain).delete_chain(family, TABLE, chain);
    Ok(rules.iter().filter_map(Effect::of).collect())
}

/// Whether the guard's rules exist; each has its own comment.
pub(crate) fn has_guard() -> Result<bool, linux::Error> {
    let mut kernel = NfTables::open()?;
    for rule in guard_rules() {
        let comment = Gist::of(&rule.words).comment;
        let same = |found: &Rule| found.comment == comment;
        if kernel.rules_where(Family::Ipv4, GUARD_TABLE, Some(&rule.chain), same)?.is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the container has a chain, in either family.
pub(crate) fn has_chain(owner: &Owner<'_>) -> Result<bool, linux::Error> {
    let mut kernel = NfTables::open()?;
    for family in FAMILIES {
        if kernel.chain(family, TABLE, &owner.chain())?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}
