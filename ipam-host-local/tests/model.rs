//! The leases on disk against a map in memory, over any sequence of ADD, DEL,
//! crash and switch to another process.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use ipam_host_local::{LeaseStore, Owner, RangeSet, RawRange, allocate};
use proptest::prelude::*;

/// 10.0.0.2 to 10.0.0.6 and 10.0.9.1 to 10.0.9.3 without 10.0.9.2.
const POOL_SIZE: usize = 7;

fn pool() -> Vec<RangeSet> {
    let range = |subnet: &str, start: &str, end: &str, gateway: &str| RawRange {
        subnet: cni_plugin::conf::parse_cidr(subnet),
        start: start.parse().ok(),
        end: end.parse().ok(),
        gateway: gateway.parse().ok(),
    };
    let ranges = [range("10.0.0.0/29", "", "", ""), range("10.0.9.0/24", "10.0.9.1", "10.0.9.3", "10.0.9.2")];
    vec![RangeSet::new(&ranges).expect("the ranges are valid")]
}

#[derive(Clone, Debug)]
enum Op {
    Add(u8),
    AddRequested(u8, u8),
    Del(u8),
    /// A writer of the reference died between creating a lease and writing it.
    EmptyLease(u8),
    /// The file that keeps the round robin's place is lost or half-written.
    LosePlace(&'static str),
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..12u8).prop_map(Op::Add),
        1 => (0..12u8, 0..10u8).prop_map(|(id, last)| Op::AddRequested(id, last)),
        4 => (0..12u8).prop_map(Op::Del),
        1 => (2..7u8).prop_map(Op::EmptyLease),
        1 => prop_oneof![Just(""), Just("10.0."), Just("10.77.0.1")].prop_map(Op::LosePlace),
    ]
}

fn owner(id: u8) -> Owner {
    Owner { container_id: format!("c{id}"), ifname: "eth0".to_owned() }
}

/// Each call opens the store anew, as each process does.
fn add(dir: &Path, id: u8, requested: &[IpAddr]) -> Result<IpAddr, String> {
    let store = LeaseStore::create(dir, "net").map_err(|e| e.to_string())?;
    let mut locked = store.lock().map_err(|e| e.to_string())?;
    let ips = allocate(&mut locked, &pool(), requested, &owner(id));
    ips.map(|ips| ips[0].address.ip()).map_err(|e| cni_plugin::CniError::from(e).msg)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_address_has_two_owners_and_full_means_full(ops in proptest::collection::vec(any_op(), 1..60)) {
        let temp = tempfile::tempdir().expect("a temporary directory");
        let mut model: BTreeMap<IpAddr, u8> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Add(id) => match add(temp.path(), id, &[]) {
                    Ok(ip) => {
                        prop_assert!(pool()[0].contains(ip));
                        prop_assert!(!model.values().any(|holder| *holder == id));
                        prop_assert_eq!(model.insert(ip, id), None, "{} was taken", ip);
                    }
                    Err(e) if e.contains("duplicate allocation is not allowed") => {
                        prop_assert!(model.values().any(|holder| *holder == id));
                    }
                    Err(e) => {
                        prop_assert_eq!(model.len(), POOL_SIZE, "{}", e);
                        let full = "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.6,10.0.9.1-10.0.9.3";
                        prop_assert_eq!(e, full);
                    }
                },
                Op::AddRequested(id, last) => {
                    let ip: IpAddr = format!("10.0.0.{last}").parse().expect("an address");
                    match add(temp.path(), id, &[ip]) {
                        Ok(given) => {
                            prop_assert_eq!(given, ip);
                            prop_assert_eq!(model.insert(ip, id), None);
                        }
                        // The gateway, taken, or outside the pool: then an ordinary
                        // address was taken first and must have been given back.
                        Err(_) => prop_assert!(!(2..=6).contains(&last) || model.contains_key(&ip)),
                    }
                }
                Op::Del(id) => {
                    let store = LeaseStore::create(temp.path(), "net").expect("the store opens");
                    let mut locked = store.lock().expect("the lock");
                    locked.release(&owner(id), false, &[]).expect("release");
                    locked.finish();
                    model.retain(|_, holder| *holder != id);
                }
                Op::EmptyLease(last) => {
                    let ip: IpAddr = format!("10.0.0.{last}").parse().expect("an address");
                    if !model.contains_key(&ip) {
                        LeaseStore::create(temp.path(), "net").expect("the store opens");
                        std::fs::write(temp.path().join("net").join(ip.to_string()), "").expect("write");
                    }
                }
                Op::LosePlace(text) => {
                    LeaseStore::create(temp.path(), "net").expect("the store opens");
                    std::fs::write(temp.path().join("net/last_reserved_ip.0"), text).expect("write");
                }
            }
            for (ip, id) in &model {
                let lease = std::fs::read_to_string(temp.path().join("net").join(ip.to_string()));
                prop_assert_eq!(lease.expect("a lease file"), format!("c{id}\r\neth0"));
            }
        }
        let store = LeaseStore::create(temp.path(), "net").expect("the store opens");
        let mut locked = store.lock().expect("the lock");
        for id in 0..12 {
            let held = locked.held_by(&owner(id)).expect("list");
            prop_assert_eq!(held.all().count(), model.values().filter(|holder| **holder == id).count());
        }
    }
}
