//! PostgreSQL from Debian's packages as an application of tests and benches.
//!
//! Invariant: a server's data directory may lie in a volume, everything else of it lies outside. So
//! its log can be read while the volume is full or has no daemon.

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, User};

use crate::eventually;

/// Debian's package of server and clients.
pub const PACKAGE: &str = "postgresql";
const MISSING: &str =
    "run `apt-get install postgresql`, or `cargo xtask test`, which installs package postgresql";

/// The programs of one release, and the user that runs them: a server refuses to run as root.
#[derive(Debug, Clone)]
pub struct Programs {
    dir: PathBuf,
    user: User,
}

impl Programs {
    /// The newest release's: Debian puts only some of them into PATH.
    pub fn find() -> Result<Self> {
        let user = User::from_name("postgres").context("user postgres")?;
        let user = user.with_context(|| format!("no user postgres: {MISSING}"))?;
        let releases = fs::read_dir("/usr/lib/postgresql").with_context(|| MISSING.to_owned())?;
        let mut releases: Vec<(u32, PathBuf)> = releases
            .flatten()
            .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
            .filter(|(_, dir)| ["initdb", "pgbench"].iter().all(|name| dir.join(name).is_file()))
            .collect();
        releases.sort();
        let (_, dir) = releases.pop().with_context(|| MISSING.to_owned())?;
        Ok(Self { dir, user })
    }
}

/// A database cluster and its server.
#[derive(Debug)]
pub struct Cluster {
    programs: Programs,
    data: PathBuf,
    sockets: PathBuf,
    log: PathBuf,
}

impl Cluster {
    /// Makes the data directory, which may lie in a volume. `outside` is an existing directory that does
    /// not, for the socket and the log.
    pub fn create(programs: Programs, data: PathBuf, outside: &Path) -> Result<Self> {
        let cluster = Self { programs, data, sockets: outside.join("s"), log: outside.join("postgres.log") };
        let user = &cluster.programs.user;
        for dir in [&cluster.data, &cluster.sockets] {
            fs::create_dir(dir).with_context(|| dir.display().to_string())?;
            chown(dir, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
                .with_context(|| dir.display().to_string())?;
        }
        Ok(cluster)
    }

    /// One of the programs, as the server's user and a client of the server.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.dir.join(program));
        command.uid(self.programs.user.uid.as_raw()).gid(self.programs.user.gid.as_raw());
        command.env_clear().env("LC_ALL", "C.UTF-8").env("HOME", "/");
        command.env("PATH", "/usr/local/bin:/usr/bin:/bin");
        command.env("PGHOST", &self.sockets).env("PGUSER", "postgres").env("PGDATABASE", "postgres");
        command.current_dir("/").stdin(Stdio::null());
        command
    }

    /// With data checksums.
    pub fn initdb(&self) -> Command {
        let mut initdb = self.command("initdb");
        initdb.args(["--data-checksums", "--auth=trust", "--locale=C", "--encoding=UTF8", "-D"]);
        initdb.arg(&self.data);
        initdb
    }

    /// psql, for one statement.
    pub fn psql(&self, statement: &str) -> Command {
        let mut psql = self.command("psql");
        psql.args(["--no-psqlrc", "--tuples-only", "--no-align", "--set=ON_ERROR_STOP=1", "--command"]);
        psql.arg(statement);
        psql
    }

    /// Verifies the checksum of each block of a server that was stopped.
    pub fn pg_checksums(&self) -> Command {
        let mut checksums = self.command("pg_checksums");
        checksums.arg("--check").arg("-D").arg(&self.data);
        checksums
    }

    /// Starts the server without TCP, and does not wait. Its log is appended to. The process is in the
    /// caller's sandbox, and not killed when the handle is dropped.
    pub fn spawn(&self, settings: &[&str]) -> Result<Child> {
        let log = File::options().append(true).create(true).open(&self.log);
        let log = log.with_context(|| self.log.display().to_string())?;
        let mut server = self.command("postgres");
        server.arg("-D").arg(&self.data).arg("-k").arg(&self.sockets);
        for setting in ["listen_addresses="].iter().chain(settings) {
            server.arg("-c").arg(setting);
        }
        server.stdout(log.try_clone().context("duplicate a descriptor")?).stderr(log);
        server.spawn().with_context(|| format!("start postgres: {MISSING}"))
    }

    /// Starts the server, and waits until it serves.
    pub fn start(&self, settings: &[&str], timeout: Duration) -> Result<Child> {
        let mut server = self.spawn(settings)?;
        eventually("postgres serves", timeout, || match server.try_wait().context("wait")? {
            Some(status) => Ok(Err(format!("it ended: {status}\n{}", self.log()))),
            None if self.is_ready()? => Ok(Ok(())),
            None => anyhow::bail!("not ready:\n{}", self.log()),
        })?
        .map_err(anyhow::Error::msg)?;
        Ok(server)
    }

    /// Its fast shutdown, with a checkpoint.
    pub fn stop(&self, server: &mut Child, timeout: Duration) -> Result<()> {
        kill(Pid::from_raw(server.id().cast_signed()), Signal::SIGINT).context("SIGINT")?;
        let status: ExitStatus = eventually("postgres ends", timeout, || {
            server.try_wait().context("wait")?.with_context(|| format!("it runs:\n{}", self.log()))
        })?;
        ensure!(status.success(), "postgres: {status}\n{}", self.log());
        Ok(())
    }

    /// The server's log since the first start.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    fn is_ready(&self) -> Result<bool> {
        let mut ready = self.command("pg_isready");
        let status = ready.stdout(Stdio::null()).stderr(Stdio::null()).status();
        Ok(status.with_context(|| format!("start pg_isready: {MISSING}"))?.success())
    }
}
