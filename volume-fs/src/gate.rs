//! The way of every request that changes something. While it is shut nothing
//! changes: the use is being counted, or a snapshot is being cut.
//!
//! A change that comes meanwhile is put aside, so that the event loops go on
//! answering reads; what would take too much memory waits where it is.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::EventfdFlags;

/// Data of requests put aside; beyond it event loops wait.
const MOST_BYTES_ASIDE: usize = 8 << 20;
/// Requests put aside.
const MOST_ASIDE: usize = 1024;

/// A request that was put aside. Its size is data that it keeps.
type Job = Box<dyn FnOnce() + Send>;

pub(crate) struct Gate {
    state: Mutex<State>,
    opened: Condvar,
    /// See [`Gate::still`].
    still: OwnedFd,
}

/// Why it is shut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Counting,
    Pause,
}

#[derive(Default)]
struct State {
    counting: bool,
    paused: bool,
    inside: usize,
    aside: VecDeque<Job>,
    bytes_aside: usize,
}

/// A change that is being made.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
}

/// It is shut, and stays as it is while this is held.
pub(crate) struct Shut<'a> {
    gate: &'a Gate,
    state: MutexGuard<'a, State>,
}

impl Gate {
    pub(crate) fn new(counting: bool) -> rustix::io::Result<Self> {
        let still = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = State { counting, ..State::default() };
        Ok(Self { state: Mutex::new(state), opened: Condvar::new(), still })
    }

    pub(crate) fn enter(&self) -> Result<Pass<'_>, Shut<'_>> {
        let mut state = self.state();
        if state.is_shut() {
            return Err(Shut { gate: self, state });
        }
        state.inside += 1;
        Ok(Pass { gate: self })
    }

    /// Nobody enters from now on; those inside go on. [`Self::still`] says when they are through.
    pub(crate) fn shut(&self, reason: Reason) {
        let mut state = self.state();
        *state.reason(reason) = true;
        if state.inside == 0 {
            self.say_still();
        }
    }

    /// Ends one reason, and the shutting with the last one: what was put aside is done.
    pub(crate) fn open(self: &Arc<Self>, reason: Reason) {
        let mut state = self.state();
        *state.reason(reason) = false;
        if state.is_shut() {
            // Whoever waits for stillness may have waited for this.
            self.say_still();
            return;
        }
        let aside = std::mem::take(&mut state.aside);
        state.bytes_aside = 0;
        // Inside already: the next pause waits for them.
        state.inside += aside.len();
        drop(state);
        self.opened.notify_all();
        self.catch_up(aside);
    }

    /// Whether nothing changes, and nothing will until [`Self::open`].
    pub(crate) fn is_still(&self) -> bool {
        let state = self.state();
        state.is_shut() && state.inside == 0
    }

    /// Readable when [`Self::is_still`] may have become true, or a reason to shut has ended.
    pub(crate) fn still(&self) -> BorrowedFd<'_> {
        self.still.as_fd()
    }

    pub(crate) fn clear_still(&self) {
        // EAGAIN: it was clear.
        rustix::io::read(&self.still, &mut [0_u8; 8]).unwrap_or_default();
    }

    /// In a thread of its own, or, if there can be none, here.
    fn catch_up(self: &Arc<Self>, aside: VecDeque<Job>) {
        if aside.is_empty() {
            return;
        }
        let aside = Arc::new(Mutex::new(aside));
        let (gate, theirs) = (Arc::clone(self), Arc::clone(&aside));
        let thread = std::thread::Builder::new().name("catch-up".to_owned()).stack_size(256 << 10);
        if thread.spawn(move || gate.do_all(&theirs)).is_err() {
            self.do_all(&aside);
        }
    }

    fn do_all(&self, aside: &Mutex<VecDeque<Job>>) {
        loop {
            let job = aside.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(job) = job else { return };
            let _entered_by_open = Pass { gate: self };
            job();
        }
    }

    fn leave(&self) {
        let mut state = self.state();
        state.inside -= 1;
        if state.inside == 0 && state.is_shut() {
            self.say_still();
        }
    }

    fn say_still(&self) {
        // EAGAIN: it has said so very often.
        rustix::io::write(&self.still, &1_u64.to_ne_bytes()).unwrap_or_default();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_shut(&self) -> bool {
        self.counting || self.paused
    }

    fn reason(&mut self, reason: Reason) -> &mut bool {
        match reason {
            Reason::Counting => &mut self.counting,
            Reason::Pause => &mut self.paused,
        }
    }
}

