//! The way of every request that changes something, for backends that can hold changes back.
//! While it is shut nothing changes: the use is being counted, or a snapshot is being cut.
//!
//! A change that comes meanwhile is put aside, so that the event loops go on
//! answering reads; what would take too much memory waits where it is.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Data of requests put aside; beyond it event loops wait.
const MOST_BYTES_ASIDE: usize = 8 << 20;
/// Requests put aside.
const MOST_ASIDE: usize = 1024;

/// A request that was put aside. Its size is data that it keeps.
type Job = Box<dyn FnOnce() + Send>;

pub struct Gate {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Default)]
struct State {
    counting: bool,
    paused: bool,
    inside: usize,
    aside: VecDeque<Job>,
    bytes_aside: usize,
    /// To be called when the pause has begun.
    when_still: Option<Job>,
}

/// A change that is being made.
#[derive(Debug)]
pub struct Pass<'a> {
    gate: &'a Gate,
}

/// It is shut, and stays as it is while this is held.
pub struct Shut<'a> {
    gate: &'a Gate,
    state: MutexGuard<'a, State>,
}

impl Gate {
    /// `counting`: shut until [`Self::counted`].
    pub fn new(counting: bool) -> Self {
        Self { state: Mutex::new(State { counting, ..State::default() }), opened: Condvar::new() }
    }

    pub fn enter(&self) -> Result<Pass<'_>, Shut<'_>> {
        let mut state = self.state();
        if state.is_shut() {
            return Err(Shut { gate: self, state });
        }
        state.inside += 1;
        Ok(Pass { gate: self })
    }

    /// No change enters from now on; those inside go on. `when_still` is called once they are
    /// through and the use is counted, from any thread; not at all if [`Self::resume`] comes first.
    pub fn pause(&self, when_still: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.paused = true;
        state.when_still = Some(Box::new(when_still));
        let told = state.now_still();
        drop(state);
        told.into_iter().for_each(|tell| tell());
    }

    /// Ends the pause.
    pub fn resume(self: &Arc<Self>) {
        let mut state = self.state();
        state.paused = false;
        let never_told = state.when_still.take();
        self.open(state);
        drop(never_told);
    }

    /// The count of the use has ended.
    pub fn counted(self: &Arc<Self>) {
        let mut state = self.state();
        state.counting = false;
        self.open(state);
    }

    /// Whether nothing changes, and nothing will until it is opened.
    pub fn is_still(&self) -> bool {
        let state = self.state();
        state.is_shut() && state.inside == 0
    }

    /// Where the last reason to shut has ended: what was put aside is done.
    fn open(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.is_shut() {
            let told = state.now_still();
            drop(state);
            told.into_iter().for_each(|tell| tell());
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
        let told = state.now_still();
        drop(state);
        told.into_iter().for_each(|tell| tell());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_shut(&self) -> bool {
        self.counting || self.paused
    }

    /// Who waits for the pause, if it begins now.
    fn now_still(&mut self) -> Option<Job> {
        let is_still = self.paused && !self.counting && self.inside == 0;
        self.when_still.take_if(|_| is_still)
    }
}

impl<'a> Shut<'a> {
    /// Whether a request with so much data may be put aside.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.state.aside.len() < MOST_ASIDE && self.state.bytes_aside + bytes <= MOST_BYTES_ASIDE
    }

    /// Puts a request aside, which keeps so much data.
    pub fn put_aside(mut self, bytes: usize, job: Job) {
        self.state.bytes_aside += bytes;
        self.state.aside.push_back(job);
    }

    /// Waits until it is open.
    pub fn wait(self) -> Pass<'a> {
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
    use std::sync::mpsc::{Receiver, TryRecvError, channel};

    fn gate() -> Arc<Gate> {
        Arc::new(Gate::new(false))
    }

    /// Begins a pause. Returns what hears once that it has begun, or hangs up if it never does.
    fn pause(gate: &Gate) -> Receiver<()> {
        let (still, told) = channel();
        gate.pause(move || still.send(()).unwrap());
        told
    }

    #[test]
    fn a_pause_begins_when_the_last_one_inside_has_left() {
        let gate = gate();
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        let told = pause(&gate);
        drop(one);
        assert!(!gate.is_still());
        assert_eq!(told.try_recv(), Err(TryRecvError::Empty));
        drop(two);
        assert!(gate.is_still());
        assert_eq!(told.recv(), Ok(()));
        gate.resume();
        assert!(!gate.is_still());
        gate.enter().unwrap();
    }

    #[test]
    fn a_pause_that_ends_before_it_has_begun_is_never_told() {
        let gate = gate();
        let inside = gate.enter().unwrap();
        let told = pause(&gate);
        gate.resume();
        drop(inside);
        assert_eq!(told.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn a_pause_during_the_count_begins_with_its_end() {
        let gate = Arc::new(Gate::new(true));
        drop(pause(&gate));
        gate.resume();
        assert!(gate.enter().is_err(), "it still counts");
        let told = pause(&gate);
        assert_eq!(told.try_recv(), Err(TryRecvError::Empty));
        gate.counted();
        assert_eq!(told.recv(), Ok(()));
        assert!(gate.is_still());
        gate.resume();
        gate.enter().unwrap();
    }

    #[test]
    fn what_is_put_aside_is_done_in_order_after_the_opening_and_before_the_next_stillness() {
        let gate = gate();
        gate.pause(|| {});
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
        gate.resume();
        gate.pause(|| {});
        assert!(!gate.is_still(), "both are inside");
        go.send(()).unwrap();
        assert_eq!((told.recv(), told.recv()), (Ok(1), Ok(2)));
        assert!(told.recv().is_err(), "and gone");
    }

    #[test]
    fn what_takes_too_much_memory_waits_for_the_opening() {
        let gate = gate();
        gate.pause(|| {});
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
            gate.resume();
            waiting.join().unwrap();
        });
        gate.enter().unwrap();
    }
}
