//! The test support's tracer of a process that serves: a shell that makes each file whose
//! name it reads.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::Pid;
use tests::eventually;
use tests::trace_steps::{Fault, Injection, Kind, Places, Step, Trace, Tracing};

const TIMEOUT: Duration = Duration::from_secs(30);

struct Shell {
    dir: tempfile::TempDir,
    child: Child,
}

impl Shell {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "while read -r name; do : > \"$name\"; echo done > last; done"]);
        command.current_dir(&dir).stdin(Stdio::piped()).stderr(Stdio::null());
        Self { child: command.spawn().unwrap(), dir }
    }

    fn trace(&self, injection: Option<Injection>, reached: impl FnOnce() + Send + 'static) -> Tracing {
        let places = Places {
            root: self.dir.path().canonicalize().unwrap(),
            ignored: vec![self.dir.path().join("ignored")],
        };
        Tracing::start(Pid::from_raw(self.child.id().cast_signed()), places, injection, reached).unwrap()
    }

    fn make(&mut self, name: &str) {
        // The reader of a pipe may be dead.
        let _dead = writeln!(self.child.stdin.as_mut().unwrap(), "{name}");
    }

    fn has(&self, name: &str) -> bool {
        self.dir.path().join(name).exists()
    }

    #[track_caller]
    fn wait_for(&self, name: &str) {
        eventually(name, TIMEOUT, || {
            anyhow::ensure!(self.has(name), "not there");
            Ok(())
        })
        .unwrap();
    }

    /// The file is asked for while it is traced, with a fault at its making.
    fn with_fault(mut self, fault: Fault) -> (Trace, Self) {
        let step = Step { name: "openat", object: "$/file".to_owned(), nth: 0, kind: Kind::Effect };
        let tracing = self.trace(Some(Injection { step, fault }), || {});
        self.make("file");
        eventually("the end of it", TIMEOUT, || {
            anyhow::ensure!(tracing.is_over() || self.has("last"), "it goes on");
            Ok(())
        })
        .unwrap();
        (tracing.finish().unwrap(), self)
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _dead = self.child.kill();
        let _reaped = self.child.wait();
    }
}

#[test]
fn a_service_is_traced_and_goes_on_untraced() {
    let mut shell = Shell::start();
    let tracing = shell.trace(None, || {});
    for name in ["a", "ignored", "/dev/null", "a", "b"] {
        shell.make(name);
    }
    shell.wait_for("b");
    shell.wait_for("last");
    let trace = tracing.finish().unwrap();
    let made: Vec<_> = trace
        .steps
        .iter()
        .filter(|step| step.name == "openat" && step.object != "$/last")
        .map(|step| (step.object.as_str(), step.nth, step.kind))
        .collect();
    assert_eq!(made, [("$/a", 0, Kind::Effect), ("$/a", 1, Kind::Effect), ("$/b", 0, Kind::Effect)]);
    assert!(trace.steps.iter().any(|step| step.name == "write" && step.object == "$/last"), "{trace:?}");
    shell.make("later");
    shell.wait_for("later");
    let status = std::fs::read_to_string(format!("/proc/{}/status", shell.child.id())).unwrap();
    assert!(status.contains("TracerPid:\t0\n"), "{status}");
}

#[test]
fn a_fault_is_injected_where_it_was_asked_for() {
    let (trace, shell) = Shell::start().with_fault(Fault::KillBefore);
    assert!(trace.is_injected && !shell.has("file") && !shell.has("last"));
    let (trace, shell) = Shell::start().with_fault(Fault::KillAfter);
    assert!(trace.is_injected && shell.has("file") && !shell.has("last"));
    // Its parent sees its end, as of any child.
    let mut shell = shell;
    assert_eq!(shell.child.wait().unwrap().code(), None);
    // A shell without the command's redirection goes on with the next.
    let (trace, shell) = Shell::start().with_fault(Fault::Fail(Errno::ENOSPC));
    assert!(trace.is_injected && !shell.has("file"));
}

#[test]
fn what_is_held_waits_until_it_is_released() {
    let mut shell = Shell::start();
    let step = Step { name: "openat", object: "$/file".to_owned(), nth: 0, kind: Kind::Effect };
    let (tell, told) = channel();
    let injection = Injection { step, fault: Fault::Hold };
    let tracing = shell.trace(Some(injection), move || tell.send(()).expect("the test waits"));
    shell.make("file");
    told.recv_timeout(TIMEOUT).unwrap();
    assert!(!Path::new(&shell.dir.path().join("file")).exists());
    tracing.release();
    shell.wait_for("last");
    assert!(shell.has("file") && tracing.finish().unwrap().is_injected);
}