impl<'a> Shut<'a> {
    /// Whether a request with so much data may be put aside.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.state.aside.len() < MOST_ASIDE && self.state.bytes_aside + bytes <= MOST_BYTES_ASIDE
    }

    /// Puts a request aside, which keeps so much data.
    pub(crate) fn put_aside(mut self, bytes: usize, job: Job) {
        self.state.bytes_aside += bytes;
        self.state.aside.push_back(job);
    }

    /// Waits until it is open.
    pub(crate) fn wait(self) -> Pass<'a> {
        let Self { gate, state } = self;
        let opened = gate.opened.wait_while(state, |state| state.is_shut());
        opened.unwrap_or_else(PoisonError::into_inner).inside += 1;
        Pass { gate }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.leave();
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        f.debug_struct("Gate")
            .field("counting", &state.counting)
            .field("paused", &state.paused)
            .field("inside", &state.inside)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Shut<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Shut")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn gate() -> Arc<Gate> {
        Arc::new(Gate::new(false).unwrap())
    }

    fn readable(gate: &Gate) -> bool {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(gate.still(), rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() == 1
    }

    #[test]
    fn it_is_still_when_the_last_one_inside_has_left() {
        let gate = gate();
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        gate.shut(Reason::Pause);
        drop(one);
        assert!(!gate.is_still() && !readable(&gate));
        drop(two);
        assert!(gate.is_still() && readable(&gate));
        gate.clear_still();
        assert!(gate.is_still() && !readable(&gate));
        gate.open(Reason::Pause);
        assert!(!gate.is_still());
        gate.enter().unwrap();
    }

    #[test]
    fn two_reasons_to_shut_take_two_openings() {
        let gate = Arc::new(Gate::new(true).unwrap());
        gate.shut(Reason::Pause);
        gate.open(Reason::Pause);
        assert!(gate.enter().is_err(), "it still counts");
        gate.shut(Reason::Pause);
        gate.clear_still();
        gate.open(Reason::Counting);
        assert!(gate.is_still() && readable(&gate), "the end of the count is told");
        gate.open(Reason::Pause);
        gate.enter().unwrap();
    }

    #[test]
    fn what_is_put_aside_is_done_in_order_after_the_opening_and_before_the_next_stillness() {
        let gate = gate();
        gate.shut(Reason::Pause);
        let (done, told) = channel();
        let (go, wait) = channel::<()>();
        let first = done.clone();
        gate.enter().unwrap_err().put_aside(
            1,
            Box::new(move || {
                wait.recv().unwrap();
                first.send(1).unwrap();
            }),
        );
        gate.enter().unwrap_err().put_aside(1, Box::new(move || done.send(2).unwrap()));
        told.try_recv().unwrap_err();
        gate.open(Reason::Pause);
        gate.shut(Reason::Pause);
        assert!(!gate.is_still(), "both are inside");
        go.send(()).unwrap();
        assert_eq!((told.recv(), told.recv()), (Ok(1), Ok(2)));
        assert!(told.recv().is_err(), "and gone");
    }

    #[test]
    fn what_takes_too_much_memory_waits_for_the_opening() {
        let gate = gate();
        gate.shut(Reason::Pause);
        let shut = gate.enter().unwrap_err();
        assert!(shut.has_room(MOST_BYTES_ASIDE) && !shut.has_room(MOST_BYTES_ASIDE + 1));
        shut.put_aside(MOST_BYTES_ASIDE, Box::new(|| {}));
        assert!(!gate.enter().unwrap_err().has_room(1));
        std::thread::scope(|scope| {
            let (found_it_shut, told) = channel();
            let gate = &gate;
            let waiting = scope.spawn(move || {
                let shut = gate.enter().unwrap_err();
                found_it_shut.send(()).unwrap();
                drop(shut.wait());
            });
            told.recv().unwrap();
            gate.open(Reason::Pause);
            waiting.join().unwrap();
        });
        gate.enter().unwrap();
    }
}
