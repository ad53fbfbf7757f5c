//! Which of the event loops wait for requests.
//!
//! The kernel wakes the loop that has waited longest (fs/fuse/dev.c, `fuse_dev_do_read`: exclusive,
//! first in, first out). If all wait, each request of a sequence goes to another thread, which has
//! run on another processor. With four loops on two processors, a file took 129 us to make and
//! write, and with one loop 66 us. But one loop alone would let all requests wait for one that
//! takes long.
//!
//! So a loop that has answered a request waits for the next one only if no other loop does;
//! otherwise it rests. All loops wait, for a while, when the one that waited is busy and
//! - requests of several threads wait for each other ([`Callers`]), or more requests come meanwhile,
//!   time after time,
//! - or its request usually takes long: it waits for the disk, or has much data (the caller says so),
//! - or its request has taken [`LOOK`] already, and another one waits, or [`LONG`]. For that, one of
//!   the resting loops, the watcher, looks at the others as long as requests come.
//!
//! Invariant: a loop rests only if another one waits that has a [`Membership`], by which the resting
//! loops learn of the connection's end.

mod callers;

use std::cell::{Cell, RefCell};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::callers::Callers;

/// How long requests may wait for another one before the watcher notices.
const LOOK: Duration = Duration::from_millis(2);
/// A request that takes so long waits for something.
const LONG: Duration = Duration::from_millis(20);
/// How long all loops wait for requests.
const SHARED: Duration = Duration::from_millis(50);
/// A request that is read so soon after the last answer was there before: its sender did not wait for that answer.
const AT_ONCE: Duration = Duration::from_micros(5);
/// Inodes that a loop forgets in shorter intervals come from one request.
const TOGETHER: Duration = Duration::from_micros(100);
/// Each that many requests, the loop looks whether more have come.
const INTERVAL: u64 = 7;
/// So many requests one after the other that find another one behind them come from more than one
/// process. From one process, RELEASE and the request after it can come together: the kernel does
/// not wait for the answer to RELEASE. And FORGETs can wait behind up to eight requests of a process
/// that removes files (fs/fuse/dev.c, `forget_batch`).
const CROWD: u32 = 12;

#[derive(Debug)]
pub(crate) struct EventLoops {
    /// /dev/fuse.
    device: Arc<OwnedFd>,
    state: Mutex<State>,
    watcher: Condvar,
    others: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Loops that wait for a request, or are about to, and have a [`Membership`].
    waiting: usize,
    resting: usize,
    /// Resting loops that are called. They count as waiting already.
    called: usize,
    has_watcher: bool,
    /// Whether the watcher looks from time to time.
    is_watched: bool,
    requests: u64,
    callers: Callers,
    /// Requests that loops handle now.
    handled: usize,
    last_answer: Option<Instant>,
    /// How many requests one after the other found another one behind them.
    followed: u32,
    /// Since when no loop waits.
    none_waits_since: Option<Instant>,
    shared_until: Option<Instant>,
    has_ended: bool,
}

/// Of an event loop's thread, from its first request to its end.
#[derive(Debug)]
struct Membership(Arc<EventLoops>);

/// The last inodes that a loop forgot together.
#[derive(Debug, Clone, Copy)]
struct Forgets {
    began: Instant,
    ended: Instant,
}

thread_local! {
    static FORGETS: Cell<Option<Forgets>> = const { Cell::new(None) };
    static MEMBERSHIP: RefCell<Option<Membership>> = const { RefCell::new(None) };
}

/// A request that an event loop handles; dropped when it can handle another one.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    loops: &'a EventLoops,
}

/// An inode that an event loop forgets.
#[derive(Debug)]
pub(crate) struct Forget<'a> {
    loops: &'a EventLoops,
    /// The first one of those that came together.
    began: Instant,
}

