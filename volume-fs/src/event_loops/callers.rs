//! Whether requests come from several threads at the same time: then their threads take turns.

/// Requests in which a thread's return is noticed.
const RECENT: usize = 8;
/// Requests after which the count begins anew.
const INTERVAL: u32 = 32;
/// So many returns in an interval are no coincidence, as those of a process and its children are.
const RETURNS: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct Callers {
    /// Threads of the last requests, a ring.
    recent: [u32; RECENT],
    /// The last one in it.
    last: usize,
    requests: u32,
    /// Of `requests`, those of a thread that had one of the recent requests, but not the last one.
    returns: u32,
}

impl Callers {
    /// Adds a request of this thread (`fuse_in_header.pid`), and says whether threads take turns. The kernel
    /// names none (0) for RELEASE, and for threads that the mounter's pid namespace does not have.
    pub(super) fn take_turns(&mut self, thread: u32) -> bool {
        if thread == 0 {
            return false;
        }
        if self.requests == INTERVAL {
            (self.requests, self.returns) = (0, 0);
        }
        self.requests += 1;
        let returns = self.recent[self.last] != thread && self.recent.contains(&thread);
        self.returns += u32::from(returns);
        self.last = (self.last + 1) % RECENT;
        self.recent[self.last] = thread;
        self.returns >= RETURNS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the last request showed that threads take turns.
    fn take_turns(threads: impl IntoIterator<Item = u32>) -> bool {
        let mut callers = Callers::default();
        threads.into_iter().fold(false, |_before, thread| callers.take_turns(thread))
    }

    #[test]
    fn threads_that_take_turns_are_seen_soon() {
        for threads in 2..=6 {
            assert!(take_turns((1..=threads).cycle().take(16)), "{threads}");
        }
        assert!(take_turns([1, 1, 2, 2].into_iter().cycle().take(24)));
    }

    #[test]
    fn one_thread_after_the_other_is_no_turn() {
        assert!(!take_turns([1; 1000]));
        assert!(!take_turns(1..1000));
        // A shell and its children.
        let children = (2..50).flat_map(|child| [1, 1, 1].into_iter().chain([child; 20]));
        let mut callers = Callers::default();
        assert!(!children.into_iter().any(|thread| callers.take_turns(thread)));
        assert!(!take_turns([0, 1].into_iter().cycle().take(1000)));
    }
}
