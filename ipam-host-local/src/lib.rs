//! Allocates addresses from configured ranges. Leases are files, one for each address, in the
//! format of the reference host-local, so that both can share a directory.
//!
//! `config`, `range`, `lease` and `index::format` decide; `files`, `index` and `store` access the
//! disk; this file has the verbs.

mod allocate;
mod config;
mod error;
mod files;
mod host;
mod index;
mod lease;
mod range;
mod reclaim;
mod resolv_conf;
mod store;

use std::net::IpAddr;

use cni_plugin::{CniError, CniResult, Invocation, ValidAttachments};

pub use allocate::allocate;
pub use config::{Config, KEYS, routes};
pub use error::{Error, RangeError};
pub use lease::Owner;
pub use range::{Range, RangeSet, RawRange, Segment};
pub use store::{Held, LeaseStore, LockedStore};

use lease::Holder;

/// ADD: one address of each range set.
pub fn add(call: &Invocation) -> Result<CniResult, CniError> {
    let config = Config::read(&call.conf, &call.args)?;
    let routes = config::routes(&call.conf)?;
    let dns = resolv_conf::read(config.resolv_conf.as_deref())?;
    let store = LeaseStore::create(&config.data_dir, &call.conf.name)?;
    let ips = allocate(&mut store.lock()?, &config.ranges, &config.requested, &owner(call))?;
    Ok(CniResult { ips, routes, dns, ..CniResult::default() })
}

/// DEL: releases the attachment's leases; none is a success.
pub fn del(call: &Invocation) -> Result<(), CniError> {
    let config = Config::read(&call.conf, &call.args)?;
    let Some(store) = LeaseStore::find(&config.data_dir, &call.conf.name)? else { return Ok(()) };
    let mut store = store.lock()?;
    // The reference goes over the leases once for each range set. The second time, only leases of
    // the oldest format are left.
    let every_format = config.ranges.len() > 1;
    let released = store.release(&owner(call), every_format, &addresses_before(call));
    store.finish();
    Ok(released.map(drop)?)
}

/// CHECK: the attachment must hold an address, and all of its addresses in `prevResult` that are in
/// these ranges.
pub fn check(call: &Invocation) -> Result<(), CniError> {
    let config = Config::read(&call.conf, &call.args)?;
    let nothing = || CniError::from(Error::NothingHeld { container_id: call.container_id.clone() });
    let store = LeaseStore::find(&config.data_dir, &call.conf.name)?.ok_or_else(nothing)?;
    let mut store = store.lock()?;
    let held = store.held_by(&owner(call))?;
    store.finish();
    if held.is_empty() {
        return Err(nothing());
    }
    let of_ours = |ip: &IpAddr| config.ranges.iter().any(|set| set.contains(*ip));
    match addresses_before(call).into_iter().filter(of_ours).find(|ip| !held.contains(*ip)) {
        None => Ok(()),
        Some(ip) => Err(nothing().with_details(format_args!("prevResult has {ip}, which it does not hold"))),
    }
}

/// STATUS: whether ADD would find an address in every range set that is known.
pub fn status(call: &Invocation) -> Result<(), CniError> {
    let config = Config::read_for_status(&call.conf, &call.args)?;
    let Some(store) = LeaseStore::find(&config.data_dir, &call.conf.name)? else { return Ok(()) };
    for (index, set) in config.ranges.iter().enumerate() {
        if !self::store::has_room(&store, &set.round(store.place(index).last()))? {
            return Err(Error::NoRoom { set: set.clone() }.into());
        }
    }
    Ok(())
}

/// GC: removes the network's leases of attachments that are not in the list.
pub fn gc(call: &Invocation) -> Result<(), CniError> {
    let data_dir = config::data_dir(&call.conf)?;
    let valid = ValidAttachments::read(&call.conf)?;
    let Some(store) = LeaseStore::find(&data_dir, &call.conf.name)? else { return Ok(()) };
    let mut store = store.lock()?;
    let removed = store.remove_stale(|holder| match holder {
        Holder::Attachment(owner) => !valid.contains(&owner.container_id, &owner.ifname),
        Holder::Container(id) => !valid.contains_container(id),
        Holder::Empty | Holder::Other => false,
    });
    store.finish();
    Ok(removed?)
}

fn owner(call: &Invocation) -> Owner {
    Owner { container_id: call.container_id.clone(), ifname: call.ifname.clone() }
}

/// The addresses in `prevResult`, if it can be parsed: the leases are authoritative.
fn addresses_before(call: &Invocation) -> Vec<IpAddr> {
    let result = call.conf.prev_result().ok().flatten().unwrap_or_default();
    result.ips.iter().map(|ip| ip.address.ip()).collect()
}
