//! Earlier measurements of a container, a pod or a directory, kept in memory beside it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use linux::disk_usage::DiskUsage;

use crate::error::Result;

/// The shortest time that a rate is taken over: the kernel's counters advance in steps.
const SHORTEST_WINDOW: Duration = Duration::from_secs(1);
/// A measurement that took a second is good for this many seconds, so that at most one in twenty
/// is spent with it.
const VALIDITY: u32 = 20;
const LONGEST_VALIDITY: Duration = Duration::from_secs(600);

/// The use of processors at an earlier call.
#[derive(Debug, Default)]
pub(crate) struct Processor(Mutex<Option<Sample>>);

#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    nanoseconds: u64,
    rate: Option<u64>,
}

impl Processor {
    /// Nanoseconds of processor time a second since an earlier call, at least a second ago.
    /// `nanoseconds`: the total at `now`. `None` at the first call.
    pub(crate) fn rate(&self, now: Instant, nanoseconds: u64) -> Option<u64> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = match *kept {
            Some(last) => {
                let elapsed = now.saturating_duration_since(last.at);
                if elapsed < SHORTEST_WINDOW {
                    return last.rate;
                }
                let used = nanoseconds.checked_sub(last.nanoseconds);
                used.and_then(|used| {
                    let rate = u128::from(used) * 1_000_000_000 / elapsed.as_nanos();
                    u64::try_from(rate).ok()
                })
            }
            None => None,
        };
        *kept = Some(Sample { at: now, nanoseconds, rate });
        rate
    }
}

/// The size of a tree that may be huge.
#[derive(Debug, Default)]
pub(crate) struct Tree(tokio::sync::Mutex<Option<Measured>>);

#[derive(Debug)]
struct Measured {
    usage: DiskUsage,
    until: Instant,
}

impl Tree {
    /// The last measurement while it is valid, or else that of `measure`. Callers wait for each
    /// other rather than read the same tree.
    pub(crate) async fn usage(&self, measure: impl Future<Output = Result<DiskUsage>>) -> Result<DiskUsage> {
        let mut kept = self.0.lock().await;
        let began = Instant::now();
        if let Some(measured) = kept.as_ref().filter(|measured| began < measured.until) {
            return Ok(measured.usage);
        }
        let usage = measure.await?;
        let ended = Instant::now();
        let validity = (ended - began).saturating_mul(VALIDITY).min(LONGEST_VALIDITY);
        *kept = Some(Measured { usage, until: ended + validity });
        Ok(usage)
    }
}

/// Of a container.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    pub(crate) processor: Processor,
    pub(crate) layer: Tree,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_taken_over_a_second_or_more() {
        let processor = Processor::default();
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        assert_eq!(processor.rate(at(0), 1000), None);
        assert_eq!(processor.rate(at(500), 900_000), None, "too early");
        assert_eq!(processor.rate(at(2000), 1_000_001_000), Some(500_000_000));
        assert_eq!(processor.rate(at(2100), 5_000_000_000), Some(500_000_000), "the last one");
        assert_eq!(processor.rate(at(4000), 1_000_001_000), Some(0));
        assert_eq!(processor.rate(at(6000), 0), None, "another group");
    }

    #[tokio::test]
    async fn a_measurement_is_repeated_once_it_is_no_longer_valid() {
        let tree = Tree::default();
        let usage = |bytes| DiskUsage { bytes, inodes: 1, is_complete: true };
        let slow = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            Ok(usage(1))
        };
        assert_eq!(tree.usage(slow).await.unwrap().bytes, 1);
        assert_eq!(tree.usage(async { Ok(usage(2)) }).await.unwrap().bytes, 1, "within a second");
        let tree = Tree::default();
        let quick = tree.usage(async { Ok(usage(3)) }).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let next = tree.usage(async { Ok(usage(4)) }).await.unwrap();
        assert_eq!((quick.bytes, next.bytes), (3, 4));
    }
}
