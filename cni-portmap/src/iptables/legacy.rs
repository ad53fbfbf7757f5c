//! Rules of the iptables backend in the tables of iptables-legacy, which only its own program can
//! read, not netlink.

use cni_plugin::warn;
use netfilter::iptables::{IpTables, IpVersion, legacy_tables};

use super::plan::{self, Listing};
use super::rules::{Owner, TABLE};
use crate::NAME;
use crate::error::Error;
use crate::family::Family;

/// Removes the container's rules.
pub(crate) fn remove(owner: &Owner<'_>) -> Result<(), Error> {
    change(|listing| plan::remove(owner, listing))
}

/// [`remove`] for all containers of `network` that are not in use.
pub(crate) fn remove_stale(network: &str, is_valid: impl Fn(&str) -> bool) -> Result<(), Error> {
    change(|listing| plan::remove_stale(network, &is_valid, listing))
}

/// Whether either family has such tables.
pub(crate) fn is_in_use() -> bool {
    [IpVersion::V4, IpVersion::V6].into_iter().any(has_table)
}

fn has_table(version: IpVersion) -> bool {
    legacy_tables(version).unwrap_or_default().iter().any(|table| table == TABLE)
}

/// Runs the program only if this namespace has such tables already, since running it would create
/// them.
fn change(plan: impl Fn(&Listing) -> Vec<String>) -> Result<(), Error> {
    let both = [(Family::V4, IpVersion::V4), (Family::V6, IpVersion::V6)];
    let changed = both.into_iter().map(|(family, version)| change_one(&plan, family, version));
    Error::all(changed.filter_map(Result::err).collect())
}

fn change_one(
    plan: impl Fn(&Listing) -> Vec<String>,
    family: Family,
    version: IpVersion,
) -> Result<(), Error> {
    if !has_table(version) {
        return Ok(());
    }
    let failed = |source| Error::TearDownIptables { family, source };
    let iptables = match IpTables::find_legacy(version) {
        Err(why @ netfilter::iptables::Error::NotInstalled { .. }) => {
            warn(NAME, format_args!("rules in legacy tables may be left: {why}"));
            return Ok(());
        }
        found => found.map_err(failed)?,
    };
    let listing = Listing::read(&iptables.rules(TABLE).map_err(failed)?);
    iptables.apply(TABLE, &plan(&listing)).map_err(failed)
}
