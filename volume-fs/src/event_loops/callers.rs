//! Whether several threads send requests at the same time. Then their requests alternate, and are sent before the
//! last one is answered.

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
    /// Adds a request of this thread (`fuse_in_header.pid`), and says whether several threads send requests.
    /// `waited`: it was sent before the last one was answered. The kernel names no thread (0) for RELEASE, and for
    /// threads that the mounter's pid namespace does not have.
    pub(super) fn are_several(&mut self, thread: u32, waited: bool) -> bool {
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

    /// Whether one of the requests shows several threads. All of them have waited.
    fn are_several(threads: impl IntoIterator<Item = u32>) -> bool {
        let mut callers = Callers::default();
        threads.into_iter().any(|thread| callers.are_several(thread, true))
    }

    #[test]
    fn several_threads_are_seen_soon() {
        for threads in 2..=6 {
            assert!(are_several((1..=threads).cycle().take(12)), "{threads}");
        }
        assert!(are_several([1, 1, 2, 2].into_iter().cycle().take(16)));
    }

    #[test]
    fn one_thread_after_the_other_is_one() {
        assert!(!are_several([1; 1000]));
        assert!(!are_several(1..1000));
        // A shell and its children.
        assert!(!are_several((2..50).flat_map(|child| [1; 3].into_iter().chain([child; 20]))));
        assert!(!are_several([0, 1].into_iter().cycle().take(1000)));
    }

    #[test]
    fn threads_that_wait_for_the_last_answer_count_as_one() {
        let mut callers = Callers::default();
        assert!(!(1..=4).cycle().take(1000).any(|thread| callers.are_several(thread, false)));
    }
}
