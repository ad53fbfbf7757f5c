//! The applications of the kill suite (`tests/tests/chaos`): each uses a directory of a volume, checks
//! every answer, and ends with an error at the first wrong one.
//!
//! Invariant: only `programs` starts programs while it has a file of the volume open. Otherwise each
//! start would have to close a copy, which waits for a daemon without a time limit.

mod archive;
mod blocks;
mod file;
mod fio;
mod full;
mod git;
mod locks;
mod mapping;
mod names;
mod postgres;
mod probe;
mod programs;
mod run;
mod sqlite;

use anyhow::{Result, bail};

use crate::run::Run;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [name, dir, report, seed] = &words[..] else { bail!("usage: workload NAME DIR REPORT SEED") };
    let run = Run::new(dir.into(), report.into(), seed.parse()?)?;
    match name.as_str() {
        "probe" => probe::run(&run),
        "programs" => programs::run(&run),
        "file" => file::run(&run),
        "names" => names::run(&run),
        "blocks" => blocks::run(&run),
        "full" => full::run(&run),
        "lock-hold" => locks::hold(&run),
        "lock-try" => locks::try_all(&run),
        "lock-count" => locks::count(&run),
        "fio-direct" => fio::run(&run, &["--ioengine=psync", "--direct=1"]),
        "fio-buffered" => fio::run(&run, &["--ioengine=psync", "--fsync=32"]),
        "fio-mapped" => fio::run(&run, &["--ioengine=mmap"]),
        "sqlite-journal" => sqlite::run(&run, "delete"),
        "sqlite-wal" => sqlite::run(&run, "wal"),
        "postgres" => postgres::run(&run),
        "git" => git::run(&run),
        "archive" => archive::run(&run),
        _ => bail!("no workload {name}"),
    }
}
