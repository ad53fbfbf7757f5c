//! The business program of the demo image and of the tests: one static binary,
//! small verbs, no shell needed beside it.
//!
//! Invariant: as process 1 of a container it has no default signal handling, so
//! every verb that lasts ends on SIGTERM and SIGINT by its own hand (exit 143).

mod business;
mod chaos;
mod health;
mod hostile;
mod http;
mod listen;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::SpliceFFlags;
use nix::sys::signal::{SigSet, Signal};
use nix::time::{ClockId, clock_gettime};

const USAGE: &str = "usage: demo-app VERB
  print TEXT               one line to stdout
  sleep SECONDS|forever    ends on SIGTERM
  late SECONDS             ends on SIGTERM, which has no effect in the first SECONDS
  hold MEBIBYTES           sleeps with so much memory, whose release takes the kernel a while
  exit CODE                0 to 255
  leave                    a process that sleeps for a minute with this one's output, and ends
  write FILE TEXT          TEXT and a newline, synced
  cat FILE                 to stdout
  remove FILE              if it is there
  flood BYTES CODE         so many bytes to stdout, and this exit code
  copy                     stdin to stdout, to its end
  terminal                 the size of the terminal on stdin, then a line for each change
  serve ADDR:PORT DIR      HTTP/1.0, files of DIR; [::]:PORT listens on v4 and v6
  health ADDR:PORT DIR     gRPC health checks; a service is SERVING while DIR has a file of its name
  hostile ADDR:PORT        HTTP with redirects, slow and large answers
  fetch URL [SECONDS]      http by IP address; tries again until SECONDS (10) have passed
  monotonic                CLOCK_MONOTONIC in ns, read by the first statement
  status                   /proc/self/status
  count                    1, 2, 3... a line each 10 ms
  reopen-terminal          closes its terminal, opens it again, and writes
  hold-output              writes to stdout, and keeps all who read it waiting
  demo one|two DIR PORT    the two pods of the demo
  chaos DIR                the pod of the demo in which processes are killed; /sqlite3 must be there";

