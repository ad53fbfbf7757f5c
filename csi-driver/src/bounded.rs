//! System calls that may never return, on threads that may be left behind.

use std::collections::HashSet;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use crate::error::{Error, Result, Step};

/// Does `work` on a thread of its own, and waits `limit` for it. The thread of
/// one that takes longer goes on; its result is dropped.
pub(crate) fn within<T: Send + 'static>(
    what: impl Into<String>,
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T> {
    let what = what.into();
    let (done, finished) = mpsc::channel();
    std::thread::Builder::new()
        .name("bounded".to_owned())
        .spawn(move || {
            // Nobody listens any more once the limit is over.
            let _too_late = done.send(work());
        })
        .map_err(|e| linux::Error::new("start thread for", &what, e))
        .step("start thread")?;
    finished.recv_timeout(limit).map_err(|_| Error::Deadline { what, limit })
}

/// At most one piece of work a key: while one is stuck, no second joins it.
#[derive(Debug)]
pub(crate) struct OneEach<K> {
    busy: Arc<Mutex<HashSet<K>>>,
}

impl<K> Default for OneEach<K> {
    fn default() -> Self {
        Self { busy: Arc::default() }
    }
}

impl<K: Clone + Eq + Hash + Send + 'static> OneEach<K> {
    /// [`within`]; refused with the same error, at once, while an earlier one for
    /// `key` goes on.
    pub(crate) fn within<T: Send + 'static>(
        &self,
        key: &K,
        what: impl Into<String>,
        limit: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let what = what.into();
        let Some(turn) = self.turn(key) else { return Err(Error::Deadline { what, limit }) };
        within(what, limit, move || {
            let _until_it_returns = turn;
            work()
        })
    }

    fn turn(&self, key: &K) -> Option<Turn<K>> {
        let is_first = lock(&self.busy).insert(key.clone());
        is_first.then(|| Turn { busy: self.busy.clone(), key: key.clone() })
    }
}

#[derive(Debug)]
struct Turn<K: Eq + Hash> {
    busy: Arc<Mutex<HashSet<K>>>,
    key: K,
}

impl<K: Eq + Hash> Drop for Turn<K> {
    fn drop(&mut self) {
        lock(&self.busy).remove(&self.key);
    }
}

fn lock<K>(busy: &Mutex<HashSet<K>>) -> MutexGuard<'_, HashSet<K>> {
    busy.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn what_does_not_return_is_left_behind_and_keeps_its_key_until_it_does() {
        let each = OneEach::default();
        let (release, wait) = mpsc::channel::<()>();
        let stuck = each.within(&1, "look", SHORT, move || wait.recv()).unwrap_err();
        assert!(matches!(stuck, Error::Deadline { .. }), "{stuck}");
        assert!(each.within(&1, "look", PATIENCE, || ()).is_err(), "refused without a thread");
        assert_eq!(each.within(&2, "look", PATIENCE, || 7).unwrap(), 7, "another key is not concerned");
        release.send(()).unwrap();
        ::tests::eventually("the key is free", PATIENCE, || Ok(each.within(&1, "look", PATIENCE, || ())?))
            .unwrap();
    }
}
