//! The gate that every changing request passes, for backends that can hold changes back. While it
//! is shut, nothing changes: the use is being counted, or a snapshot is being cut.
//!
//! A change that arrives meanwhile is set aside, so that the event loops continue to answer reads.
//! If that would take too much memory, its event loop waits, and reads with it once all loops do.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Most data of requests set aside: 128 of the largest writes. The daemon's default memory limit has room
/// for it.
const MOST_BYTES_ASIDE: usize = 32 << 20;
/// Most requests set aside; each takes some hundred bytes beside its data.
const MOST_ASIDE: usize = 16_384;

/// A request that was set aside. Its size is the data that it keeps.
type Job = Box<dyn FnOnce() + Send>;

/// Shared by all event loops of a volume and by its control. Shut as long as the use is being
/// counted or a pause lasts.
pub struct Gate {
    state: Mutex<State>,
    opened: Condvar,
}

#[derive(Default)]
struct State {
    counting: bool,
    paused: bool,
    /// The pause lasts for good.
    has_ended: bool,
    inside: usize,
    aside: VecDeque<Job>,
    bytes_aside: usize,
    /// Called when the pause has begun.
    when_still: Option<Job>,
}

/// A change in progress.
#[derive(Debug)]
pub struct Pass<'a> {
    gate: &'a Gate,
}

/// The gate is shut, and does not change while this is held.
pub struct Shut<'a> {
    gate: &'a Gate,
    state: MutexGuard<'a, State>,
}

impl Gate {
    /// `counting`: shut until [`Self::counted`].
    pub fn new(counting: bool) -> Self {
        Self { state: Mutex::new(State { counting, ..State::default() }), opened: Condvar::new() }
    }

    /// Begins a change, which lasts until the [`Pass`] is dropped. `Err`: the gate is shut; the caller
    /// sets the change aside or waits.
    pub fn enter(&self) -> Result<Pass<'_>, Shut<'_>> {
        let mut state = self.state();
        if state.is_shut() {
            return Err(Shut { gate: self, state });
        }
        state.inside += 1;
        Ok(Pass { gate: self })
    }

    /// Blocks further changes; changes in progress continue. Calls `when_still`, from any thread,
    /// once they have ended and the use is counted. If [`Self::resume`] comes first, or [`Self::end`] has
    /// come, it is not called.
    pub fn pause(&self, when_still: impl FnOnce() + Send + 'static) {
        let state = self.state();
        if !state.has_ended {
            Self::begin_pause(state, when_still);
        }
    }

    fn begin_pause(mut state: MutexGuard<'_, State>, when_still: impl FnOnce() + Send + 'static) {
        state.paused = true;
        state.when_still = Some(Box::new(when_still));
        let callbacks = state.now_still();
        drop(state);
        callbacks.into_iter().for_each(|call| call());
    }

    /// [`Self::pause`] for good.
    pub fn end(&self, when_still: impl FnOnce() + Send + 'static) {
        let mut state = self.state();
        state.has_ended = true;
        Self::begin_pause(state, when_still);
    }

    /// Ends the pause, unless it lasts for good.
    pub fn resume(self: &Arc<Self>) {
        let mut state = self.state();
        if state.has_ended {
            return;
        }
        state.paused = false;
        let uncalled = state.when_still.take();
        self.open(state);
        drop(uncalled);
    }

    /// The use has been counted.
    pub fn counted(self: &Arc<Self>) {
        let mut state = self.state();
        state.counting = false;
        self.open(state);
    }

    /// Opens the gate if no reason to shut it is left, and does the requests set aside.
    fn open(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if state.is_shut() {
            let callbacks = state.now_still();
            drop(state);
            callbacks.into_iter().for_each(|call| call());
            return;
        }
        let aside = std::mem::take(&mut state.aside);
        state.bytes_aside = 0;
        // They count as inside: the next pause waits for them.
        state.inside += aside.len();
        drop(state);
        self.opened.notify_all();
        self.catch_up(aside);
    }

    /// Does the jobs in a separate thread or, if none can be started, here.
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
        let callbacks = state.now_still();
        drop(state);
        callbacks.into_iter().for_each(|call| call());
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_shut(&self) -> bool {
        self.counting || self.paused
    }

