//! Traces a process that serves already, with all its threads, and injects a fault at
//! one of its steps: kill -9, an error in the place of a call's result, or a hold.
//!
//! A step is known by what is done, to what, and the how-manieth time, never by
//! its place among all calls: threads order their calls anew every time.
//!
//! Invariant: what the process starts is not traced, and the process itself goes
//! on untraced after [`Tracing::finish`]. Until then only the tracer may wait for it.

mod calls;

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::errno::Errno;
use nix::libc::{self, user_regs_struct};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;

/// `op` of struct ptrace_syscall_info (linux/ptrace.h).
const SYSCALL_ENTRY: u8 = 1;
/// How long other threads wait for the tracer while one is held.
const LOOK: Duration = Duration::from_millis(1);
/// Does nothing to a process that is not traced, and stops one that is.
const BELL: Signal = Signal::SIGWINCH;

/// What a step is to the world outside of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Something is different after it.
    Effect,
    /// What is different comes to disk.
    Sync,
    /// Something is looked at.
    Look,
    /// A thread is started.
    Thread,
}

/// One system call of those that [`Kind`] speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub name: &'static str,
    /// Paths, as [`Places`] shows them; `a -> b` where there are two.
    pub object: String,
    /// How many of this name and object were before it since tracing began.
    pub nth: usize,
    pub kind: Kind,
}

impl Step {
    /// Whether it is the same one, in another run.
    fn is(&self, other: &Self) -> bool {
        (self.name, &self.object, self.nth) == (other.name, &other.object, other.nth)
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}({}) no. {}", self.name, self.object, self.nth)
    }
}

/// Which files' calls are steps, and what the files are called from run to run.
#[derive(Debug, Clone)]
pub struct Places {
    /// Shown as `$`.
    pub root: PathBuf,
    /// None of the process's own, as its log: a path, or the last names of one.
    pub ignored: Vec<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// kill -9 of the process instead of the call.
    KillBefore,
    /// kill -9 of the process once the child is there and is not another program yet.
    KillWithin,
    /// kill -9 of the process once the call is done, before it returns.
    KillAfter,
    /// The call is not made and returns this error.
    Fail(Errno),
    /// The call is made after [`Tracing::release`].
    Hold,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Injection {
    pub step: Step,
    pub fault: Fault,
}

/// What was seen of the process.
#[derive(Debug, Default)]
pub struct Trace {
    pub steps: Vec<Step>,
    /// False: the process never came to the step that was to get the fault.
    pub is_injected: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Command {
    Release,
    Finish,
}

/// A process that is traced.
#[derive(Debug)]
pub struct Tracing {
    process: Pid,
    commands: Sender<Command>,
    tracer: JoinHandle<Result<Trace>>,
}

impl Tracing {
    /// Every thread of `process` is traced when it returns; one that was stopped by
    /// a signal goes on. `reached` is called, on another thread, when a step is held.
    pub fn start(
        process: Pid,
        places: Places,
        injection: Option<Injection>,
        reached: impl FnOnce() + Send + 'static,
    ) -> Result<Self> {
        let (commands, received) = channel();
        let (seized, is_seized) = channel();
        let trace = move || {
            let mut tracer = Tracer::new(process, places, injection, received, Box::new(reached));
            // The process that started it waits for this.
            let _starter_waits = seized.send(tracer.seize());
            tracer.follow()?;
            Ok(tracer.trace)
        };
        let tracer = thread::Builder::new().name("tracer".to_owned()).spawn(trace).context("start tracer")?;
        is_seized.recv().context("the tracer ended")??;
        kill(process, Signal::SIGCONT).context("let the process go on")?;
        Ok(Self { process, commands, tracer })
    }

    /// Lets go what is held.
    pub fn release(&self) {
        self.command(Command::Release);
    }

    /// Whether the process is dead.
    pub fn is_over(&self) -> bool {
        self.tracer.is_finished()
    }

    /// The process goes on untraced, if it lives.
    pub fn finish(self) -> Result<Trace> {
        self.command(Command::Finish);
        self.tracer.join().map_err(|_| anyhow!("the tracer panicked"))?
    }

