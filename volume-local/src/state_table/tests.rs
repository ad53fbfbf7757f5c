//! What is recorded is what a successor recovers, in any order of operations.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use proptest::prelude::*;

use super::requests::Effect;
use super::*;
use crate::charge::Charged;
use crate::quota::Quota;

const TABLE_BYTES: u64 = 8 << 20;

fn memory() -> OwnedFd {
    linux::shared_memory::create("test", TABLE_BYTES).unwrap()
}

fn region(memfd: &OwnedFd) -> Region {
    Region::of_backend(memfd).unwrap()
}

fn place(directory: u64, name: &str) -> Place {
    Place { directory, name: CString::new(name).unwrap() }
}

fn sorted(recovered: Recovered) -> (BTreeMap<u64, NodeRecord>, BTreeMap<u64, HandleRecord>) {
    let nodes = recovered.nodes.into_iter().map(|(_, node)| (node.id, node));
    let handles = recovered.handles.into_iter().map(|(_, handle)| (handle.handle, handle));
    (nodes.collect(), handles.collect())
}

#[derive(Debug, Clone)]
enum Step {
    Put { id: u64, lookups: u64, name: Option<(u64, String)>, removed_by: Option<u32> },
    Lookups { id: u64, lookups: u64 },
    Remove { id: u64 },
    Open { handle: u64, node: u64, flags: u32 },
    Close { handle: u64 },
    GiveBack,
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    let name = proptest::option::of((1_u64..50, "[a-z]{1,255}"));
    prop_oneof![
        4 => (2_u64..40, any::<u64>(), name, proptest::option::of(any::<u32>()))
            .prop_map(|(id, lookups, name, removed_by)| Step::Put { id, lookups, name, removed_by }),
        2 => (2_u64..40, any::<u64>()).prop_map(|(id, lookups)| Step::Lookups { id, lookups }),
        2 => (2_u64..40).prop_map(|id| Step::Remove { id }),
        2 => (1_u64..40, any::<u64>(), any::<u32>())
            .prop_map(|(handle, node, flags)| Step::Open { handle, node, flags }),
        1 => (1_u64..40).prop_map(|handle| Step::Close { handle }),
        1 => Just(Step::GiveBack),
        1 => Just(Step::Recover),
    ]
}

proptest! {
    #[test]
    fn a_successor_finds_exactly_what_was_recorded_last(steps in proptest::collection::vec(step(), 1..120)) {
        let memfd = memory();
        let mut table = StateTable::new(region(&memfd));
        let (mut nodes, mut handles) = (BTreeMap::new(), BTreeMap::new());
        let (mut node_records, mut handle_records) = (BTreeMap::new(), BTreeMap::new());
        for step in steps.into_iter().chain([Step::Recover]) {
            match step {
                Step::Put { id, lookups, name, removed_by } => {
                    let place = name.map(|(directory, name)| place(directory, &name));
                    let removed_by = removed_by.filter(|_| place.is_none());
                    let view = NodeView { id, lookups, place: place.as_ref(), removed_by };
                    let record = table.put_node(node_records.get(&id).copied(), &view).unwrap();
                    node_records.insert(id, record);
                    nodes.insert(id, NodeRecord { id, lookups, place, removed_by });
                }
                Step::Lookups { id, lookups } => {
                    if let (Some(record), Some(node)) = (node_records.get(&id), nodes.get_mut(&id)) {
                        table.set_lookups(*record, lookups);
                        node.lookups = lookups;
                    }
                }
                Step::Remove { id } => {
                    if let Some(record) = node_records.remove(&id) {
                        table.remove(record);
                        nodes.remove(&id);
                    }
                }
                Step::Open { handle, node, flags } => {
                    handles.entry(handle).or_insert_with(|| {
                        let record = HandleRecord { kind: Opened::File, handle, node, flags, request: node };
                        handle_records.insert(handle, table.put_handle(&record).unwrap());
                        record
                    });
                }
                Step::Close { handle } => {
                    if let Some(record) = handle_records.remove(&handle) {
                        table.remove(record);
                        handles.remove(&handle);
                    }
                }
                Step::GiveBack => table.give_back_from(1),
                Step::Recover => {
                    drop(table);
                    let (successor, recovered) = StateTable::recover(region(&memfd)).unwrap();
                    node_records = recovered.nodes.iter().map(|(record, node)| (node.id, *record)).collect();
                    handle_records = recovered.handles.iter().map(|(record, open)| (open.handle, *record)).collect();
                    prop_assert_eq!(sorted(recovered), (nodes.clone(), handles.clone()));
                    table = successor;
                }
            }
        }
    }

    #[test]
    fn a_damaged_table_is_an_error_or_some_records_and_never_a_panic(
        damage in proptest::collection::vec((0_usize..64, any::<u64>()), 1..20),
    ) {
        let memfd = memory();
        let table = StateTable::new(region(&memfd));
        for id in 2..20 {
            let charged = Charged { bytes: id << 12, lasting: false, attribute_blocks: None };
            let mut posting = table.post(None);
            posting.enter(id, charges::ChargeState { charged, removed: false, is_changing: false }).unwrap();
            posting.commit();
            let place = place(1, &"x".repeat(usize::try_from(id).unwrap() * 12));
            table.put_node(None, &NodeView { id, lookups: 1, place: Some(&place), removed_by: None }).unwrap();
        }
        let words = region(&memfd);
        for (at, value) in damage {
            words[RECORDS_AT + at].store(value, Ordering::Relaxed);
            words[requests::AT + at].store(value, Ordering::Relaxed);
            words[8 + at % 6].store(value, Ordering::Relaxed);
        }
        words[8].store(1, Ordering::Relaxed);
        if let Ok((table, Recovered { charges: Some(charges), .. })) = StateTable::recover(region(&memfd)) {
            let quota = Quota::new(volume_fs::figures::Limits::default(), 4, Some(Arc::new(table)));
            quota.restore(&charges);
            quota.forget_unknown(|_id| false);
        }
    }
}

