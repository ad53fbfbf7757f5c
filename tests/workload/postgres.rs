//! PostgreSQL with data checksums under pgbench. At the end its balances agree, each acknowledged
//! transaction is there, and pg_amcheck and pg_checksums find nothing.

use anyhow::{Context, Result, ensure};
use tests::postgres::{Cluster, Programs};

use crate::run::{PROGRAM_TIMEOUT, Run};

const SETTINGS: [&str; 3] = ["shared_buffers=16MB", "max_wal_size=64MB", "checkpoint_timeout=30s"];
const CLIENTS: u64 = 4;
const TRANSACTIONS: u64 = 10;
/// Lines of the server's log that are no fault: it is asked before it is ready.
const STARTING: &str = "the database system is starting up";

pub(crate) fn run(run: &Run) -> Result<()> {
    let programs = Programs::find()?;
    let cluster = run.step(|| Cluster::create(programs, run.dir.join("cluster"), &run.report))??;
    run.program(cluster.initdb())?;
    let mut server = cluster.start(&SETTINGS, PROGRAM_TIMEOUT)?;
    let result = benchmark(run, &cluster);
    let ended = cluster.stop(&mut server, PROGRAM_TIMEOUT);
    result.with_context(|| cluster.log())?;
    ended?;
    run.program(cluster.pg_checksums())?;
    let log = cluster.log();
    let faults = ["ERROR:", "FATAL:", "PANIC:"];
    let mut lines = log.lines().filter(|line| faults.iter().any(|fault| line.contains(fault)));
    let fault = lines.find(|line| !line.contains(STARTING));
    ensure!(fault.is_none(), "{fault:?} in\n{log}");
    Ok(())
}

fn benchmark(run: &Run, cluster: &Cluster) -> Result<()> {
    let mut init = cluster.command("pgbench");
    init.args(["--initialize", "--quiet", "--scale=1"]);
    run.program(init)?;
    let (mut transactions, mut round) = (0, 0_u64);
    while run.goes_on() || round == 0 {
        let mut bench = cluster.command("pgbench");
        bench.args(["--no-vacuum", "--jobs=2", &format!("--client={CLIENTS}")]);
        bench
            .arg(format!("--transactions={TRANSACTIONS}"))
            .arg(format!("--random-seed={}", run.seed + round));
        let output = run.program(bench)?;
        let all = CLIENTS * TRANSACTIONS;
        ensure!(output.contains(&format!("processed: {all}/{all}")), "{output}");
        transactions += all;
        round += 1;
        let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM \
                    pgbench_branches), (SELECT sum(tbalance) FROM pgbench_tellers), sum(delta), count(*) \
                    FROM pgbench_history";
        let answer = run.program(cluster.psql(sums))?;
        let numbers: Vec<&str> = answer.trim().split('|').collect();
        let [accounts, branches, tellers, deltas, count] = numbers[..] else { anyhow::bail!("{answer}") };
        ensure!([branches, tellers, deltas] == [accounts; 3], "balances: {answer}");
        ensure!(
            count == transactions.to_string(),
            "{count} transactions, and {transactions} were acknowledged"
        );
    }
    let mut check = cluster.command("pg_amcheck");
    check.args(["--install-missing", "--heapallindexed", "--database=postgres"]);
    run.program(check).map(drop)
}
