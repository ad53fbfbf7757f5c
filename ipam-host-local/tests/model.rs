//! The leases on disk against a map in memory, over any sequence of calls,
//! crashes at any system call, and writes by others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use ipam_host_local::{LeaseStore, Owner, RangeSet, RawRange, allocate};
use proptest::prelude::*;
use tests::trace_calls::{self, Fault, Injection, Point};

/// 10.0.0.2 to 10.0.0.6 and 10.0.9.1 to 10.0.9.3 without 10.0.9.2.
const POOL_SIZE: usize = 7;

const FULL: &str = "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.6,10.0.9.1-10.0.9.3";

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
    /// A process with a fault at its first such system call from the given one on.
    Crash {
        verb: &'static str,
        id: u8,
        from: usize,
        name: &'static str,
        after: bool,
    },
    /// The reference or a person, with or without the lock.
    Theirs(u8, u8),
    TheirsGone(u8),
    /// A writer of the reference died between creating a lease and writing it.
    EmptyLease(u8),
    /// The file that keeps the round robin's place is lost or half-written.
    LosePlace(&'static str),
    LoseIndex,
    /// Half an index, or the index of another day.
    DamageIndex(prop::sample::Index, u8),
}

/// What changes something, and what comes before that.
const WITH_FAULTS: [&str; 12] = [
    "openat",
    "read",
    "flock",
    "statx",
    "mkdir",
    "write",
    "pwrite64",
    "pread64",
    "linkat",
    "unlinkat",
    "utimensat",
    "rename",
];

fn any_op() -> impl Strategy<Value = Op> {
    let crash = (
        prop_oneof![Just("ADD"), Just("DEL")],
        0..12u8,
        0..70usize,
        prop::sample::select(&WITH_FAULTS),
        any::<bool>(),
    );
    prop_oneof![
        10 => (0..12u8).prop_map(Op::Add),
        2 => (0..12u8, 0..10u8).prop_map(|(id, last)| Op::AddRequested(id, last)),
        8 => (0..12u8).prop_map(Op::Del),
        3 => crash.prop_map(|(verb, id, from, name, after)| Op::Crash { verb, id, from, name, after }),
        2 => (0..12u8, 2..7u8).prop_map(|(id, last)| Op::Theirs(id, last)),
        1 => (2..7u8).prop_map(Op::TheirsGone),
        1 => (2..7u8).prop_map(Op::EmptyLease),
        1 => prop_oneof![Just(""), Just("10.0."), Just("10.77.0.1")].prop_map(Op::LosePlace),
        1 => Just(Op::LoseIndex),
        1 => (any::<prop::sample::Index>(), any::<u8>()).prop_map(|(at, byte)| Op::DamageIndex(at, byte)),
    ]
}

fn owner(id: u8) -> Owner {
    Owner { container_id: format!("c{id}"), ifname: "eth0".to_owned() }
}

