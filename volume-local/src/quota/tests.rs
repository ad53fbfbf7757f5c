use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::removals::FORGET_IS_DUE;
use super::*;
use crate::charge::{BLOCK_BYTES, charge, growth, longest_fitting};
use crate::loops_at_rest::WaitsFor;

const NONE: Counted = Counted { bytes: 0, inodes: 0 };

fn quota(bytes: u64, inodes: u64) -> Quota {
    using(Limits { bytes, inodes }, NONE)
}

fn using(limits: Limits, counted: Counted) -> Quota {
    known(limits, Use { counted, unsettled: Vec::new() }, 4)
}

fn known(limits: Limits, found: Use, event_loops: usize) -> Quota {
    let quota = Quota::new(limits, event_loops, None);
    quota.set_counted(found);
    quota
}

/// Files are closed and forgotten while the volume is counted.
#[test]
fn charges_that_are_measured_while_the_volume_is_counted_are_neither_lost_nor_kept() {
    const FILES: u64 = 20_000;
    let memfd = linux::shared_memory::create("test", 8 << 20).unwrap();
    let region = || volume_fs::state::Region::of_backend(&memfd).unwrap();
    let table = Arc::new(StateTable::new(region()));
    let quota = Quota::new(Limits { bytes: 1 << 40, inodes: 0 }, 4, Some(table));
    let found = Use {
        counted: Counted { bytes: FILES * 8192, inodes: FILES },
        unsettled: (0..FILES).map(|id| (id, 8192)).collect(),
    };
    let close_and_forget = || {
        for id in 0..FILES {
            quota.settle(id, |_before| Ok(lasting(4096)));
            quota.forget(id);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while quota.usage().counting {
                close_and_forget();
            }
        });
        quota.set_counted(found);
    });
    close_and_forget();
    assert_eq!(quota.usage().used, Counted { bytes: FILES * 4096, inodes: FILES });
    let (_, recovered) = StateTable::recover(region()).unwrap();
    let charges = recovered.charges.unwrap();
    assert_eq!((charges.sum.bytes, charges.records.len()), ((FILES * 4096).cast_signed(), 0));
}

/// A change of a file without any effect.
fn look_at(quota: &Quota, id: u64, charged: Charged) -> Charged {
    let change = quota.begin_change(id, || Ok(charged)).unwrap();
    let before = change.before();
    change.settle(Ok);
    before
}

fn lasting(bytes: u64) -> Charged {
    Charged { bytes, lasting: true, attribute_blocks: Some(0) }
}

fn used(quota: &Quota) -> u64 {
    quota.usage().used.bytes
}

#[test]
fn what_is_not_settled_is_given_back() {
    let quota = quota(10_000, 0);
    let reserved = quota.reserve(10_000).unwrap();
    assert_eq!(quota.reserve(1).unwrap_err(), Errno::NOSPC);
    drop(reserved);
    let change =
        |reserved| quota.begin_change(5, || Ok(lasting(0))).unwrap().with(quota.reserve(reserved).unwrap());
    change(9_000).settle(|_before| Ok(lasting(4_096)));
    assert_eq!(used(&quota), 4_096);
    drop(change(1_000));
    assert_eq!(used(&quota), 4_096, "nothing was changed");
    change(1_000).settle(|_before| Err(Errno::IO));
    assert_eq!(used(&quota), 4_096, "what cannot be measured stays as it was");
}

#[test]
fn what_charges_of_many_files_took_is_returned_when_they_are_forgotten() {
    let quota = quota(0, 0);
    let files = 2..20_000;
    files.clone().for_each(|id| quota.add_open(id, lasting(0), None));
    files.for_each(|id| quota.forget(id));
    let capacity = || quota.charges.iter().map(|shard| shard.lock().unwrap().capacity()).sum::<usize>();
    assert!(capacity() > 19_000, "{}", capacity());
    quota.shrink();
    assert_eq!(capacity(), 0);
}

#[test]
fn a_limit_of_zero_is_none_and_a_use_beyond_the_limit_is_full() {
    quota(0, 0).reserve(u64::MAX).unwrap();
    let full = using(Limits { bytes: 10, inodes: 1 }, Counted { bytes: 20, inodes: 5 });
    assert_eq!(full.reserve(1).unwrap_err(), Errno::NOSPC);
    assert!(full.reserve(0).is_ok(), "overwriting takes nothing");
    assert_eq!(full.reserve_inode().unwrap_err(), Errno::NOSPC);
    assert_eq!(full.admit_block(), Err(Errno::NOSPC));
    assert_eq!(full.free_bytes(), 0);
}

