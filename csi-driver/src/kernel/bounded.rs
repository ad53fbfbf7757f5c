//! Runs system calls that may never return, on threads that can be abandoned.

mod threads;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};

/// Does `work` on a separate thread and waits up to `limit` for it. After that the thread
/// continues, and its result is dropped.
pub(crate) fn within<T: Send + 'static>(
    what: impl Into<String>,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let what = what.into();
    let (done, finished) = mpsc::channel();
    threads::give(&what, move || {
        // The caller has gone if the limit is over.
        let _too_late = done.send(work());
    })?;
    finished.recv_timeout(limit).map_err(|_| Error::Deadline { what, limit })
}

/// At most one piece of work for each key; while one is stuck, a second is refused.
#[derive(Debug)]
pub(crate) struct OneEach<K> {
    busy: Arc<Mutex<HashMap<K, Interrupt>>>,
}

/// Ends the wait of the caller, while the work continues.
struct Interrupt(Box<dyn Fn() + Send>);

impl fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Interrupt")
    }
}

impl<K> Default for OneEach<K> {
    fn default() -> Self {
        Self { busy: Arc::default() }
    }
}

impl<K: Clone + Eq + Hash + Send + 'static> OneEach<K> {
    /// [`within`]; refused at once, with the same error, while an earlier call for `key` is under
    /// way. [`Self::interrupt`] ends the wait with [`Error::Interrupted`].
    pub(crate) fn within<T: Send + 'static>(
        &self,
        key: &K,
        what: impl Into<String>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let what = what.into();
        let (done, finished) = mpsc::channel();
        let interrupted = done.clone();
        // The caller may have gone.
        let interrupt = Interrupt(Box::new(move || drop(interrupted.send(None))));
        let Some(turn) = self.turn(key, interrupt) else { return Err(Error::Deadline { what, limit }) };
        threads::give(&what, move || {
            let result = work();
            // The caller may begin the next work for the key at once.
            drop(turn);
            drop(done.send(Some(result)));
        })?;
        match finished.recv_timeout(limit) {
            Ok(Some(result)) => Ok(result),
            Ok(None) => Err(Error::Interrupted { what }),
            Err(_) => Err(Error::Deadline { what, limit }),
        }
    }

    /// Ends the wait for the work for `key`, which cannot end: it needs something that the caller keeps
    /// back.
    pub(crate) fn interrupt(&self, key: &K) {
        if let Some(Interrupt(interrupt)) = lock(&self.busy).get(key) {
            interrupt();
        }
    }

    fn turn(&self, key: &K, interrupt: Interrupt) -> Option<Turn<K>> {
        match lock(&self.busy).entry(key.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(free) => {
                free.insert(interrupt);
                Some(Turn { busy: self.busy.clone(), key: key.clone() })
            }
        }
    }
}

#[derive(Debug)]
struct Turn<K: Eq + Hash> {
    busy: Arc<Mutex<HashMap<K, Interrupt>>>,
    key: K,
}

impl<K: Eq + Hash> Drop for Turn<K> {
    fn drop(&mut self) {
        lock(&self.busy).remove(&self.key);
    }
}

/// One piece of work after the other for each key. While one is stuck, further ones for its key are
/// refused without taking a thread.
#[derive(Debug)]
pub(crate) struct InTurn<K> {
    turns: Arc<Turns<K>>,
}

#[derive(Debug)]
struct Turns<K> {
    /// The start time of the work under way, by key.
    busy: Mutex<HashMap<K, Instant>>,
    ended: Condvar,
}

impl<K> Default for InTurn<K> {
    fn default() -> Self {
        Self { turns: Arc::new(Turns { busy: Mutex::default(), ended: Condvar::new() }) }
    }
}

