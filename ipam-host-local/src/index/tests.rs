use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use super::format::{address, boot, digest, machine, number};
use super::*;

const NOW: Origin = Origin { machine: 1, boot: 2 };

/// From an earlier boot, from this one, from another machine, of unknown origin.
fn entry(owner: u64, address: u128) -> Entry {
    let (machine, boot) = [(1, 1), (1, 2), (2, 1), (0, 0)][(owner % 4) as usize];
    Entry { container: owner, ifname: 7, address, life: 9, origin: Origin { machine, boot } }
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let origin = any::<[u64; 2]>().prop_map(|[machine, boot]| Origin { machine, boot });
    (any::<u64>(), any::<u64>(), any::<u128>(), any::<u64>(), origin).prop_map(
        |(container, ifname, address, life, origin)| Entry { container, ifname, address, life, origin },
    )
}

fn header() -> Header {
    Header {
        origin: NOW,
        stamp: Stamp { inode: 3, modified: (4, 5), changed: (-6, 7) },
        build: 8,
        buckets: 9,
        slots: 10,
        blocks: 11,
        leases: 12,
        earlier: 13,
    }
}

/// Neighbours in one block, in the next one, of the other family, and both ends.
fn any_address() -> impl Strategy<Value = u128> {
    let v4 = number("10.0.0.0".parse().expect("an address"));
    prop_oneof![
        6 => (0..40u128).prop_map(move |offset| v4 + offset),
        2 => (2030..2060u128).prop_map(move |offset| v4 + offset),
        2 => (0..5u128).prop_map(|offset| 0xfd00_u128 << 112 | offset),
        1 => (0..3u128).prop_map(|offset| u128::MAX - offset),
        1 => 0..3u128,
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Insert(u64, u128),
    Remove(u128),
    FirstFree(u128, u128),
    Reopen,
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..6u64, any_address()).prop_map(|(owner, address)| Op::Insert(owner, address)),
        3 => any_address().prop_map(Op::Remove),
        4 => (any_address(), any_address()).prop_map(|(a, b)| Op::FirstFree(a.min(b), a.max(b))),
        1 => Just(Op::Reopen),
    ]
}

#[test]
fn addresses_are_numbers_and_back() {
    for text in ["0.0.0.0", "10.1.2.3", "255.255.255.255", "::", "fd00::7", "ffff::"] {
        let ip: IpAddr = text.parse().unwrap();
        assert_eq!(address(number(ip)), ip);
    }
}

#[test]
fn boots_and_machines_are_known_by_whole_ids_only() {
    let id = "fe0aaad6-e549-49e4-b5fb-2f76ff2abaa2\n";
    assert_ne!(boot(id), 0);
    assert_eq!(boot(id), boot(id.trim()));
    assert_ne!(boot(id), boot("fe0aaad6-e549-49e4-b5fb-2f76ff2abaa3"));
    for wrong in ["", "fe0aaad6", "+e0aaad6-e549-49e4-b5fb-2f76ff2abaa2", &"0".repeat(32)] {
        assert_eq!(boot(wrong), 0, "{wrong}");
    }

    let id = "3d1219c7c4c5404aaa1f6d2a48adfda4\n";
    assert_ne!(machine(id, "node-1\n"), 0);
    assert_eq!(machine(id, "node-1\n"), machine(id.trim(), "node-1"));
    assert_ne!(machine(id, "node-1"), machine(id, "node-2"), "copies of one disk image");
    assert_ne!(machine(id, "node-1"), machine(&id.replace('3', "4"), "node-1"));
    for wrong in ["", "\n", "uninitialized\n", "3d1219c7", &"0".repeat(32)] {
        assert_eq!(machine(wrong, "node-1"), 0, "{wrong}");
    }
    assert_eq!(machine(id, "\n"), 0);
}

#[test]
fn only_what_is_known_whole_is_past() {
    let origin = |machine, boot| Origin { machine, boot };
    assert!(origin(1, 1).is_past(NOW));
    for other in [NOW, origin(2, 1), origin(0, 1), origin(1, 0), origin(0, 0)] {
        assert!(!other.is_past(NOW), "{other:?}");
    }
    for unknown in [origin(0, 2), origin(1, 0)] {
        assert!(!origin(0, 1).is_past(unknown) && !origin(1, 1).is_past(unknown), "{unknown:?}");
    }
}

#[test]
fn texts_have_digests_of_their_own() {
    let texts = ["", "a", "b", "aa", "a\0", "eth0", "eth1", "abcdefgh", "abcdefghi"];
    let digests: std::collections::BTreeSet<u64> = texts.into_iter().map(digest).collect();
    assert_eq!(digests.len(), texts.len());
}

#[test]
fn a_container_with_more_interfaces_than_a_bucket_holds_has_no_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own/index");
    let leases: Vec<Entry> = (0..19).map(|address| entry(5, address)).collect();
    let refused = Index::build(&path, NOW, Contents { leases, others: Vec::new() });
    assert_eq!(refused.err(), Some(Unusable));
    assert_eq!(std::fs::read_dir(dir.path().join("own")).unwrap().count(), 0, "nothing half-made stays");
}

