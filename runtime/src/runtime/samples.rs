//! Earlier measurements of a container, a pod or a directory, kept in memory beside it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use linux::disk_usage::DiskUsage;
use tokio::sync::{Semaphore, watch};

use crate::blocking::blocking;
use crate::error::{Result, chain};
use crate::shim::protocol::now;

/// The shortest time that a rate is taken over: the kernel's counters advance in steps.
const SHORTEST_WINDOW: Duration = Duration::from_secs(1);
/// A measurement that took a second is good for this many seconds, so that at most one in twenty
/// is spent with it.
const VALIDITY: u32 = 20;
const LONGEST_VALIDITY: Duration = Duration::from_secs(600);

/// The writable layers that are measured at the same time, each of another pod: a pod with many slow layers must not
/// take all turns. Further ones wait, without a thread.
const MEASURED_AT_ONCE: usize = 4;

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
///
/// Invariant: one measurement of a tree is under way at most, and it goes on without its callers.
#[derive(Debug)]
pub(crate) struct Tree {
    known: Arc<Mutex<Measurements>>,
    turns: &'static Semaphore,
}

#[derive(Debug, Default)]
struct Measurements {
    last: Option<Measured>,
    /// Closed at the end of the measurement that is under way.
    under_way: Option<watch::Receiver<()>>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Measured {
    pub(crate) usage: DiskUsage,
    /// Nanoseconds since the epoch.
    pub(crate) taken_at: i64,
    until: Instant,
}

impl Tree {
    /// The image store: it waits for no layer.
    pub(crate) fn of_images() -> Self {
        static TURN: Semaphore = Semaphore::const_new(1);
        Self { known: Arc::default(), turns: &TURN }
    }

    pub(crate) fn of_layer() -> Self {
        static TURNS: Semaphore = Semaphore::const_new(MEASURED_AT_ONCE);
        Self { known: Arc::default(), turns: &TURNS }
    }

    /// The last measurement while it is valid, or else that of `measure` if it ends within `time`.
    /// If it is late, the last one again; `None` if there is none, or if it failed. A later call has
    /// what a late measurement found.
    pub(crate) async fn measured(
        &self,
        time: Duration,
        measure: impl FnOnce() -> Result<DiskUsage> + Send + 'static,
    ) -> Option<Measured> {
        self.measured_after(time, None, measure).await
    }

    /// As [`Self::measured`]. The trees of one owner, who has one `turn`, are measured one after the other.
    pub(crate) async fn measured_in_turn(
        &self,
        time: Duration,
        turn: &Arc<Semaphore>,
        measure: impl FnOnce() -> Result<DiskUsage> + Send + 'static,
    ) -> Option<Measured> {
        self.measured_after(time, Some(Arc::clone(turn)), measure).await
    }

    async fn measured_after(
        &self,
        time: Duration,
        turn: Option<Arc<Semaphore>>,
        measure: impl FnOnce() -> Result<DiskUsage> + Send + 'static,
    ) -> Option<Measured> {
        let mut end = {
            let mut known = lock(&self.known);
            if let Some(measured) = known.last.filter(|measured| Instant::now() < measured.until) {
                return Some(measured);
            }
            known.under_way.get_or_insert_with(|| self.begin(turn, measure)).clone()
        };
        // An error is the end.
        let _late_or_ended = tokio::time::timeout(time, end.changed()).await;
        lock(&self.known).last
    }

