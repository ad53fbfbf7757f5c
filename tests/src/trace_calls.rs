//! Runs a program under ptrace and injects a fault at one chosen system call: kill -9
//! before or after it, an error in the place of its result, or another message
//! in the place of the one that it sends.
//!
//! Invariant: the program and everything it starts, threads and processes, is
//! traced and has ended when [`run`] returns; one that hangs is killed.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::libc::{self, c_long, user_regs_struct};
use nix::sys::ptrace::{self, Options};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// A program that has not ended by then hangs; generous, since tests share two cores.
const TIMEOUT: Duration = Duration::from_secs(30);
/// `op` of struct ptrace_syscall_info (linux/ptrace.h).
const SYSCALL_ENTRY: u8 = 1;

/// A system call by its place among those of an undisturbed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Point {
    /// 0 is the program, 1 the first process that it or its children start, and so on.
    pub process: usize,
    /// The how-manieth of the process's calls that [`name_of`] knows, from 0.
    pub call: usize,
}

/// A fault at the call at `point`, if it is called `name`, or at the process's
/// next one of that name: waiting for others makes some runs a call longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Injection {
    pub point: Point,
    pub name: &'static str,
    pub fault: Fault,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// kill -9 of the process instead of the call.
    KillBefore,
    /// kill -9 of the process once the call is done, before it returns.
    KillAfter,
    /// The call is not made and returns this error.
    Fail(Errno),
    /// Of `sendto`: the first of these texts, wherever the message holds it,
    /// becomes the second, which is as long. A call without it is passed by.
    Alter(&'static str, &'static str),
}

/// One system call as it was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub point: Point,
    pub name: &'static str,
    pub arguments: [u64; 6],
    /// The path, or what the descriptor stands for.
    pub object: String,
    /// Type of the first netlink message that is sent.
    pub netlink_type: Option<u16>,
    /// Negative: an errno. `None` when it never returned.
    pub result: Option<i64>,
}

/// How a run ended.
#[derive(Debug)]
pub struct Run {
    /// Every known call, in the order in which they were made.
    pub calls: Vec<Call>,
    /// Exit code of the program; `None` when a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    /// The call that got the fault; `None` when the run never came there.
    pub injected: Option<Call>,
    /// It had to be killed, since it did not end.
    pub hung: bool,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} call {}: {}({}", self.point.process, self.point.call, self.name, self.object)?;
        if let Some(kind) = self.netlink_type {
            write!(f, ", message {kind}")?;
        }
        write!(f, ")")
    }
}

/// Runs `program`, whose path is absolute, with `stdin` (less than a pipe
/// holds: 64 KiB) to its end, with one fault at most.
///
/// Reaps whatever child of the calling thread ends meanwhile: there may be no other.
pub fn run(program: &Command, stdin: &[u8], injection: Option<Injection>) -> Result<Run> {
    // Tracing begins before the first instruction of the program: a shell waits
    // for a line, and is seized meanwhile.
    let file = fs::canonicalize(program.get_program()).context("the program's path")?;
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", "read -r go; exec \"$0\" \"$@\""])
        .arg(program.get_program())
        .args(program.get_args());
    command.env_clear();
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("start the shell that becomes the program")?;
    let root = Pid::from_raw(child.id().cast_signed());
    let options = Options::PTRACE_O_TRACESYSGOOD
        | Options::PTRACE_O_TRACEEXEC
        | Options::PTRACE_O_TRACEFORK
        | Options::PTRACE_O_TRACEVFORK
        | Options::PTRACE_O_TRACECLONE
        | Options::PTRACE_O_EXITKILL;
    ptrace::seize(root, options).context("seize")?;
    // Otherwise tracing would begin at its next event, which may be before or after the shell's own start.
    ptrace::interrupt(root).context("interrupt")?;
    let mut pipe = child.stdin.take().context("stdin is piped")?;
    pipe.write_all(b"go\n").and_then(|()| pipe.write_all(stdin)).context("write to the program")?;
    drop(pipe);

    let mut tracer = Tracer::new(root, file, injection);
    let followed = tracer.follow();
    let hung = tracer.watchdog.finish();
    followed?;
    let mut run = Run {
        calls: tracer.calls,
        code: tracer.code,
        stdout: String::new(),
        stderr: String::new(),
        injected: None,
        hung,
    };
    run.injected = tracer.injected.and_then(|index| run.calls.get(index).cloned());
    read_all(child.stdout.take(), &mut run.stdout)?;
    read_all(child.stderr.take(), &mut run.stderr)?;
    Ok(run)
}

