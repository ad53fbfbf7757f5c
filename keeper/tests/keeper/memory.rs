//! What the keeper costs. The binary under test is not the one that nodes run, so this prints, and
//! only guards against growth without a reason.

use std::os::fd::AsFd;

use keeper::wire::Role;

use crate::fixture::{Keeper, good, key};

#[test]
fn a_volume_costs_less_than_a_page() {
    const VOLUMES: u32 = 1000;
    let keeper = Keeper::start();
    let mut client = keeper.client();
    client.ping().unwrap();
    let descriptors = Role::ALL.map(|role| (role, good(role, &keeper.sandbox)));
    let before = keeper.memory("VmRSS");
    for number in 0..VOLUMES {
        for (role, fd) in &descriptors {
            client.put(key(number), *role, fd.as_fd()).unwrap();
        }
    }
    let after = keeper.memory("VmRSS");
    println!("keeper: VmRSS {before} kB, with {VOLUMES} volumes {after} kB");
    assert!(after - before <= 4 * u64::from(VOLUMES), "{before} kB, then {after} kB");
}