#[test]
fn a_removed_node_is_charged_until_it_is_forgotten_and_freed_once() {
    let quota = using(Limits::default(), Counted { bytes: 8192, inodes: 2 });
    quota.removed(7, lasting(4096), None);
    quota.removed(7, lasting(4096), None);
    assert_eq!(quota.usage().used, Counted { bytes: 8192, inodes: 2 });
    assert_eq!(quota.at_the_end().unwrap().counted, Counted { bytes: 4096, inodes: 1 });
    quota.forget(7);
    quota.forget(7);
    assert_eq!(quota.usage().used, Counted { bytes: 4096, inodes: 1 });
    // Forgotten with its names: still there.
    look_at(&quota, 8, lasting(4096));
    quota.forget(8);
    assert_eq!(quota.usage().used, Counted { bytes: 4096, inodes: 1 });
    // It was forgotten before: no change.
    quota.settle(8, |_before| Ok(lasting(99)));
    assert_eq!(used(&quota), 4096);
}

#[test]
fn what_is_freed_is_what_was_charged_though_the_file_takes_more_by_now() {
    let quota = quota(0, 0);
    let unsettled = |bytes| Charged { bytes, lasting: false, attribute_blocks: Some(0) };
    quota.reserve_inode().unwrap().keep();
    quota.add(7, lasting(0), None);
    quota.begin_change(7, || Ok(lasting(0))).unwrap().settle(|_before| Ok(unsettled(8192)));
    quota.forget(7);
    let end = quota.at_the_end().unwrap();
    assert_eq!(end, Use { counted: Counted { bytes: 8192, inodes: 1 }, unsettled: vec![(7, 8192)] });
    // Written back, it takes one block more, which the next daemon meets.
    let next = known(Limits::default(), end, 4);
    let change = next.begin_change(7, || Ok(unsettled(12_288))).unwrap();
    assert_eq!(change.before().bytes, 8192);
    change.settle(|_before| Ok(lasting(12_288)));
    assert_eq!(used(&next), 12_288);
    assert_eq!(next.at_the_end().unwrap().unsettled, []);
    // Or it is removed unseen.
    quota.free(7, unsettled(12_288), None);
    assert_eq!(quota.usage().used, NONE);
}

#[test]
fn the_first_write_of_a_new_file_does_not_measure_it() {
    let quota = quota(0, 0);
    quota.reserve_inode().unwrap().keep();
    quota.add_open(7, lasting(0), None);
    let change = quota.begin_change(7, || panic!("it is measured")).unwrap();
    assert_eq!(change.before(), lasting(0));
    change.settle(|_before| Ok(lasting(4096)));
    assert_eq!(quota.usage().used, Counted { bytes: 4096, inodes: 1 });
    quota.removed(7, lasting(4096), None);
    quota.forget(7);
    assert_eq!(quota.usage().used, NONE);
}

#[test]
fn not_all_event_loops_wait_for_a_forget() {
    let full = |loops| {
        let used = Use { counted: Counted { bytes: 4096, inodes: 1 }, unsettled: Vec::new() };
        known(Limits { bytes: 4096, inodes: 1 }, used, loops)
    };
    let refused_after = |quota: &Quota| {
        let begun = Instant::now();
        quota.removed(7, lasting(4096), None);
        assert_eq!(quota.retrying(|| quota.reserve(1)).map(drop), Err(Errno::NOSPC));
        begun.elapsed()
    };
    assert_soon("one loop", || refused_after(&full(1)));
    let took = refused_after(&full(2));
    assert!(took >= FORGET_IS_DUE, "{took:?}");
    assert_soon("others wait already", || {
        let quota = full(4);
        let loops = quota.loops_at_rest();
        let _others =
            [WaitsFor::Nodes, WaitsFor::Nodes, WaitsFor::Space].map(|reason| loops.rest(reason).unwrap());
        refused_after(&quota)
    });
}

/// `attempt` takes less time than a wait for a FORGET. A busy machine may be late in all attempts but one.
fn assert_soon(what: &str, attempt: impl Fn() -> Duration) {
    const ATTEMPTS: usize = 5;
    let mut took = Vec::new();
    while took.last().is_none_or(|last| *last >= FORGET_IS_DUE) {
        assert!(took.len() < ATTEMPTS, "{what}: {took:?}");
        took.push(attempt());
    }
}