fn read_all(pipe: Option<impl Read>, text: &mut String) -> Result<()> {
    let mut bytes = Vec::new();
    pipe.context("the output is piped")?.read_to_end(&mut bytes).context("read the output")?;
    text.push_str(&String::from_utf8_lossy(&bytes));
    Ok(())
}

struct Tracer {
    root: Pid,
    /// Its file, by its true name.
    program: PathBuf,
    injection: Option<Injection>,
    watchdog: Watchdog,
    /// Every thread that is traced.
    threads: HashMap<Pid, Traced>,
    /// Process ids by their number.
    processes: Vec<Pid>,
    /// Known calls made so far, by number of process.
    made: Vec<usize>,
    calls: Vec<Call>,
    injected: Option<usize>,
    code: Option<i32>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Traced {
    process: usize,
    /// Index of the call that it is in.
    within: Option<usize>,
    /// What the call is to return instead.
    error: Option<Errno>,
}

impl Tracer {
    fn new(root: Pid, program: PathBuf, injection: Option<Injection>) -> Self {
        Self {
            root,
            program,
            injection,
            watchdog: Watchdog::start(root),
            threads: HashMap::new(),
            processes: Vec::new(),
            made: Vec::new(),
            calls: Vec::new(),
            injected: None,
            code: None,
        }
    }

    /// Until no tracee is left.
    fn follow(&mut self) -> Result<()> {
        loop {
            // Not the children of the test's other threads.
            let any = WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD;
            match waitpid(None, Some(any)) {
                Err(Errno::ECHILD) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno).context("wait for the traced"),
                Ok(WaitStatus::Exited(pid, code)) => self.ended(pid, Some(code)),
                Ok(WaitStatus::Signaled(pid, ..)) => self.ended(pid, None),
                Ok(WaitStatus::PtraceSyscall(pid)) => {
                    // ESRCH: killed meanwhile; its end is reported next.
                    gone_is_fine(self.at_call(pid))?;
                    gone_is_fine(ptrace::syscall(pid, None))?;
                }
                Ok(WaitStatus::PtraceEvent(pid, ..)) if self.is_shell_still(pid) => {
                    gone_is_fine(ptrace::cont(pid, None))?;
                }
                Ok(WaitStatus::PtraceEvent(pid, ..)) => {
                    self.register(pid);
                    gone_is_fine(ptrace::syscall(pid, None))?;
                }
                Ok(WaitStatus::Stopped(pid, signal)) => gone_is_fine(ptrace::syscall(pid, signal))?,
                Ok(other) => anyhow::bail!("unexpected {other:?}"),
            }
        }
    }

    /// The end of the shell's own execve may be seen as well.
    fn is_shell_still(&self, pid: Pid) -> bool {
        self.threads.is_empty()
            && pid == self.root
            && fs::read_link(format!("/proc/{pid}/exe")).ok() != Some(self.program.clone())
    }

    fn ended(&mut self, pid: Pid, code: Option<i32>) {
        self.threads.remove(&pid);
        self.watchdog.forget(pid);
        if pid == self.root {
            self.code = code;
        }
    }

    /// Gives a new thread its process, and a new process its number.
    fn register(&mut self, pid: Pid) {
        if self.threads.contains_key(&pid) {
            return;
        }
        let leader = thread_group(pid).unwrap_or(pid);
        let process = self.processes.iter().position(|known| *known == leader).unwrap_or_else(|| {
            self.processes.push(leader);
            self.made.push(0);
            self.watchdog.watch(leader);
            self.processes.len() - 1
        });
        self.threads.insert(pid, Traced { process, ..Traced::default() });
    }

    fn at_call(&mut self, pid: Pid) -> nix::Result<()> {
        self.register(pid);
        let is_entry = ptrace::syscall_info(pid)?.op == SYSCALL_ENTRY;
        let registers = ptrace::getregs(pid)?;
        if is_entry { self.enter(pid, registers) } else { self.leave(pid, registers) }
    }

    fn enter(&mut self, pid: Pid, mut registers: user_regs_struct) -> nix::Result<()> {
        let Some(name) = name_of(registers.orig_rax.cast_signed()) else { return Ok(()) };
        let Some(thread) = self.threads.get_mut(&pid) else { return Ok(()) };
        let made = &mut self.made[thread.process];
        let point = Point { process: thread.process, call: *made };
        *made += 1;
        thread.within = Some(self.calls.len());
        self.calls.push(describe(pid, point, name, &registers));
        let Some(injection) = self.injection.filter(|_| self.injected.is_none()) else { return Ok(()) };
        let at = injection.point;
        if at.process != point.process || at.call > point.call || injection.name != name {
            return Ok(());
        }
        if let Fault::Alter(from, to) = injection.fault
            && !alter(pid, registers.rsi, registers.rdx, from.as_bytes(), to.as_bytes())
        {
            return Ok(());
        }
        self.injected = thread.within;
        match injection.fault {
            Fault::KillBefore => kill(self.processes[thread.process], Signal::SIGKILL),
            Fault::KillAfter | Fault::Alter(..) => Ok(()),
            Fault::Fail(errno) => {
                thread.error = Some(errno);
                // No call has this number: the kernel does nothing.
                registers.orig_rax = u64::MAX;
                ptrace::setregs(pid, registers)
            }
        }
    }