/// A daemon that is killed between the new record of a node and the release of the old one.
#[test]
fn of_two_records_of_a_node_the_later_one_counts() {
    let memfd = memory();
    let table = StateTable::new(region(&memfd));
    for name in ["old", "new"] {
        let place = place(1, name);
        table.put_node(None, &NodeView { id: 7, lookups: 1, place: Some(&place), removed_by: None }).unwrap();
    }
    let (table, recovered) = StateTable::recover(region(&memfd)).unwrap();
    let [(record, node)] = &recovered.nodes[..] else { panic!("{recovered:?}") };
    assert_eq!(node.place, Some(place(1, "new")));
    table.remove(*record);
    let (_, recovered) = StateTable::recover(region(&memfd)).unwrap();
    assert!(recovered.nodes.is_empty(), "the other one was released: {recovered:?}");
}

#[test]
fn a_full_table_has_no_record_for_another_node_and_room_again_after_a_removal() {
    let memfd = linux::shared_memory::create("test", 4096 + 8 * (RECORDS_AT as u64 + 512)).unwrap();
    let table = StateTable::new(region(&memfd));
    let view = |id| NodeView { id, lookups: 1, place: None, removed_by: None };
    let records: Vec<RecordId> = (2..).map_while(|id| table.put_node(None, &view(id))).collect();
    assert_eq!(records.len(), 512 / CHUNK_WORDS);
    table.remove(records[5]);
    assert_eq!(table.put_node(None, &view(1000)), Some(records[5]));
}

/// Puts as many nodes with a record of this length as half the table holds, and removes them.
fn fill_half(table: &StateTable, chunks: usize) {
    let name = "n".repeat((chunks - 1) * 8 * CHUNK_WORDS - 8);
    let place = place(1, &name);
    let half = table.space().most as usize / 2;
    let view = |id| NodeView { id, lookups: 1, place: Some(&place), removed_by: None };
    let records: Vec<_> = (2..).take(half / chunks).map_while(|id| table.put_node(None, &view(id))).collect();
    assert_eq!(records.len(), half / chunks, "nodes with {chunks} chunks");
    assert!(table.has_room(), "beside nodes with {chunks} chunks");
    records.into_iter().for_each(|record| table.remove(record));
    assert!(table.has_room(), "after nodes with {chunks} chunks");
}

#[test]
fn released_records_of_one_length_serve_for_each_other_length() {
    let memfd = linux::shared_memory::create("test", 4096 + 8 * (RECORDS_AT as u64 + 64 * 1024)).unwrap();
    let table = StateTable::new(region(&memfd));
    (2..=MOST_CHUNKS).rev().chain(2..=MOST_CHUNKS).for_each(|chunks| fill_half(&table, chunks));
    // A successor finds the same space.
    let (successor, recovered) = StateTable::recover(region(&memfd)).unwrap();
    assert_eq!(recovered.nodes, []);
    (2..=MOST_CHUNKS).for_each(|chunks| fill_half(&successor, chunks));
}

