//! Copies that outlive the calls that started them. A call waits for its copy up to its limit; the
//! next call with the same key finds the copy and continues to wait.

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;

use crate::backend::copies::Progress;
use crate::error::{Error, Result, Step, chain};

/// The copies under way, by the id of the volume or snapshot that they make.
#[derive(Debug, Clone, Default)]
pub(crate) struct Jobs {
    running: Arc<Mutex<HashMap<String, Arc<Job>>>>,
    copied_bytes: Counter,
}

/// One copy.
#[derive(Debug)]
pub(crate) struct Job {
    /// The id of the volume or snapshot that is copied.
    source: String,
    progress: Progress,
    outcome: Mutex<Outcome>,
    ended: Condvar,
}

#[derive(Debug)]
enum Outcome {
    Running,
    Ended(Option<Result<()>>),
}

impl Jobs {
    /// All copies add the bytes that they read to `copied_bytes`.
    pub(crate) fn new(copied_bytes: Counter) -> Self {
        Self { running: Arc::default(), copied_bytes }
    }

    /// Starts `work`, a copy of `total_bytes`, on its own thread. No other copy with this key may
    /// run: the caller holds the lock of the volume or snapshot that is made.
    pub(crate) fn start(
        &self,
        key: &str,
        source: &str,
        total_bytes: u64,
        work: impl FnOnce(&Progress) -> Result<()> + Send + 'static,
    ) -> Result<Arc<Job>> {
        let job = Arc::new(Job {
            source: source.to_owned(),
            progress: Progress {
                total_bytes: total_bytes.into(),
                all_bytes: self.copied_bytes.clone(),
                ..Progress::default()
            },
            outcome: Mutex::new(Outcome::Running),
            ended: Condvar::new(),
        });
        self.locked().insert(key.to_owned(), job.clone());
        let panicked = Err(Error::Panicked { operation: "copy" });
        let running = Running { jobs: self.clone(), key: key.to_owned(), job: job.clone(), result: panicked };
        std::thread::Builder::new()
            .name("copy".to_owned())
            .spawn(move || {
                let result = work(&running.job.progress);
                running.end(result);
            })
            .map_err(|e| linux::Error::new("start thread for", key, e))
            .step("start copy")?;
        Ok(job)
    }

    pub(crate) fn find(&self, key: &str) -> Option<Arc<Job>> {
        self.locked().get(key).cloned()
    }

    /// The copies under way: done and total bytes, by key.
    pub(crate) fn list(&self) -> BTreeMap<String, (u64, u64)> {
        self.locked().iter().map(|(key, job)| (key.clone(), job.bytes())).collect()
    }

