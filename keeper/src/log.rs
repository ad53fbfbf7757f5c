//! Lines on standard error.
//!
//! Invariant: a reader that stops reading does not stop the keeper. A line for which the pipe has no
//! room is lost.

use std::fmt;
use std::io;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

/// Writes lines up to its level.
#[derive(Debug, Clone, Copy)]
pub struct Log {
    pub most: Level,
}

impl Level {
    pub const ALL: [Self; 4] = [Self::Error, Self::Warn, Self::Info, Self::Debug];

    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
        }
    }
}

impl Log {
    pub(crate) fn warn(self, line: fmt::Arguments<'_>) {
        self.write(Level::Warn, line);
    }

    pub(crate) fn info(self, line: fmt::Arguments<'_>) {
        self.write(Level::Info, line);
    }

    pub(crate) fn debug(self, line: fmt::Arguments<'_>) {
        self.write(Level::Debug, line);
    }

    pub fn write(self, level: Level, line: fmt::Arguments<'_>) {
        /// A pipe that can be written takes this much at once (pipe(7), PIPE_BUF).
        const MOST: usize = 4096;
        if level > self.most {
            return;
        }
        let stderr = io::stderr();
        let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        if !poll(&mut polled, Some(&now)).is_ok_and(|ready| ready == 1) {
            return;
        }
        let text = format!("hawser-keeper: {}: {line}\n", level.name());
        // An error here cannot be reported anywhere.
        let _lost = rustix::io::write(&stderr, &text.as_bytes()[..text.len().min(MOST)]);
    }
}