impl EventLoops {
    /// `device`: /dev/fuse.
    pub(crate) fn new(device: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { device, state: Mutex::default(), watcher: Condvar::new(), others: Condvar::new() })
    }

    /// Called by an event loop that has received a request of the thread `caller`; says whether that usually
    /// takes long.
    pub(crate) fn begin(self: &Arc<Self>, caller: u32, takes_long: bool) -> Turn<'_> {
        // What follows does not come together with what came before.
        FORGETS.set(None);
        let now = Instant::now();
        let mut state = self.receive(now);
        let was_there =
            state.handled > 0 || state.last_answer.is_some_and(|last| now.duration_since(last) < AT_ONCE);
        state.handled += 1;
        let are_several = state.callers.are_several(caller, was_there);
        if are_several || takes_long {
            self.call_all(&mut state);
        } else if state.waiting == 0 && state.at_rest() > 0 {
            let looks = state.followed > 0 || state.requests.is_multiple_of(INTERVAL);
            state.followed = if looks && self.has_more() { state.followed + 1 } else { 0 };
            if state.followed >= CROWD {
                self.call_all(&mut state);
            }
        }
        Turn { loops: self }
    }

    /// [`Self::begin`] for one of the inodes of a FORGET. The loop has perhaps more of them to handle,
    /// without a call of its own for each request, so it never rests at the end.
    pub(crate) fn begin_forget(self: &Arc<Self>) -> Forget<'_> {
        let now = Instant::now();
        let last = FORGETS.get().filter(|last| now.duration_since(last.ended) < TOGETHER);
        let began = last.map_or(now, |last| last.began);
        drop(self.receive(began));
        Forget { loops: self, began }
    }

    /// This loop does not wait for requests any more.
    fn receive(self: &Arc<Self>, began: Instant) -> MutexGuard<'_, State> {
        let is_new = MEMBERSHIP.with_borrow_mut(|membership| {
            let is_new = membership.is_none();
            membership.get_or_insert_with(|| Membership(Arc::clone(self)));
            is_new
        });
        let mut state = self.state();
        state.requests += 1;
        if !is_new {
            state.waiting -= 1;
        }
        if state.waiting == 0 {
            state.none_waits_since = Some(began);
            if state.at_rest() > 0 && !state.is_watched {
                state.is_watched = true;
                self.watcher.notify_one();
            }
        }
        state
    }

    /// Waits until this loop should wait for a request.
    fn end(&self) {
        let mut state = self.state();
        state.handled -= 1;
        state.last_answer = Some(Instant::now());
        let is_shared = || state.shared_until.is_some_and(|until| Instant::now() < until);
        if state.has_ended || state.waiting == 0 || is_shared() || self.has_more() {
            state.waiting += 1;
            return;
        }
        state.resting += 1;
        let mut state = self.rest(state);
        state.resting -= 1;
        if !state.has_watcher {
            // Another one becomes the watcher.
            self.others.notify_one();
        }
    }

    /// Returns when this loop is called.
    fn rest<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        loop {
            if state.called > 0 {
                state.called -= 1;
                return state;
            }
            if state.has_ended {
                state.waiting += 1;
                return state;
            }
            if state.has_watcher {
                state = self.others.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            state.has_watcher = true;
            state = self.watch(state);
            state.has_watcher = false;
        }
    }

    /// Returns when this loop is called, or calls all.
    fn watch<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        while !state.has_ended && state.called == 0 {
            if !state.is_watched {
                state = self.watcher.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let known = state.requests;
            let waited = self.watcher.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            state = waited.0;
            if !waited.1.timed_out() {
                continue;
            }
            match state.none_waits_since {
                Some(since) if state.waiting == 0 => {
                    let took = since.elapsed();
                    if took >= LONG || took >= LOOK && self.has_more() {
                        self.call_all(&mut state);
                    }
                }
                _ => state.is_watched = state.requests != known,
            }
        }
        state
    }

    /// Calls all loops that rest; for a while no loop rests.
    fn call_all(&self, state: &mut State) {
        state.shared_until = Some(Instant::now() + SHARED);
        let at_rest = state.at_rest();
        if at_rest == 0 {
            return;
        }
        state.called += at_rest;
        state.waiting += at_rest;
        state.followed = 0;
        self.watcher.notify_one();
        self.others.notify_all();
    }

    /// Whether a request waits, or the connection has ended.
    fn has_more(&self) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::IN)];
        // After an error the loop waits, which is always right.
        poll(&mut device, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) != Ok(0)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// How many loops rest and are not called.
    fn at_rest(&self) -> usize {
        self.resting - self.called
    }
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.loops.state().waiting += 1;
        FORGETS.set(Some(Forgets { began: self.began, ended: Instant::now() }));
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.loops.end();
    }
}

