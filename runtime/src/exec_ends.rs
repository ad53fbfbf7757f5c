//! Who waits for the end of a program that exec has started.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// The callers that wait for the end of a program.
#[derive(Debug, Default)]
pub(crate) struct Execs(Mutex<HashMap<String, Waiting>>);

#[derive(Debug)]
struct Waiting {
    sandbox: String,
    /// Gets the exit code, or is dropped with the shim.
    caller: oneshot::Sender<i32>,
}

impl Execs {
    pub(crate) fn expect(&self, exec: &str, sandbox: &str) -> oneshot::Receiver<i32> {
        let (caller, ended) = oneshot::channel();
        self.locked().insert(exec.to_owned(), Waiting { sandbox: sandbox.to_owned(), caller });
        ended
    }

    pub(crate) fn forget(&self, exec: &str) {
        self.locked().remove(exec);
    }

    pub(crate) fn ended(&self, exec: &str, code: i32) {
        if let Some(waiting) = self.locked().remove(exec) {
            let _caller_gone = waiting.caller.send(code);
        }
    }

    /// The sandbox's shim is gone, and with it all programs.
    pub(crate) fn lost(&self, sandbox: &str) {
        self.locked().retain(|_, waiting| waiting.sandbox != sandbox);
    }

    fn locked(&self) -> MutexGuard<'_, HashMap<String, Waiting>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
