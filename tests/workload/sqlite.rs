//! Transactions of sqlite3, each acknowledged before the next. Every acknowledged row must be there,
//! and no other; the accounts between which each transaction moves an amount add up to zero.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};

use anyhow::{Context, Result, ensure};
use tests::random::Random;

use crate::run::{PROGRAM_TIMEOUT, Run, wait};

const ACCOUNTS: u64 = 20;
const COMPARED_AFTER: u64 = 25;
/// Transactions of one process.
const OPENED_ANEW_AFTER: u64 = 60;

/// A sqlite3 that answers statement by statement.
struct Shell {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
}

impl Shell {
    fn start(run: &Run, database: &Path) -> Result<Self> {
        let log = run.report.join("sqlite3.log");
        let log = File::options().append(true).create(true).open(&log).context("open the log")?;
        let mut command = run.command("sqlite3");
        command.args(["-batch", "-bail"]).arg(database);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child =
            command.spawn().context("start sqlite3: if it is missing, run `apt-get install sqlite3`")?;
        let input = child.stdin.take().context("its input")?;
        let output = BufReader::new(child.stdout.take().context("its output")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut lines = output.lines().map_while(std::io::Result::ok);
            lines.try_for_each(|line| sender.send(line))
        });
        Ok(Self { child, input, lines })
    }

    /// Executes statements. Returns what they print before their own last line.
    fn ask(&mut self, run: &Run, statements: &str) -> Result<Vec<String>> {
        run.step(|| {
            writeln!(self.input, "{statements}\nSELECT 'done';").context("write to sqlite3")?;
            let mut answer = Vec::new();
            loop {
                let line = self.lines.recv_timeout(PROGRAM_TIMEOUT);
                let line = line.with_context(|| format!("sqlite3 has ended or hangs: {}", log(run)))?;
                if line == "done" {
                    return Ok(answer);
                }
                answer.push(line);
            }
        })?
    }

    fn end(self, run: &Run) -> Result<()> {
        let Self { mut child, input, lines: _ } = self;
        drop(input);
        let status = wait(&mut child, PROGRAM_TIMEOUT)?;
        ensure!(status.success(), "sqlite3: {status}: {}", log(run));
        Ok(())
    }
}

fn log(run: &Run) -> String {
    std::fs::read_to_string(run.report.join("sqlite3.log")).unwrap_or_default()
}

struct Ledger {
    acknowledged: BTreeMap<u64, u64>,
    random: Random,
}

pub(crate) fn run(run: &Run, journal: &str) -> Result<()> {
    let database = run.dir.join(format!("{journal}.db"));
    let mut shell = open(run, &database, journal)?;
    shell.ask(run, "CREATE TABLE ledger (n INTEGER PRIMARY KEY, amount INTEGER, pad TEXT);")?;
    shell.ask(run, "CREATE TABLE account (id INTEGER PRIMARY KEY, balance INTEGER);")?;
    for account in 0..ACCOUNTS {
        shell.ask(run, &format!("INSERT INTO account VALUES ({account}, 0);"))?;
    }
    let mut ledger = Ledger { acknowledged: BTreeMap::new(), random: run.random() };
    let mut number = 0;
    while run.goes_on() || number == 0 {
        number += 1;
        ledger.commit(run, &mut shell, number)?;
        if number % COMPARED_AFTER == 0 {
            ledger.compare(run, &mut shell)?;
        }
        if number % OPENED_ANEW_AFTER == 0 {
            shell.end(run)?;
            shell = open(run, &database, journal)?;
        }
    }
    shell.end(run)?;
    let mut shell = open(run, &database, journal)?;
    ledger.compare(run, &mut shell)?;
    let answer = shell.ask(run, "PRAGMA integrity_check;")?;
    ensure!(answer == ["ok"], "integrity_check: {answer:?}");
    let rows = shell.ask(run, "SELECT n || ' ' || amount FROM ledger ORDER BY n;")?;
    let wanted: Vec<String> = ledger.acknowledged.iter().map(|(n, amount)| format!("{n} {amount}")).collect();
    ensure!(rows == wanted, "{} rows, and {} were acknowledged", rows.len(), wanted.len());
    shell.end(run)
}

fn open(run: &Run, database: &Path, journal: &str) -> Result<Shell> {
    let mut shell = Shell::start(run, database)?;
    let answer = shell.ask(run, &format!("PRAGMA journal_mode={journal};\nPRAGMA synchronous=FULL;"))?;
    ensure!(answer == [journal], "journal_mode: {answer:?}");
    Ok(shell)
}

impl Ledger {
    fn commit(&mut self, run: &Run, shell: &mut Shell, number: u64) -> Result<()> {
        let amount = self.random.below(1000);
        let (from, to) = (self.random.below(ACCOUNTS), self.random.below(ACCOUNTS));
        let pad = "p".repeat(self.random.index(3000));
        let statements = format!(
            "BEGIN IMMEDIATE;\nINSERT INTO ledger VALUES ({number}, {amount}, '{pad}');\n\
             UPDATE account SET balance = balance - {amount} WHERE id = {from};\n\
             UPDATE account SET balance = balance + {amount} WHERE id = {to};\nCOMMIT;"
        );
        let answer = shell.ask(run, &statements)?;
        ensure!(answer.is_empty(), "{answer:?}");
        self.acknowledged.insert(number, amount);
        Ok(())
    }

    fn compare(&mut self, run: &Run, shell: &mut Shell) -> Result<()> {
        let answer =
            shell.ask(run, "SELECT count(*), sum(amount) FROM ledger;\nSELECT sum(balance) FROM account;")?;
        let (count, sum) = (self.acknowledged.len(), self.acknowledged.values().sum::<u64>());
        ensure!(
            answer == [format!("{count}|{sum}"), "0".to_owned()],
            "{answer:?}, and not {count}|{sum} and 0"
        );
        Ok(())
    }
}
