//! What failed beside what is expected to fail.

use std::collections::BTreeSet;

use super::expected::{self, Expected};
use super::tap::{Outcome, Output};
use crate::posix::counts::Counts;
use crate::posix::exception::Exception;

/// Of one script on one ground.
#[derive(Debug)]
pub(super) struct Comparison<'a> {
    script: &'a str,
    ground: &'a str,
    output: &'a Output,
    /// Those that fail, and that no entry names.
    unexpected: Vec<usize>,
    /// Entries with those of their assertions that do not fail.
    out_of_date: Vec<(&'a Expected, Vec<usize>)>,
}

impl<'a> Comparison<'a> {
    /// `listed`: the entries for the ground.
    pub(super) fn new(
        script: &'a str,
        ground: &'a str,
        output: &'a Output,
        listed: impl Iterator<Item = &'a Expected>,
    ) -> Self {
        let failed: BTreeSet<usize> = output.failed().map(|(number, _)| number).collect();
        let mut unexpected = failed.clone();
        let mut out_of_date = Vec::new();
        for entry in listed.filter(|entry| entry.exception.name == script) {
            entry.numbers().for_each(|number| {
                unexpected.remove(&number);
            });
            let others: Vec<usize> = entry.numbers().filter(|number| !failed.contains(number)).collect();
            if !others.is_empty() {
                out_of_date.push((entry, others));
            }
        }
        Self { script, ground, output, unexpected: unexpected.into_iter().collect(), out_of_date }
    }

    /// An assertion that does not fail as expected counts as failed, and as nothing else.
    pub(super) fn counts(&self) -> Counts {
        let others: BTreeSet<usize> =
            self.out_of_date.iter().flat_map(|(_, numbers)| numbers).copied().collect();
        let mut counts = Counts {
            failed: others.len(),
            not_run: usize::from(self.output.is_skipped()),
            ..Counts::default()
        };
        for (number, outcome) in self.output.outcomes().filter(|(number, _)| !others.contains(number)) {
            match outcome {
                Outcome::Passed => counts.passed += 1,
                Outcome::Failed if self.unexpected.contains(&number) => counts.failed += 1,
                Outcome::Failed | Outcome::FailedAsMarked => counts.excepted += 1,
                Outcome::Skipped => counts.not_run += 1,
            }
        }
        counts
    }

    /// What differs, and how to change the list.
    pub(super) fn complaints(&self) -> Vec<String> {
        let failed = self.output.failed().filter(|(number, _)| self.unexpected.contains(number));
        let mut complaints: Vec<String> =
            failed.map(|(_, line)| format!("FAILED {}: {line}", self.script)).collect();
        if !self.unexpected.is_empty() {
            complaints.push(self.missing_entry());
        }
        complaints.extend(self.out_of_date.iter().map(|(entry, others)| self.out_of_date(entry, others)));
        complaints
    }

    fn missing_entry(&self) -> String {
        let Self { script, ground, unexpected, .. } = self;
        format!(
            "{script} on {ground}: {} failed, and the list does not expect it. An entry would be: {}",
            expected::ranges(unexpected),
            expected::entry(script, ground, unexpected, "REASON")
        )
    }

