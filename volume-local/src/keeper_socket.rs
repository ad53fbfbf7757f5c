//! The socket to the keeper. The keeper may die, and another one takes its place.

use std::sync::{Arc, PoisonError, RwLock};

use keeper::daemon::Removed;

#[derive(Debug)]
pub(crate) struct KeeperSocket(RwLock<Arc<Removed>>);

impl KeeperSocket {
    pub(crate) fn new(keeper: Arc<Removed>) -> Self {
        Self(RwLock::new(keeper))
    }

    pub(crate) fn now(&self) -> Arc<Removed> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn replace(&self, keeper: Arc<Removed>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keeper;
    }
}
