//! A `main` without std's runtime, for programs that live about a millisecond.
//!
//! Before `main` std reads `/proc/self/maps`, maps a signal stack and installs
//! handlers that report a stack overflow: an eighth of a millisecond, a tenth
//! of what a small plugin's whole call takes. What such a program needs of it
//! [`run`] does.

#![expect(unsafe_code, reason = "signal dispositions are set before any thread exists")]

use std::os::fd::IntoRawFd;
use std::process::ExitCode;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{SigHandler, Signal, signal};

/// Makes `$main`, a `fn() -> ExitCode`, the program's start. The crate says
/// `#![cfg_attr(not(test), no_main)]`.
///
/// A panic prints its message and aborts; there is no code 101. What is left in
/// a buffer of stdout is not written at the end.
#[macro_export]
macro_rules! bare_main {
    ($main:path) => {
        #[cfg(target_env = "musl")]
        #[global_allocator]
        static ALLOCATOR: $crate::bare_start::Allocator = $crate::bare_start::Allocator;

        // Unit tests have the test harness's start; this counts as a use of ours.
        const _: fn() -> std::process::ExitCode = $main;

        #[cfg(not(test))]
        #[allow(unsafe_code, reason = "the C runtime starts a program by this name")]
        #[unsafe(no_mangle)]
        extern "C" fn main() -> i32 {
            $crate::bare_start::run($main)
        }
    };
}

/// Keeps what it has freed: a program of a millisecond does not give pages back.
#[cfg(target_env = "musl")]
pub use dlmalloc::GlobalDlmalloc as Allocator;

/// For [`bare_main!`](crate::bare_main). 0 for success, 1 for every other code.
pub fn run(main: fn() -> ExitCode) -> i32 {
    prepare();
    i32::from(main() != ExitCode::SUCCESS)
}

/// A closed pipe is an error to handle, not a death; and 0, 1 and 2 are open,
/// so that no socket or file becomes standard output.
fn prepare() {
    // SAFETY: no handler runs Rust code, and there is one thread.
    // Refused only for signals that cannot be ignored.
    let _previous = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    for number in 0..3 {
        // SAFETY: borrowed for the length of a system call that judges it.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        if fcntl(fd, FcntlArg::F_GETFD).is_err() {
            // The lowest free number is this one.
            let opened = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null");
            drop(opened.map(IntoRawFd::into_raw_fd));
        }
    }
}