    fn out_of_date(&self, entry: &Expected, others: &[usize]) -> String {
        let Self { script, ground, .. } = self;
        let Exception { ground: listed, reason, .. } = &entry.exception;
        let left: Vec<usize> = entry.numbers().filter(|number| !others.contains(number)).collect();
        let change = match &left[..] {
            [] => "remove the entry".to_owned(),
            left => format!("change the entry to {}", expected::entry(script, listed, left, reason)),
        };
        format!(
            "{script} on {ground}: {} did not fail, and the list expects it on grounds with {listed:?} ({reason}). If it \
             fails on none of them, {change}; otherwise have an entry for each ground",
            expected::ranges(others)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::expected::failing;
    use super::*;

    const GROUND: &str = "xfs, by the daemon";

    fn output(printed: &str) -> Output {
        Output::read(printed).unwrap()
    }

    fn compare(printed: &str, listed: &[Expected]) -> (Counts, Vec<String>) {
        let output = output(printed);
        let comparison = Comparison::new("a/00.t", GROUND, &output, listed.iter());
        (comparison.counts(), comparison.complaints())
    }

    #[test]
    fn a_script_that_fails_as_listed_gives_no_complaint() {
        let listed = [
            failing("a/00.t", "", &[2..=3], "no devices"),
            failing("a/00.t", "xfs", &[5..=5], "too long"),
            failing("b/00.t", "", &[1..=1], "of another script"),
        ];
        let (counts, complaints) =
            compare("1..6\nok 1\nnot ok 2\nnot ok 3\nok 4\nnot ok 5\nnot ok 6 # TODO\n", &listed);
        assert_eq!(counts, Counts { passed: 2, failed: 0, excepted: 4, not_run: 0 });
        assert_eq!(complaints, Vec::<String>::new());
    }

    #[test]
    fn one_more_failure_is_found_beside_those_that_are_listed() {
        let listed = [failing("a/00.t", "", &[2..=2], "no devices")];
        let (counts, complaints) = compare("1..3\nok 1\nnot ok 2\nnot ok 3 - tried 'x'\n", &listed);
        assert_eq!(counts, Counts { passed: 1, failed: 1, excepted: 1, not_run: 0 });
        assert_eq!(
            complaints,
            [
                "FAILED a/00.t: not ok 3 - tried 'x'",
                "a/00.t on xfs, by the daemon: 3..=3 failed, and the list does not expect it. An entry would be: \
                 failing(\"a/00.t\", \"xfs, by the daemon\", &[3..=3], \"REASON\")"
            ]
        );
    }

    #[test]
    fn as_many_failures_of_other_assertions_are_found() {
        let listed = [failing("a/00.t", "", &[1..=2], "no devices")];
        let (counts, complaints) = compare("1..3\nok 1\nnot ok 2\nnot ok 3\n", &listed);
        assert_eq!(counts, Counts { passed: 0, failed: 2, excepted: 1, not_run: 0 });
        assert_eq!(complaints.len(), 3, "{complaints:?}");
    }

    #[test]
    fn an_entry_is_out_of_date_when_some_of_its_assertions_pass() {
        let listed = [failing("a/00.t", "", &[1..=3], "no devices")];
        let (counts, complaints) = compare("1..3\nnot ok 1\nok 2\nnot ok 3\n", &listed);
        assert_eq!(counts, Counts { passed: 0, failed: 1, excepted: 2, not_run: 0 });
        assert_eq!(
            complaints,
            [
                "a/00.t on xfs, by the daemon: 2..=2 did not fail, and the list expects it on grounds with \"\" (no \
                 devices). If it fails on none of them, change the entry to failing(\"a/00.t\", \"\", &[1..=1, \
                 3..=3], \"no devices\"); otherwise have an entry for each ground"
            ]
        );
    }

    #[test]
    fn an_entry_is_out_of_date_when_its_assertions_are_not_made() {
        let listed = [failing("a/00.t", "xfs", &[1..=4], "no devices")];
        let (counts, complaints) = compare("1..4\nok 1 # SKIP\nok 2\nnot ok 3 # TODO\n", &listed);
        assert_eq!(counts, Counts { passed: 0, failed: 4, excepted: 0, not_run: 0 });
        let [complaint] = &complaints[..] else { panic!("{complaints:?}") };
        assert!(
            complaint.contains("1..=4 did not fail") && complaint.contains("remove the entry"),
            "{complaint}"
        );
    }

    #[test]
    fn a_script_that_is_skipped_is_not_run() {
        let (counts, complaints) = compare("1..0 # SKIP not here\n", &[]);
        assert_eq!((counts, complaints.len()), (Counts { passed: 0, failed: 0, excepted: 0, not_run: 1 }, 0));
    }
}
