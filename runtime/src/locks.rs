//! One lock for each of many keys.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Locks `L` by key. A lock takes memory only while it is held or waited for.
#[derive(Debug, Default)]
pub struct Locks<K, L>(Mutex<HashMap<K, Weak<L>>>);

impl<K: Eq + Hash, L: Default> Locks<K, L> {
    /// The lock of `key`.
    pub fn of<Q: Eq + Hash + ToOwned<Owned = K> + ?Sized>(&self, key: &Q) -> Arc<L>
    where
        K: Borrow<Q>,
    {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| lock.strong_count() > 0);
        if let Some(lock) = locks.get(key).and_then(Weak::upgrade) {
            return lock;
        }
        let lock = Arc::default();
        locks.insert(key.to_owned(), Arc::downgrade(&lock));
        lock
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_one_lock_and_takes_no_memory_without_users() {
        let locks: Locks<String, Mutex<()>> = Locks::default();
        let (first, second, other) = (locks.of("a"), locks.of("a"), locks.of("b"));
        assert!(Arc::ptr_eq(&first, &second) && !Arc::ptr_eq(&first, &other));
        drop((first, second, other));
        let _held = locks.of("c");
        assert_eq!(locks.0.lock().unwrap().len(), 1);
    }
}
