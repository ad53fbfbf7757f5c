//! Many volumes at once, and what some of them suffer while the others go on.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod full_pool;
mod many;
mod slow_pods;

use std::sync::Mutex;
use std::thread;

/// Does all of `work`, `at_once` at a time; the outcomes in its order.
fn all<W: Sync, T: Send>(at_once: usize, work: &[W], run: impl Fn(&W) -> T + Sync) -> Vec<T> {
    let queue = Mutex::new(work.iter().enumerate());
    let worker = || {
        let mut done = Vec::new();
        loop {
            let next = queue.lock().unwrap().next();
            let Some((index, item)) = next else { return done };
            done.push((index, run(item)));
        }
    };
    let mut done: Vec<(usize, T)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}
