//! How many assertions, or tests, had which outcome.

use std::fmt;
use std::ops::AddAssign;

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: usize,
    /// Those that are expected to fail and do not among them.
    pub(super) failed: usize,
    /// Failed as the list of exceptions, or the suite itself, expects.
    pub(super) excepted: usize,
    /// The suite found that something which the test needs is not there.
    pub(super) not_run: usize,
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.excepted += other.excepted;
        self.not_run += other.not_run;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, excepted, not_run } = self;
        write!(f, "{passed} passed, {failed} failed, {excepted} failed as expected, {not_run} not run")
    }
}
