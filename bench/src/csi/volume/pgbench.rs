//! PostgreSQL's own benchmark on a database in a directory. fsync is on, as by default.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ::tests::postgres::{Cluster, Programs};
use anyhow::{Context, Result, ensure};

/// 160 MiB.
const SCALE: &str = "--scale=10";
/// Less shared memory than the database has, so that transactions read files. Nothing runs between the
/// measurements.
const SETTINGS: [&str; 2] = ["shared_buffers=16MB", "autovacuum=off"];
/// Of one measurement.
const SECONDS: u32 = 3;
/// Of a start, which may recover, and of a stop with its checkpoint.
const TIMEOUT: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Script {
    /// Each transaction changes four rows of three tables and adds one.
    TpcB,
    SelectOnly,
}

/// A server with its database.
pub(super) struct Database {
    cluster: Cluster,
    server: Child,
}

impl Database {
    /// Makes the database below `parent`. `outside` is an existing directory for socket and log.
    pub(super) fn start(parent: &Path, outside: &Path) -> Result<Self> {
        let cluster = Cluster::create(Programs::find()?, parent.join("database"), outside)?;
        output(cluster.initdb())?;
        let server = cluster.start(&SETTINGS, TIMEOUT)?;
        let mut fill = cluster.command("pgbench");
        fill.args(["--initialize", "--quiet", SCALE]);
        output(fill)?;
        Ok(Self { cluster, server })
    }

    /// Microseconds of a transaction, and how many processors the serving process used meanwhile, by what
    /// `processor` returns.
    pub(super) fn time(&self, script: Script, processor: impl Fn() -> f64) -> Result<(f64, f64)> {
        // The first change of a block after a checkpoint logs the whole block: every measurement begins
        // with one, and none has one within.
        output(self.cluster.psql("CHECKPOINT"))?;
        let mut bench = self.cluster.command("pgbench");
        bench.args(["--no-vacuum", "--client=2", "--jobs=2"]).arg(format!("--time={SECONDS}"));
        if script == Script::SelectOnly {
            bench.arg("--select-only");
        }
        let (before, begun) = (processor(), Instant::now());
        let report = output(bench)?;
        let cores = (processor() - before) / begun.elapsed().as_secs_f64();
        let each_second = transactions_per_second(&report).with_context(|| report.clone())?;
        Ok((1e6 / each_second, cores))
    }

    pub(super) fn stop(mut self) -> Result<()> {
        self.cluster.stop(&mut self.server, TIMEOUT)
    }
}

fn transactions_per_second(report: &str) -> Option<f64> {
    let line = report.lines().find_map(|line| line.strip_prefix("tps = "))?;
    line.split_whitespace().next()?.parse().ok().filter(|number| *number > 0.0)
}

fn output(mut command: Command) -> Result<String> {
    let output = command.output().with_context(|| format!("start {command:?}"))?;
    let [report, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    ensure!(output.status.success(), "{command:?}: {}\n{report}{errors}", output.status);
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_read_from_the_report() {
        let report = "number of clients: 2\nlatency average = 0.425 ms\n\
                      tps = 4703.123456 (without initial connection time)\n";
        assert_eq!(transactions_per_second(report), Some(4703.123456));
        assert_eq!(transactions_per_second("tps = 0.000000 (without initial connection time)"), None);
        assert_eq!(transactions_per_second("pgbench: error: no tps"), None);
    }
}
