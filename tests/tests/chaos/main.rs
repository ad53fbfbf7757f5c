//! The kill suite: real applications use volumes while daemons, the keeper and the driver are killed at
//! random. They see pauses, never an error, and all their data is right (docs/decisions/0046).
//!
//! The applications are processes of their own (`tests/workload`). So this process has no file of a
//! volume open, and none of its own calls can wait for a daemon without a time limit.
//!
//! `HAWSER_TEST_LONG=1` (`cargo xtask test --long`) makes it long: five times as many kills, and ten minutes of soak.
//! `HAWSER_CHAOS_SEED=<number>` repeats the choices of an earlier run. `HAWSER_CHAOS_POOL` is described in
//! `limited`.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]
#![expect(clippy::print_stderr, reason = "the kills and pauses are the report")]

mod app;
mod limited;
mod process;
mod report;
mod situations;
mod soak;
mod suite;
mod traffic;

use std::time::Duration;

/// For what takes at most some seconds on an idle machine: pauses add to it.
const TIMEOUT: Duration = Duration::from_secs(120);

fn is_long() -> bool {
    std::env::var_os("HAWSER_TEST_LONG").is_some_and(|value| !value.is_empty())
}

/// This many kills in the short form; five times as many in the long one.
fn kills(short: usize) -> usize {
    if is_long() { short * 5 } else { short }
}
