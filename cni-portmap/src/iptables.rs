//! The iptables backend: the host's own program reads the rules and applies the whole change, once
//! for each IP version.

pub(crate) mod legacy;
mod plan;
pub(crate) mod rules;
pub(crate) mod visible;

use netfilter::iptables::{IpTables, IpVersion, Variant, legacy_tables};
use netfilter::nftables::NamespaceLock;

use crate::config::Config;
use crate::error::Error;
use crate::family::Family;
use plan::{Change, Listing, Missing};
use rules::{GUARD_TABLE, Owner, TABLE, Wanted};

/// Adds all rules of the attachment. After a failure nothing has changed, except that the guard may
/// exist.
pub(crate) fn add(config: &Config, owner: &Owner<'_>) -> Result<(), Error> {
    let mut parts = Vec::new();
    for (family, container) in config.container.each() {
        let wanted = Wanted::new(config, owner, family, container)?;
        let iptables = IpTables::find(version(family)).map_err(|source| Error::OpenIptables { source })?;
        parts.push((iptables, wanted));
    }
    // Two concurrent calls would both add a missing shared rule.
    let _lock = NamespaceLock::take();
    let mut done: Vec<(&IpTables, Change)> = Vec::new();
    for (iptables, wanted) in &parts {
        let added = list(iptables, TABLE).and_then(|listing| {
            let change = plan::add(wanted, &listing);
            let unconfirmed = if wanted.guarded { unconfirmed_guard(iptables)? } else { None };
            let guard = unconfirmed.as_ref().map(plan::add_guard).unwrap_or_default();
            iptables.apply_each(&[(GUARD_TABLE, &guard), (TABLE, &change.commands)])?;
            Ok(change)
        });
        match added {
            Ok(change) => done.push((iptables, change)),
            Err(source) => return Err(roll_back(&done, Error::SetUpIptables { source })),
        }
    }
    Ok(())
}

fn roll_back(done: &[(&IpTables, Change)], cause: Error) -> Error {
    let undone = done.iter().rev().map(|(iptables, change)| {
        iptables.apply(TABLE, &change.undo).map_err(|source| Error::SetUpIptables { source })
    });
    match Error::all(undone.filter_map(Result::err).collect()) {
        Ok(()) => cause,
        Err(rollback) => Error::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) },
    }
}

pub(crate) fn check(config: &Config, owner: &Owner<'_>) -> Result<(), Error> {
    for (family, container) in config.container.each() {
        let wanted = Wanted::new(config, owner, family, container)?;
        let failed = |source| Error::CheckIptables { family, source };
        let iptables = IpTables::find(version(family)).map_err(failed)?;
        let listing = list(&iptables, TABLE).map_err(failed)?;
        match plan::missing(&wanted, &listing) {
            None => {}
            Some(Missing::Chain(chain)) => return Err(Error::MissingChain { family, chain }),
            Some(Missing::Rule { chain, rule }) => {
                return Err(Error::MissingRule { family, table: TABLE, chain, rule });
            }
        }
        let unconfirmed = if wanted.guarded { unconfirmed_guard(&iptables).map_err(failed)? } else { None };
        if let Some((chain, rule)) = unconfirmed.as_ref().and_then(plan::missing_guard) {
            return Err(Error::MissingRule { family, table: GUARD_TABLE, chain, rule });
        }
    }
    Ok(())
}

/// The guard's table, unless nf_tables shows a complete guard. On a node with mapped ports it
/// usually does, and no program is run.
fn unconfirmed_guard(iptables: &IpTables) -> Result<Option<Listing>, netfilter::iptables::Error> {
    // If nf_tables cannot be read, the program still can read the table.
    let complete = iptables.variant() == Variant::NfTables && visible::has_guard().unwrap_or_default();
    if complete { Ok(None) } else { list(iptables, GUARD_TABLE).map(Some) }
}

/// Runs one process, which reads no table. A host may lack IPv6.
pub(crate) fn status() -> Result<(), Error> {
    let found = IpTables::find(IpVersion::V4).or_else(|_| IpTables::find(IpVersion::V6));
    let missing = |e| Error::NoBackend { details: cni_plugin::CniError::chain(&e).msg };
    found.map(drop).map_err(missing)
}

fn list(iptables: &IpTables, table: &str) -> Result<Listing, netfilter::iptables::Error> {
    // Reading with the legacy program would create the table.
    let absent = iptables.variant() == Variant::Legacy
        && legacy_tables(iptables.version()).is_ok_and(|tables| !tables.iter().any(|there| there == table));
    if absent {
        return Ok(Listing::default());
    }
    Ok(Listing::read(&iptables.rules(table)?))
}

fn version(family: Family) -> IpVersion {
    match family {
        Family::V4 => IpVersion::V4,
        Family::V6 => IpVersion::V6,
    }
}

#[cfg(test)]
mod tests;
