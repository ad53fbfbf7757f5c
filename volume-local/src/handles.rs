//! Open files and directories, by the handle numbers that the kernel uses.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;
use volume_fs::file::Handle;

use crate::errno::Result;

/// Numbers are never reused, so a late request cannot reach another file.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    most: usize,
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    /// `most`: the limit of open handles.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, next: AtomicU64::new(1), open: RwLock::new(HashMap::new()) }
    }

    /// Called before an open. Concurrent calls may all succeed: an event loop opens one file at a
    /// time.
    pub(crate) fn admit(&self) -> Result<()> {
        if self.count() < self.most { Ok(()) } else { Err(Errno::MFILE) }
    }

    pub(crate) fn insert(&self, item: T) -> Handle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(item));
        Handle(number)
    }

    pub(crate) fn get(&self, handle: Handle) -> Result<Arc<T>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.get(&handle.0).cloned().ok_or(Errno::BADF)
    }

    /// All open handles, with their numbers.
    pub(crate) fn all(&self) -> Vec<(u64, Arc<T>)> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.iter().map(|(number, item)| (*number, Arc::clone(item))).collect()
    }

    /// This number and higher ones are unused.
    pub(crate) fn next(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self) -> usize {
        self.open.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// Removes and returns the handle; it closes when the last request that uses it ends.
    pub(crate) fn remove(&self, handle: Handle) -> Option<Arc<T>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_handle_is_bad_and_its_number_is_not_used_again() {
        let handles = Handles::new(2);
        let first = handles.insert("a");
        assert_eq!(handles.remove(first).as_deref(), Some(&"a"));
        assert_eq!(handles.get(first), Err(Errno::BADF));
        assert_ne!(handles.insert("b"), first);
        assert_eq!(handles.admit(), Ok(()));
        handles.insert("c");
        assert_eq!(handles.admit(), Err(Errno::MFILE));
    }
}