    fn leave(&mut self, pid: Pid, mut registers: user_regs_struct) -> nix::Result<()> {
        let Some(thread) = self.threads.get_mut(&pid) else { return Ok(()) };
        let Some(index) = thread.within.take() else { return Ok(()) };
        if let Some(errno) = thread.error.take() {
            registers.rax = (-i64::from(errno as i32)).cast_unsigned();
            ptrace::setregs(pid, registers)?;
        }
        self.calls[index].result = Some(registers.rax.cast_signed());
        let is_injected = self.injected == Some(index);
        if is_injected && self.injection.is_some_and(|injection| injection.fault == Fault::KillAfter) {
            kill(self.processes[thread.process], Signal::SIGKILL)?;
        }
        Ok(())
    }
}

fn gone_is_fine(outcome: nix::Result<()>) -> Result<()> {
    match outcome {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(errno) => Err(errno).context("trace"),
    }
}

/// `Tgid` of /proc/<pid>/status.
fn thread_group(pid: Pid) -> Option<Pid> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    line.trim().parse().ok().map(Pid::from_raw)
}

/// The calls that change something, ask something, or may fail for want of
/// something. Not those by which a program looks after its own memory and signals.
pub fn name_of(number: c_long) -> Option<&'static str> {
    const KNOWN: [(c_long, &str); 59] = [
        (libc::SYS_read, "read"),
        (libc::SYS_write, "write"),
        (libc::SYS_pread64, "pread64"),
        (libc::SYS_pwrite64, "pwrite64"),
        (libc::SYS_readv, "readv"),
        (libc::SYS_writev, "writev"),
        (libc::SYS_open, "open"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_openat2, "openat2"),
        (libc::SYS_mkdir, "mkdir"),
        (libc::SYS_mkdirat, "mkdirat"),
        (libc::SYS_rmdir, "rmdir"),
        (libc::SYS_link, "link"),
        (libc::SYS_linkat, "linkat"),
        (libc::SYS_symlinkat, "symlinkat"),
        (libc::SYS_unlink, "unlink"),
        (libc::SYS_unlinkat, "unlinkat"),
        (libc::SYS_rename, "rename"),
        (libc::SYS_renameat, "renameat"),
        (libc::SYS_renameat2, "renameat2"),
        (libc::SYS_ftruncate, "ftruncate"),
        (libc::SYS_fallocate, "fallocate"),
        (libc::SYS_fchmod, "fchmod"),
        (libc::SYS_fchmodat, "fchmodat"),
        (libc::SYS_utimensat, "utimensat"),
        (libc::SYS_fsync, "fsync"),
        (libc::SYS_fdatasync, "fdatasync"),
        (libc::SYS_flock, "flock"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_stat, "stat"),
        (libc::SYS_lstat, "lstat"),
        (libc::SYS_statx, "statx"),
        (libc::SYS_newfstatat, "newfstatat"),
        (libc::SYS_statfs, "statfs"),
        (libc::SYS_fstatfs, "fstatfs"),
        (libc::SYS_getdents64, "getdents64"),
        (libc::SYS_socket, "socket"),
        (libc::SYS_bind, "bind"),
        (libc::SYS_getsockname, "getsockname"),
        (libc::SYS_setsockopt, "setsockopt"),
        (libc::SYS_sendto, "sendto"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_recvfrom, "recvfrom"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_poll, "poll"),
        (libc::SYS_ppoll, "ppoll"),
        (libc::SYS_setns, "setns"),
        (libc::SYS_unshare, "unshare"),
        (libc::SYS_mount, "mount"),
        (libc::SYS_umount2, "umount2"),
        (libc::SYS_pipe2, "pipe2"),
        (libc::SYS_clone, "clone"),
        (libc::SYS_clone3, "clone3"),
        (libc::SYS_vfork, "vfork"),
        (libc::SYS_dup2, "dup2"),
        (libc::SYS_dup3, "dup3"),
        (libc::SYS_execve, "execve"),
        (libc::SYS_wait4, "wait4"),
        (libc::SYS_waitid, "waitid"),
    ];
    KNOWN.iter().find(|(known, _)| *known == number).map(|(_, name)| *name)
}