#[test]
fn space_that_a_forget_is_about_to_free_is_waited_for() {
    let quota = using(Limits { bytes: 4096, inodes: 1 }, Counted { bytes: 4096, inodes: 1 });
    quota.removed(7, lasting(4096), None);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| quota.retrying(|| quota.reserve(4096)).map(drop));
        quota.forget(7);
        assert_eq!(waiting.join().unwrap(), Ok(()));
    });
    quota.reserve_inode().unwrap();
}

#[test]
fn a_forget_counts_though_another_file_is_removed_meanwhile() {
    let quota = using(Limits { bytes: 8192, inodes: 2 }, Counted { bytes: 8192, inodes: 2 });
    quota.removed(7, lasting(4096), None);
    let attempts = AtomicU64::new(0);
    let reserved = quota.retrying(|| {
        let reserved = quota.reserve(4096);
        if attempts.fetch_add(1, Ordering::Relaxed) == 0 {
            // Between the attempt and the wait.
            quota.removed(8, lasting(4096), None);
            quota.forget(7);
        }
        reserved
    });
    assert_eq!(reserved.map(drop), Ok(()));
    assert_eq!(attempts.into_inner(), 2);
}

#[test]
fn a_removed_file_that_stays_open_costs_others_one_long_wait() {
    assert_soon("after a long wait", || {
        let quota = using(Limits { bytes: 4096, inodes: 1 }, Counted { bytes: 4096, inodes: 1 });
        quota.removed(7, lasting(4096), None);
        let refused = || quota.retrying(|| quota.reserve(1)).map(drop);
        assert_eq!(refused(), Err(Errno::NOSPC));
        let again = Instant::now();
        assert_eq!(refused(), Err(Errno::NOSPC));
        again.elapsed()
    });
}

#[test]
fn limits_grow_and_never_shrink() {
    let quota = quota(100, 10);
    for (wanted, field) in [
        (Limits { bytes: 99, inodes: 10 }, "capacity_bytes: 99 is less than the 100"),
        (Limits { bytes: 200, inodes: 9 }, "inode_limit: 9 is less than the 10"),
    ] {
        let refused = quota.set_limits(wanted).unwrap_err().to_string();
        assert!(refused.starts_with(field), "{refused}");
        assert_eq!(quota.usage().limits, Limits { bytes: 100, inodes: 10 });
    }
    for wanted in [(100, 10), (200, 20), (0, 0), (0, 0)] {
        quota.set_limits(Limits { bytes: wanted.0, inodes: wanted.1 }).unwrap();
    }
    assert!(quota.set_limits(Limits { bytes: u64::MAX - 1, inodes: 0 }).is_err(), "from no limit to one");
}