fn pool_address(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

/// Each call opens the store anew, as each process does.
fn add(dir: &Path, id: u8, requested: &[IpAddr]) -> Result<IpAddr, String> {
    let store = LeaseStore::create(dir, "net").map_err(|e| e.to_string())?;
    let mut locked = store.lock().map_err(|e| e.to_string())?;
    let ips = allocate(&mut locked, &pool(), requested, &owner(id));
    ips.map(|ips| ips[0].address.ip()).map_err(|e| cni_plugin::CniError::from(e).msg)
}

fn del(dir: &Path, id: u8) {
    let store = LeaseStore::create(dir, "net").expect("the store opens");
    let mut locked = store.lock().expect("the lock");
    locked.release(&owner(id), false, &[]).expect("release");
    locked.finish();
}

/// The executable, killed.
fn crash(dir: &Path, verb: &str, id: u8, injection: Injection) {
    let conf = format!(
        r#"{{"cniVersion":"1.0.0","name":"net","ipam":{{"dataDir":"{}","ranges":[[{{"subnet":"10.0.0.0/29"}},{{"subnet":"10.0.9.0/24","rangeStart":"10.0.9.1","rangeEnd":"10.0.9.3","gateway":"10.0.9.2"}}]]}}}}"#,
        dir.display()
    );
    let mut command = Command::new(env!("CARGO_BIN_EXE_host-local"));
    command.env("CNI_COMMAND", verb).env("CNI_CONTAINERID", format!("c{id}")).env("CNI_IFNAME", "eth0");
    command.env("CNI_NETNS", "/dummy").env("CNI_PATH", "/dummy");
    let run = trace_calls::run(&command, conf.as_bytes(), Some(injection)).expect("a traced run");
    assert!(!run.hung && (run.code.is_some() || run.injected.is_some()));
}

/// Who holds what, by the files alone: with a file in its place there is no index.
fn on_disk(dir: &Path) -> BTreeMap<IpAddr, u8> {
    let mut leases = BTreeMap::new();
    for entry in std::fs::read_dir(dir.join("net")).into_iter().flatten() {
        let entry = entry.expect("an entry");
        let Some(ip) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let content = std::fs::read_to_string(entry.path()).expect("a lease");
        if content.is_empty() {
            continue;
        }
        let id = content.strip_prefix('c').and_then(|rest| rest.strip_suffix("\r\neth0"));
        let id = id.unwrap_or_else(|| panic!("{ip} holds {content:?}"));
        leases.insert(ip, id.parse().expect("an id of ours"));
    }
    leases
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_address_is_lost_or_has_two_owners(ops in proptest::collection::vec(any_op(), 1..60)) {
        let temp = tempfile::tempdir().expect("a temporary directory");
        let dir = temp.path();
        LeaseStore::create(dir, "net").expect("the store opens");
        let mut model: BTreeMap<IpAddr, u8> = BTreeMap::new();
        let at = |last: u8| dir.join("net").join(pool_address(last).to_string());
        let index = dir.join(".hawser/net/index");
        for op in ops {
            match op {
                Op::Add(id) => match add(dir, id, &[]) {
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
                        prop_assert_eq!(e, FULL);
                    }
                },
                Op::AddRequested(id, last) => {
                    let ip = pool_address(last);
                    match add(dir, id, &[ip]) {
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
                    del(dir, id);
                    model.retain(|_, holder| *holder != id);
                }
                Op::Crash { verb, id, from, name, after } => {
                    let fault = if after { Fault::KillAfter } else { Fault::KillBefore };
                    crash(dir, verb, id, Injection { point: Point { process: 0, call: from }, name, fault });
                    let before = model.clone();
                    model = on_disk(dir);
                    if verb == "ADD" {
                        // One lease more, of an owner who had none, or none more.
                        let new: Vec<_> = model.iter().filter(|lease| !before.contains_key(lease.0)).collect();
                        prop_assert!(before.iter().all(|(ip, holder)| model.get(ip) == Some(holder)));
                        prop_assert!(new.is_empty() || !before.values().any(|holder| *holder == id));
                        prop_assert!(new.len() <= 1 && new.iter().all(|(_, holder)| **holder == id));
                    } else {
                        prop_assert!(before.iter().all(|(ip, holder)| *holder == id || model.get(ip) == Some(holder)));
                        prop_assert!(model.iter().all(|(ip, holder)| before.get(ip) == Some(holder)));
                    }
                }
                Op::Theirs(id, last) => {
                    let ip = pool_address(last);
                    if !model.contains_key(&ip) && !model.values().any(|holder| *holder == id) {
                        // Over an empty lease, too.
                        std::fs::write(at(last), format!("c{id}\r\neth0")).expect("write");
                        model.insert(ip, id);
                    }
                }
                Op::TheirsGone(last) => {
                    drop(std::fs::remove_file(at(last)));
                    model.remove(&pool_address(last));
                }
                Op::EmptyLease(last) => {
                    if !model.contains_key(&pool_address(last)) {
                        std::fs::write(at(last), "").expect("write");
                    }
                }
                Op::LosePlace(text) => {
                    std::fs::write(dir.join("net/last_reserved_ip.0"), text).expect("write");
                }
                Op::LoseIndex => drop(std::fs::remove_file(&index)),
                Op::DamageIndex(at, byte) => {
                    if let Ok(mut bytes) = std::fs::read(&index) {
                        let at = at.index(bytes.len());
                        bytes[at] ^= byte;
                        std::fs::write(&index, bytes).expect("write");
                    }
                }
            }
            prop_assert_eq!(&on_disk(dir), &model);
        }

        // The same leases without an index, and with a file where it would be.
        let other = tempfile::tempdir().expect("a temporary directory");
        std::os::unix::fs::symlink(dir.join("net"), other.path().join("net")).expect("a link");
        std::fs::write(other.path().join(".hawser"), "").expect("write");
        for id in 0..12 {
            let held = |dir: &Path| {
                let store = LeaseStore::create(dir, "net").expect("the store opens");
                let mut locked = store.lock().expect("the lock");
                let mut held: Vec<IpAddr> = locked.held_by(&owner(id)).expect("an answer").all().collect();
                locked.finish();
                held.sort();
                held
            };
            let expected: Vec<IpAddr> = model.iter().filter(|(_, holder)| **holder == id).map(|(ip, _)| *ip).collect();
            prop_assert_eq!(held(dir), expected.clone());
            prop_assert_eq!(held(other.path()), expected);
        }
        // And the next address is the same one.
        if let Ok(with) = add(dir, 12, &[]) {
            del(dir, 12);
            let place = dir.join("net/last_reserved_ip.0");
            let before = pool()[0].round(None).iter().flat_map(|s| s.addresses()).collect::<Vec<_>>();
            let at = before.iter().position(|ip| *ip == with).expect("of the pool");
            std::fs::write(&place, before[(at + before.len() - 1) % before.len()].to_string()).expect("write");
            prop_assert_eq!(add(other.path(), 12, &[]), Ok(with));
        }
    }
}