fn describe(pid: Pid, point: Point, name: &'static str, registers: &user_regs_struct) -> Call {
    let r = registers;
    let arguments = [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9];
    let object = match name {
        "open" | "stat" | "lstat" | "statfs" | "mkdir" | "rmdir" | "unlink" | "execve" => text_at(pid, r.rdi),
        "link" | "rename" => text_at(pid, r.rsi),
        "openat" | "openat2" | "mkdirat" | "unlinkat" | "statx" | "newfstatat" | "fchmodat" => {
            Some(text_at(pid, r.rsi).unwrap_or_default())
                .filter(|path| !path.is_empty())
                .or_else(|| descriptor(pid, r.rdi))
        }
        "linkat" | "renameat" | "renameat2" | "symlinkat" => {
            text_at(pid, r.r10).or_else(|| text_at(pid, r.rdx))
        }
        "poll" | "ppoll" | "pipe2" | "clone" | "clone3" | "vfork" | "wait4" | "waitid" | "socket"
        | "unshare" | "mount" | "umount2" => None,
        _ => descriptor(pid, r.rdi),
    };
    let netlink_type = match name {
        "sendto" => read_at::<6>(pid, r.rsi).map(|header| u16::from_ne_bytes([header[4], header[5]])),
        _ => None,
    };
    Call { point, name, arguments, object: object.unwrap_or_default(), netlink_type, result: None }
}

fn descriptor(pid: Pid, fd: u64) -> Option<String> {
    let link = fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok()?;
    let name = link.display().to_string();
    if name.starts_with("pipe:") && fs::read_link(format!("/proc/{pid}/fd/1")).ok() == Some(link) {
        return Some("stdout".to_owned());
    }
    // Inode numbers differ from run to run.
    Some(format!("fd {fd} {}", name.split('[').next().unwrap_or_default().trim_end_matches(':')))
}

pub(crate) fn read_at<const N: usize>(pid: Pid, address: u64) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    File::open(format!("/proc/{pid}/mem")).ok()?.read_exact_at(&mut bytes, address).ok()?;
    Some(bytes)
}

/// Whether `from` was in the `length` bytes at `address`, and is `to` now.
fn alter(pid: Pid, address: u64, length: u64, from: &[u8], to: &[u8]) -> bool {
    let Ok(memory) = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")) else {
        return false;
    };
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    if from.len() != to.len() || memory.read_exact_at(&mut bytes, address).is_err() {
        return false;
    }
    let places = bytes.windows(from.len()).enumerate().filter(|(_, window)| *window == from);
    let written = places.map(|(at, _)| memory.write_all_at(to, address + at as u64).is_ok());
    written.reduce(|all, one| all && one).unwrap_or(false)
}

/// A string that ends with a zero byte, cut at 255 bytes.
pub(crate) fn text_at(pid: Pid, address: u64) -> Option<String> {
    let mut bytes = [0; 255];
    let length = File::open(format!("/proc/{pid}/mem")).ok()?.read_at(&mut bytes, address).ok()?;
    let text = bytes.get(..length)?.split(|byte| *byte == 0).next()?;
    Some(String::from_utf8_lossy(text).into_owned())
}

/// Kills what is being traced when it does not end by itself.
#[derive(Debug)]
struct Watchdog {
    alive: Arc<Mutex<BTreeSet<Pid>>>,
    stop: Sender<()>,
    watcher: JoinHandle<bool>,
}

impl Watchdog {
    fn start(root: Pid) -> Self {
        let alive = Arc::new(Mutex::new(BTreeSet::from([root])));
        let (stop, stopped) = channel();
        let watched = Arc::clone(&alive);
        let watcher = thread::spawn(move || {
            let mut hung = false;
            while stopped.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                hung = true;
                for pid in watched.lock().unwrap_or_else(PoisonError::into_inner).iter() {
                    // Ended in this moment is as good.
                    let _ended = kill(*pid, Signal::SIGKILL);
                }
            }
            hung
        });
        Self { alive, stop, watcher }
    }

    fn watch(&self, pid: Pid) {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
    }

    fn forget(&self, pid: Pid) {
        self.alive.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
    }

    /// Whether it had to kill.
    fn finish(self) -> bool {
        drop(self.stop);
        self.watcher.join().unwrap_or(true)
    }
}

/// The call that got the fault; an error when the run never came to it, or hung.
pub fn ensure_injected(run: &Run) -> Result<&Call> {
    ensure!(!run.hung, "the program hung and was killed after {TIMEOUT:?}");
    run.injected.as_ref().context("the run never came to the call that was to get the fault")
}