    fn command(&self, command: Command) {
        // A tracer that ended has no use for it: the process is dead.
        let _ended = self.commands.send(command);
        let _dead = kill(self.process, BELL);
    }
}

struct Tracer {
    process: Pid,
    places: Places,
    injection: Option<Injection>,
    commands: Receiver<Command>,
    reached: Option<Box<dyn FnOnce() + Send>>,
    /// Every thread that is traced.
    threads: HashMap<Pid, Traced>,
    held: Option<Pid>,
    /// No thread is to go on traced.
    is_leaving: bool,
    made: HashMap<(&'static str, String), usize>,
    trace: Trace,
}

#[derive(Debug, Clone, Copy, Default)]
struct Traced {
    /// It is in the call that gets the fault.
    is_injected: bool,
    /// What the call is to return instead.
    error: Option<Errno>,
}

impl Tracer {
    fn new(
        process: Pid,
        places: Places,
        injection: Option<Injection>,
        commands: Receiver<Command>,
        reached: Box<dyn FnOnce() + Send>,
    ) -> Self {
        Self {
            process,
            places,
            injection,
            commands,
            reached: Some(reached),
            threads: HashMap::new(),
            held: None,
            is_leaving: false,
            made: HashMap::new(),
            trace: Trace::default(),
        }
    }

    /// Stops every thread before its next call.
    fn seize(&mut self) -> Result<()> {
        // A child is seen, so that it can be released before it is another program.
        let options = Options::PTRACE_O_TRACESYSGOOD
            | Options::PTRACE_O_TRACECLONE
            | Options::PTRACE_O_TRACEFORK
            | Options::PTRACE_O_TRACEVFORK;
        loop {
            let new: Vec<Pid> =
                self.tasks()?.into_iter().filter(|thread| !self.threads.contains_key(thread)).collect();
            if new.is_empty() {
                return Ok(());
            }
            for thread in new {
                match ptrace::seize(thread, options) {
                    // Traced from its start, by one that was seized before; or gone.
                    Err(Errno::EPERM | Errno::ESRCH) => {}
                    seized => {
                        seized.context("seize")?;
                        gone_is_fine(ptrace::interrupt(thread))?;
                    }
                }
                self.threads.insert(thread, Traced::default());
            }
        }
    }

    fn tasks(&self) -> Result<Vec<Pid>> {
        let dir = format!("/proc/{}/task", self.process);
        let tasks = fs::read_dir(&dir).context(dir)?;
        let names = tasks.flatten().filter_map(|task| task.file_name().to_str()?.parse().ok());
        Ok(names.map(Pid::from_raw).collect())
    }

    /// Until the process is dead, or no thread is traced any more.
    fn follow(&mut self) -> Result<()> {
        let any = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
        let look = any | WaitPidFlag::WEXITED | WaitPidFlag::WSTOPPED | WaitPidFlag::WNOWAIT;
        loop {
            // A process whose only thread is held does not hear the bell.
            let until = if self.held.is_some() { look | WaitPidFlag::WNOHANG } else { look };
            let thread = match waitid(Id::All, until) {
                Err(Errno::ECHILD) => return Ok(()),
                Err(Errno::EINTR) => continue,
                Ok(WaitStatus::StillAlive) => {
                    if let Ok(command) = self.commands.recv_timeout(LOOK) {
                        gone_is_fine(self.obey(command))?;
                    }
                    continue;
                }
                // The process's own end is its parent's to see.
                Ok(WaitStatus::Exited(thread, _) | WaitStatus::Signaled(thread, ..))
                    if thread == self.process =>
                {
                    return Ok(());
                }
                status => status.context("wait for the traced")?.pid().context("something was waited for")?,
            };
            let (signal, at) = match waitpid(thread, Some(any)).context("wait for the traced")? {
                WaitStatus::Exited(..) | WaitStatus::Signaled(..) => {
                    self.threads.remove(&thread);
                    continue;
                }
                WaitStatus::PtraceSyscall(_) => (None, At::Call),
                WaitStatus::PtraceEvent(_, _, event) => (None, At::Event(event)),
                WaitStatus::Stopped(_, BELL) => (None, At::Signal),
                WaitStatus::Stopped(_, signal) => (Some(signal), At::Signal),
                other => anyhow::bail!("unexpected {other:?}"),
            };
            // ESRCH: killed meanwhile; its end is reported next.
            gone_is_fine(self.stopped(thread, at))?;
            while let Ok(command) = self.commands.try_recv() {
                gone_is_fine(self.obey(command))?;
            }
            if self.held == Some(thread) {
                continue;
            }
            gone_is_fine(self.go_on(thread, signal))?;
        }
    }

