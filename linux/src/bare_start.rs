//! A `main` without std's runtime, for programs that live about a millisecond.
//!
//! Before `main`, std reads `/proc/self/maps`, maps a signal stack and installs handlers that
//! report a stack overflow. That takes 125 µs, a tenth of a small plugin's whole call. [`run`] does
//! the parts that such a program needs.

#![expect(unsafe_code, reason = "signal dispositions are set before any thread exists")]

use std::os::fd::IntoRawFd;
use std::process::ExitCode;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::signal::{SigHandler, Signal, signal};

/// Makes `$main`, a `fn() -> ExitCode`, the program's start. The crate needs
/// `#![cfg_attr(not(test), no_main)]`.
///
/// A panic prints its message and aborts, without exit code 101. Output that is still in stdout's
/// buffer at the end is lost.
#[macro_export]
macro_rules! bare_main {
    ($main:path) => {
        #[cfg(target_env = "musl")]
        #[global_allocator]
        static ALLOCATOR: $crate::bare_start::Allocator = $crate::bare_start::Allocator;

        // Unit tests start in the test harness; this counts as a use of the function.
        const _: fn() -> std::process::ExitCode = $main;

        #[cfg(not(test))]
        #[allow(unsafe_code, reason = "the C runtime starts a program by this name")]
        #[unsafe(no_mangle)]
        extern "C" fn main() -> i32 {
            $crate::bare_start::run($main)
        }
    };
}

/// Keeps freed memory: a program that lives a millisecond need not return pages.
#[cfg(target_env = "musl")]
pub use dlmalloc::GlobalDlmalloc as Allocator;

/// Called by [`bare_main!`](crate::bare_main). Returns 0 for success, 1 for every other code.
pub fn run(main: fn() -> ExitCode) -> i32 {
    prepare();
    i32::from(main() != ExitCode::SUCCESS)
}

/// A closed pipe must be an error, not a signal. Descriptors 0, 1 and 2 must be open, so that no
/// socket or file becomes standard output.
fn prepare() {
    // SAFETY: no handler runs Rust code, and there is one thread.
    // Refused only for signals that cannot be ignored.
    let _previous = unsafe { signal(Signal::SIGPIPE, SigHandler::SigIgn) };
    for number in 0..3 {
        // SAFETY: borrowed for the length of a system call that judges it.
        let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
        if fcntl(fd, FcntlArg::F_GETFD).is_err() {
            // The lowest free descriptor is this one.
            let opened = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null");
            let _stays_open = opened.map(IntoRawFd::into_raw_fd);
        }
    }
}
