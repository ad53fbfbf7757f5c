//! The threads for bounded work. A thread that has finished waits briefly for more work: one call
//! of the driver has several pieces, each shorter than a thread's start.
//!
//! Invariant: only an idle thread gets work. Work is never queued behind other work, which may
//! never return.

use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SendError, Sender};
use std::thread;
use std::time::Duration;

use super::lock;
use crate::error::{Result, Step};

/// How long a thread waits for more work.
const IDLE: Duration = Duration::from_secs(2);
/// Most threads that wait.
const MAX_IDLE: usize = 4;

type Work = Box<dyn FnOnce() + Send>;

/// The channels of the idle threads; the last one is used first. The caller that removes a thread
/// from the list must send it work.
static WAITING: Mutex<Vec<(thread::ThreadId, Sender<Work>)>> = Mutex::new(Vec::new());

/// Lets an idle thread, or a new one, do `work`. `what` is for the error.
pub(super) fn give(what: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let mut work: Work = Box::new(work);
    loop {
        let Some((_, thread)) = lock(&WAITING).pop() else { break };
        match thread.send(work) {
            Ok(()) => return Ok(()),
            Err(SendError(unsent)) => work = unsent,
        }
    }
    let started = thread::Builder::new().name("bounded".to_owned()).spawn(move || work_on(work));
    started.map(drop).map_err(|e| linux::Error::new("start thread for", what, e)).step("start thread")
}

fn work_on(first: Work) {
    first();
    let (sender, given) = mpsc::channel();
    while wait_with(&sender)
        && let Some(work) = next(&given)
    {
        work();
    }
}

/// False: enough threads wait already.
fn wait_with(sender: &Sender<Work>) -> bool {
    let mut waiting = lock(&WAITING);
    let is_wanted = waiting.len() < MAX_IDLE;
    if is_wanted {
        waiting.push((thread::current().id(), sender.clone()));
    }
    is_wanted
}

fn next(given: &Receiver<Work>) -> Option<Work> {
    match given.recv_timeout(IDLE) {
        Ok(work) => Some(work),
        Err(RecvTimeoutError::Timeout) if !leave() => given.recv().ok(),
        Err(_) => None,
    }
}

/// False: this thread was taken from the list, and its work is on the way.
fn leave() -> bool {
    let own = thread::current().id();
    let mut waiting = lock(&WAITING);
    let before = waiting.len();
    waiting.retain(|(thread, _)| *thread != own);
    waiting.len() < before
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME_LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn work_never_waits_behind_other_work() {
        let (release, wait) = mpsc::channel::<()>();
        let wait = std::sync::Arc::new(Mutex::new(wait));
        let (done, finished) = mpsc::channel();
        // More of it than threads that may wait, so that some are started for it.
        for _ in 0..3 * MAX_IDLE {
            let wait = wait.clone();
            give("stuck work", move || assert!(wait.lock().unwrap().recv().is_err())).unwrap();
        }
        for number in 0..100 {
            let done = done.clone();
            give("work", move || done.send(number).unwrap()).unwrap();
            assert_eq!(finished.recv_timeout(TIME_LIMIT), Ok(number));
        }
        drop(release);
    }

    #[test]
    fn a_thread_does_more_than_one_piece_of_work_and_ends_by_a_panic() {
        let (done, finished) = mpsc::channel();
        let mut seen = std::collections::HashSet::new();
        let is_seen_again = (0..100).any(|_| {
            let done = done.clone();
            give("work", move || done.send(thread::current().id()).unwrap()).unwrap();
            let is_new = seen.insert(finished.recv_timeout(TIME_LIMIT).unwrap());
            give("panic", || panic!("on purpose")).unwrap();
            !is_new
        });
        assert!(is_seen_again, "each was done by another thread");
        let (done, finished) = mpsc::channel();
        give("work", move || done.send(()).unwrap()).unwrap();
        assert_eq!(finished.recv_timeout(TIME_LIMIT), Ok(()));
    }
}
