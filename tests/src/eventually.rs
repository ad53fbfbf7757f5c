//! Waiting for what another process does, with the last observation in hand
//! when timeout ends.

use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

const PAUSE: Duration = Duration::from_millis(10);
/// How many times slower this machine is than one where tests are written: the
/// laboratory's guests are emulated, and say so here.
static SLOWNESS: LazyLock<u32> = LazyLock::new(|| {
    let said = std::env::var("HAWSER_TEST_SLOWNESS").ok();
    said.and_then(|factor| factor.parse().ok()).unwrap_or(1)
});

/// `timeout` as it is meant on a machine of usual speed, on this one.
pub(crate) fn here(timeout: Duration) -> Duration {
    timeout * *SLOWNESS
}

/// Looks until `look` is content or `timeout` has passed; then the error says
/// what was awaited and what `look` saw last.
#[expect(clippy::disallowed_methods, reason = "the one place of the test support that polls")]
pub fn eventually<T>(what: &str, timeout: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let timeout = here(timeout);
    loop {
        match look() {
            Ok(seen) => return Ok(seen),
            Err(last) if started.elapsed() >= timeout => {
                return Err(last).with_context(|| format!("{what}: not within {timeout:?}; last seen"));
            }
            Err(_) => thread::sleep(PAUSE),
        }
    }
}

/// Returns at the first look, without a pause between looks, that `is_so`: for a
/// fault that must be injected while something happens.
pub fn as_soon_as(what: &str, timeout: Duration, mut is_so: impl FnMut() -> bool) -> Result<()> {
    let started = Instant::now();
    let timeout = here(timeout);
    while !is_so() {
        anyhow::ensure!(started.elapsed() < timeout, "{what}: not within {timeout:?}");
        thread::yield_now();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_observation_is_in_the_error() {
        let mut looked = 0;
        let error = eventually("a third look", Duration::from_millis(25), || -> Result<()> {
            looked += 1;
            anyhow::bail!("look {looked}")
        })
        .unwrap_err();
        let text = format!("{error:#}");
        assert!(text.starts_with("a third look: not within 25ms; last seen: look "), "{text}");
    }
}
