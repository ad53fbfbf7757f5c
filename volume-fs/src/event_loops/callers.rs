//! Whether requests come from several threads at the same time. Then the threads take turns, and their requests
//! wait for each other.

/// Requests in which a thread's return is noticed.
const RECENT: usize = 8;
/// Requests after which the count begins anew.
const INTERVAL: u32 = 32;
/// So many returns in an interval are no coincidence.
const RETURNS: u32 = 4;

#[derive(Debug, Default)]
pub(super) struct Callers {
    /// Threads of the last requests, a ring.
    recent: [u32; RECENT],
    /// The last one in it.
    last: usize,
    requests: u32,
    /// Of `requests`, those that waited, of a thread that had one of the recent requests, but not the last one.
    returns: u32,
}

impl Callers {
    /// Adds a request of this thread (`fuse_in_header.pid`), and says whether threads take turns. `waited`: it was
    /// sent before the last one was answered. The kernel names no thread (0) for RELEASE, and for threads that the
    /// mounter's pid namespace does not have.
    pub(super) fn take_turns(&mut self, thread: u32, waited: bool) -> bool {
        if thread == 0 {
            return false;
        }
        if self.requests == INTERVAL {
            (self.requests, self.returns) = (0, 0);
        }
        self.requests += 1;
        let returns = waited && self.recent[self.last] != thread && self.recent.contains(&thread);
        self.returns += u32::from(returns);
        self.last = (self.last + 1) % RECENT;
        self.recent[self.last] = thread;
        self.returns >= RETURNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether one of the requests shows that threads take turns. All of them have waited.
    fn take_turns(threads: impl IntoIterator<Item = u32>) -> bool {
        let mut callers = Callers::default();
        threads.into_iter().any(|thread| callers.take_turns(thread, true))
    }

    #[test]
    fn threads_that_take_turns_are_seen_soon() {
        for threads in 2..=6 {
            assert!(take_turns((1..=threads).cycle().take(12)), "{threads}");
        }
        assert!(take_turns([1, 1, 2, 2].into_iter().cycle().take(16)));
    }

    #[test]
    fn one_thread_after_the_other_is_no_turn() {
        assert!(!take_turns([1; 1000]));
        assert!(!take_turns(1..1000));
        // A shell and its children.
        assert!(!take_turns((2..50).flat_map(|child| [1; 3].into_iter().chain([child; 20]))));
        assert!(!take_turns([0, 1].into_iter().cycle().take(1000)));
    }

    #[test]
    fn threads_that_wait_for_each_other_take_no_turns() {
        let mut callers = Callers::default();
        assert!(!(1..=4).cycle().take(1000).any(|thread| callers.take_turns(thread, false)));
    }
}