fn main() -> ExitCode {
    let started = clock_gettime(ClockId::CLOCK_MONOTONIC);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&words, started) {
        Ok(code) => code,
        Err(error) => {
            let _unwritable = writeln!(io::stderr(), "demo-app {}: {error}", words.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn run(words: &[&str], started: nix::Result<nix::sys::time::TimeSpec>) -> io::Result<ExitCode> {
    match words {
        ["print", text] => say(text)?,
        ["sleep", "forever"] => sleep(None)?,
        ["sleep", seconds] => sleep(Some(parse_seconds(seconds)?))?,
        ["late", seconds] => {
            let (begun, wanted) = (Instant::now(), parse_seconds(seconds)?);
            while begun.elapsed() < wanted {
                thread::park_timeout(wanted.saturating_sub(begun.elapsed()));
            }
            sleep(None)?;
        }
        ["hold", mebibytes] => {
            let memory = vec![1_u8; parse::<usize>("MEBIBYTES", mebibytes)? << 20];
            sleep(None)?;
            drop(memory);
        }
        ["exit", code] => return Ok(ExitCode::from(parse::<u8>("CODE", code)?)),
        ["leave"] => drop(Command::new("/proc/self/exe").args(["sleep", "60"]).spawn()?),
        ["write", file, text] => write_synced(Path::new(file), text)?,
        ["cat", file] => io::stdout().write_all(&fs::read(file)?)?,
        ["remove", file] => match fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        },
        ["flood", bytes, code] => {
            let bytes = parse::<u64>("BYTES", bytes)?;
            io::copy(&mut io::repeat(b'x').take(bytes), &mut io::stdout().lock())?;
            return Ok(ExitCode::from(parse::<u8>("CODE", code)?));
        }
        ["hostile", address] => {
            end_on_signals()?;
            hostile::serve(parse::<SocketAddr>("ADDR:PORT", address)?)?;
        }
        ["copy"] => {
            io::copy(&mut io::stdin().lock(), &mut io::stdout().lock())?;
        }
        ["terminal"] => terminal()?,
        ["serve", address, dir] => {
            end_on_signals()?;
            http::SERVER.run(parse::<SocketAddr>("ADDR:PORT", address)?, Path::new(dir))?;
        }
        ["health", address, dir] => {
            end_on_signals()?;
            health::SERVER.run(parse::<SocketAddr>("ADDR:PORT", address)?, Path::new(dir))?;
        }
        ["fetch", url] => io::stdout().write_all(&http::fetch(url, Duration::from_secs(10))?)?,
        ["fetch", url, seconds] => io::stdout().write_all(&http::fetch(url, parse_seconds(seconds)?)?)?,
        ["monotonic"] => {
            let now = started?;
            say(&format!("{}", i128::from(now.tv_sec()) * 1_000_000_000 + i128::from(now.tv_nsec())))?;
        }
        ["status"] => io::stdout().write_all(&fs::read("/proc/self/status")?)?,
        ["reopen-terminal"] => reopen_terminal()?,
        ["hold-output"] => hold_output()?,
        ["count"] => count()?,
        ["demo", "one", dir, port] => {
            end_on_signals()?;
            business::one(Path::new(dir), parse("PORT", port)?)?;
        }
        ["demo", "two", dir, port] => {
            end_on_signals()?;
            business::two(Path::new(dir), parse("PORT", port)?)?;
        }
        ["chaos", dir] => {
            end_on_signals()?;
            chaos::run(Path::new(dir))?;
        }
        _ => {
            writeln!(io::stderr(), "{USAGE}")?;
            return Ok(ExitCode::from(2));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// One line to stdout, at once: logs are read while the program runs.
fn say(line: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Blocks SIGTERM and SIGINT for every thread started from now on, and ends the
/// process when one arrives. Call before the first thread.
fn end_on_signals() -> io::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;
    thread::spawn(move || wait_and_exit(signals));
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the process ends here by its signal; nothing is left to clean up"
)]
fn wait_and_exit(signals: SigSet) {
    if let Ok(signal) = signals.wait() {
        std::process::exit(128 + signal as i32);
    }
}

/// splice(2) of a pipe keeps it locked, and what is in it there, while it waits for its target:
/// here a socket that is never read. A read of the pipe waits for the lock.
fn hold_output() -> io::Result<()> {
    thread::spawn(|| while io::stdout().write_all(&[b'x'; 4096]).is_ok() {});
    let (target, _never_read) = UnixStream::pair()?;
    let pipe = File::open("/proc/self/fd/1")?;
    while nix::fcntl::splice(&pipe, None, &target, None, 1 << 16, SpliceFFlags::empty())? > 0 {}
    Ok(())
}

fn sleep(duration: Option<Duration>) -> io::Result<()> {
    end_on_signals()?;
    let started = Instant::now();
    loop {
        match duration {
            None => thread::park(),
            Some(duration) => match duration.checked_sub(started.elapsed()) {
                Some(left) if !left.is_zero() => thread::park_timeout(left),
                _ => return Ok(()),
            },
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a pace is what is asked for, not an event")]
fn count() -> io::Result<()> {
    end_on_signals()?;
    for number in 1_u64.. {
        say(&number.to_string())?;
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

fn terminal() -> io::Result<()> {
    let mut changes = SigSet::empty();
    changes.add(Signal::SIGWINCH);
    changes.thread_block()?;
    end_on_signals()?;
    loop {
        let size = rustix::termios::tcgetwinsize(io::stdin())?;
        say(&format!("{} columns, {} rows", size.ws_col, size.ws_row))?;
        changes.wait()?;
    }
}

/// Meanwhile only the parent has it open.
fn reopen_terminal() -> io::Result<()> {
    let null = File::options().read(true).write(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    // The reader has time to notice that.
    sleep(Some(Duration::from_millis(300)))?;
    writeln!(File::options().write(true).open("/dev/tty")?, "open again")
}

fn write_synced(file: &Path, text: &str) -> io::Result<()> {
    let mut open = fs::File::create(file)?;
    writeln!(open, "{text}")?;
    open.sync_all()
}

fn parse<T: std::str::FromStr<Err: std::fmt::Display>>(name: &str, text: &str) -> io::Result<T> {
    text.parse().map_err(|e| invalid(&format!("{name} {text:?}: {e}")))
}

fn parse_seconds(text: &str) -> io::Result<Duration> {
    let seconds = parse::<f64>("SECONDS", text)?;
    Duration::try_from_secs_f64(seconds).map_err(|e| invalid(&format!("SECONDS {text:?}: {e}")))
}

fn monotonic_ns() -> io::Result<i128> {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)?;
    Ok(i128::from(now.tv_sec()) * 1_000_000_000 + i128::from(now.tv_nsec()))
}

fn invalid(message: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, message)
}
