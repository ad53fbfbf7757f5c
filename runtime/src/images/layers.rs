//! Locks for layers under import, one for each digest. Imports of different layers do not wait for
//! each other, and no layer is removed during its import.
//!
//! Invariant: a layer's directory is removed only under [`Layers::unless_pinned`], and looked up
//! only by a holder of its pin.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct Layers(Mutex<BTreeMap<String, Arc<Mutex<()>>>>);

/// Prevents the removal of one layer.
#[derive(Debug)]
pub(crate) struct Pin<'a> {
    layers: &'a Layers,
    digest: String,
    lock: Option<Arc<Mutex<()>>>,
}

impl Layers {
    pub(crate) fn pin(&self, digest: &str) -> Pin<'_> {
        let lock = Arc::clone(self.locked().entry(digest.to_owned()).or_default());
        Pin { layers: self, digest: digest.to_owned(), lock: Some(lock) }
    }

    /// Does `removal` at once, or nothing if the layer is pinned. `removal` must be quick.
    pub(crate) fn unless_pinned<T>(&self, digest: &str, removal: impl FnOnce() -> T) -> Option<T> {
        let pinned = self.locked();
        (!pinned.contains_key(digest)).then(removal)
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Mutex<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pin<'_> {
    /// Waits for another import of the same layer.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ()> {
        let lock = self.lock.as_ref().expect("taken only by drop");
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        let mut pinned = self.layers.locked();
        self.lock = None;
        if pinned.get(&self.digest).is_some_and(|lock| Arc::strong_count(lock) == 1) {
            pinned.remove(&self.digest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_is_pinned_until_its_last_import_ends() {
        let layers = Layers::default();
        let (one, two) = (layers.pin("a"), layers.pin("a"));
        drop(one);
        assert_eq!(layers.unless_pinned("a", || 1), None);
        assert_eq!(layers.unless_pinned("b", || 1), Some(1));
        drop(two.lock());
        drop(two);
        assert_eq!(layers.unless_pinned("a", || 1), Some(1));
    }

    #[test]
    fn other_layers_do_not_wait() {
        let layers = Layers::default();
        let (one, other) = (layers.pin("a"), layers.pin("b"));
        let _held = one.lock();
        drop(other.lock());
    }
}
