//! Addresses from ranges in the configuration; leases as files, one per
//! address, in the reference host-local's format, so that both can share a
//! directory.
//!
//! `config` and `range` decide, `store` touches the disk, this file is the verbs.

mod allocate;
mod config;
mod error;
mod range;
mod resolv_conf;
mod store;

use cni_plugin::{CniError, CniResult, Invocation};

pub use allocate::allocate;
pub use config::Config;
pub use error::{Error, RangeError};
pub use range::{Range, RangeSet, RawRange};
pub use store::{LeaseStore, LockedStore, Owner};

/// ADD: one address out of each range set.
pub fn add(call: &Invocation) -> Result<CniResult, CniError> {
    let config = Config::read(&call.conf, &call.args)?;
    let dns = resolv_conf::read(config.resolv_conf.as_deref())?;
    let store = LeaseStore::open(&config.data_dir, &call.conf.name)?;
    let ips = allocate(&store.lock()?, &config.ranges, &config.requested, &owner(call))?;
    Ok(CniResult { ips, routes: config.routes, dns, ..CniResult::default() })
}

/// DEL: releases what the attachment holds; nothing held is a success.
pub fn del(call: &Invocation) -> Result<(), CniError> {
    let config = Config::read(&call.conf, &call.args)?;
    let store = LeaseStore::open(&config.data_dir, &call.conf.name)?;
    Ok(store.lock()?.release(&owner(call))?)
}

/// CHECK: the attachment holds an address, whichever.
pub fn check(call: &Invocation) -> Result<(), CniError> {
    let config = Config::read(&call.conf, &call.args)?;
    let store = LeaseStore::open(&config.data_dir, &call.conf.name)?;
    if store.lock()?.held_by(&owner(call))?.is_empty() {
        return Err(Error::NothingHeld { container_id: call.container_id.clone() }.into());
    }
    Ok(())
}

fn owner(call: &Invocation) -> Owner {
    Owner { container_id: call.container_id.clone(), ifname: call.ifname.clone() }
}
