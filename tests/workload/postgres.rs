//! PostgreSQL with data checksums under pgbench. At the end its balances agree, each acknowledged
//! transaction is there, and pg_amcheck and pg_checksums find nothing.

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User};

use crate::run::{PROGRAM_TIMEOUT, Run, wait};

const MISSING: &str = "run `apt-get install postgresql`, or `cargo xtask test`, which installs it";
const CLIENTS: u64 = 4;
const TRANSACTIONS: u64 = 10;
/// Lines of the server's log that are no fault: it is asked before it is ready.
const STARTING: &str = "the database system is starting up";

/// A server on the volume; it refuses to run as root.
struct Cluster<'a> {
    run: &'a Run,
    user: User,
    programs: PathBuf,
    data: PathBuf,
    sockets: PathBuf,
}

pub(crate) fn run(run: &Run) -> Result<()> {
    let user = User::from_name("postgres").context("user postgres")?;
    let user = user.with_context(|| format!("no user postgres: {MISSING}"))?;
    let (data, sockets) = (run.dir.join("cluster"), run.report.join("s"));
    let cluster = Cluster { run, user, programs: programs()?, data, sockets };
    for dir in [&cluster.data, &cluster.sockets] {
        run.step(|| fs::create_dir(dir))?.context("mkdir")?;
        chown(dir, Some(cluster.user.uid.as_raw()), Some(cluster.user.gid.as_raw())).context("chown")?;
    }
    let mut initdb = cluster.command("initdb");
    initdb
        .args(["--data-checksums", "--auth=trust", "--locale=C", "--encoding=UTF8", "-D"])
        .arg(&cluster.data);
    run.program(initdb)?;
    let server = cluster.start()?;
    let result = cluster.benchmark();
    let ended = cluster.stop(server);
    result.with_context(|| cluster.log())?;
    ended?;
    let mut checksums = cluster.command("pg_checksums");
    checksums.arg("--check").arg("-D").arg(&cluster.data);
    run.program(checksums)?;
    let log = cluster.log();
    let faults = ["ERROR:", "FATAL:", "PANIC:"];
    let mut lines = log.lines().filter(|line| faults.iter().any(|fault| line.contains(fault)));
    let fault = lines.find(|line| !line.contains(STARTING));
    ensure!(fault.is_none(), "{fault:?} in\n{log}");
    Ok(())
}

/// The newest release's programs: Debian puts only some of them into PATH.
fn programs() -> Result<PathBuf> {
    let releases = fs::read_dir("/usr/lib/postgresql").with_context(|| MISSING.to_owned())?;
    let mut releases: Vec<(u32, PathBuf)> = releases
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .filter(|(_, bin)| bin.join("initdb").is_file())
        .collect();
    releases.sort();
    releases.pop().map(|(_, bin)| bin).with_context(|| MISSING.to_owned())
}

impl Cluster<'_> {
    fn command(&self, program: &str) -> Command {
        let mut command = self.run.command(&self.programs.join(program).display().to_string());
        command.uid(self.user.uid.as_raw()).gid(self.user.gid.as_raw()).current_dir("/");
        command.env("PGHOST", &self.sockets).env("PGUSER", "postgres").env("PGDATABASE", "postgres");
        command
    }

    fn log_path(&self) -> PathBuf {
        self.run.report.join("postgres.log")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn start(&self) -> Result<Child> {
        let log = File::create(self.log_path()).context("open the log")?;
        let mut server = self.command("postgres");
        server.arg("-D").arg(&self.data).arg("-k").arg(&self.sockets);
        for setting in
            ["listen_addresses=", "shared_buffers=16MB", "max_wal_size=64MB", "checkpoint_timeout=30s"]
        {
            server.args(["-c", setting]);
        }
        server.stdout(log.try_clone().context("duplicate a descriptor")?).stderr(log);
        let mut server = server.spawn().with_context(|| format!("start postgres: {MISSING}"))?;
        let begun = Instant::now();
        while !self.is_ready()? {
            ensure!(server.try_wait().context("wait")?.is_none(), "it ended:\n{}", self.log());
            ensure!(
                begun.elapsed() < PROGRAM_TIMEOUT,
                "not ready within {PROGRAM_TIMEOUT:?}:\n{}",
                self.log()
            );
            std::thread::park_timeout(Duration::from_millis(50));
        }
        Ok(server)
    }

    fn is_ready(&self) -> Result<bool> {
        let mut ready = self.command("pg_isready");
        let mut asked =
            ready.stdout(Stdio::null()).spawn().with_context(|| format!("start pg_isready: {MISSING}"))?;
        Ok(wait(&mut asked, PROGRAM_TIMEOUT)?.success())
    }

    fn benchmark(&self) -> Result<()> {
        let mut init = self.command("pgbench");
        init.args(["--initialize", "--quiet", "--scale=1"]);
        self.run.program(init)?;
        let (mut transactions, mut round) = (0, 0_u64);
        while self.run.goes_on() || round == 0 {
            let mut bench = self.command("pgbench");
            bench.args(["--no-vacuum", "--jobs=2", &format!("--client={CLIENTS}")]);
            bench
                .arg(format!("--transactions={TRANSACTIONS}"))
                .arg(format!("--random-seed={}", self.run.seed + round));
            let output = self.run.program(bench)?;
            let all = CLIENTS * TRANSACTIONS;
            ensure!(output.contains(&format!("processed: {all}/{all}")), "{output}");
            transactions += all;
            round += 1;
            let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM \
                        pgbench_branches), (SELECT sum(tbalance) FROM pgbench_tellers), sum(delta), count(*) \
                        FROM pgbench_history";
            let answer = self.ask(sums)?;
            let numbers: Vec<&str> = answer.trim().split('|').collect();
            let [accounts, branches, tellers, deltas, count] = numbers[..] else { anyhow::bail!("{answer}") };
            ensure!([branches, tellers, deltas] == [accounts; 3], "balances: {answer}");
            ensure!(
                count == transactions.to_string(),
                "{count} transactions, and {transactions} were acknowledged"
            );
        }
        let mut check = self.command("pg_amcheck");
        check.args(["--install-missing", "--heapallindexed", "--database=postgres"]);
        self.run.program(check).map(drop)
    }

    fn ask(&self, statement: &str) -> Result<String> {
        let mut psql = self.command("psql");
        psql.args([
            "--no-psqlrc",
            "--tuples-only",
            "--no-align",
            "--set=ON_ERROR_STOP=1",
            "--command",
            statement,
        ]);
        self.run.program(psql)
    }

    /// Its fast shutdown, with a checkpoint.
    fn stop(&self, mut server: Child) -> Result<()> {
        kill(Pid::from_raw(server.id().cast_signed()), Signal::SIGINT).context("SIGINT")?;
        let status = wait(&mut server, PROGRAM_TIMEOUT)?;
        ensure!(status.success(), "postgres: {status}\n{}", self.log());
        Ok(())
    }
}