/// An event loop ends with the connection.
impl Drop for Membership {
    fn drop(&mut self) {
        self.0.state().has_ended = true;
        self.0.watcher.notify_all();
        self.0.others.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::{self, JoinHandle};

    use linux::fd_passing::PacketSocket;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(10);
    const QUICK: &[u8] = b"quick";
    /// Of another thread.
    const OTHER: &[u8] = b"other";
    /// Until the test answers it.
    const LONG: &[u8] = b"long";
    const FSYNC: &[u8] = b"fsync";
    /// So many that they last until the test ends them.
    const FORGETS: &[u8] = b"forgets";

    /// Event loops that read from a socket instead of /dev/fuse.
    struct Served {
        kernel: PacketSocket,
        loops: Arc<EventLoops>,
        threads: Vec<JoinHandle<()>>,
        begun: Receiver<thread::ThreadId>,
        ends: Sender<()>,
    }

    fn serve(count: usize) -> Served {
        let (kernel, daemon) = PacketSocket::pair().unwrap();
        let daemon = OwnedFd::from(daemon);
        let loops = EventLoops::new(Arc::new(daemon.try_clone().unwrap()));
        let (began, begun) = channel();
        let (ends, ended) = channel();
        let ended = Arc::new(Mutex::new(ended));
        let threads = (0..count).map(|_| {
            let (loops, began, ended) = (Arc::clone(&loops), began.clone(), Arc::clone(&ended));
            let device = daemon.try_clone().unwrap();
            thread::spawn(move || {
                let mut request = [0; 16];
                loop {
                    let length = rustix::io::read(&device, &mut request).unwrap();
                    if length == 0 {
                        return;
                    }
                    if &request[..length] == FORGETS {
                        began.send(thread::current().id()).unwrap();
                        while ended.lock().unwrap().try_recv().is_err() {
                            let _forget = loops.begin_forget();
                        }
                        continue;
                    }
                    let is_other = &request[..length] == OTHER;
                    let _turn = loops.begin(if is_other { 2 } else { 1 }, &request[..length] == FSYNC);
                    began.send(thread::current().id()).unwrap();
                    if &request[..length] != QUICK && !is_other {
                        ended.lock().unwrap().recv().unwrap();
                    }
                }
            })
        });
        let threads = threads.collect();
        Served { kernel, loops, threads, begun, ends }
    }

    impl Served {
        fn send(&self, request: &[u8]) {
            self.kernel.send(request, &[]).unwrap();
        }

        /// Returns the loop that handles the next request.
        fn begun(&self) -> thread::ThreadId {
            self.begun.recv_timeout(TIMEOUT).unwrap()
        }

        fn wait_until(&self, is: impl Fn(&State) -> bool) {
            let began = Instant::now();
            while !is(&self.loops.state()) {
                assert!(began.elapsed() < TIMEOUT, "{:?}", self.loops.state());
                thread::yield_now();
            }
        }

        /// Sends quick requests until one loop waits.
        fn settle(&self) {
            let began = Instant::now();
            while self.loops.state().resting + 1 < self.threads.len() {
                assert!(began.elapsed() < TIMEOUT, "{:?}", self.loops.state());
                self.send(QUICK);
                self.begun();
            }
        }

        fn end(self) {
            drop(self.kernel);
            self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        }
    }

    /// Of 99 requests, how many went to the loop that had the one before.
    fn went_to_the_same_loop() -> usize {
        let served = serve(4);
        served.settle();
        let mut handlers = Vec::new();
        for _ in 0..100 {
            // Else requests would come together.
            served.wait_until(|state| state.waiting > 0);
            served.send(QUICK);
            handlers.push(served.begun());
        }
        served.end();
        handlers.windows(2).filter(|pair| pair[0] == pair[1]).count()
    }

    /// Several attempts: a thread that does not run for a while counts as one whose request takes long.
    #[test]
    fn requests_one_after_the_other_go_to_one_loop() {
        let mut seen = Vec::new();
        while seen.last().is_none_or(|same| *same <= 50) {
            assert!(seen.len() < 10, "{seen:?} of 99 requests went to the loop that had the one before");
            seen.push(went_to_the_same_loop());
        }
    }

    #[test]
    fn requests_do_not_wait_for_those_that_take_long() {
        for long in [LONG, FSYNC, FORGETS] {
            let served = serve(4);
            served.settle();
            for _ in 0..3 {
                served.send(long);
                served.begun();
            }
            served.send(QUICK);
            served.begun();
            (0..3).for_each(|_| served.ends.send(()).unwrap());
            served.settle();
            served.end();
        }
    }

    #[test]
    fn many_requests_at_once_are_handled_by_all_loops() {
        let served = serve(4);
        for _ in 0..10 {
            served.settle();
            (0..4).for_each(|_| served.send(LONG));
            let mut handlers: Vec<_> = (0..4).map(|_| served.begun()).collect();
            handlers.sort_by_key(|id| format!("{id:?}"));
            handlers.dedup();
            assert_eq!(handlers.len(), 4);
            (0..4).for_each(|_| served.ends.send(()).unwrap());
        }
        served.end();
    }

    /// After each pair nothing waits, so a look for further requests does not show that there are two threads.
    #[test]
    fn two_threads_at_once_are_handled_by_all_loops() {
        let served = serve(4);
        served.settle();
        let began = Instant::now();
        while served.loops.state().resting > 0 {
            assert!(began.elapsed() < TIMEOUT, "{:?}", served.loops.state());
            served.send(QUICK);
            served.send(OTHER);
            served.begun();
            served.begun();
        }
        served.end();
    }

    #[test]
    fn all_loops_end_with_the_connection_wherever_they_are() {
        for requests in 0..12 {
            let served = serve(4);
            (0..requests).for_each(|_| served.send(QUICK));
            served.end();
        }
    }

    #[test]
    fn one_loop_serves_alone() {
        let served = serve(1);
        for request in [QUICK, FSYNC, QUICK] {
            served.send(request);
            served.begun();
            if request == FSYNC {
                served.ends.send(()).unwrap();
            }
        }
        served.end();
    }
}
