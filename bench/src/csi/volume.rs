//! `bench volume`: operations in volumes, beside native directories and other FUSE file systems.

mod native;
mod operations;
mod place;
mod record;

use std::path::Path;

use anyhow::{Result, ensure};
use xtask::build::{products, require_root};
use xtask::foreign::debian_program;
use xtask::progress::{part, say};

use self::operations::Operation;
use super::RUNS_MIN;

/// `only`: of operations whose title contains it. `passthrough_hp`: libfuse's example, built by the
/// caller, since no Debian package has it.
pub(crate) fn run(runs: usize, only: Option<&str>, passthrough_hp: Option<&Path>) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    let is_wanted = |operation: &Operation| only.is_none_or(|word| operation.title.contains(word));
    ensure!(operations::all().any(is_wanted), "--only {only:?}: no operation");
    part("build the static binaries", products)?;
    for (program, package) in [("bindfs", "bindfs"), ("git", "git"), ("mkfs.btrfs", "btrfs-progs")] {
        debian_program(program, package)?;
    }
    say(&part("beside native directories", || native::table(runs, is_wanted, passthrough_hp))?);
    say(&part("the record", || record::table(runs, is_wanted))?);
    Ok(())
}
