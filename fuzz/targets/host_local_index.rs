//! host-local's store while somebody else writes and removes leases, and the
//! index beside them is torn, stale or made up: no address is given twice, and
//! each container finds what it holds.
#![no_main]

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::net::IpAddr;
use std::os::unix::fs::FileExt;

use ipam_host_local::{LeaseStore, Owner, RangeSet, RawRange, allocate};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let dir = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let (leases, index) = (dir.path().join("n"), dir.path().join(".hawser/n/index"));
    let set = RangeSet::new(&[RawRange {
        subnet: cni_plugin::conf::parse_cidr("10.0.0.0/28"),
        ..RawRange::default()
    }])
    .expect("a sound range");
    let sets = [set];
    let owner = |number: u8| Owner { container_id: format!("c{}", number % 6), ifname: "eth0".to_owned() };
    let mut model: BTreeMap<IpAddr, u8> = BTreeMap::new();
    let mut old_index = None;
    let store = LeaseStore::create(dir.path(), "n").expect("a store");
    let mut bytes = input.iter().copied();
    while let (Some(action), Some(number)) = (bytes.next(), bytes.next()) {
        let holds = |model: &BTreeMap<IpAddr, u8>| model.values().any(|held| *held == number % 6);
        match action % 8 {
            0 | 1 => {
                let given = allocate(&mut store.lock().expect("the lock"), &sets, &[], &owner(number));
                match given {
                    Ok(ips) => {
                        assert!(!holds(&model), "a second address");
                        let before = model.insert(ips[0].address.ip(), number % 6);
                        assert_eq!(before, None, "{} given twice", ips[0].address);
                    }
                    Err(e) => assert!(holds(&model) || model.len() == 13, "{e}"),
                }
            }
            2 => {
                let mut locked = store.lock().expect("the lock");
                locked.release(&owner(number), false, &[]).expect("a release");
                locked.finish();
                model.retain(|_, held| *held != number % 6);
            }
            // As the reference writes them.
            3 if number % 16 > 1 && number % 16 < 15 => {
                let ip = IpAddr::from([10, 0, 0, number % 16]);
                let lock = store.lock().expect("the lock");
                let holder = number / 16 % 6;
                if !model.contains_key(&ip) && !model.values().any(|held| *held == holder) {
                    let Owner { container_id, ifname } = owner(holder);
                    fs::write(leases.join(ip.to_string()), format!("{container_id}\r\n{ifname}"))
                        .expect("write");
                    model.insert(ip, holder);
                }
                drop(lock);
            }
            4 => {
                let lock = store.lock().expect("the lock");
                if let Some(ip) = model.keys().nth(usize::from(number)).copied() {
                    fs::remove_file(leases.join(ip.to_string())).expect("remove");
                    model.remove(&ip);
                }
                drop(lock);
            }
            5 => old_index = fs::read(&index).ok().or(old_index),
            6 => {
                if let Some(old) = &old_index {
                    drop(fs::write(&index, old));
                }
            }
            7 => {
                let at = u64::from(number) * 61;
                let torn: Vec<u8> = bytes.by_ref().take(8).collect();
                if let Ok(file) = OpenOptions::new().write(true).open(&index) {
                    drop(file.write_all_at(&torn, at));
                }
            }
            _ => {}
        }
    }
    let mut locked = store.lock().expect("the lock");
    for number in 0..6 {
        let held = locked.held_by(&owner(number)).expect("an answer");
        let expected: Vec<IpAddr> =
            model.iter().filter(|(_, held)| **held == number).map(|(ip, _)| *ip).collect();
        assert_eq!(held.all().collect::<Vec<_>>(), expected);
    }
});
