//! A pause of a thread by system calls that the daemon's seccomp filter allows.

use std::time::{Duration, Instant};

/// Returns after `time`, not earlier.
pub(crate) fn rest(time: Duration) {
    let begun = Instant::now();
    while begun.elapsed() < time {
        std::thread::park_timeout(time.saturating_sub(begun.elapsed()));
    }
}
