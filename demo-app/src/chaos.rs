//! The pod of `demo --chaos`: a stream of blocks and a database in one directory, each checked after
//! every step. The first wrong answer ends the program with an error.
//!
//! A line every 50 ms has CLOCK_MONOTONIC in ns, and for the stream and the database the number of
//! steps so far and the longest one since the line before, in microseconds. A step that has not ended
//! counts with the time that it has taken.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::{invalid, monotonic_ns, say};

const REPORT: Duration = Duration::from_millis(50);
/// Everything is verified, and the program ends, once a file of this name is there.
const STOP: &str = "stop";
const BLOCK_BYTES: usize = 64 << 10;
const BLOCKS: u64 = 256;
/// Rows that are kept.
const ROWS: u64 = 500;

/// Steps of one of the two.
#[derive(Debug, Default)]
struct Progress(Mutex<Steps>);

#[derive(Debug, Default)]
struct Steps {
    done: u64,
    begun: Option<Instant>,
    longest: Duration,
}

impl Progress {
    fn steps(&self) -> MutexGuard<'_, Steps> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step<T>(&self, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let begun = Instant::now();
        self.steps().begun = Some(begun);
        let done = work();
        let mut steps = self.steps();
        steps.begun = None;
        steps.done += 1;
        steps.longest = steps.longest.max(begun.elapsed());
        done
    }

    fn report(&self) -> String {
        let mut steps = self.steps();
        let under_way = steps.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        let longest = std::mem::take(&mut steps.longest).max(under_way);
        format!("{} {}", steps.done, longest.as_micros())
    }
}

pub(crate) fn run(dir: &Path) -> io::Result<()> {
    let (stream, database) = (Arc::new(Progress::default()), Arc::new(Progress::default()));
    let (sender, ended) = mpsc::channel();
    for (name, work, progress) in
        [("stream", streamed as Work, &stream), ("database", stored as Work, &database)]
    {
        let (sender, dir, progress) = (sender.clone(), dir.to_owned(), progress.clone());
        thread::spawn(move || sender.send((name, work(&dir, &progress))));
    }
    drop(sender);
    loop {
        match ended.recv_timeout(REPORT) {
            Ok((_, Ok(verified))) => say(&verified)?,
            Ok((name, Err(error))) => return Err(io::Error::new(error.kind(), format!("{name}: {error}"))),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                say(&format!("{} {} {}", monotonic_ns()?, stream.report(), database.report()))?;
            }
        }
    }
}

type Work = fn(&Path, &Progress) -> io::Result<String>;

fn is_asked_to_stop(dir: &Path) -> io::Result<bool> {
    match fs::metadata(dir.join(STOP)) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes blocks one after the other, synced, and reads each back. In the end all are compared.
fn streamed(dir: &Path, progress: &Progress) -> io::Result<String> {
    let path = dir.join("stream");
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path)?;
    let mut number = 0;
    while !is_asked_to_stop(dir)? {
        let at = number % BLOCKS * BLOCK_BYTES as u64;
        progress.step(|| {
            file.write_all_at(&block(number), at)?;
            file.sync_data()
        })?;
        progress.step(|| compare(&file, number))?;
        number += 1;
    }
    drop(file);
    let file = File::open(&path)?;
    for number in number.saturating_sub(BLOCKS)..number {
        compare(&file, number)?;
    }
    Ok(format!("verified {number} blocks of the stream"))
}

fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK_BYTES / size_of::<u64>())
}

fn compare(file: &File, number: u64) -> io::Result<()> {
    let mut found = vec![0; BLOCK_BYTES];
    file.read_exact_at(&mut found, number % BLOCKS * BLOCK_BYTES as u64)?;
    if found == block(number) { Ok(()) } else { Err(invalid(&format!("block {number} has other data"))) }
}

/// Transactions of sqlite3, each acknowledged before the next.
fn stored(dir: &Path, progress: &Progress) -> io::Result<String> {
    let mut shell = Shell::start(dir.join("database"))?;
    shell.ask("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;")?;
    shell.ask("CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER);")?;
    shell.ask("CREATE TABLE entry (number INTEGER PRIMARY KEY, amount INTEGER);")?;
    shell.ask("INSERT INTO account VALUES (1, 0), (2, 0);")?;
    let mut number: u64 = 0;
    while !is_asked_to_stop(dir)? {
        number += 1;
        let amount = number % 97;
        progress.step(|| {
            shell.ask(&format!(
                "BEGIN; INSERT INTO entry VALUES ({number}, {amount}); \
                 DELETE FROM entry WHERE number <= {number} - {ROWS}; \
                 UPDATE account SET balance = balance + {amount} WHERE id = 1; \
                 UPDATE account SET balance = balance - {amount} WHERE id = 2; COMMIT;"
            ))
        })?;
        let rows = number.min(ROWS);
        let right = [format!("0|{rows}|{number}")];
        let found = progress.step(|| {
            shell.ask(
                "SELECT (SELECT sum(balance) FROM account), (SELECT count(*) FROM entry), \
                 (SELECT max(number) FROM entry);",
            )
        })?;
        if found != right {
            return Err(invalid(&format!("after transaction {number}: {found:?}, not {right:?}")));
        }
    }
    match &shell.ask("PRAGMA integrity_check;")?[..] {
        [ok] if ok == "ok" => Ok(format!("verified {number} transactions of the database")),
        faults => Err(invalid(&faults.join("; "))),
    }
}

/// A sqlite3 that answers statement by statement.
struct Shell {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Shell {
    fn start(database: PathBuf) -> io::Result<Self> {
        let mut command = Command::new("/sqlite3");
        command.args(["-batch", "-bail"]).arg(database).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| io::Error::new(e.kind(), format!("/sqlite3: {e}")))?;
        let output = child.stdout.take().ok_or_else(|| invalid("no output"))?;
        Ok(Self { input: child.stdin.take(), output: BufReader::new(output), child })
    }

    /// What the statements print.
    fn ask(&mut self, statements: &str) -> io::Result<Vec<String>> {
        let input = self.input.as_mut().ok_or_else(|| invalid("no input"))?;
        writeln!(input, "{statements}\nSELECT 'done';")?;
        let mut answer = Vec::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                return Err(invalid("sqlite3 has ended"));
            }
            match line.trim_end() {
                "done" => return Ok(answer),
                line => answer.push(line.to_owned()),
            }
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // It ends with its input.
        self.input = None;
        let _killed_already = self.child.wait();
    }
}