#[test]
fn every_free_chunk_of_a_full_table_serves_for_a_handle() {
    let memfd = linux::shared_memory::create("test", 4096 + 8 * (RECORDS_AT as u64 + 4096)).unwrap();
    let table = StateTable::new(region(&memfd));
    let place = place(1, "name");
    let view = |id| NodeView { id, lookups: 1, place: Some(&place), removed_by: None };
    let records: Vec<_> = (2..).map_while(|id| table.put_node(None, &view(id))).collect();
    records.into_iter().step_by(2).for_each(|record| table.remove(record));
    let free = table.space().free();
    let handle = |handle| HandleRecord { kind: Opened::File, handle, node: 2, flags: 0, request: 0 };
    let handles = (1..).map_while(|number| table.put_handle(&handle(number))).count();
    assert_eq!(handles, free);
    assert!(!table.has_room(), "it is full");
    let (_successor, recovered) = StateTable::recover(region(&memfd)).unwrap();
    assert_eq!(recovered.handles.len(), free);
}

#[test]
fn a_successor_reads_each_note_and_takes_it_once() {
    let memfd = memory();
    let table = StateTable::new(region(&memfd));
    let effects = [
        Effect::Make { at: place(1, "made"), found: None, is_new: true },
        Effect::Make { at: place(1, "linked"), found: None, is_new: false },
        Effect::Remove { at: place(2, "removed"), found: Some(9), removed_by: Some(0), takes: 4096 },
        Effect::Rename {
            from: place(3, "from"),
            moving: Some(5),
            to: place(4, &"t".repeat(255)),
            in_the_way: None,
            exchange: false,
            removed_by: None,
            takes: 0,
        },
        Effect::Rename {
            from: place(3, "a"),
            moving: Some(5),
            to: place(3, "b"),
            in_the_way: Some(6),
            exchange: true,
            removed_by: Some(1001),
            takes: 1 << 40,
        },
        Effect::Attribute { at: place(7, "user.x"), had: true, sets: false },
        Effect::Attribute { at: place(7, "user.y"), had: false, sets: true },
        Effect::Lookup,
    ];
    for (number, effect) in (100..).zip(&effects) {
        let slot = table.requests.slot(None).unwrap();
        table.requests.note(slot, number, effect);
        table.requests.counted(slot, number + 1000);
    }
    let answered = table.requests.slot(None).unwrap();
    table.requests.note(answered, 99, &Effect::Lookup);
    table.requests.drop_note(answered);

    let (successor, _) = StateTable::recover(region(&memfd)).unwrap();
    let mut asked = 0;
    successor.requests.settle(|effect| {
        asked += 1;
        matches!(effect, Effect::Make { .. })
    });
    assert!(asked >= effects.len());
    // Their processes may have been killed before they asked again: a later daemon decides nothing anew.
    let (second, _) = StateTable::recover(region(&memfd)).unwrap();
    second.requests.settle(|effect| *effect != Effect::Lookup);
    for (number, effect) in (100..).zip(&effects) {
        let note = second.requests.take_note(number).unwrap();
        let is_made = number == 100 || number == 101;
        assert_eq!(note.effect, if is_made { effect.clone() } else { Effect::Lookup });
        assert_eq!((note.is_done, note.counted), (is_made, Some(number + 1000)));
    }
    for (number, effect) in (100..).zip(&effects) {
        let note = successor.requests.take_note(number).unwrap();
        assert_eq!((&note.effect, note.counted), (effect, Some(number + 1000)));
        assert_eq!(note.is_done, number == 100 || number == 101);
        assert!(successor.requests.take_note(number).is_none());
    }
    assert!(successor.requests.take_note(99).is_none());
}

/// The table that a daemon of version 1 has left on Linux 6.18, with the notes of three requests.
fn table_of_version_1() -> OwnedFd {
    let memfd = linux::shared_memory::create("test", 192 << 10).unwrap();
    let words = linux::shared_memory::SharedWords::map(&memfd).unwrap();
    for line in include_str!("../../../volume-fs/fixtures/state-table-1.txt").lines() {
        let (at, value) = line.split_once(" 0x").unwrap();
        let value = u64::from_str_radix(value, 16).unwrap();
        words[at.parse::<usize>().unwrap()].store(value, Ordering::Relaxed);
    }
    memfd
}