    /// The copy of `source` that is under way, if any.
    pub(crate) fn copying(&self, source: &str) -> Option<Arc<Job>> {
        self.locked().values().find(|job| job.source == source).cloned()
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<String, Arc<Job>>> {
        // Every critical section is one call of the map.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The result of a copy; a panic is a failure like others.
pub(crate) fn caught(copy: impl FnOnce() -> Result<()>) -> Result<()> {
    // Of what the copy changed, only the reason of its failure is used.
    std::panic::catch_unwind(AssertUnwindSafe(copy)).unwrap_or(Err(Error::Panicked { operation: "copy" }))
}

/// Completes the job however its thread ends.
struct Running {
    jobs: Jobs,
    key: String,
    job: Arc<Job>,
    result: Result<()>,
}

impl Running {
    fn end(mut self, result: Result<()>) {
        self.result = result;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.result, Ok(()));
        if let Err(error) = &result {
            tracing::warn!(copy = self.key, of = self.job.source, error = chain(error), "copy failed");
        }
        // Removed from the list first: a caller that sees the result may start the next copy with
        // this key.
        self.jobs.locked().remove(&self.key);
        *self.job.outcome() = Outcome::Ended(Some(result));
        self.job.ended.notify_all();
    }
}

impl Job {
    /// The copy's result, if it ends within `limit`. Only one caller gets it. ABORTED until then.
    pub(crate) fn wait(&self, what: impl Into<String>, limit: Duration) -> Result<()> {
        let outcome = self.outcome();
        let running = |outcome: &mut Outcome| matches!(outcome, Outcome::Running);
        let waited = self.ended.wait_timeout_while(outcome, limit, running);
        let (mut outcome, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match &mut *outcome {
            Outcome::Running => Err(self.under_way(what)),
            Outcome::Ended(result) => result.take().unwrap_or(Ok(())),
        }
    }

    /// Cancels the copy, and waits up to `limit` for its end.
    pub(crate) fn cancel(&self, what: impl Into<String>, limit: Duration) -> Result<()> {
        self.progress.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        match self.wait(what, limit) {
            Err(unfinished @ Error::Copying { .. }) => Err(unfinished),
            // It has ended; a failure is expected after a cancel.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// The progress: done and total bytes.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        let load = |n: &std::sync::atomic::AtomicU64| n.load(std::sync::atomic::Ordering::Relaxed);
        (load(&self.progress.done_bytes), load(&self.progress.total_bytes))
    }

    pub(crate) fn under_way(&self, what: impl Into<String>) -> Error {
        let (done_bytes, total_bytes) = self.bytes();
        Error::Copying { what: what.into(), done_bytes, total_bytes }
    }

    fn outcome(&self) -> MutexGuard<'_, Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn a_call_waits_as_long_as_it_may_and_the_next_finds_the_copy() {
        let jobs = Jobs::default();
        let (release, wait) = mpsc::channel::<()>();
        let job = jobs
            .start("copy", "original", 0, move |progress| {
                progress.total_bytes.store(9, Ordering::Relaxed);
                progress.done_bytes.store(3, Ordering::Relaxed);
                wait.recv().map_err(|_| Error::Panicked { operation: "test" })
            })
            .unwrap();
        ::tests::eventually("it has begun", TIMEOUT, || {
            anyhow::ensure!(job.bytes() == (3, 9), "{:?}", job.bytes());
            Ok(())
        })
        .unwrap();
        let error = job.wait("snapshot x", SHORT).unwrap_err().to_string();
        assert_eq!(error, "snapshot x is being copied: 3 of 9 bytes are done");
        let begun = Error::Copying { what: "snapshot x".into(), done_bytes: 0, total_bytes: 0 };
        assert_eq!(begun.to_string(), "snapshot x is being copied: the copy begins; call again");
        assert!(jobs.copying("original").is_some() && jobs.copying("copy").is_none());
        let again = jobs.find("copy").unwrap();
        release.send(()).unwrap();
        again.wait("snapshot x", TIMEOUT).unwrap();
        assert!(jobs.find("copy").is_none() && jobs.copying("original").is_none());
    }

    #[test]
    fn a_copy_that_panics_is_an_error_and_off_the_list() {
        let jobs = Jobs::default();
        let job = jobs.start("copy", "original", 0, |_| panic!("on purpose")).unwrap();
        assert!(matches!(job.wait("x", TIMEOUT), Err(Error::Panicked { .. })));
        assert!(jobs.find("copy").is_none());
    }

    #[test]
    fn a_panic_of_a_copy_is_a_result() {
        assert!(matches!(caught(|| panic!("on purpose")), Err(Error::Panicked { .. })));
        caught(|| Ok(())).unwrap();
    }

    #[test]
    fn cancel_stops_a_copy_and_waits_for_its_end() {
        let jobs = Jobs::default();
        let job = jobs
            .start("copy", "original", 0, |progress| {
                while !progress.stop.load(Ordering::Relaxed) {
                    std::thread::yield_now();
                }
                Err(Error::Panicked { operation: "test" })
            })
            .unwrap();
        job.cancel("x", TIMEOUT).unwrap();
        assert!(jobs.find("copy").is_none());
    }
}