impl<K: Clone + Eq + Hash + Send + 'static> InTurn<K> {
    /// [`within`], after the work for `key` that is under way. That work has `limit` from its own
    /// start; then the wait fails.
    pub(crate) fn within<T: Send + 'static>(
        &self,
        key: &K,
        what: impl Into<String>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let what = what.into();
        let Some(turn) = self.turn(key, limit) else { return Err(Error::Deadline { what, limit }) };
        within(what, limit, move || {
            let _until_it_returns = turn;
            work()
        })
    }

    fn turn(&self, key: &K, limit: Duration) -> Option<InTurnGuard<K>> {
        let mut busy = lock(&self.turns.busy);
        while let Some(begun) = busy.get(key) {
            let left = limit.checked_sub(begun.elapsed()).filter(|left| !left.is_zero())?;
            busy = self.turns.ended.wait_timeout(busy, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        busy.insert(key.clone(), Instant::now());
        Some(InTurnGuard { turns: self.turns.clone(), key: key.clone() })
    }
}

struct InTurnGuard<K: Eq + Hash> {
    turns: Arc<Turns<K>>,
    key: K,
}

impl<K: Eq + Hash> Drop for InTurnGuard<K> {
    fn drop(&mut self) {
        lock(&self.turns.busy).remove(&self.key);
        self.turns.ended.notify_all();
    }
}

/// At most one piece of work for each key; all callers during that time share its result.
#[derive(Debug)]
pub(crate) struct Shared<K, T> {
    under_way: Arc<Mutex<HashMap<K, Arc<Work<T>>>>>,
}

#[derive(Debug)]
struct Work<T> {
    begun: Instant,
    outcome: Mutex<Outcome<T>>,
    ended: Condvar,
}

#[derive(Debug)]
enum Outcome<T> {
    Awaited,
    /// `None` after a panic.
    Ended(Option<T>),
}

impl<K, T> Default for Shared<K, T> {
    fn default() -> Self {
        Self { under_way: Arc::default() }
    }
}

impl<K, T> Shared<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Clone + Send + 'static,
{
    /// [`within`] for the first caller. Later callers get its result, or the same error once their
    /// own limit is over.
    pub(crate) fn within(
        &self,
        key: &K,
        what: impl Into<String>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let what = what.into();
        let (shared, is_first) = self.join(key);
        if is_first {
            let ending = Ending { under_way: self.under_way.clone(), key: key.clone(), work: shared.clone() };
            threads::give(&what, move || ending.end(work()))?;
        }
        let left = limit.saturating_sub(shared.begun.elapsed());
        let awaited = |outcome: &mut Outcome<T>| matches!(outcome, Outcome::Awaited);
        let (outcome, _) = shared
            .ended
            .wait_timeout_while(lock(&shared.outcome), left, awaited)
            .unwrap_or_else(PoisonError::into_inner);
        match &*outcome {
            Outcome::Awaited => Err(Error::Deadline { what, limit }),
            Outcome::Ended(Some(result)) => Ok(result.clone()),
            Outcome::Ended(None) => Err(Error::Panicked { operation: "shared look" }),
        }
    }

    /// The work for `key`, and whether the caller must start it.
    fn join(&self, key: &K) -> (Arc<Work<T>>, bool) {
        let mut under_way = lock(&self.under_way);
        if let Some(work) = under_way.get(key) {
            return (work.clone(), false);
        }
        let (begun, outcome) = (Instant::now(), Mutex::new(Outcome::Awaited));
        let work = Arc::new(Work { begun, outcome, ended: Condvar::new() });
        under_way.insert(key.clone(), work.clone());
        (work, true)
    }
}

/// Completes the work however its thread ends, or if it cannot start.
struct Ending<K: Eq + Hash, T> {
    under_way: Arc<Mutex<HashMap<K, Arc<Work<T>>>>>,
    key: K,
    work: Arc<Work<T>>,
}

impl<K: Eq + Hash, T> Ending<K, T> {
    fn end(self, result: T) {
        *lock(&self.work.outcome) = Outcome::Ended(Some(result));
    }
}

impl<K: Eq + Hash, T> Drop for Ending<K, T> {
    fn drop(&mut self) {
        lock(&self.under_way).remove(&self.key);
        let mut outcome = lock(&self.work.outcome);
        if matches!(*outcome, Outcome::Awaited) {
            *outcome = Outcome::Ended(None);
        }
        self.work.ended.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn all_who_ask_meanwhile_share_one_result() {
        let shared = Arc::new(Shared::<u8, usize>::default());
        let (release, wait) = mpsc::channel::<()>();
        let begun = Arc::new(Mutex::new(0));
        let wait = Arc::new(Mutex::new(wait));
        let ask = || {
            let (shared, begun, wait) = (shared.clone(), begun.clone(), wait.clone());
            std::thread::spawn(move || {
                shared.within(&1, "look", TIMEOUT, move || {
                    *lock(&begun) += 1;
                    lock(&wait).recv().unwrap();
                    7
                })
            })
        };
        let asking: Vec<_> = (0..4).map(|_| ask()).collect();
        ::tests::eventually("all have joined", TIMEOUT, || {
            // The map's, the thread's, and one for each who waits.
            let count = lock(&shared.under_way).get(&1).map(Arc::strong_count);
            anyhow::ensure!(count == Some(6), "{count:?}");
            Ok(())
        })
        .unwrap();
        release.send(()).unwrap();
        for asked in asking {
            assert_eq!(asked.join().unwrap().unwrap(), 7);
        }
        assert_eq!(*lock(&begun), 1);
        assert_eq!(shared.within(&1, "look", TIMEOUT, || 8).unwrap(), 8, "the next begins anew");
    }

    #[test]
    fn who_joins_what_is_stuck_waits_no_longer_than_the_first() {
        let shared = Shared::<u8, ()>::default();
        let (release, wait) = mpsc::channel::<()>();
        let stuck = shared.within(&1, "look", SHORT, move || wait.recv().unwrap()).unwrap_err();
        assert!(matches!(stuck, Error::Deadline { .. }), "{stuck}");
        let joined = shared.within(&1, "look", SHORT, || ()).unwrap_err();
        assert!(matches!(joined, Error::Deadline { .. }), "{joined}");
        let panicked = shared.within(&2, "look", TIMEOUT, || panic!("on purpose")).unwrap_err();
        assert!(matches!(panicked, Error::Panicked { .. }), "{panicked}");
        release.send(()).unwrap();
        ::tests::eventually("it begins anew", TIMEOUT, || Ok(shared.within(&1, "look", TIMEOUT, || ())?))
            .unwrap();
    }

    fn wait_until_free(each: &OneEach<i32>) {
        ::tests::eventually("the key is free", TIMEOUT, || Ok(each.within(&1, "look", TIMEOUT, || ())?))
            .unwrap();
    }

    #[test]
    fn what_does_not_return_is_left_behind_and_keeps_its_key_until_it_does() {
        let each = OneEach::default();
        let (release, wait) = mpsc::channel::<()>();
        let stuck = each.within(&1, "look", SHORT, move || wait.recv()).unwrap_err();
        assert!(matches!(stuck, Error::Deadline { .. }), "{stuck}");
        assert!(each.within(&1, "look", TIMEOUT, || ()).is_err(), "refused without a thread");
        assert_eq!(each.within(&2, "look", TIMEOUT, || 7).unwrap(), 7, "another key is not concerned");
        release.send(()).unwrap();
        wait_until_free(&each);
    }

    #[test]
    fn who_waits_for_work_of_one_key_can_be_interrupted() {
        let each = Arc::new(OneEach::default());
        let (release, wait) = mpsc::channel::<()>();
        let waiting = each.clone();
        let waiting = std::thread::spawn(move || waiting.within(&1, "look", TIMEOUT, move || wait.recv()));
        ::tests::eventually("it is interrupted", TIMEOUT, || {
            each.interrupt(&1);
            anyhow::ensure!(waiting.is_finished());
            Ok(())
        })
        .unwrap();
        let interrupted = waiting.join().unwrap().unwrap_err();
        assert!(matches!(interrupted, Error::Interrupted { .. }), "{interrupted}");
        assert!(each.within(&1, "look", TIMEOUT, || ()).is_err(), "it is still under way");
        release.send(()).unwrap();
        wait_until_free(&each);
    }

    #[test]
    fn work_of_one_key_is_done_in_turn_and_behind_stuck_work_refused_at_once() {
        let turns = Arc::new(InTurn::default());
        let (release, wait) = mpsc::channel::<()>();
        let first = turns.clone();
        let first = std::thread::spawn(move || first.within(&1, "look", TIMEOUT, move || wait.recv()));
        ::tests::eventually("it is under way", TIMEOUT, || {
            anyhow::ensure!(lock(&turns.turns.busy).contains_key(&1));
            Ok(())
        })
        .unwrap();
        assert!(turns.within(&1, "look", SHORT, || ()).is_err(), "refused after its limit");
        assert_eq!(turns.within(&2, "look", TIMEOUT, || 7).unwrap(), 7, "another key is not concerned");
        let second = turns.clone();
        let second = std::thread::spawn(move || second.within(&1, "look", TIMEOUT, || 8));
        release.send(()).unwrap();
        first.join().unwrap().unwrap().unwrap();
        assert_eq!(second.join().unwrap().unwrap(), 8);
    }
}
