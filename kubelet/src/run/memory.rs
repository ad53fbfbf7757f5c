//! Keeps this process small: threads share few heaps, and after work, free memory goes back to the kernel.

use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use tracing::debug;

/// The C library makes up to eight for each processor, and each keeps the most that it ever had.
const HEAPS: u32 = 2;
const PERIOD: Duration = Duration::from_secs(10);
/// Processor time of an idle kubelet in a period. Giving memory back makes allocations wait for milliseconds:
/// no pod that starts should wait for it.
const IDLE: Duration = Duration::from_millis(200);
/// Processor time after which giving memory back is worth it again.
const WORTH: Duration = Duration::from_millis(250);

/// Must be called before there are threads.
pub(crate) fn limit_heaps() -> Result<(), linux::Error> {
    linux::memory::limit_heaps(HEAPS)
}

/// Gives free memory back whenever the kubelet is idle after work. Never ends.
pub(crate) async fn give_back_after_work() {
    let mut work = Work::default();
    loop {
        tokio::time::sleep(PERIOD).await;
        if work.is_done(processor_time()) {
            let given = tokio::task::spawn_blocking(|| {
                linux::memory::give_back();
                linux::memory::forget_code()
            });
            if let Ok(Err(error)) = given.await {
                debug!(%error, "the program's code stays in memory");
            }
            work.memory_is_given_back(processor_time());
        }
    }
}

/// User and system time of this process.
fn processor_time() -> Duration {
    let time = |time: nix::sys::time::TimeVal| {
        let (seconds, micros) = (time.tv_sec().unsigned_abs(), time.tv_usec().unsigned_abs());
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    };
    getrusage(UsageWho::RUSAGE_SELF)
        .map(|usage| time(usage.user_time()) + time(usage.system_time()))
        .unwrap_or_default()
}

/// Processor time of this process, once a period.
#[derive(Debug, Default)]
struct Work {
    last: Duration,
    given_back: Duration,
}

impl Work {
    /// Whether the process is idle now, after it has worked.
    fn is_done(&mut self, used: Duration) -> bool {
        let since_last = used.saturating_sub(self.last);
        self.last = used;
        since_last < IDLE && used.saturating_sub(self.given_back) >= WORTH
    }

    fn memory_is_given_back(&mut self, used: Duration) {
        (self.last, self.given_back) = (used, used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_given_back_once_after_each_work() {
        let mut work = Work::default();
        let mut is_done = |ms| {
            let used = Duration::from_millis(ms);
            let is_done = work.is_done(used);
            if is_done {
                work.memory_is_given_back(used);
            }
            is_done
        };
        assert!(!is_done(220), "it works");
        assert!(!is_done(230), "it has worked too little");
        assert!(!is_done(2_000), "it works");
        assert!(is_done(2_100), "it is idle after work");
        assert!(!is_done(2_150), "there is nothing new");
        assert!(!is_done(2_240) && !is_done(2_330), "there is little new");
        assert!(is_done(2_420), "small works add up");
    }

    #[test]
    fn processor_time_grows_with_work() {
        let before = processor_time();
        while processor_time() == before {
            std::hint::spin_loop();
        }
        assert!(processor_time() > before);
    }
}