#[test]
fn leases_and_others_share_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let at = |offset: u128| number("10.0.0.0".parse().unwrap()) + offset;
    let leases = [3, 9000, 1, 5000].map(|offset| entry(offset, at(u128::from(offset)))).to_vec();
    let others = vec![at(2), at(9001), at(0), at(7000)];
    let contents = Contents { leases, others };
    let index = Index::build(&dir.path().join("index"), NOW, contents).unwrap();
    let free = |from: u128| index.first_free(at(from), at(20_000)).unwrap().map(|free| free - at(0));
    assert_eq!([0, 2, 5000, 7000, 9000, 8999].map(free), [4, 4, 5001, 7001, 9002, 8999].map(Some));
    assert_eq!(index.first_free(at(0), at(3)), Ok(None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn parts_come_back_as_they_were_written(
        entries in proptest::collection::vec(any_entry(), 0..=BUCKET_ENTRIES),
        taken in proptest::collection::vec(0..2048u128, 0..50),
        key in 0..u128::MAX >> 11,
    ) {
        prop_assert_eq!(Header::decode(&header().encode()), Some(header()));
        let bucket = Bucket { entries };
        prop_assert_eq!(Bucket::decode(&bucket.encode(3, 8), 3, 8), Some(bucket));
        let mut block = Block::new(key);
        taken.iter().for_each(|offset| block.set((key << 11) + offset, true));
        let bytes = Block::encode_slot(Some(&block), 3, 8);
        prop_assert_eq!(Block::decode_slot(&bytes, 3, 8), Some(Some(block)));
        prop_assert_eq!(Block::decode_slot(&Block::encode_slot(None, 3, 8), 3, 8), Some(None));
    }

    /// One wrong byte, another place or another build: the part is refused.
    #[test]
    fn a_part_that_is_not_just_that_part_is_refused(
        entries in proptest::collection::vec(any_entry(), 0..=BUCKET_ENTRIES),
        at in any::<prop::sample::Index>(),
        flip in 1..=u8::MAX,
    ) {
        let mut bytes = header().encode();
        bytes[at.index(bytes.len())] ^= flip;
        // The last word but one is not used.
        prop_assert!(Header::decode(&bytes).is_none_or(|decoded| decoded == header()));

        let mut bytes = Bucket { entries }.encode(3, 8);
        prop_assert_eq!(Bucket::decode(&bytes, 4, 8), None);
        prop_assert_eq!(Bucket::decode(&bytes, 3, 9), None);
        bytes[at.index(BUCKET_BYTES)] ^= flip;
        prop_assert_eq!(Bucket::decode(&bytes, 3, 8), None);

        let mut bytes = Block::encode_slot(Some(&Block::new(7)), 3, 8);
        prop_assert_eq!(Block::decode_slot(&bytes, 4, 8), None);
        prop_assert_eq!(Block::decode_slot(&bytes, 3, 9), None);
        bytes[at.index(BLOCK_BYTES)] ^= flip;
        prop_assert_eq!(Block::decode_slot(&bytes, 3, 8), None);
    }

    #[test]
    fn any_bytes_are_no_index(bytes: Vec<u8>, length in 0..20_000usize) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("index");
        let mut bytes = bytes;
        bytes.resize(length, 0xa5);
        std::fs::write(&path, bytes).expect("write");
        prop_assert!(Index::open(&path).is_none());
    }

    #[test]
    fn it_knows_what_a_map_knows(ops in proptest::collection::vec(any_op(), 1..80)) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("own/index");
        let mut index = Index::build(&path, NOW, Contents::default()).expect("an index");
        let mut model: BTreeMap<u128, Entry> = BTreeMap::new();
        for op in ops {
            match op {
                Op::Insert(owner, address) if !model.contains_key(&address) => {
                    // Full: as the store does, a new one.
                    if index.insert(entry(owner, address)).is_err() {
                        let mut leases: Vec<Entry> = model.values().copied().collect();
                        leases.push(entry(owner, address));
                        let contents = Contents { leases, others: Vec::new() };
                        index = Index::build(&path, NOW, contents).expect("an index");
                    }
                    model.insert(address, entry(owner, address));
                }
                Op::Insert(..) => {}
                Op::Remove(address) => {
                    let entry = model.remove(&address);
                    let container = entry.map_or(1, |entry| entry.container);
                    prop_assert_eq!(index.remove(container, address).is_ok(), entry.is_some());
                }
                Op::FirstFree(from, last) => {
                    let mut free = from;
                    while model.contains_key(&free) && free < last {
                        free += 1;
                    }
                    let expected = Some(free).filter(|free| !model.contains_key(free));
                    prop_assert_eq!(index.first_free(from, last), Ok(expected));
                }
                Op::Reopen => {
                    let stamp = Stamp { inode: 1, ..Stamp::default() };
                    index.seal(stamp).expect("sealed");
                    index = Index::open(&path).expect("what was sealed opens");
                    prop_assert!(index.describes(stamp, NOW.boot));
                }
            }
            prop_assert_eq!(index.leases(), model.len() as u64);
            prop_assert_eq!(index.earlier(), model.values().filter(|entry| entry.container % 4 == 0).count() as u64);
        }
        let known: Vec<Entry> = model.values().filter(|entry| entry.container % 4 != 3).copied().collect();
        prop_assert_eq!(index.of_known_origin(), known);
        for owner in 0..6 {
            let mut entries = index.entries_of(owner).expect("readable");
            entries.sort_by_key(|entry| entry.address);
            let expected: Vec<Entry> = model.values().filter(|e| e.container == owner).copied().collect();
            prop_assert_eq!(entries, expected);
        }
    }
}
