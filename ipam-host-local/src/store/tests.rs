use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt;

use proptest::prelude::*;

use super::*;
use crate::range::RawRange;
use crate::{RangeSet, allocate};

/// Leases of network `net` in a temporary directory, as the machine `node`
/// finds them.
struct Net {
    dir: tempfile::TempDir,
    sets: Vec<RangeSet>,
    node: Cell<&'static str>,
}

fn owner(id: &str) -> Owner {
    Owner { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

impl Net {
    fn new(subnet: &str) -> Self {
        let subnet = cni_plugin::conf::parse_cidr(subnet);
        let sets = vec![RangeSet::new(&[RawRange { subnet, ..RawRange::default() }]).unwrap()];
        let net = Self { dir: tempfile::tempdir().unwrap(), sets, node: Cell::new("") };
        net.machine("a", '1');
        net
    }

    fn store(&self) -> LeaseStore {
        let mut store = LeaseStore::create(self.dir.path(), "net").unwrap();
        let file = |kind| self.node_file(kind);
        let name = self.node.get().to_owned();
        store.host = Host { boot_id: file("boot_id"), machine_id: file("machine-id"), name };
        store
    }

    fn node_file(&self, kind: &str) -> PathBuf {
        self.dir.path().join(format!("{kind} of {}", self.node.get()))
    }

    /// From now on, calls are those of `node`, whose machine id consists of `digit`.
    fn machine(&self, node: &'static str, digit: char) {
        self.node.set(node);
        fs::write(self.node_file("machine-id"), format!("{}\n", digit.to_string().repeat(32))).unwrap();
        if !self.node_file("boot_id").exists() {
            self.reboot(1);
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join("net").join(name)
    }

    fn index(&self) -> PathBuf {
        self.dir.path().join(".hawser/net/index")
    }

    /// Which file the index is: every build makes another one.
    fn index_inode(&self) -> u64 {
        fs::metadata(self.index()).unwrap().ino()
    }

    fn add(&self, id: &str) -> Result<String, String> {
        self.add_requested(id, &[])
    }

    fn add_requested(&self, id: &str, requested: &[IpAddr]) -> Result<String, String> {
        let ips = allocate(&mut self.store().lock().unwrap(), &self.sets, requested, &owner(id));
        ips.map(|ips| ips[0].address.ip().to_string()).map_err(|e| cni_plugin::CniError::from(e).msg)
    }

    fn del(&self, id: &str) {
        let store = self.store();
        let mut locked = store.lock().unwrap();
        locked.release(&owner(id), false, &[]).unwrap();
        locked.finish();
    }

    fn held(&self, id: &str) -> Vec<String> {
        let store = self.store();
        let mut locked = store.lock().unwrap();
        let held = locked.held_by(&owner(id)).unwrap();
        locked.finish();
        held.all().map(|ip| ip.to_string()).collect()
    }

    fn has_room(&self) -> bool {
        let store = self.store();
        has_room(&store, &self.sets[0].round(store.place(0).last())).unwrap()
    }

    /// The node's kernel is started for the `time`th time.
    fn reboot(&self, time: u8) {
        let node = self.node.get().as_bytes()[0];
        fs::write(self.node_file("boot_id"), format!("{node:08x}-0000-0000-0000-{time:012x}\n")).unwrap();
    }

    /// As the reference does it, or a person.
    fn write_lease(&self, ip: &str, content: &str) {
        fs::write(self.path(ip), content).unwrap();
    }
}

#[test]
fn the_files_are_the_references() {
    let net = Net::new("10.0.0.0/29");
    assert_eq!(net.add("a").unwrap(), "10.0.0.2");

    let mode = |name: &str| fs::metadata(net.path(name)).unwrap().mode() & 0o7777;
    assert_eq!(fs::read(net.path("10.0.0.2")).unwrap(), b"a\r\neth0");
    assert_eq!(fs::read(net.path("last_reserved_ip.0")).unwrap(), b"10.0.0.2");
    assert_eq!(fs::read(net.path("lock")).unwrap(), b"");
    assert_eq!((mode("10.0.0.2"), mode("last_reserved_ip.0"), mode("lock")), (0o600, 0o600, 0o750));
    assert_eq!(fs::read_dir(net.path("")).unwrap().count(), 3);
}

#[test]
fn a_longer_place_is_replaced_by_a_shorter_one() {
    let net = Net::new("10.0.0.0/29");
    net.store();
    net.write_lease("last_reserved_ip.0", "10.0.0.255 of old");
    assert_eq!(net.add("a").unwrap(), "10.0.0.2");
    assert_eq!(fs::read(net.path("last_reserved_ip.0")).unwrap(), b"10.0.0.2");
}

#[test]
fn what_a_crashed_writer_left_is_free() {
    for content in ["", "\0\0\0\0\0\0\0"] {
        let net = Net::new("10.0.0.0/29");
        net.store();
        net.write_lease("10.0.0.2", content);
        assert!(net.has_room());
        assert_eq!(net.add("a").unwrap(), "10.0.0.2");
        assert_eq!(fs::read(net.path("10.0.0.2")).unwrap(), b"a\r\neth0");
    }
}

#[test]
fn a_lease_of_the_oldest_format_is_known_and_released() {
    let net = Net::new("10.0.0.0/29");
    net.store();
    net.write_lease("10.0.0.5", "a\n");
    let refused = net.add("a").unwrap_err();
    let expected = "failed to allocate for range 0: 10.0.0.5 has been allocated to a, duplicate allocation is not allowed";
    assert_eq!(refused, expected);
    net.del("a");
    assert!(!net.path("10.0.0.5").exists());
}

#[test]
fn a_lease_without_its_second_file_is_taken_back() {
    let net = Net::new("10.0.0.0/29");
    net.store();
    // A directory in its place makes the write fail for root, too.
    fs::create_dir(net.path("last_reserved_ip.0")).unwrap();
    assert!(net.add("a").unwrap_err().contains("write "));
    assert!(!net.path("10.0.0.2").exists());
}

#[test]
fn the_index_is_kept_from_call_to_call() {
    let net = Net::new("10.0.0.0/16");
    net.add("a").unwrap();
    let built = net.index_inode();
    for round in 0..20 {
        net.add(&format!("b{round}")).unwrap();
        net.del(&format!("b{}", round / 2));
        assert_eq!(net.held("a"), ["10.0.0.2"]);
    }
    assert_eq!(net.index_inode(), built);
    for round in 0..20 {
        net.del(&format!("b{round}"));
    }
    net.del("a");
    assert_eq!(net.index_inode(), built, "small, it stays when the last lease is gone");
    assert_eq!(net.add("a").unwrap(), "10.0.0.23");
    assert_eq!(net.index_inode(), built);
}

#[test]
fn an_index_of_many_leases_goes_with_the_last() {
    let net = Net::new("10.0.0.0/16");
    net.store();
    for last in 2..500 {
        net.write_lease(&format!("10.0.{}.{}", last / 250, last % 250 + 1), &format!("c{last}\r\neth0"));
    }
    assert_eq!(net.held("c77").len(), 1);
    assert!(net.index().exists());
    for last in 2..500 {
        net.del(&format!("c{last}"));
    }
    assert!(!net.index().exists());
}

#[test]
fn it_grows_with_the_leases() {
    let net = Net::new("10.0.0.0/16");
    for id in 0..400 {
        net.add(&format!("c{id}")).unwrap();
    }
    let size = fs::metadata(net.index()).unwrap().len();
    assert!(size > 30_000, "{size}");
    for id in 0..400 {
        assert_eq!(net.held(&format!("c{id}")).len(), 1);
    }
}

#[test]
fn changes_by_others_are_noticed_however_soon() {
    let net = Net::new("10.0.0.0/24");
    net.add("a").unwrap();
    for round in 0..50 {
        // Within the tick of the kernel's clock in which our own change was made.
        let ip = format!("10.0.0.{}", 100 + round);
        net.write_lease(&ip, &format!("theirs{round}\r\neth0"));
        assert_eq!(net.held(&format!("theirs{round}")), [ip.as_str()]);
        fs::rename(net.path(&ip), net.path("10.0.0.99")).unwrap();
        assert_eq!(net.held(&format!("theirs{round}")), ["10.0.0.99"]);
        fs::remove_file(net.path("10.0.0.99")).unwrap();
        assert_eq!(net.held(&format!("theirs{round}")), Vec::<String>::new());
    }
}

#[test]
fn a_lease_overwritten_in_place_is_not_taken_for_what_it_was() {
    let net = Net::new("10.0.0.0/24");
    net.add("a").unwrap();
    net.add("b").unwrap();
    net.write_lease("10.0.0.2", "b\r\neth0");
    assert_eq!(net.held("a"), Vec::<String>::new());
    net.write_lease("10.0.0.3", "a\r\neth0");
    let store = net.store();
    let mut locked = store.lock().unwrap();
    let expected: [IpAddr; 1] = ["10.0.0.3".parse().unwrap()];
    let released = locked.release(&owner("a"), false, &expected).unwrap();
    locked.finish();
    assert_eq!(released.attachment, expected);
    assert!(!net.path("10.0.0.3").exists() && net.path("10.0.0.2").exists());
}

#[test]
fn without_a_place_for_the_index_all_goes_on() {
    let net = Net::new("10.0.0.0/29");
    fs::write(net.dir.path().join(".hawser"), "").unwrap();
    for last in 2..7 {
        assert_eq!(net.add(&format!("c{last}")).unwrap(), format!("10.0.0.{last}"));
    }
    assert!(net.add("late").unwrap_err().contains("no IP addresses available"));
    assert!(!net.has_room());
    assert_eq!(net.held("c4"), ["10.0.0.4"]);
    net.del("c4");
    assert!(net.has_room());
    assert_eq!(net.add("late").unwrap(), "10.0.0.4");
}

#[test]
fn a_file_system_without_nameless_files_gets_the_same_lease() {
    let net = Net::new("10.0.0.0/29");
    let store = net.store();
    let lease = store.files.new_named_lease("a\r\neth0").unwrap();
    let ip: IpAddr = "10.0.0.2".parse().unwrap();
    assert!(store.files.publish(&lease, ip).unwrap().is_some());
    drop(lease);
    let late = store.files.new_named_lease("b\r\neth0").unwrap();
    assert_eq!(store.files.publish(&late, ip).unwrap(), None);
    drop(late);
    assert_eq!(fs::read(net.path("10.0.0.2")).unwrap(), b"a\r\neth0");
    assert_eq!(fs::read_dir(net.path("")).unwrap().count(), 1);
    assert_eq!(fs::read_dir(net.dir.path().join(".hawser/net")).unwrap().count(), 0);
}

#[test]
fn leases_of_an_earlier_boot_make_room_when_there_is_none() {
    let net = Net::new("10.0.0.0/29");
    for id in ["a", "b", "c", "d"] {
        net.add(id).unwrap();
    }
    net.reboot(2);
    assert_eq!(net.add("new").unwrap(), "10.0.0.6");
    assert_eq!(net.held("a"), ["10.0.0.2"], "nothing is reclaimed before the set is exhausted");
    assert!(net.has_room());
    assert_eq!(net.add("newer").unwrap(), "10.0.0.2");
    for id in ["a", "b", "c", "d"] {
        assert_eq!(net.held(id), Vec::<String>::new());
    }
    assert_eq!((net.held("new"), net.held("newer")), (vec!["10.0.0.6".into()], vec!["10.0.0.2".into()]));
    // The late DEL of a container that died with the machine.
    net.del("a");
    assert_eq!(net.held("newer"), ["10.0.0.2"]);
}

#[test]
fn a_lease_of_a_file_system_without_nameless_files_is_reclaimed_too() {
    let net = Net::new("10.0.0.0/30");
    let ip: IpAddr = "10.0.0.2".parse().unwrap();
    let store = net.store();
    let mut locked = store.lock().unwrap();
    let lease = store.files.new_named_lease(&owner("a").content()).unwrap();
    let life = locked.change(|files| files.publish(&lease, ip)).unwrap().unwrap();
    assert_eq!(fs::metadata(net.path("10.0.0.2")).unwrap().nlink(), 1);
    drop(lease);
    assert_eq!(store.files.read(ip).unwrap().unwrap().life, life);
    let mut place = locked.place(0);
    assert_eq!(locked.reserved(ip, life, &mut place, &owner("a")).unwrap(), ip);
    locked.finish();
    drop(locked);
    assert!(!net.has_room());
    net.reboot(2);
    assert!(net.has_room());
    assert_eq!(net.add("new").unwrap(), "10.0.0.2");
}

#[test]
fn a_requested_address_is_reclaimed_alone() {
    let net = Net::new("10.0.0.0/29");
    net.add("a").unwrap();
    net.add("b").unwrap();
    net.reboot(2);
    assert_eq!(net.add_requested("c", &["10.0.0.3".parse().unwrap()]).unwrap(), "10.0.0.3");
    assert_eq!((net.held("a"), net.held("b")), (vec!["10.0.0.2".into()], vec![]));
}

const FULL: &str =
    "failed to allocate for range 0: no IP addresses available in range set: 10.0.0.1-10.0.0.6";

#[test]
fn what_is_not_proven_dead_is_kept() {
    let net = Net::new("10.0.0.0/29");
    for id in ["a", "b", "c"] {
        net.add(id).unwrap();
    }
    // Made by the reference, and listed by us in the boot that made it.
    net.write_lease("10.0.0.5", "theirs\r\neth0");
    assert_eq!(net.held("theirs"), ["10.0.0.5"]);
    net.reboot(2);
    // Renewed; overwritten; and by hand.
    fs::remove_file(net.path("10.0.0.3")).unwrap();
    net.write_lease("10.0.0.3", "b\r\neth0");
    net.write_lease("10.0.0.4", "x\r\neth0");
    net.write_lease("10.0.0.6", "kept for the printer");
    assert_eq!(net.add("new").unwrap(), "10.0.0.2", "of five, only a is the same as before");
    assert_eq!(net.add("newer").unwrap_err(), FULL);
    assert!(!net.has_room());
    // After another boot, leases of this one are dead, and an index of unknown origin proves nothing.
    net.reboot(3);
    assert!(net.has_room());
    fs::remove_file(net.index()).unwrap();
    assert_eq!(net.add("newer").unwrap_err(), FULL);
    net.reboot(4);
    assert!(!net.has_room());
    assert_eq!(net.add("newer").unwrap_err(), FULL);
}

#[test]
fn of_machines_that_share_a_directory_each_takes_back_its_own() {
    let net = Net::new("10.0.0.0/29");
    net.machine("a", '1');
    net.add("a1").unwrap();
    net.machine("b", '2');
    net.add("b1").unwrap();
    net.add("b2").unwrap();
    net.machine("a", '1');
    net.add("a2").unwrap();
    net.machine("b", '2');
    net.add("b3").unwrap();
    let all_of_b = || ["b1", "b2", "b3"].map(|id| net.held(id).len());

    net.machine("a", '1');
    assert_eq!(net.add("a3").unwrap_err(), FULL);
    net.reboot(2);
    assert_eq!(net.add("a3").unwrap(), "10.0.0.2");
    assert_eq!((all_of_b(), net.held("a2")), ([1, 1, 1], vec![]));
    assert_eq!(net.add("a4").unwrap(), "10.0.0.5");
    // The other one has not been started anew.
    net.machine("b", '2');
    assert!(!net.has_room());
    assert_eq!(net.add("b4").unwrap_err(), FULL);
    // And may be, any number of times, without the first one's knowing.
    net.machine("a", '1');
    assert_eq!((net.add("a5").unwrap_err().as_str(), all_of_b()), (FULL, [1, 1, 1]));
    net.machine("b", '2');
    net.reboot(2);
    assert_eq!(net.add("b4").unwrap(), "10.0.0.6", "the round goes on after a4's");
    assert_eq!((all_of_b(), net.held("a3").len(), net.held("a4").len()), ([0, 0, 0], 1, 1));
}

#[test]
fn copies_of_one_disk_image_are_machines_of_their_own() {
    let net = Net::new("10.0.0.0/30");
    net.machine("a", '1');
    net.add("a1").unwrap();
    net.machine("b", '1');
    net.add("b1").unwrap_err();
    net.reboot(2);
    assert!(net.add("b1").is_err() && !net.has_room());
    assert_eq!(net.held("a1"), ["10.0.0.2"]);
}

#[test]
fn a_machine_that_cannot_say_who_it_is_takes_nothing_back() {
    for (before, after) in [("", ""), ("1", ""), ("", "1"), ("uninitialized\n", "uninitialized\n")] {
        let net = Net::new("10.0.0.0/30");
        let identify = |id: &str| {
            let id = if id == "1" { "1".repeat(32) } else { id.to_owned() };
            fs::write(net.node_file("machine-id"), id).unwrap();
        };
        identify(before);
        net.add("a").unwrap();
        net.reboot(2);
        identify(after);
        assert!(net.add("b").is_err() && !net.has_room(), "{before:?}, {after:?}");
        fs::remove_file(net.node_file("machine-id")).unwrap();
        net.reboot(3);
        assert!(net.add("b").is_err() && !net.has_room(), "{before:?}, none");
    }
}

#[test]
fn leases_of_an_earlier_boot_are_known_however_many() {
    let net = Net::new("10.0.0.0/24");
    for id in 0..250 {
        net.add(&format!("c{id}")).unwrap();
    }
    net.reboot(2);
    for id in 0..4 {
        net.add(&format!("d{id}")).unwrap();
    }
    assert_eq!(fs::read_dir(net.path("")).unwrap().count(), 4 + 2, "lock and place beside the four");
}

#[test]
fn an_index_of_the_former_version_is_built_anew() {
    let net = Net::new("10.0.0.0/29");
    for id in ["a", "b"] {
        net.add(id).unwrap();
    }
    let mut bytes = fs::read(net.index()).unwrap();
    bytes[..8].copy_from_slice(b"hawsidx1");
    fs::write(net.index(), bytes).unwrap();
    assert_eq!((net.held("a"), net.held("b")), (vec!["10.0.0.2".into()], vec!["10.0.0.3".into()]));
    assert_eq!(net.add("c").unwrap(), "10.0.0.4");
    assert_eq!(&fs::read(net.index()).unwrap()[..8], b"hawsidx2");
}

#[test]
fn what_is_known_of_the_earlier_boot_outlives_builds_of_the_index() {
    let net = Net::new("10.0.0.0/29");
    for id in ["a", "b", "c", "d", "e"] {
        net.add(id).unwrap();
    }
    net.reboot(2);
    assert_eq!(net.held("a").len(), 1);
    for id in ["b", "c"] {
        net.del(id);
        // Another writer: the index is built anew.
        net.write_lease("10.0.0.77", "elsewhere\r\neth0");
        assert_eq!(net.held("elsewhere").len(), 1);
        fs::remove_file(net.path("10.0.0.77")).unwrap();
    }
    assert_eq!(net.add("f").unwrap(), "10.0.0.3");
    assert_eq!(net.add("g").unwrap(), "10.0.0.4");
    assert_eq!(net.add("h").unwrap(), "10.0.0.5", "d's: a and e follow");
    assert_eq!((net.held("a"), net.held("e")), (vec![], vec![]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Whatever stands in the index file: answers are those of the files.
    #[test]
    fn a_damaged_index_is_never_believed(
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let net = Net::new("10.0.0.0/27");
        for id in 0..12 {
            net.add(&format!("c{id}")).expect("room");
        }
        net.del("c3");
        let mut bytes = fs::read(net.index()).expect("an index");
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(net.index(), bytes).expect("write");
        for id in 0..14 {
            let expected = usize::from(id < 12 && id != 3);
            prop_assert_eq!(net.held(&format!("c{id}")).len(), expected);
        }
        prop_assert_eq!(net.add("next"), Ok("10.0.0.14".to_owned()));
        net.del("c7");
        prop_assert_eq!(fs::read_dir(net.path("")).expect("a directory").count(), 13);
    }
}
