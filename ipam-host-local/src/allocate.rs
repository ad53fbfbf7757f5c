//! One address out of each range set, or none at all.

use std::net::IpAddr;

use cni_plugin::IpConfig;
use ipnetwork::IpNetwork;

use crate::{Error, LockedStore, Owner, Range, RangeSet};

/// Reserves for `owner` one address of each of `sets`, the `requested` ones
/// where they fit. A failure gives back what this call had reserved, and only
/// that.
pub fn allocate(
    store: &LockedStore<'_>,
    sets: &[RangeSet],
    requested: &[IpAddr],
    owner: &Owner,
) -> Result<Vec<IpConfig>, Error> {
    let mut reserved = Vec::new();
    try_allocate(store, sets, requested, owner, &mut reserved).map_err(|cause| {
        let rollback: Vec<Error> =
            reserved.iter().rev().filter_map(|ip: &IpConfig| store.remove(ip.address.ip()).err()).collect();
        if rollback.is_empty() { cause } else { Error::Rollback { cause: Box::new(cause), rollback } }
    })?;
    Ok(reserved)
}

fn try_allocate(
    store: &LockedStore<'_>,
    sets: &[RangeSet],
    requested: &[IpAddr],
    owner: &Owner,
    reserved: &mut Vec<IpConfig>,
) -> Result<(), Error> {
    let mut requested = requested.to_vec();
    for (index, set) in sets.iter().enumerate() {
        let wanted = requested.iter().position(|ip| set.contains(*ip)).map(|at| requested.remove(at));
        let (ip, range) = match wanted {
            Some(ip) => reserve_requested(store, set, ip, index, owner),
            None => reserve_next(store, set, index, owner),
        }
        .map_err(|cause| Error::Allocate { index, cause: Box::new(cause) })?;
        let address = IpNetwork::new(ip, range.subnet.prefix()).expect("an address of the subnet's family");
        reserved.push(IpConfig { interface: None, address, gateway: Some(range.gateway) });
    }
    if requested.is_empty() { Ok(()) } else { Err(Error::RequestsLeft { ips: requested }) }
}

fn reserve_requested<'a>(
    store: &LockedStore<'_>,
    set: &'a RangeSet,
    ip: IpAddr,
    index: usize,
    owner: &Owner,
) -> Result<(IpAddr, &'a Range), Error> {
    let range = set.range_of(ip).expect("requested addresses are matched to the set that contains them");
    if ip == range.gateway {
        return Err(Error::RequestedGateway { ip });
    }
    match store.reserve_first([(ip, range)].into_iter(), index, owner)? {
        Some(reserved) => Ok(reserved),
        None => Err(Error::RequestedTaken { ip, set: set.clone() }),
    }
}

fn reserve_next<'a>(
    store: &LockedStore<'_>,
    set: &'a RangeSet,
    index: usize,
    owner: &Owner,
) -> Result<(IpAddr, &'a Range), Error> {
    if let Some(ip) = store.held_by(owner)?.into_iter().find(|ip| set.contains(*ip)) {
        return Err(Error::Duplicate { ip, container_id: owner.container_id.clone() });
    }
    let candidates = set.candidates(store.last_reserved(index));
    store.reserve_first(candidates, index, owner)?.ok_or_else(|| Error::Exhausted { set: set.clone() })
}