#[test]
fn a_table_of_version_1_is_read_and_its_use_is_not_known() {
    let memfd = table_of_version_1();
    let (table, recovered) = StateTable::recover(region(&memfd)).unwrap();
    assert_eq!(recovered.charges, None, "the volume is counted anew");
    let (nodes, handles) = sorted(recovered);
    let long = "a file with a name that takes several chunks of the table";
    let node = |id, place, removed_by| (id, NodeRecord { id, lookups: 1, place, removed_by });
    let expected = [
        node(3_481_610, Some(place(1, "directory")), None),
        node(3_481_611, Some(place(3_481_610, "below")), None),
        node(3_481_612, Some(place(3_481_610, long)), None),
        node(3_481_613, Some(place(1, "open")), None),
        node(3_481_614, None, Some(0)),
    ];
    assert_eq!(nodes, expected.into_iter().collect());
    let mut open: Vec<_> = handles.values().map(|open| (open.kind == Opened::File, open.node)).collect();
    open.sort_unstable();
    // One number for a file and for a directory.
    assert!(open.contains(&(true, 3_481_613)), "{open:?}");
    table.requests.settle(|_effect| true);
    assert_eq!(table.requests.uncharged().len(), 3);
    let note = |number| table.requests.take_note(number).unwrap();
    assert_eq!(note(1001).effect, Effect::Make { at: place(3_481_610, "made"), found: None, is_new: true });
    let removed =
        Effect::Remove { at: place(3_481_610, "gone"), found: Some(77), removed_by: Some(1001), takes: 0 };
    assert_eq!(note(1003).effect, removed);
    let looked_up = note(1005);
    assert_eq!((looked_up.effect, looked_up.counted), (Effect::Lookup, Some(3_481_613)));
    // This daemon goes on writing where the other one has ended.
    let at = place(1, "another");
    table.put_node(None, &NodeView { id: 9, lookups: 1, place: Some(&at), removed_by: None }).unwrap();
    let (_, recovered) = StateTable::recover(region(&memfd)).unwrap();
    assert_eq!(recovered.nodes.len(), 6);
}

#[test]
fn a_node_whose_name_is_too_long_is_not_recorded_and_leaves_its_earlier_record() {
    let table = StateTable::new(region(&memory()));
    let put = |earlier, bytes| {
        let at = place(1, &"n".repeat(bytes));
        table.put_node(earlier, &NodeView { id: 7, lookups: 1, place: Some(&at), removed_by: None })
    };
    let longest = put(None, 255).unwrap();
    assert_eq!(put(Some(longest), 256), None);
    assert_eq!(put(None, 1000), None);
    assert_eq!(put(None, 255), Some(longest), "the chunks are free again");
}

/// An attacker may have written the table.
#[test]
fn no_recorded_name_leads_out_of_the_volume() {
    for path in ["", ".", "..", "/etc/passwd", "../x", "a/b"] {
        let memfd = memory();
        let table = StateTable::new(region(&memfd));
        let (wrong, good) = (place(1, path), place(1, "good"));
        let effects = [
            Effect::Make { at: wrong.clone(), found: None, is_new: true },
            Effect::Remove { at: wrong.clone(), found: Some(7), removed_by: None, takes: 0 },
            Effect::Rename {
                from: good,
                moving: Some(7),
                to: wrong.clone(),
                in_the_way: None,
                exchange: false,
                removed_by: None,
                takes: 0,
            },
        ];
        for (number, effect) in (100..).zip(&effects) {
            table.requests.note(table.requests.slot(None).unwrap(), number, effect);
        }
        let (successor, _) = StateTable::recover(region(&memfd)).unwrap();
        for number in 100..103 {
            assert_eq!(successor.requests.take_note(number).unwrap().effect, Effect::Lookup, "{path:?}");
        }
        let view = NodeView { id: 7, lookups: 1, place: Some(&wrong), removed_by: None };
        table.put_node(None, &view).unwrap();
        let damaged = StateTable::recover(region(&memfd)).unwrap_err();
        assert_eq!(damaged.reason, "a path instead of a name", "{path:?}");
    }
}