    /// The callback of a pause that begins now.
    fn now_still(&mut self) -> Option<Job> {
        let is_still = self.is_still();
        self.when_still.take_if(|_| is_still)
    }

    /// Whether a pause has begun: the use is counted, nothing changes, and nothing will until
    /// [`Gate::resume`].
    fn is_still(&self) -> bool {
        self.paused && !self.counting && self.inside == 0
    }
}

impl<'a> Shut<'a> {
    /// Whether a request with this much data may be set aside.
    pub fn has_room(&self, bytes: usize) -> bool {
        self.state.aside.len() < MOST_ASIDE && self.state.bytes_aside + bytes <= MOST_BYTES_ASIDE
    }

    /// Sets a request aside that keeps this much data.
    pub fn put_aside(mut self, bytes: usize, job: Job) {
        self.state.bytes_aside += bytes;
        self.state.aside.push_back(job);
    }

    /// Waits until the gate opens.
    pub fn wait(self) -> Pass<'a> {
        let Self { gate, state } = self;
        let opened = gate.opened.wait_while(state, |state| state.is_shut());
        let mut state = opened.unwrap_or_else(PoisonError::into_inner);
        state.inside += 1;
        drop(state);
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
        let (still, done) = channel();
        gate.pause(move || still.send(()).unwrap());
        done
    }

    #[test]
    fn a_pause_begins_when_the_last_one_inside_has_left() {
        let gate = gate();
        let (one, two) = (gate.enter().unwrap(), gate.enter().unwrap());
        let still = pause(&gate);
        drop(one);
        assert!(!gate.state().is_still());
        assert_eq!(still.try_recv(), Err(TryRecvError::Empty));
        drop(two);
        assert!(gate.state().is_still());
        assert_eq!(still.recv(), Ok(()));
        gate.resume();
        assert!(!gate.state().is_still());
        gate.enter().unwrap();
    }

    #[test]
    fn a_pause_that_ends_before_it_has_begun_is_never_reported() {
        let gate = gate();
        let inside = gate.enter().unwrap();
        let still = pause(&gate);
        gate.resume();
        drop(inside);
        assert_eq!(still.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn nothing_opens_a_gate_that_has_ended() {
        let gate = Arc::new(Gate::new(true));
        let (still, done) = channel();
        gate.end(move || still.send(()).unwrap());
        gate.pause(|| panic!("it has ended"));
        gate.resume();
        gate.counted();
        assert_eq!(done.recv(), Ok(()));
        assert!(gate.enter().is_err(), "it is shut");
    }

    #[test]
    fn a_pause_during_the_count_begins_with_its_end() {
        let gate = Arc::new(Gate::new(true));
        drop(pause(&gate));
        gate.resume();
        assert!(gate.enter().is_err(), "it still counts");
        let still = pause(&gate);
        assert_eq!(still.try_recv(), Err(TryRecvError::Empty));
        assert!(!gate.state().is_still());
        gate.counted();
        assert_eq!(still.recv(), Ok(()));
        assert!(gate.state().is_still());
        gate.resume();
        gate.enter().unwrap();
    }

    #[test]
    fn what_is_put_aside_is_done_in_order_after_the_opening_and_before_the_next_stillness() {
        let gate = gate();
        gate.pause(|| {});
        let (done, still) = channel();
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
        still.try_recv().unwrap_err();
        gate.resume();
        gate.pause(|| {});
        assert!(!gate.state().is_still(), "both are inside");
        go.send(()).unwrap();
        assert_eq!((still.recv(), still.recv()), (Ok(1), Ok(2)));
        assert!(still.recv().is_err(), "and gone");
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
            let (found_it_shut, still) = channel();
            let gate = &gate;
            let waiting = scope.spawn(move || {
                let shut = gate.enter().unwrap_err();
                found_it_shut.send(()).unwrap();
                drop(shut.wait());
            });
            still.recv().unwrap();
            gate.resume();
            waiting.join().unwrap();
        });
        gate.enter().unwrap();
    }
}
