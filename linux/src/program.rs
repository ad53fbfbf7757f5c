//! Starts a program without waiting until it runs.
//!
//! std's function (posix_spawn(3)) suspends the caller until the kernel has opened the program and
//! released the old memory. That takes as long as all the rest of the start: a tenth of a
//! short-lived caller's time, and two changes of CPU. Here caller and child run at the same time.
//! Between clone(2) and execve(2) the child shares the caller's memory, but not its stack,
//! descriptors or signal handlers.

#![expect(unsafe_code, reason = "a child that shares memory is made by hand")]

use std::ffi::{CString, c_char, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use nix::errno::Errno;
use nix::libc::{self, c_int, c_long};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// A started program. If it is dropped without [`Program::wait`], the drop waits for its end.
#[derive(Debug)]
pub struct Program {
    pid: libc::pid_t,
    /// Used by the child until execve(2); `None` after its end.
    shared: Option<Box<Shared>>,
}

/// Why there is no exit status.
#[derive(Debug)]
pub enum NoStatus {
    /// execve(2) failed, and no program ran.
    NotStarted(io::Error),
    /// waitpid(2) failed.
    NotWaitedFor(io::Error),
}

/// The memory that the child reads, and the one word that it writes.
#[derive(Debug)]
struct Shared {
    path: CString,
    /// Terminated by null; the pointers lead into `words`.
    arguments: [*const c_char; 2],
    environment: Vec<*const c_char>,
    /// Owns the memory behind the pointers.
    _words: Vec<CString>,
    stdio: [RawFd; 3],
    /// The error of execve(2); 0 if there is none.
    errno: AtomicI32,
    stack: Vec<u128>,
}

/// The child's few system calls need some hundred bytes.
const STACK: usize = 16 * 1024;

/// Exit code of a child whose execve(2) failed, as in a shell.
const NOT_STARTED: c_int = 127;

/// Starts the program at `path` without arguments, with the environment `KEY=VALUE` and the three
/// descriptors as its stdin, stdout and stderr. Signals are as programs expect: SIGPIPE at its
/// default, none blocked. [`Program::wait`] reports a program that does not exist or cannot run.
///
/// Other descriptors must be close-on-exec, and the three must not be 0 to 2.
pub fn start(path: CString, environment: Vec<CString>, stdio: [OwnedFd; 3]) -> io::Result<Program> {
    let pointers = environment.iter().map(|word| word.as_ptr());
    let pointers = pointers.chain([ptr::null()]).collect();
    let mut shared = Box::new(Shared {
        arguments: [path.as_ptr(), ptr::null()],
        path,
        environment: pointers,
        _words: environment,
        stdio: stdio.each_ref().map(AsRawFd::as_raw_fd),
        errno: AtomicI32::new(0),
        stack: Vec::with_capacity(STACK / size_of::<u128>()),
    });
    let capacity = shared.stack.capacity();
    // SAFETY: one past the end of the allocation, aligned to 16 bytes: stacks
    // grow downwards.
    let top: *mut c_void = unsafe { shared.stack.as_mut_ptr().add(capacity) }.cast();
    let argument: *mut c_void = ptr::from_mut::<Shared>(&mut shared).cast();
    // SAFETY: the child runs `become_program` on a stack of its own; what it uses
    // is in `shared`, which stays where it is until the child has ended
    // (`Program`'s Drop waits). It makes system calls only, by `call`, which
    // touches no thread-local storage: that is the caller's.
    let pid = unsafe { libc::clone(become_program, top, FLAGS, argument) };
    // The child has its own copies of `stdio`; ours are closed now.
    Ok(Program { pid: Errno::result(pid)?, shared: Some(shared) })
}

impl Program {
    /// Waits for its end. A second call returns `ECHILD`.
    pub fn wait(&mut self) -> Result<ExitStatus, NoStatus> {
        let mut status = 0;
        if self.shared.is_none() {
            return Err(NoStatus::NotWaitedFor(Errno::ECHILD.into()));
        }
        loop {
            // SAFETY: the kernel writes into `status`; no other code waits for this child, so its
            // pid is not reused.
            match Errno::result(unsafe { libc::waitpid(self.pid, &raw mut status, 0) }) {
                Ok(_) => break,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(NoStatus::NotWaitedFor(errno.into())),
            }
        }
        match self.shared.take().map_or(0, |shared| shared.errno.load(Ordering::Acquire)) {
            0 => Ok(ExitStatus::from_raw(status)),
            errno => Err(NoStatus::NotStarted(io::Error::from_raw_os_error(errno))),
        }
    }
}

impl Program {
    /// Its pid, until [`Self::wait`] returns.
    pub fn id(&self) -> i32 {
        self.pid
    }

    /// Kills it; [`Program::wait`] still returns how it ended.
    pub fn kill(&self) {
        if self.shared.is_some() {
            // No code has waited for it, so its pid is not reused.
            let _killed = nix::sys::signal::kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if self.shared.is_some() {
            // A drop cannot report an error. If the wait fails, the memory that the child may use
            // is leaked.
            let _is_leaked = self.wait();
            std::mem::forget(self.shared.take());
        }
    }
}

extern "C" fn become_program(argument: *mut c_void) -> c_int {
    // SAFETY: `start` passes its `Shared`, which outlives this process's use of it.
    let shared = unsafe { &*argument.cast::<Shared>() };
    // SIG_DFL, no flags and an empty mask, in every layout.
    let default = [0_u64; 8];
    // SAFETY: the kernel reads a `struct sigaction` and a set of 8 bytes.
    unsafe {
        call(libc::SYS_rt_sigaction, [word(libc::SIGPIPE), default.as_ptr().addr(), 0, 8]);
        call(libc::SYS_rt_sigprocmask, [word(libc::SIG_SETMASK), default.as_ptr().addr(), 0, 8]);
    }
    let [stdin, stdout, stderr] = &shared.stdio;
    for (number, fd) in [(0, stdin), (1, stdout), (2, stderr)] {
        // SAFETY: both are this process's own descriptors.
        let done = unsafe { call(libc::SYS_dup3, [word(*fd), number, 0, 0]) };
        if done < 0 {
            return shared.failed(done);
        }
    }
    let pointers = [
        shared.path.as_ptr().addr(),
        shared.arguments.as_ptr().addr(),
        shared.environment.as_ptr().addr(),
        0,
    ];
    // SAFETY: strings and lists end with zeros and live as long as `shared`.
    let done = unsafe { call(libc::SYS_execve, pointers) };
    shared.failed(done)
}

impl Shared {
    fn failed(&self, done: isize) -> c_int {
        // Errors are small negative numbers.
        self.errno.store(i32::try_from(-done).unwrap_or(libc::EINVAL), Ordering::Release);
        NOT_STARTED
    }
}

fn word(number: c_int) -> usize {
    number.cast_unsigned() as usize
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
const FLAGS: c_int = libc::CLONE_VM | libc::SIGCHLD;

/// A system call that does not touch `errno`. A negative result is an errno.
///
/// # Safety
///
/// As for the system call itself.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: c_long, [a, b, c, d]: [usize; 4]) -> isize {
    let result;
    // SAFETY: x86-64's convention for system calls; the caller answers for the arguments.
    unsafe {
        std::arch::asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b,
            in("rdx") c, in("r10") d, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// As above.
///
/// # Safety
///
/// As the call itself.
#[cfg(target_arch = "aarch64")]
unsafe fn call(number: c_long, [a, b, c, d]: [usize; 4]) -> isize {
    let result;
    // SAFETY: AArch64's convention for system calls; the caller answers for the arguments.
    unsafe {
        std::arch::asm!("svc 0", in("x8") number, inlateout("x0") a => result, in("x1") b, in("x2") c,
            in("x3") d, options(nostack));
    }
    result
}

/// On other architectures the C library makes the calls and may write `errno`, so the caller is
/// suspended meanwhile.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const FLAGS: c_int = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;

/// As above.
///
/// # Safety
///
/// As the call itself.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn call(number: c_long, [a, b, c, d]: [usize; 4]) -> isize {
    // SAFETY: the caller answers for the arguments.
    match unsafe { libc::syscall(number, a, b, c, d) } {
        -1 => -(Errno::last_raw() as isize),
        done => done as isize,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;

    /// The program, what writes to its stdin, what reads its stdout and stderr.
    fn shell(path: &str, environment: &[&str]) -> (Program, File, File, File) {
        let pipe = || crate::pipes::pipe().unwrap();
        let (stdin, to) = pipe();
        let (from, stdout) = pipe();
        let (errors, stderr) = pipe();
        let words = environment.iter().map(|word| CString::new(*word).unwrap()).collect();
        let program = start(CString::new(path).unwrap(), words, [stdin, stdout, stderr]).unwrap();
        (program, to.into(), from.into(), errors.into())
    }

    #[test]
    fn a_program_has_its_pipes_and_environment_and_ends_with_its_code() {
        let (mut program, mut to, mut from, mut errors) = shell("/bin/sh", &["A=b c", "PATH=/bin"]);
        to.write_all(b"echo \"$A\"; echo said >&2; kill -s PIPE $$; exit 3").unwrap();
        drop(to);
        let status = program.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGPIPE), "not ignored, though it is here");
        let (mut out, mut err) = (String::new(), String::new());
        from.read_to_string(&mut out).unwrap();
        errors.read_to_string(&mut err).unwrap();
        assert_eq!((out.as_str(), err.as_str()), ("b c\n", "said\n"));
    }

    #[test]
    fn what_cannot_be_run_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let text = dir.path().join("text");
        std::fs::write(&text, "").unwrap();
        for (path, errno) in [("/nonexistent", Errno::ENOENT), (text.to_str().unwrap(), Errno::EACCES)] {
            let (mut program, ..) = shell(path, &[]);
            let refused = program.wait().unwrap_err();
            assert!(
                matches!(&refused, NoStatus::NotStarted(e) if e.raw_os_error() == Some(errno as i32)),
                "{path}: {refused:?}"
            );
        }
    }

    #[test]
    fn many_at_once_all_become_programs() {
        let starters: Vec<_> = (0..8)
            .map(|_| {
                std::thread::spawn(|| {
                    for _ in 0..50 {
                        let (mut program, to, _from, _errors) = shell("/bin/cat", &[]);
                        drop(to);
                        let status = program.wait().unwrap();
                        assert!(status.success(), "{status}");
                    }
                })
            })
            .collect();
        starters.into_iter().for_each(|starter| starter.join().unwrap());
    }
}
