//! Who waits for the end of a program that exec has started, or of a client's connection with a container.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// By the id that the runtime has chosen. `T`: how it ended.
#[derive(Debug)]
pub(crate) struct Waiters<T>(Mutex<HashMap<String, Waiting<T>>>);

#[derive(Debug)]
struct Waiting<T> {
    sandbox: String,
    /// Gets the end, or is dropped with the shim.
    caller: oneshot::Sender<T>,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Waiters<T> {
    pub(crate) fn expect(&self, id: &str, sandbox: &str) -> oneshot::Receiver<T> {
        let (caller, ended) = oneshot::channel();
        self.locked().insert(id.to_owned(), Waiting { sandbox: sandbox.to_owned(), caller });
        ended
    }

    pub(crate) fn forget(&self, id: &str) {
        self.locked().remove(id);
    }

    pub(crate) fn ended(&self, id: &str, end: T) {
        if let Some(waiting) = self.locked().remove(id) {
            let _caller_gone = waiting.caller.send(end);
        }
    }

    /// The sandbox's shim is gone, and with it all of them.
    pub(crate) fn lost(&self, sandbox: &str) {
        self.locked().retain(|_, waiting| waiting.sandbox != sandbox);
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<String, Waiting<T>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
