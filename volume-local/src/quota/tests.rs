use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;

use proptest::prelude::*;

use super::*;

const NONE: Counted = Counted { bytes: 0, inodes: 0 };

fn quota(bytes: u64, inodes: u64) -> Quota {
    using(Limits { bytes, inodes }, NONE)
}

fn using(limits: Limits, counted: Counted) -> Quota {
    Quota::new(limits, Some(Use { counted, unsettled: Vec::new() }), 4)
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
    quota.before_change(5, || Ok(lasting(0))).unwrap();
    let reserved = quota.reserve(9_000).unwrap();
    quota.settle(5, Some(reserved), |_before| Ok(lasting(4_096)));
    assert_eq!(used(&quota), 4_096);
    let reserved = quota.reserve(1_000).unwrap();
    quota.settle(5, Some(reserved), |_before| Err(Errno::IO));
    assert_eq!(used(&quota), 4_096, "what cannot be measured stays as it was");
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
    quota.removed(7, lasting(4096));
    quota.removed(7, lasting(4096));
    assert_eq!(quota.usage().used, Counted { bytes: 8192, inodes: 2 });
    assert_eq!(quota.at_the_end().counted, Counted { bytes: 4096, inodes: 1 });
    quota.forget(7);
    quota.forget(7);
    assert_eq!(quota.usage().used, Counted { bytes: 4096, inodes: 1 });
    // Forgotten with its names: still there.
    quota.before_change(8, || Ok(lasting(4096))).unwrap();
    quota.forget(8);
    assert_eq!(quota.usage().used, Counted { bytes: 4096, inodes: 1 });
    // It was forgotten before: no change.
    quota.settle(8, None, |_before| Ok(lasting(99)));
    assert_eq!(used(&quota), 4096);
}

#[test]
fn what_is_freed_is_what_was_charged_though_the_file_takes_more_by_now() {
    let quota = quota(0, 0);
    let unsettled = |bytes| Charged { bytes, lasting: false, attribute_blocks: Some(0) };
    quota.reserve_inode().unwrap().keep();
    quota.add(7, lasting(0));
    quota.before_change(7, || Ok(lasting(0))).unwrap();
    quota.settle(7, None, |_before| Ok(unsettled(8192)));
    quota.forget(7);
    let end = quota.at_the_end();
    assert_eq!(end, Use { counted: Counted { bytes: 8192, inodes: 1 }, unsettled: vec![(7, 8192)] });
    // Written back, it takes one block more, which the next daemon meets.
    let next = Quota::new(Limits::default(), Some(end), 4);
    assert_eq!(next.before_change(7, || Ok(unsettled(12_288))).unwrap().bytes, 8192);
    next.settle(7, None, |_before| Ok(lasting(12_288)));
    assert_eq!(used(&next), 12_288);
    assert_eq!(next.at_the_end().unsettled, []);
    // Or it is removed unseen.
    quota.free(7, unsettled(12_288));
    assert_eq!(quota.usage().used, NONE);
}

#[test]
fn not_all_event_loops_wait_for_a_forget() {
    for (loops, waits) in [(1, false), (2, true)] {
        let used = Use { counted: Counted { bytes: 4096, inodes: 1 }, unsettled: Vec::new() };
        let quota = Quota::new(Limits { bytes: 4096, inodes: 1 }, Some(used), loops);
        quota.removed(7, lasting(4096));
        let begun = Instant::now();
        assert_eq!(quota.retrying(|| quota.reserve(1)).map(drop), Err(Errno::NOSPC));
        assert_eq!(begun.elapsed() >= FORGET_IS_DUE, waits, "{:?}", begun.elapsed());
    }
}

#[test]
fn space_that_a_forget_is_about_to_free_is_waited_for() {
    let quota = using(Limits { bytes: 4096, inodes: 1 }, Counted { bytes: 4096, inodes: 1 });
    quota.removed(7, lasting(4096));
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
    quota.removed(7, lasting(4096));
    let attempts = AtomicU64::new(0);
    let reserved = quota.retrying(|| {
        let reserved = quota.reserve(4096);
        if attempts.fetch_add(1, Ordering::Relaxed) == 0 {
            // Between the attempt and the wait.
            quota.removed(8, lasting(4096));
            quota.forget(7);
        }
        reserved
    });
    assert_eq!(reserved.map(drop), Ok(()));
    assert_eq!(attempts.into_inner(), 2);
}

#[test]
fn a_removed_file_that_stays_open_costs_others_one_long_wait() {
    let quota = using(Limits { bytes: 4096, inodes: 1 }, Counted { bytes: 4096, inodes: 1 });
    quota.removed(7, lasting(4096));
    let refused = || quota.retrying(|| quota.reserve(1)).map(drop);
    assert_eq!(refused(), Err(Errno::NOSPC));
    let again = Instant::now();
    assert_eq!(refused(), Err(Errno::NOSPC));
    assert!(again.elapsed() < FORGET_IS_DUE, "{:?}", again.elapsed());
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
    assert_eq!(super::growth(&file, &(0..5 * 4096), 4096).unwrap(), 4096);
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
                        quota.add(id, lasting(0));
                        files.insert(id, (0, true));
                    }
                }
                (1, Some((before, named))) => {
                    prop_assert_eq!(quota.before_change(id, || Ok(lasting(before))).map(|now| now.bytes), Ok(before));
                    if let Ok(reserved) = quota.reserve(bytes.saturating_sub(before)) {
                        quota.settle(id, Some(reserved), |_before| Ok(lasting(bytes)));
                        files.insert(id, (bytes, named));
                    }
                }
                (2, Some((charged, true))) => {
                    quota.removed(id, lasting(charged));
                    files.insert(id, (charged, false));
                }
                (3, Some((_, false))) => {
                    quota.forget(id);
                    files.remove(&id);
                }
                (4, Some((charged, true))) => {
                    quota.forget(id);
                    quota.free(id, lasting(charged));
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
        let quota = Quota::new(Limits { bytes: 0, inodes: 0 }, None, 2);
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
