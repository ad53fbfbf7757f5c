//! What `cargo test` prints: counts, failed tests with their output, and test binaries that died.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::progress::say;

/// Lines of a failed test that are repeated at the end.
const FAILURE_LINES: usize = 40;
/// Lines before the death of a test binary that are repeated at the end.
const LAST_LINES: usize = 20;
/// Tests without a result that are named.
const UNFINISHED: usize = 4;
/// How long the output may be silent after cargo's end: a process that a test left
/// may hold the pipe open.
const SILENCE: Duration = Duration::from_secs(2);
/// What is printed later after cargo's end is not read.
const LAST_OUTPUT: Duration = Duration::from_secs(30);
/// Lines that wait to be repeated.
const LINES_KEPT: usize = 1000;

/// Sums over all test binaries.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub passed: usize,
    pub failed: usize,
    pub ignored: usize,
}

impl Counts {
    /// Adds a line such as `test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; ...`.
    pub fn add(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for part in counts.split("; ") {
            match part.split_once(' ').map(|(number, word)| (number.parse::<usize>(), word)) {
                Some((Ok(number), "passed")) => self.passed += number,
                Some((Ok(number), "failed")) => self.failed += number,
                Some((Ok(number), "ignored")) => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// A test that failed, with the first [`FAILURE_LINES`] of its output.
#[derive(Debug, PartialEq, Eq)]
struct Failure {
    test: String,
    output: Vec<String>,
}

impl Failure {
    fn new(test: &str) -> Self {
        Self { test: test.to_owned(), output: Vec::new() }
    }
}

/// A test binary that is running, or that ended without a result.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    /// As cargo names it: `tests/hostile/main.rs (target/debug/deps/hostile-1fd34a9138880e48)`.
    name: String,
    /// How many tests it was to run; none before it said so.
    tests: Option<usize>,
    /// Tests that have a result.
    finished: Vec<String>,
    last_lines: VecDeque<String>,
}

/// What the test binaries of one or more `cargo test` did.
#[derive(Debug, Default)]
pub struct Transcript {
    counts: Counts,
    failures: Vec<Failure>,
    died: Vec<Binary>,
    running: Option<Binary>,
    /// The failed test whose output is being read.
    shown: Option<String>,
}

impl Transcript {
    /// Runs a `cargo test`, repeats each of its lines and reads it.
    ///
    /// # Errors
    ///
    /// The command cannot be started or waited for. A status other than 0 is no error.
    pub fn run(&mut self, command: &mut Command) -> Result<ExitStatus> {
        // The words by which cargo names a binary are read below.
        command.env("CARGO_TERM_COLOR", "never").env("CARGO_TERM_QUIET", "false");
        let status = run_lines(command, |line| {
            say(line);
            self.read(line);
        });
        self.end_binary();
        status
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// How many tests failed and test binaries died.
    pub fn failures(&self) -> usize {
        self.failures.len() + self.died.len()
    }

    /// Repeats what failed and why, so that the end of a long output names it.
    pub fn say_failures(&self) {
        for Failure { test, output } in &self.failures {
            say(&format!("failed: {test}"));
            for line in output {
                say(&format!("    {line}"));
            }
        }
        for binary in &self.died {
            let tests = binary.tests.unwrap_or(0);
            say(&format!("died: {}: {} of {tests} tests had ended", binary.name, binary.finished.len()));
            for test in binary.unfinished().into_iter().take(UNFINISHED) {
                say(&format!("    without a result: {test}"));
            }
            for line in &binary.last_lines {
                say(&format!("    {line}"));
            }
        }
    }

    fn read(&mut self, line: &str) {
        let name = line.strip_prefix("     Running ").or_else(|| line.strip_prefix("   Doc-tests "));
        if let Some(name) = name {
            self.end_binary();
            self.running = Some(Binary::new(name));
        } else if line.starts_with("test result: ") {
            self.counts.add(line);
            // What cargo prints after that concerns no test.
            self.running = None;
            self.shown = None;
        } else if let Some(tests) = running(line) {
            self.running.get_or_insert_with(|| Binary::new("a test binary")).tests = Some(tests);
        } else if let Some((test, _result)) = ended(line) {
            if let Some(binary) = &mut self.running {
                binary.finished.push(test.to_owned());
            }
            self.failures.extend(failed_test(line).map(Failure::new));
        } else if let Some(test) = output_of(line) {
            // Its result may not have had a line of its own.
            if !self.failures.iter().any(|failure| failure.test == test) {
                self.failures.push(Failure::new(test));
            }
            self.shown = Some(test.to_owned());
        } else if line == "failures:" {
            self.shown = None;
        } else if !line.is_empty() {
            self.keep(line);
        }
    }

    /// Keeps what a failed test printed, and the last that a binary printed.
    fn keep(&mut self, line: &str) {
        let shown = |failure: &&mut Failure| Some(&failure.test) == self.shown.as_ref();
        if let Some(failure) = self.failures.iter_mut().rev().find(shown)
            && failure.output.len() < FAILURE_LINES
        {
            failure.output.push(line.to_owned());
        }
        let Some(binary) = &mut self.running else { return };
        if binary.last_lines.len() == LAST_LINES {
            binary.last_lines.pop_front();
        }
        binary.last_lines.push_back(line.to_owned());
    }

    /// A binary that printed no result died.
    fn end_binary(&mut self) {
        self.shown = None;
        self.died.extend(self.running.take().filter(|binary| binary.tests.is_some()));
    }
}

/// Runs a command and hands on its lines. Standard output and standard error share one pipe,
/// so that cargo's words about a test binary stand beside those of the binary.
fn run_lines(command: &mut Command, mut each: impl FnMut(&str)) -> Result<ExitStatus> {
    let (reader, writer) = io::pipe().context("make a pipe")?;
    command.stdout(writer.try_clone().context("share the pipe")?).stderr(writer);
    let mut child = command.spawn().context("start cargo test")?;
    // This process's copies of the writing end go, so that the reader sees the end.
    command.stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let (sender, lines) = sync_channel(LINES_KEPT);
    thread::spawn(move || {
        for line in BufReader::new(reader).split(b'\n') {
            let Ok(line) = line else { return };
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    let mut ended: Option<(ExitStatus, Instant)> = None;
    loop {
        let received = lines.recv_timeout(SILENCE);
        if let Ok(line) = &received {
            each(line);
        }
        match (received, ended) {
            (Err(RecvTimeoutError::Disconnected), _) => return child.wait().context("wait for cargo test"),
            (Err(RecvTimeoutError::Timeout), Some((status, _))) => return Ok(status),
            (_, Some((status, since))) if since.elapsed() > LAST_OUTPUT => return Ok(status),
            (_, Some(_)) => {}
            (_, None) => {
                ended =
                    child.try_wait().context("wait for cargo test")?.map(|status| (status, Instant::now()));
            }
        }
    }
}

impl Binary {
    fn new(name: &str) -> Self {
        Self { name: name.to_owned(), tests: None, finished: Vec::new(), last_lines: VecDeque::new() }
    }

    /// Tests without a result, in the order in which they are started; none if the binary cannot list them, or
    /// was to run only some.
    fn unfinished(&self) -> Vec<String> {
        let path = self.name.rsplit_once('(').and_then(|(_, path)| path.strip_suffix(')'));
        let listed =
            path.and_then(|path| Command::new(path).args(["--list", "--format", "terse"]).output().ok());
        let listed =
            listed.map(|listed| String::from_utf8_lossy(&listed.stdout).into_owned()).unwrap_or_default();
        let tests = listed_tests(&listed);
        if self.tests != Some(tests.len()) {
            return Vec::new();
        }
        tests.into_iter().filter(|test| !self.finished.contains(test)).collect()
    }
}

/// The names in what `--list --format terse` prints.
pub fn listed_tests(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

/// The number in `running 58 tests`.
fn running(line: &str) -> Option<usize> {
    let (number, unit) = line.strip_prefix("running ")?.split_once(' ')?;
    number.parse().ok().filter(|_| matches!(unit, "test" | "tests"))
}

/// The name in `test a::b ... FAILED`.
pub fn failed_test(line: &str) -> Option<&str> {
    ended(line).and_then(|(test, result)| (result == "FAILED").then_some(test))
}

/// Name and result of `test a::b ... FAILED`.
fn ended(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("test ")?.rsplit_once(" ... ")
}

/// The name in `---- a::b stdout ----`.
fn output_of(line: &str) -> Option<&str> {
    line.strip_prefix("---- ")?.strip_suffix(" stdout ----")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transcript_of(text: &str) -> Transcript {
        let mut transcript = Transcript::default();
        for line in text.lines() {
            transcript.read(line);
        }
        transcript.end_binary();
        transcript
    }

    #[test]
    fn counts_are_summed_over_test_binaries() {
        let counts = transcript_of(
            "running 4 tests
test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.03s
test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 30.61s",
        )
        .counts();
        assert_eq!(counts, Counts { passed: 7, failed: 1, ignored: 2 });
    }

    #[test]
    fn a_failed_test_is_named_with_its_output() {
        let transcript = transcript_of(
            "     Running tests/words.rs (target/debug/deps/words-1)

running 3 tests
test a::b ... FAILED
test a::c ... ok
test a::d ... FAILED

failures:

---- a::b stdout ----

thread 'a::b' panicked at tests/words.rs:3:
no word

---- a::d stdout ----
another

failures:
    a::b
    a::d

test result: FAILED. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `-p xtask --test words`",
        );
        let failure = |test: &str, output: &[&str]| Failure {
            test: test.to_owned(),
            output: output.iter().copied().map(str::to_owned).collect(),
        };
        assert_eq!(
            transcript.failures,
            [
                failure("a::b", &["thread 'a::b' panicked at tests/words.rs:3:", "no word"]),
                failure("a::d", &["another"])
            ]
        );
        assert_eq!(transcript.died, []);
        assert_eq!(transcript.failures(), 2);
    }

    #[test]
    fn a_test_binary_that_died_is_named_with_its_last_words() {
        let transcript = transcript_of(
            "     Running unittests src/lib.rs (target/debug/deps/linux-1)
running 1 test
test x ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
     Running tests/hostile/main.rs (target/debug/deps/hostile-1)

running 58 tests
test cgroups::a ... ok

thread 'deep_trees::b' has overflowed its stack
error: test failed, to rerun pass `-p tests --test hostile`

Caused by:
  process didn't exit successfully: `target/debug/deps/hostile-1` (signal: 6, SIGABRT: process abort signal)
   Doc-tests kubelet

running 0 tests

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
error: 1 target failed:",
        );
        let [binary] = transcript.died.as_slice() else { panic!("{:?}", transcript.died) };
        assert_eq!(binary.name, "tests/hostile/main.rs (target/debug/deps/hostile-1)");
        assert_eq!((binary.tests, binary.finished.as_slice()), (Some(58), &["cgroups::a".to_owned()][..]));
        assert_eq!(binary.last_lines.front().unwrap(), "thread 'deep_trees::b' has overflowed its stack");
        assert!(binary.last_lines.back().unwrap().contains("SIGABRT"));
    }

    #[test]
    fn output_ends_with_cargo_though_a_process_holds_the_pipe_open() {
        // `cat` runs until this test drops the writing end of its input.
        let script = "exec 3<&0; cat <&3 & echo out; echo error >&2; exit 3";
        let (input, _held) = io::pipe().unwrap();
        let mut lines = Vec::new();
        let status = run_lines(Command::new("sh").args(["-c", script]).stdin(input), |line| {
            lines.push(line.to_owned());
        });
        assert_eq!((status.unwrap().code(), lines), (Some(3), vec!["out".to_owned(), "error".to_owned()]));
    }
}
