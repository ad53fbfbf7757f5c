//! Work that waits for a disk, in code that also serves others.

use tokio::runtime::{Handle, RuntimeFlavor};

/// Does `work` on this thread, while other tasks of its worker continue on other threads: an fsync
/// takes seconds on a busy disk.
///
/// `work` may hold a lock that only such work takes.
pub fn while_others_go_on<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn tasks_run_on_while_every_worker_waits_for_a_disk() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let (done, disk) = std::sync::mpsc::channel();
        let waits =
            runtime.spawn(async move { while_others_go_on(|| disk.recv_timeout(Duration::from_secs(30))) });
        runtime.spawn(async move { done.send(()) });
        runtime.block_on(waits).unwrap().expect("the other task ran meanwhile");
    }

    #[tokio::test]
    async fn a_runtime_of_one_thread_does_it_too() {
        assert_eq!(while_others_go_on(|| 7), 7);
    }
}