    fn begin(
        &self,
        turn: Option<Arc<Semaphore>>,
        measure: impl FnOnce() -> Result<DiskUsage> + Send + 'static,
    ) -> watch::Receiver<()> {
        let (under_way, end) = watch::channel(());
        let (known, turns) = (Arc::clone(&self.known), self.turns);
        tokio::spawn(async move {
            // The owner's first: one that waits for it must not take a turn of the others.
            let _owners_turn = match &turn {
                Some(turn) => Some(turn.acquire().await),
                None => None,
            };
            let _turn = turns.acquire().await;
            let began = Instant::now();
            let measured = blocking("count a tree", measure).await;
            let ended = Instant::now();
            let validity = (ended - began).saturating_mul(VALIDITY).min(LONGEST_VALIDITY);
            let measured =
                measured.inspect_err(|e| tracing::warn!(error = %chain(e), "a tree was not counted"));
            let keep = |usage| Measured { usage, taken_at: now(), until: ended + validity };
            *lock(&known) = Measurements { last: measured.ok().map(keep), under_way: None };
            drop(under_way);
        });
        end
    }
}

fn lock(known: &Mutex<Measurements>) -> std::sync::MutexGuard<'_, Measurements> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Of a container.
#[derive(Debug)]
pub(crate) struct Samples {
    pub(crate) processor: Processor,
    pub(crate) layer: Tree,
}

impl Default for Samples {
    fn default() -> Self {
        Self { processor: Processor::default(), layer: Tree::of_layer() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    use crate::error::Error;

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

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn usage(bytes: u64) -> DiskUsage {
        DiskUsage { bytes, inodes: 1, is_complete: true }
    }

    impl Tree {
        async fn usage(
            &self,
            time: Duration,
            measure: impl FnOnce() -> Result<DiskUsage> + Send + 'static,
        ) -> Option<DiskUsage> {
            self.measured(time, measure).await.map(|measured| measured.usage)
        }
    }

    #[tokio::test]
    async fn a_measurement_is_repeated_once_it_is_no_longer_valid() {
        let tree = Tree::of_layer();
        let (_never, wait) = mpsc::channel::<()>();
        let slow = move || {
            wait.recv_timeout(Duration::from_millis(50)).unwrap_err();
            Ok(usage(1))
        };
        assert_eq!(tree.usage(TIMEOUT, slow).await, Some(usage(1)));
        assert_eq!(tree.usage(TIMEOUT, || Ok(usage(2))).await, Some(usage(1)), "within a second");
        lock(&tree.known).last.as_mut().unwrap().until = Instant::now();
        assert_eq!(tree.usage(TIMEOUT, || Ok(usage(3))).await, Some(usage(3)));
    }

    #[tokio::test]
    async fn the_image_store_waits_for_no_layer() {
        let (_held, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let layers: Vec<Tree> = (0..MEASURED_AT_ONCE).map(|_| Tree::of_layer()).collect();
        for layer in &layers {
            let wait = Arc::clone(&wait);
            let hangs = move || {
                let _dropped = wait.lock().unwrap().recv();
                Ok(usage(1))
            };
            assert_eq!(layer.usage(Duration::from_millis(1), hangs).await, None);
        }
        assert_eq!(Tree::of_images().usage(TIMEOUT, || Ok(usage(2))).await, Some(usage(2)));
    }

    #[tokio::test]
    async fn a_pod_takes_one_turn_at_a_time() {
        static TURNS: Semaphore = Semaphore::const_new(2);
        let tree = || Tree { known: Arc::default(), turns: &TURNS };
        let (held, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let (pod, other) = (Arc::new(Semaphore::new(1)), Arc::new(Semaphore::new(1)));
        let slow: Vec<Tree> = (0..3).map(|_| tree()).collect();
        for layer in &slow {
            let wait = Arc::clone(&wait);
            let hangs = move || {
                let _dropped = wait.lock().unwrap().recv();
                Ok(usage(1))
            };
            let late = layer.measured_in_turn(Duration::from_millis(1), &pod, hangs).await;
            assert!(late.is_none(), "{late:?}");
        }
        let measured = tree().measured_in_turn(TIMEOUT, &other, || Ok(usage(2))).await;
        assert_eq!(measured.map(|measured| measured.usage), Some(usage(2)), "the other pod's turn");
        drop(held);
        for layer in &slow {
            assert_eq!(layer.usage(TIMEOUT, || Ok(usage(3))).await, Some(usage(1)));
        }
    }

    #[tokio::test]
    async fn a_late_measurement_is_the_only_one_and_is_kept() {
        let tree = Tree::of_layer();
        let (release, wait) = mpsc::channel::<()>();
        let (begun, begins) = mpsc::channel();
        let wait = Arc::new(Mutex::new(wait));
        let measure = || {
            let (begun, wait) = (begun.clone(), Arc::clone(&wait));
            move || {
                begun.send(()).unwrap();
                wait.lock().unwrap().recv().unwrap();
                Ok(usage(1))
            }
        };
        for _ in 0..3 {
            // The caller goes, as when its connection ends.
            tokio::time::timeout(Duration::from_millis(20), tree.usage(TIMEOUT, measure()))
                .await
                .unwrap_err();
        }
        assert_eq!(tree.usage(Duration::from_millis(20), measure()).await, None, "late");
        let other = Tree::of_layer();
        assert_eq!(other.usage(TIMEOUT, || Ok(usage(7))).await, Some(usage(7)), "another tree's");
        release.send(()).unwrap();
        assert_eq!(tree.usage(TIMEOUT, || Ok(usage(2))).await, Some(usage(1)));
        assert_eq!(begins.try_iter().count(), 1);
    }

    #[tokio::test]
    async fn a_late_measurement_leaves_the_last_one_and_a_failed_one_does_not() {
        let tree = Tree::of_layer();
        let expired = Measured { usage: usage(1), taken_at: 0, until: Instant::now() };
        lock(&tree.known).last = Some(expired);
        let (release, wait) = mpsc::channel::<()>();
        let late = move || {
            wait.recv().unwrap();
            Err(Error::Task { task: "count" })
        };
        assert_eq!(tree.usage(Duration::from_millis(20), late).await, Some(usage(1)));
        release.send(()).unwrap();
        assert_eq!(tree.usage(TIMEOUT, || Ok(usage(2))).await, None, "the one under way failed");
        assert_eq!(tree.usage(TIMEOUT, || Ok(usage(2))).await, Some(usage(2)));
    }
}
