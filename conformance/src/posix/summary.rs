//! The end of a run: a line for each suite on each ground, and one for each suite.

use std::fmt;
use std::time::Duration;

use anyhow::{Result, bail};

use super::counts::Counts;

/// In the order of the run.
#[derive(Debug, Default)]
pub(super) struct Summary(Vec<Row>);

#[derive(Debug)]
struct Row {
    suite: &'static str,
    ground: &'static str,
    time: Duration,
    /// None, if the suite did not reach its end.
    counts: Option<Counts>,
}

impl Summary {
    pub(super) fn add(
        &mut self,
        suite: &'static str,
        ground: &'static str,
        time: Duration,
        counts: Option<Counts>,
    ) {
        self.0.push(Row { suite, ground, time, counts });
    }

    /// An error if something failed, or if nothing ran.
    pub(super) fn judge(&self) -> Result<()> {
        let is_good = |row: &&Row| row.counts.is_some_and(|counts| counts.failed == 0);
        let bad: Vec<String> = self.0.iter().filter(|row| !is_good(row)).map(Row::title).collect();
        if !bad.is_empty() {
            bail!("failed: {}", bad.join("; "));
        }
        if self.0.iter().all(|row| row.counts.is_none_or(|counts| counts.passed == 0)) {
            bail!("nothing ran: no ground or no test has such a name");
        }
        Ok(())
    }
}

impl Row {
    fn title(&self) -> String {
        format!("{} on {}", self.suite, self.ground)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut suites: Vec<(&str, Counts)> = Vec::new();
        for row in &self.0 {
            let time = row.time.as_secs_f64();
            match row.counts {
                Some(counts) => writeln!(f, "{}: {counts} ({time:.0} s)", row.title())?,
                None => writeln!(f, "{}: did not reach its end ({time:.0} s)", row.title())?,
            }
            if suites.last().is_none_or(|(suite, _)| *suite != row.suite) {
                suites.push((row.suite, Counts::default()));
            }
            if let (Some(counts), Some((_, sum))) = (row.counts, suites.last_mut()) {
                *sum += counts;
            }
        }
        let sums: Vec<String> = suites.iter().map(|(suite, counts)| format!("{suite}: {counts}")).collect();
        write!(f, "{}", sums.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Counts = Counts { passed: 5, failed: 0, excepted: 2, not_run: 1 };

    fn summary(rows: &[(&'static str, &'static str, Option<Counts>)]) -> Summary {
        let mut summary = Summary::default();
        for (suite, ground, counts) in rows {
            summary.add(suite, ground, Duration::from_secs(9), *counts);
        }
        summary
    }

    #[test]
    fn suites_have_a_line_for_each_ground_and_share_the_last_one() {
        let bad = Counts { failed: 1, ..GOOD };
        let summary = summary(&[("a", "ext4", Some(GOOD)), ("a", "xfs", Some(bad)), ("b", "xfs", None)]);
        assert_eq!(
            summary.to_string(),
            "a on ext4: 5 passed, 0 failed, 2 failed as expected, 1 not run (9 s)\n\
             a on xfs: 5 passed, 1 failed, 2 failed as expected, 1 not run (9 s)\n\
             b on xfs: did not reach its end (9 s)\n\
             a: 10 passed, 1 failed, 4 failed as expected, 2 not run; \
             b: 0 passed, 0 failed, 0 failed as expected, 0 not run"
        );
        assert_eq!(summary.judge().unwrap_err().to_string(), "failed: a on xfs; b on xfs");
    }

    #[test]
    fn a_run_without_failures_is_good() {
        let none = Counts { passed: 0, ..GOOD };
        summary(&[("a", "ext4", Some(GOOD)), ("a", "xfs", Some(none))]).judge().unwrap();
    }

    #[test]
    fn a_run_in_which_nothing_passed_is_an_error() {
        let error = summary(&[("a", "xfs", Some(Counts::default()))]).judge().unwrap_err();
        assert_eq!(error.to_string(), "nothing ran: no ground or no test has such a name");
        summary(&[]).judge().unwrap_err();
    }
}
