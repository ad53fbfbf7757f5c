//! The nftables backend: reads and commits by netlink, in one transaction for both families. It
//! runs the host's `nft` only for conditions that it cannot parse.

mod plan;
mod rules;
mod script;

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnetwork::IpNetwork;
use netfilter::nftables::{BaseChain, Batch, NfTables, Unreached};

use crate::conditions;
use crate::config::Config;
use crate::error::Error;
use crate::family::Family;
use plan::{Found, Shared};
use rules::{HOSTPORTS, LOCALNET_GUARD, Wanted, container_rules, family_of, hook_rules};

pub(crate) use rules::{Effect, Owner, TABLE};

/// The rules of one family for ADD.
struct Part {
    family: Family,
    wanted: Vec<Wanted>,
    /// `None`: only nft understands the conditions.
    hook_rules: Option<Vec<Vec<netfilter::nftables::Expression>>>,
    guarded: bool,
}

impl Part {
    fn new(config: &Config, family: Family, container: IpNetwork) -> Result<Self, Error> {
        let parsed = conditions::parse(config.conditions(family), family);
        Ok(Self {
            family,
            wanted: container_rules(config, family, container)?,
            hook_rules: parsed.map(|conditions| hook_rules(&conditions, family)),
            guarded: config.opens_localnet(family),
        })
    }
}

/// Adds all rules of the attachment. After a failure nothing has changed.
pub(crate) fn add(config: &Config, owner: &Owner) -> Result<(), Error> {
    let parts = config.container.each().map(|(family, container)| Part::new(config, family, container));
    let parts = parts.collect::<Result<Vec<_>, _>>()?;
    let failed = |source| Error::SetUpNftables { source };
    let mut kernel = NfTables::open_if_available().map_err(failed)?.ok_or(Error::NoNftables)?;
    if parts.iter().any(|part| part.hook_rules.is_none()) {
        return script::add(&mut kernel, config, owner, &parts);
    }
    kernel
        .update(|kernel| {
            let mut batch = Batch::new();
            for part in &parts {
                let found = find(kernel, part.family, owner)?;
                let hook_rules = part.hook_rules.as_deref().unwrap_or_default();
                let shared = Shared { hook_rules, guarded: part.guarded };
                plan::add(&mut batch, part.family, &found, owner, shared, &part.wanted);
            }
            Ok((batch, ()))
        })
        .map_err(failed)
}

fn find(kernel: &mut NfTables, family: Family, owner: &Owner) -> Result<Found, linux::Error> {
    let mut found = Found::default();
    let rules = kernel.rules_where(family_of(family), TABLE, None, |rule| found.keep(owner, rule))?;
    Ok(Found { rules, ..found })
}

/// Adds to `batch` the removal of the attachment's rules. Returns their effects.
pub(crate) fn remove(
    kernel: &mut NfTables,
    batch: &mut Batch,
    owner: &Owner,
    known_addresses: &[IpAddr],
) -> Result<Vec<Effect>, linux::Error> {
    remove_where(kernel, batch, |rule| plan::is_removed(owner, known_addresses, rule))
}

/// [`remove`] for all attachments of a network that are not valid.
pub(crate) fn remove_stale(
    kernel: &mut NfTables,
    batch: &mut Batch,
    network: &str,
    is_valid: impl Fn(&str, &str) -> bool,
) -> Result<Vec<Effect>, linux::Error> {
    remove_where(kernel, batch, |rule| plan::is_stale(network, &is_valid, rule))
}

fn remove_where(
    kernel: &mut NfTables,
    batch: &mut Batch,
    condemned: impl Fn(&netfilter::nftables::Rule) -> bool,
) -> Result<Vec<Effect>, linux::Error> {
    let mut effects = Vec::new();
    for family in Family::BOTH.map(family_of) {
        for rule in kernel.rules_where(family, TABLE, None, &condemned)? {
            batch.delete_rule(family, TABLE, &rule.chain, rule.handle);
            effects.extend(Effect::of(&rule));
        }
    }
    Ok(effects)
}

/// The first rule that CHECK misses; `None` if all exist. The conditions that lead to the rules are
/// not checked: the last ADD of any network sets them.
pub(crate) fn missing(config: &Config, owner: &Owner) -> Result<Option<Error>, Error> {
    let failed = |source| Error::ListNftables { table: TABLE, source };
    let mut kernel = NfTables::open().map_err(failed)?;
    for (family, container) in config.container.each() {
        let wanted = container_rules(config, family, container)?;
        let guarded = config.opens_localnet(family);
        let unreached = unreached(&mut kernel, family, plan::base_chains(&wanted, guarded));
        if let Some(unreached) = unreached.map_err(failed)? {
            return Ok(Some(Error::Unreached(unreached)));
        }
        let found = find(&mut kernel, family, owner).map_err(failed)?;
        // The reference's rules for the same attachment are accepted too.
        let there = found.effects(owner);
        let missing = wanted.iter().find(|wanted| wanted.common && there.chain_with(wanted).is_none());
        if let Some(wanted) = missing {
            return Ok(Some(Error::MissingRules { chain: wanted.chain, missing: wanted.text.clone() }));
        }
        let forwards = wanted.iter().filter(|wanted| wanted.chain == HOSTPORTS);
        let chains: BTreeSet<_> = forwards.filter_map(|wanted| there.chain_with(wanted)).collect();
        if let Some((chain, missing)) = chains.into_iter().find_map(|chain| found.broken_path(chain)) {
            return Ok(Some(Error::MissingRules { chain, missing: missing.to_owned() }));
        }
        let missing_guard = found.missing_guard().next().filter(|_| guarded);
        if let Some((_, text)) = missing_guard {
            // The reference makes no guard, so its attachments may lack one.
            let chain = kernel.chain(family_of(family), TABLE, LOCALNET_GUARD).map_err(failed)?;
            if chain.is_some() || found.is_made_by_us(owner) {
                return Ok(Some(Error::MissingRules { chain: LOCALNET_GUARD, missing: text.to_owned() }));
            }
        }
    }
    Ok(None)
}

/// The first chain on the path of the wanted rules that packets do not reach.
fn unreached(
    kernel: &mut NfTables,
    family: Family,
    base_chains: impl Iterator<Item = (&'static str, BaseChain)>,
) -> Result<Option<Unreached>, linux::Error> {
    for (chain, base) in base_chains {
        if let Some(unreached) = kernel.unreached(family_of(family), TABLE, chain, &base)? {
            return Ok(Some(unreached));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
