//! PID namespaces: the first process of a new one, for callers that have threads and start programs
//! with std ([`crate::process::clone_child`] refuses such callers); children in an existing one; and
//! what a first process without a program does.

use std::fs::File;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::{SigSet, Signal};

use crate::cgroup::Cgroup;
use crate::{Error, Result, process};

/// Of the calling thread; children start in it.
const OWN: &str = "/proc/thread-self/ns/pid";
/// Each attempt takes some microseconds.
const RETURN_ATTEMPTS: usize = 1000;

/// Runs `start`, which starts one process: that process becomes the first one of a new PID
/// namespace, and all others in the namespace end with it. With `group`, it starts in that group's
/// v1 directories; [`Cgroup::admit`] moves it into the v2 one.
///
/// A second process that `start` starts would be a child of the first one (pid_namespaces(7)),
/// which must still be alive. `start` must not start threads: `EINVAL` (clone(2)). Needs
/// `CAP_SYS_ADMIN`.
pub fn start_first<T: Send>(group: Option<&Cgroup>, start: impl FnOnce() -> T + Send) -> Result<T> {
    // On a separate thread: both changes last as long as the thread that makes them.
    std::thread::scope(|scope| {
        let starter = std::thread::Builder::new().name("first-process".to_owned());
        let starter = starter.spawn_scoped(scope, || {
            group.map_or(Ok(()), Cgroup::join_as_thread)?;
            nix::sched::unshare(CloneFlags::CLONE_NEWPID)
                .map_err(|e| Error::new("unshare", "PID namespace", e))?;
            Ok(start())
        });
        let starter = starter.map_err(|e| Error::new("start thread", "first-process", e))?;
        match starter.join() {
            Ok(started) => started,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs `start`, whose children start in `namespace`: one of this thread or below it, whose first
/// process lives (`ENOMEM`). This thread itself stays where it is. If it could not have children of
/// its own afterwards, this process ends. Needs `CAP_SYS_ADMIN`.
pub fn with_children_in<T>(namespace: impl AsFd, start: impl FnOnce() -> T) -> Result<T> {
    const OP: &str = "start a process in a PID namespace";
    let own = File::open(OWN).map_err(|e| Error::new(OP, OWN, e))?;
    setns(namespace, CloneFlags::CLONE_NEWPID).map_err(|e| Error::new(OP, "setns", e))?;
    let started = start();
    // setns(2) allocates a little memory; a lack of it passes.
    if !(0..RETURN_ATTEMPTS).any(|_| setns(&own, CloneFlags::CLONE_NEWPID).is_ok()) {
        std::process::abort();
    }
    Ok(started)
}

/// Blocks all signals, for [`reap_until_killed`].
pub fn block_signals() -> Result<()> {
    SigSet::all().thread_block().map_err(|e| Error::new("block signals", "", e))
}

/// What process 1 of a namespace does that runs no program: it reaps the orphans of the namespace.
/// The signals of other processes there do nothing to it. Returns only with an error. Needs
/// [`block_signals`] before.
pub fn reap_until_killed() -> Error {
    let mut child_ended = SigSet::empty();
    child_ended.add(Signal::SIGCHLD);
    loop {
        match child_ended.wait() {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(e) => return Error::new("wait for", "SIGCHLD", e),
        }
        loop {
            match process::reap() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => return error,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::process::Exit;

    #[test]
    fn the_process_is_the_first_of_its_namespace_and_the_rest_ends_with_it() {
        // It says its pid and starts another process, which holds the pipe open.
        let script = "echo $$; sleep 1000 & exec sleep 1000";
        let start = || Command::new("sh").args(["-c", script]).stdout(Stdio::piped()).spawn();
        let mut child = start_first(None, start).unwrap().unwrap();
        let mut line = [0; 2];
        let mut stdout = child.stdout.take().unwrap();
        std::io::Read::read_exact(&mut stdout, &mut line).unwrap();
        assert_eq!(&line, b"1\n");
        child.kill().unwrap();
        child.wait().unwrap();
        let mut rest = Vec::new();
        std::io::Read::read_to_end(&mut stdout, &mut rest).unwrap();
        assert_eq!(rest, b"", "the other process has ended too");
    }

    #[test]
    fn the_caller_stays_in_its_namespace() {
        let before = std::fs::read_link("/proc/self/ns/pid_for_children").unwrap();
        let status = start_first(None, || Command::new("true").status()).unwrap().unwrap();
        assert_eq!(status.code().map(Exit::Code), Some(Exit::Code(0)));
        assert_eq!(std::fs::read_link("/proc/self/ns/pid_for_children").unwrap(), before);
        assert_eq!(std::fs::read_link("/proc/thread-self/ns/pid_for_children").unwrap(), before);
    }
}
