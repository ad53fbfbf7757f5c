//! What is open: file handle numbers for the kernel, the open things for us.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use fuser::FileHandle;
use rustix::io::Errno;

use crate::errno::Result;

/// Numbers are never used twice, so that a late request cannot meet another file.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    pub(crate) fn new() -> Self {
        Self { next: AtomicU64::new(1), open: RwLock::new(HashMap::new()) }
    }

    pub(crate) fn insert(&self, item: T) -> FileHandle {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::new(item));
        FileHandle(number)
    }

    pub(crate) fn get(&self, handle: FileHandle) -> Result<Arc<T>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        open.get(&handle.0).cloned().ok_or(Errno::BADF)
    }

    pub(crate) fn count(&self) -> usize {
        self.open.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// What it was; it closes when the last request that uses it is done.
    pub(crate) fn remove(&self, handle: FileHandle) -> Option<Arc<T>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&handle.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_handle_is_bad_and_its_number_is_not_used_again() {
        let handles = Handles::new();
        let first = handles.insert("a");
        assert_eq!(handles.remove(first).as_deref(), Some(&"a"));
        assert_eq!(handles.get(first), Err(Errno::BADF));
        assert_ne!(handles.insert("b"), first);
    }
}
