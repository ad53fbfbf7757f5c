//! What is open: file handle numbers for the kernel, the open things for us.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;
use volume_fs::file::Handle;

use crate::errno::Result;

/// Numbers are never used twice, so that a late request cannot meet another file.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    most: usize,
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    /// `most`: beyond it nothing is opened.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, next: AtomicU64::new(1), open: RwLock::new(HashMap::new()) }
    }

    /// To be asked before something is opened. Those who ask at the same time
    /// may all be told yes: an event loop opens one thing at a time.
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

    /// All that is open, with its number.
    pub(crate) fn all(&self) -> Vec<(u64, Arc<T>)> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.iter().map(|(number, item)| (*number, Arc::clone(item))).collect()
    }

    /// Numbers from this one on were never used.
    pub(crate) fn next(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self) -> usize {
        self.open.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// What it was; it closes when the last request that uses it is done.
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
