//! Which assertions of which scripts are expected to fail, with the reasons.

use std::ops::RangeInclusive;

use crate::posix::exception::Exception;

/// docs/SEMANTICS.md promises none of what these assertions want.
const EXPECTED: &[Expected] = &[
    failing("mknod/02.t", "", &[5..=7, 9..=11], DEVICE_NODE),
    failing("mknod/03.t", "", &[5..=7, 9..=11], DEVICE_NODE),
    failing("mknod/11.t", "", &[2..=6, 8..=19, 21..=27], DEVICE_NODE),
    failing("unlink/00.t", "", &[14..=16, 18..=20, 36..=45, 59..=66, 84..=87, 90..=93], DEVICE_NODE),
    failing(
        "rename/24.t",
        "btrfs",
        &[4..=5, 8..=9],
        "a directory of Btrfs has a link count of 1, and the test counts directories in it",
    ),
    failing(
        "symlink/03.t",
        "xfs",
        &[1..=2],
        "XFS keeps symbolic links of at most 1023 bytes, and the test makes one of 4095",
    ),
];

const DEVICE_NODE: &str = "it makes device nodes";

/// Assertions of a script that fail on certain grounds. Another entry may name others of the same script.
#[derive(Debug)]
pub(super) struct Expected {
    pub(super) exception: Exception,
    /// In order; as the script counts that runs, without device nodes.
    numbers: &'static [RangeInclusive<usize>],
}

/// `ground`: where its title contains this.
pub(super) const fn failing(
    script: &'static str,
    ground: &'static str,
    numbers: &'static [RangeInclusive<usize>],
    reason: &'static str,
) -> Expected {
    Expected { exception: Exception { name: script, ground, reason }, numbers }
}

/// The entries for a ground.
pub(super) fn on(ground: &str) -> impl Iterator<Item = &Expected> {
    EXPECTED.iter().filter(move |entry| entry.exception.is_of(ground))
}

impl Expected {
    pub(super) fn numbers(&self) -> impl Iterator<Item = usize> {
        self.numbers.iter().cloned().flatten()
    }
}

/// An entry as it stands in the list.
pub(super) fn entry(script: &str, ground: &str, numbers: &[usize], reason: &str) -> String {
    format!("failing({script:?}, {ground:?}, &[{}], {reason:?})", ranges(numbers))
}

/// `numbers` are in order.
pub(super) fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let runs = runs.filter_map(|run| Some(format!("{}..={}", run.first()?, run.last()?)));
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::posix::GROUNDS;

    #[test]
    fn an_entry_is_printed_as_it_stands_in_the_list() {
        let numbers: Vec<usize> = failing("", "", &[1..=1, 3..=5], "").numbers().collect();
        assert_eq!(
            entry("a/00.t", "xfs", &numbers, "it does \"x\""),
            r#"failing("a/00.t", "xfs", &[1..=1, 3..=5], "it does \"x\"")"#
        );
    }

    #[test]
    fn numbers_of_an_entry_are_in_order_and_ranges_do_not_touch() {
        for Expected { exception, numbers } in EXPECTED {
            let listed: Vec<usize> = numbers.iter().cloned().flatten().collect();
            assert!(listed.is_sorted_by(|a, b| a < b) && !listed.contains(&0), "{exception:?}: {numbers:?}");
            let merged: Vec<String> = numbers.iter().map(|range| format!("{range:?}")).collect();
            assert_eq!(ranges(&listed), merged.join(", "), "{exception:?}");
            assert!(!listed.is_empty(), "{exception:?}");
        }
    }

    #[test]
    fn each_entry_has_a_ground() {
        for Expected { exception, .. } in EXPECTED {
            assert!(GROUNDS.iter().any(|ground| exception.is_of(ground.title)), "{exception:?}");
        }
    }

    #[test]
    fn no_assertion_has_two_entries_for_one_ground() {
        for ground in &GROUNDS {
            let mut seen = BTreeSet::new();
            for entry in on(ground.title) {
                for number in entry.numbers() {
                    let is_new = seen.insert((entry.exception.name, number));
                    assert!(is_new, "{}: {:?}: {number}", ground.title, entry.exception);
                }
            }
        }
    }
}