#[test]
fn only_whole_holes_are_growth_and_what_is_paid_for_is_not() {
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.write_at(&[1; 100], 0).unwrap();
    file.write_at(&[1; 4096], 3 * 4096).unwrap();
    let growth = |start, end| growth(&file, &(start..end), u64::MAX).unwrap();
    assert_eq!(growth(0, 4096), 0, "the rest of a block that has data");
    assert_eq!(growth(4095, 4097), 4096);
    assert_eq!(growth(0, 5 * 4096), 3 * 4096, "two before the last block, one after it");
    assert_eq!(crate::charge::growth(&file, &(0..5 * 4096), 4096).unwrap(), 4096);
    let fits = |range: (u64, u64), free| longest_fitting(&file, &(range.0..range.1), free).unwrap();
    assert_eq!(fits((0, 5 * 4096), 8191), 2 * 4096);
    assert_eq!(fits((0, 5 * 4096), 8192), 4 * 4096);
    assert_eq!(fits((0, 5 * 4096), 3 * 4096), 5 * 4096);
    assert_eq!(fits((4097, 5000), 4095), 4097, "not one byte");
    assert_eq!(fits((10, 4096), 0), 4096);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What was reserved for a write is what its file grows by, or more; what
    /// is said to fit does.
    #[test]
    fn growth_is_never_less_than_what_a_write_takes(
        writes in prop::collection::vec((0_u64..600_000, 1_usize..100_000), 1..12),
        free in 0_u64..400_000,
    ) {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let charged = |file: &File| charge(&crate::nodes::stat(file).unwrap(), 0).bytes;
        for (at, length) in writes {
            let range = at..at + length as u64;
            let before = charged(&file);
            let fitting = longest_fitting(&file, &range, free).unwrap();
            let growth_of_it = growth(&file, &(at..fitting), u64::MAX).unwrap();
            prop_assert!(fitting == at || growth_of_it <= free);
            prop_assert!(fitting == range.end || growth(&file, &range, u64::MAX).unwrap() > free);
            let reserved = growth(&file, &range, u64::MAX).unwrap();
            file.write_all_at(&vec![1; length], at).unwrap();
            prop_assert!(charged(&file) <= before + reserved, "{} > {before} + {reserved}", charged(&file));
        }
    }

    /// `used` is the sum of all charges, whatever comes in whatever order.
    #[test]
    fn the_use_is_the_sum_of_the_charges(
        steps in prop::collection::vec((0_u64..40, 0_u8..5, 0_u64..50), 0..200),
    ) {
        let quota = quota(1_000_000, 0);
        // What a file system would say: blocks a file, and whether it has a name.
        let mut files: BTreeMap<u64, (u64, bool)> = BTreeMap::new();
        for (id, step, blocks) in steps {
            let bytes = blocks * BLOCK_BYTES;
            match (step, files.get(&id).copied()) {
                (0, None) => {
                    if let Ok(inode) = quota.reserve_inode() {
                        inode.keep();
                        quota.add(id, lasting(0), None);
                        files.insert(id, (0, true));
                    }
                }
                (1, Some((before, named))) => {
                    let change = quota.begin_change(id, || Ok(lasting(before))).unwrap();
                    prop_assert_eq!(change.before().bytes, before);
                    if let Ok(reserved) = quota.reserve(bytes.saturating_sub(before)) {
                        change.with(reserved).settle(|_before| Ok(lasting(bytes)));
                        files.insert(id, (bytes, named));
                    }
                }
                (2, Some((charged, true))) => {
                    quota.removed(id, lasting(charged), None);
                    files.insert(id, (charged, false));
                }
                (3, Some((_, false))) => {
                    quota.forget(id);
                    files.remove(&id);
                }
                (4, Some((charged, true))) => {
                    quota.forget(id);
                    quota.free(id, lasting(charged), None);
                    files.remove(&id);
                }
                _ => {}
            }
            let sum: u64 = files.values().map(|(bytes, _)| bytes).sum();
            prop_assert_eq!(quota.usage().used, Counted { bytes: sum, inodes: files.len() as u64 });
            prop_assert!(sum <= 1_000_000);
        }
    }
}

#[test]
fn a_use_that_is_known_is_never_shown_as_none() {
    for _ in 0..20_000 {
        let quota = Quota::new(Limits { bytes: 0, inodes: 0 }, 2, None);
        let counted = Counted { bytes: 7, inodes: 7 };
        std::thread::scope(|scope| {
            scope.spawn(|| quota.set_counted(Use { counted, unsettled: Vec::new() }));
            let mut now = quota.usage();
            while now.counting {
                // A busy machine runs the other thread sooner.
                std::thread::yield_now();
                now = quota.usage();
            }
            assert_eq!(now.used, counted);
        });
    }
}

/// A file of the model, as its file system would describe it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Modelled {
    charged: Charged,
    named: bool,
}

