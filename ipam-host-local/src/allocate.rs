//! Allocates one address of each range set, or none.

use std::net::IpAddr;

use cni_plugin::IpConfig;
use ipnetwork::IpNetwork;

use crate::files::Place;
use crate::range::Segment;
use crate::{Error, LockedStore, Owner, Range, RangeSet};

/// Reserves one address of each of `sets` for `owner`, and the `requested` ones where they fit. A
/// failure releases the addresses that this call has reserved, and no others.
pub fn allocate(
    store: &mut LockedStore<'_>,
    sets: &[RangeSet],
    requested: &[IpAddr],
    owner: &Owner,
) -> Result<Vec<IpConfig>, Error> {
    let mut reserved = Vec::new();
    let outcome = try_allocate(store, sets, requested, owner, &mut reserved).map_err(|cause| {
        let rollback: Vec<Error> =
            reserved.iter().rev().filter_map(|ip| store.remove(ip.address.ip(), owner).err()).collect();
        if rollback.is_empty() { cause } else { Error::Rollback { cause: Box::new(cause), rollback } }
    });
    store.finish();
    outcome.map(|()| reserved)
}

fn try_allocate(
    store: &mut LockedStore<'_>,
    sets: &[RangeSet],
    requested: &[IpAddr],
    owner: &Owner,
    reserved: &mut Vec<IpConfig>,
) -> Result<(), Error> {
    let mut requested = requested.to_vec();
    for (index, set) in sets.iter().enumerate() {
        let wanted = requested.iter().position(|ip| set.contains(*ip)).map(|at| requested.remove(at));
        let ip = match wanted {
            Some(ip) => reserve_requested(store, set, ip, index, owner),
            None => reserve_next(store, set, index, owner),
        }
        .map_err(|source| Error::Allocate { index, source: Box::new(source) })?;
        reserved.extend(set.range_of(ip).map(|range| ip_config(ip, range)));
    }
    if requested.is_empty() { Ok(()) } else { Err(Error::RequestsLeft { ips: requested }) }
}

fn reserve_requested(
    store: &mut LockedStore<'_>,
    set: &RangeSet,
    ip: IpAddr,
    index: usize,
    owner: &Owner,
) -> Result<IpAddr, Error> {
    let taken = || Error::RequestedTaken { ip, set: set.clone() };
    let range = set.range_of(ip).ok_or_else(taken)?;
    if ip == range.gateway {
        return Err(Error::RequestedGateway { ip });
    }
    let only = [Segment { first: ip, last: ip, range }];
    let mut place = store.place(index);
    reserve(store, &only, &mut place, owner)?.ok_or_else(taken)
}

fn reserve_next(
    store: &mut LockedStore<'_>,
    set: &RangeSet,
    index: usize,
    owner: &Owner,
) -> Result<IpAddr, Error> {
    // The first by file name, as in the reference.
    let held = store.held_by(owner)?;
    if let Some(ip) = held.all().filter(|ip| set.contains(*ip)).min_by_key(IpAddr::to_string) {
        return Err(Error::Duplicate { ip, container_id: owner.container_id.clone() });
    }
    let mut place = store.place(index);
    let round = set.round(place.last());
    reserve(store, &round, &mut place, owner)?.ok_or_else(|| Error::Exhausted { set: set.clone() })
}

/// Reserves the first free address; if there is none, one that is left from before a reboot.
fn reserve(
    store: &mut LockedStore<'_>,
    segments: &[Segment<'_>],
    place: &mut Place,
    owner: &Owner,
) -> Result<Option<IpAddr>, Error> {
    let mut reserved = store.reserve_first(segments, place, owner)?;
    if reserved.is_none() && store.reclaim(segments)? > 0 {
        reserved = store.reserve_first(segments, place, owner)?;
    }
    match (reserved, store.unread()) {
        // The set is full, but one lease could not be read: that is the error to report.
        (None, Some(unread)) => Err(unread),
        _ => Ok(reserved),
    }
}

fn ip_config(ip: IpAddr, range: &Range) -> IpConfig {
    let prefix = range.subnet.prefix();
    let address = IpNetwork::new(ip, prefix).unwrap_or_else(|_| IpNetwork::from(ip));
    IpConfig { interface: None, address, gateway: Some(range.gateway) }
}
