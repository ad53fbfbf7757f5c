//! What the person at the terminal sees: a line when a step begins, its time
//! when it ends.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// One line to stdout.
pub fn say(text: &str) {
    let mut stdout = io::stdout().lock();
    // A reader that closed its end (`| head`) has seen enough.
    let _closed = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
}

/// One line to stderr.
pub fn complain(text: &str) {
    let _closed = writeln!(io::stderr().lock(), "{text}");
}

/// The exit code of a program; an error goes to stderr.
pub fn exit_code(done: Result<()>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            complain(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs one step, names it before, and says how long it took.
pub fn step<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let on_terminal = io::stdout().is_terminal();
    if on_terminal {
        let mut stdout = io::stdout().lock();
        let _closed = write!(stdout, "  ...  {name}\r").and_then(|()| stdout.flush());
    }
    let started = Instant::now();
    let done = run();
    let mark = if done.is_ok() { "ok    " } else { "FAILED" };
    say(&format!("{mark} {:>9}  {name}", milliseconds(started.elapsed())));
    done.with_context(|| name.to_owned())
}

/// Announces a part that has output of its own, and says how long it took.
pub fn part<T>(name: &str, run: impl FnOnce() -> Result<T>) -> Result<T> {
    say(&format!("==> {name}"));
    let started = Instant::now();
    let done = run();
    let outcome = if done.is_ok() { "done" } else { "FAILED" };
    say(&format!("==> {name}: {outcome} in {:.1} s", started.elapsed().as_secs_f64()));
    done.with_context(|| name.to_owned())
}

fn milliseconds(duration: Duration) -> String {
    format!("{:.0} ms", duration.as_secs_f64() * 1000.0)
}
