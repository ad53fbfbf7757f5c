//! `bench volume`: operations in volumes, beside native directories and other FUSE file systems.

mod fragments;
mod native;
mod operations;
mod pgbench;
mod place;
mod record;

use std::path::Path;

use ::tests::postgres;
use anyhow::{Context, Result, ensure};
use xtask::build::{products, require_root};
use xtask::foreign::debian_program;
use xtask::progress::{complain, part, say};

use self::fragments::Fragments;
use self::operations::{Operation, Work};
use super::RUNS_MIN;

/// `only`: of operations whose title contains it. `passthrough_hp`: libfuse's example, built by the
/// caller, since no Debian package has it.
pub(crate) fn run(
    runs: usize,
    only: Option<&str>,
    passthrough_hp: Option<&Path>,
    one_processor: bool,
) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    let is_named = |operation: &Operation| only.is_none_or(|word| operation.title.contains(word));
    let needs_postgres = operations::beside_native().filter(|operation| is_named(operation)).any(on_database);
    let without_postgres = if needs_postgres { find_postgres().err() } else { None };
    if let Some(error) = &without_postgres {
        complain(&format!("the rows of pgbench are left out: package {}: {error:#}", postgres::PACKAGE));
    }
    let is_possible = |operation: &Operation| without_postgres.is_none() || !on_database(operation);
    let is_wanted = |operation: &Operation| is_named(operation) && is_possible(operation);
    let beside_native = operations::beside_native().any(is_wanted);
    let beside_unrecorded = operations::beside_unrecorded().any(is_wanted);
    ensure!(beside_native || beside_unrecorded, "--only {only:?}: no operation");
    part("build the static binaries", products)?;
    for (program, package) in [("bindfs", "bindfs"), ("git", "git"), ("mkfs.btrfs", "btrfs-progs")] {
        debian_program(program, package)?;
    }
    if one_processor {
        stay_on_one_processor()?;
    }
    if beside_native {
        let _until_the_end = Fragments::hold()?;
        let measure = || native::table(runs, is_wanted, passthrough_hp);
        say(&part("beside native directories", measure)?);
    }
    if beside_unrecorded {
        say(&part("the record", || record::table(runs, is_wanted))?);
    }
    Ok(())
}

/// Every process that is started from now on inherits it (sched_setaffinity(2)).
fn stay_on_one_processor() -> Result<()> {
    let this = nix::unistd::Pid::from_raw(0);
    let allowed = nix::sched::sched_getaffinity(this)?;
    let last = (0..nix::sched::CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false));
    let last = last.context("no processor is allowed")?;
    let mut only = nix::sched::CpuSet::new();
    only.set(last)?;
    nix::sched::sched_setaffinity(this, &only)?;
    say(&format!("everything runs on processor {last}"));
    Ok(())
}

fn on_database(operation: &Operation) -> bool {
    matches!(operation.work, Work::Transactions(_))
}

fn find_postgres() -> Result<()> {
    debian_program("pg_ctlcluster", postgres::PACKAGE)?;
    postgres::Programs::find().map(drop)
}

/// A table whose rows are also printed as soon as they are measured.
struct Table(String);

impl Table {
    fn begin<const COLUMNS: usize>(titles: [&str; COLUMNS]) -> Self {
        let header = format!("\n| {} |\n{}|", titles.join(" | "), "|---".repeat(COLUMNS));
        say(&header);
        Self(header + "\n")
    }

    fn add(&mut self, row: &str) {
        say(row);
        self.0 += row;
        self.0.push('\n');
    }

    fn end(self) -> String {
        self.0
    }
}