#[derive(Debug, Clone)]
enum Step {
    Create {
        id: u64,
        charged: Charged,
    },
    Change {
        id: u64,
        charged: Charged,
    },
    /// The daemon is killed during the change, before or after its effect.
    BeginChange {
        id: u64,
        charged: Charged,
    },
    Remove {
        id: u64,
    },
    Forget {
        id: u64,
    },
    RemoveUnknown {
        id: u64,
    },
    AddName,
    FreeName,
    /// Another daemon continues.
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    let charged = || {
        (0_u64..50, any::<bool>(), 0_u8..4).prop_map(|(blocks, lasting, attributes)| Charged {
            bytes: blocks * BLOCK_BYTES,
            lasting,
            attribute_blocks: Some(if lasting { 0 } else { attributes }),
        })
    };
    let id = || 1_u64..30;
    prop_oneof![
        4 => (id(), charged()).prop_map(|(id, charged)| Step::Create { id, charged }),
        4 => (id(), charged()).prop_map(|(id, charged)| Step::Change { id, charged }),
        1 => (id(), charged()).prop_map(|(id, charged)| Step::BeginChange { id, charged }),
        2 => id().prop_map(|id| Step::Remove { id }),
        3 => id().prop_map(|id| Step::Forget { id }),
        1 => id().prop_map(|id| Step::RemoveUnknown { id }),
        1 => Just(Step::AddName),
        1 => Just(Step::FreeName),
        2 => Just(Step::Kill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// After anything that an earlier daemon did, its successor knows the same use and the same charges, and
    /// which files were being changed.
    #[test]
    fn a_successor_continues_from_the_same_charges(
        unsettled in prop::collection::vec(1_u64..30, 0..4),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        const LIMITS: Limits = Limits { bytes: 0, inodes: 0 };
        let memfd = linux::shared_memory::create("test", 4 << 20).unwrap();
        let region = || volume_fs::state::Region::of_backend(&memfd).unwrap();
        let mut quota = Quota::new(LIMITS, 4, Some(Arc::new(StateTable::new(region()))));
        let mut files: BTreeMap<u64, Modelled> = BTreeMap::new();
        // What the count finds.
        for id in unsettled {
            let charged = Charged { bytes: id * BLOCK_BYTES, lasting: false, attribute_blocks: None };
            files.insert(id, Modelled { charged, named: true });
        }
        let mut names = 100;
        let mut changing: BTreeMap<u64, Charged> = BTreeMap::new();
        let sum = |files: &BTreeMap<u64, Modelled>| files.values().map(|file| file.charged.bytes).sum::<u64>();
        let found = files.iter().map(|(id, file)| (*id, file.charged.bytes)).collect();
        let counted = Counted { bytes: sum(&files), inodes: files.len() as u64 + names };
        quota.set_counted(Use { counted, unsettled: found });

        for step in steps.into_iter().chain([Step::Kill]) {
            match step {
                // Also the number of a file that is gone, without a FORGET.
                Step::Create { id, charged } if files.get(&id).is_none_or(|file| !file.named) && !changing.contains_key(&id) => {
                    quota.reserve_inode().unwrap().keep();
                    quota.add(id, charged, None);
                    files.insert(id, Modelled { charged, named: true });
                }
                Step::Change { id, charged } => if let Some(file) = files.get_mut(&id) {
                    let before = file.charged;
                    let change = quota.begin_change(id, || Ok(before)).unwrap();
                    prop_assert_eq!(change.before().bytes, before.bytes);
                    let reserved = quota.reserve(charged.bytes.saturating_sub(before.bytes)).unwrap();
                    change.with(reserved).settle(|_before| Ok(charged));
                    file.charged = charged;
                },
                Step::BeginChange { id, charged } => if let Some(file) = files.get(&id) {
                    let before = file.charged;
                    let change = quota.begin_change(id, || Ok(before)).unwrap();
                    std::mem::forget(change.with(quota.reserve(charged.bytes).unwrap()));
                    changing.insert(id, charged);
                },
                Step::Remove { id } => if let Some(file) = files.get_mut(&id).filter(|file| file.named) {
                    quota.removed(id, file.charged, None);
                    file.named = false;
                },
                Step::Forget { id } if !changing.contains_key(&id) => {
                    quota.forget(id);
                    files.retain(|other, file| *other != id || file.named);
                }
                Step::RemoveUnknown { id } if !changing.contains_key(&id) => {
                    if let Some(file) = files.get(&id).filter(|file| file.named) {
                        quota.free(id, file.charged, None);
                        files.remove(&id);
                    }
                }
                Step::AddName => {
                    quota.reserve_inode().unwrap().keep();
                    quota.add_name(None);
                    names += 1;
                }
                Step::FreeName if names > 0 => {
                    quota.free_name(None);
                    names -= 1;
                }
                Step::Kill => {
                    let (table, recovered) = StateTable::recover(region()).unwrap();
                    let charges = recovered.charges.unwrap();
                    quota = Quota::new(LIMITS, 4, Some(Arc::new(table)));
                    quota.restore(&charges);
                    let were_changing: Vec<u64> =
                        charges.records.iter().filter(|(_, _, state)| state.is_changing).map(|(_, id, _)| *id).collect();
                    prop_assert_eq!(were_changing.iter().collect::<std::collections::BTreeSet<_>>(),
                        changing.keys().collect::<std::collections::BTreeSet<_>>());
                    // Each is measured: the effect was made.
                    for (id, charged) in std::mem::take(&mut changing) {
                        quota.settle(id, |_before| Ok(charged));
                        files.get_mut(&id).unwrap().charged = charged;
                    }
                    prop_assert_eq!(quota.usage().used, Counted { bytes: sum(&files), inodes: files.len() as u64 + names });
                    prop_assert!(!quota.usage().counting);
                }
                _ => {}
            }
            if changing.is_empty() {
                prop_assert_eq!(quota.usage().used, Counted { bytes: sum(&files), inodes: files.len() as u64 + names });
            }
        }
        // What is remembered is also right: everything is removed.
        for (id, file) in std::mem::take(&mut files) {
            if file.named {
                quota.removed(id, file.charged, None);
            }
            quota.forget(id);
        }
        prop_assert_eq!(quota.usage().used, Counted { bytes: 0, inodes: names });
    }
}

fn with_table(memfd: &std::os::fd::OwnedFd) -> Arc<StateTable> {
    Arc::new(StateTable::new(volume_fs::state::Region::of_backend(memfd).unwrap()))
}

fn recovered(memfd: &std::os::fd::OwnedFd) -> Option<Charges> {
    StateTable::recover(volume_fs::state::Region::of_backend(memfd).unwrap()).unwrap().1.charges
}

#[test]
fn a_successor_counts_anew_if_the_use_was_not_known_or_did_not_fit_into_the_table() {
    // Room for 1,024 records of four words. An eighth of them is for nodes and handles.
    const CHARGES: u64 = 1024 - 1024 / 8 + 1;
    let memfd = linux::shared_memory::create("test", 4096 + 8 * (41 * 512 + 4 * 1024)).unwrap();
    let table = with_table(&memfd);
    let quota = Quota::new(Limits::default(), 4, Some(Arc::clone(&table)));
    assert_eq!(recovered(&memfd), None, "before the count");
    quota.set_counted(Use { counted: Counted { bytes: 1 << 20, inodes: 1000 }, unsettled: Vec::new() });
    assert_eq!(recovered(&memfd).unwrap().sum, Sum { bytes: 1 << 20, inodes: 1000 });
    for id in 0..CHARGES {
        look_at(&quota, id, lasting(4096));
    }
    assert_eq!(recovered(&memfd).unwrap().records.len() as u64, CHARGES);
    look_at(&quota, CHARGES, lasting(4096));
    assert_eq!(recovered(&memfd), None, "a charge has no record");
    assert!(table.has_room(), "files can be opened");
    quota.forget(CHARGES);
    assert_eq!(quota.usage().used.bytes, 1 << 20);

    for (unsettled, fits) in [(CHARGES, true), (CHARGES + 1, false)] {
        let memfd = linux::shared_memory::create("test", 4096 + 8 * (41 * 512 + 4 * 1024)).unwrap();
        let quota = Quota::new(Limits::default(), 4, Some(with_table(&memfd)));
        let unsettled = (0..unsettled).map(|id| (id, 4096)).collect();
        quota.set_counted(Use { counted: Counted { bytes: 8 << 20, inodes: 2000 }, unsettled });
        assert_eq!(recovered(&memfd).is_some(), fits);
    }

    let uncounted = linux::shared_memory::create("test", 1 << 20).unwrap();
    let quota = Quota::new(Limits::default(), 4, Some(with_table(&uncounted)));
    quota.set_uncounted();
    assert_eq!(recovered(&uncounted), None);
    assert_eq!(quota.at_the_end(), None, "the next daemon counts again");
}

/// An earlier daemon may have followed changes behind the mount, and then the sum is below zero.
#[test]
fn a_use_below_zero_is_none() {
    let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
    let quota = Quota::new(Limits::default(), 4, Some(with_table(&memfd)));
    quota.set_counted(Use { counted: Counted { bytes: 4096, inodes: 1 }, unsettled: Vec::new() });
    quota.free(7, lasting(1 << 20), None);
    quota.free(8, lasting(1 << 20), None);
    for _ in 0..2 {
        let (table, found) =
            StateTable::recover(volume_fs::state::Region::of_backend(&memfd).unwrap()).unwrap();
        let next = Quota::new(Limits::default(), 4, Some(Arc::new(table)));
        next.restore(&found.charges.unwrap());
        assert_eq!(next.usage().used, NONE);
    }
    let next = recovered(&memfd).unwrap();
    assert_eq!(next.sum, Sum { bytes: 0, inodes: 0 });
}