    fn stopped(&mut self, thread: Pid, at: At) -> nix::Result<()> {
        if !self.threads.contains_key(&thread) && self.is_ours(thread) {
            self.threads.insert(thread, Traced::default());
        }
        let is_injected = self.threads.get(&thread).is_some_and(|traced| traced.is_injected);
        match at {
            At::Call => {
                let is_entry = ptrace::syscall_info(thread)?.op == SYSCALL_ENTRY;
                let registers = ptrace::getregs(thread)?;
                if is_entry { self.enter(thread, registers) } else { self.leave(thread, registers) }
            }
            At::Event(libc::PTRACE_EVENT_CLONE | libc::PTRACE_EVENT_FORK | libc::PTRACE_EVENT_VFORK)
                if is_injected && self.fault() == Some(Fault::KillWithin) =>
            {
                kill(self.process, Signal::SIGKILL)
            }
            At::Event(_) | At::Signal => Ok(()),
        }
    }

    /// A thread of the process, and not a child of it.
    fn is_ours(&self, thread: Pid) -> bool {
        Path::new(&format!("/proc/{}/task/{thread}", self.process)).exists()
    }

    fn go_on(&mut self, thread: Pid, signal: Option<Signal>) -> nix::Result<()> {
        if self.is_leaving || !self.threads.contains_key(&thread) {
            self.threads.remove(&thread);
            return ptrace::detach(thread, signal);
        }
        ptrace::syscall(thread, signal)
    }

    fn obey(&mut self, command: Command) -> nix::Result<()> {
        self.is_leaving |= command == Command::Finish;
        if let Some(held) = self.held.take() {
            gone_is_fine_here(self.go_on(held, None))?;
        }
        if self.is_leaving {
            for thread in self.threads.keys() {
                gone_is_fine_here(ptrace::interrupt(*thread))?;
            }
        }
        Ok(())
    }

    fn fault(&self) -> Option<Fault> {
        self.injection.as_ref().map(|injection| injection.fault)
    }

    fn enter(&mut self, thread: Pid, mut registers: user_regs_struct) -> nix::Result<()> {
        let Some(call) = calls::describe(thread, &registers, &self.places, self.process) else {
            return Ok(());
        };
        let made = self.made.entry((call.name, call.object.clone())).or_default();
        let step = Step { name: call.name, object: call.object, nth: *made, kind: call.kind };
        *made += 1;
        let injection =
            self.injection.as_ref().filter(|injection| !self.trace.is_injected && injection.step.is(&step));
        let fault = injection.map(|injection| injection.fault);
        self.trace.steps.push(step);
        let (Some(fault), Some(traced)) = (fault, self.threads.get_mut(&thread)) else { return Ok(()) };
        traced.is_injected = true;
        self.trace.is_injected = true;
        match fault {
            Fault::KillBefore => kill(self.process, Signal::SIGKILL),
            Fault::KillWithin | Fault::KillAfter => Ok(()),
            Fault::Fail(errno) => {
                traced.error = Some(errno);
                // No call has this number: the kernel does nothing.
                registers.orig_rax = u64::MAX;
                ptrace::setregs(thread, registers)
            }
            Fault::Hold => {
                self.held = Some(thread);
                if let Some(reached) = self.reached.take() {
                    reached();
                }
                Ok(())
            }
        }
    }

    fn leave(&mut self, thread: Pid, mut registers: user_regs_struct) -> nix::Result<()> {
        let fault = self.fault();
        let Some(traced) = self.threads.get_mut(&thread) else { return Ok(()) };
        if !std::mem::take(&mut traced.is_injected) {
            return Ok(());
        }
        if let Some(errno) = traced.error.take() {
            registers.rax = (-i64::from(errno as i32)).cast_unsigned();
            ptrace::setregs(thread, registers)?;
        }
        match fault {
            Some(Fault::KillAfter) => kill(self.process, Signal::SIGKILL),
            Some(Fault::KillBefore | Fault::KillWithin | Fault::Fail(_) | Fault::Hold) | None => Ok(()),
        }
    }
}

/// Where a thread has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Call,
    Event(i32),
    Signal,
}

fn gone_is_fine(outcome: nix::Result<()>) -> Result<()> {
    gone_is_fine_here(outcome).context("trace")
}

fn gone_is_fine_here(outcome: nix::Result<()>) -> nix::Result<()> {
    match outcome {
        Err(Errno::ESRCH) => Ok(()),
        outcome => outcome,
    }
}
