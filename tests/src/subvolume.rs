//! Subvolumes of Btrfs, made by the tool (package btrfs-progs): any process that owns the
//! directory may do the same.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

pub fn create(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["subvolume", "create"]).arg(path)).map(drop)
}

/// A read-only snapshot of the subvolume `from`.
pub fn snapshot(from: &Path, to: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["subvolume", "snapshot", "-r"]).args([from, to])).map(drop)
}

pub fn make_read_only(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["property", "set", "-ts"]).arg(path).args(["ro", "true"])).map(drop)
}

/// Turns quota groups on for the file system at `path`, and waits until all is counted.
pub fn enable_quotas(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["quota", "enable"]).arg(path))?;
    btrfs(Command::new("btrfs").args(["quota", "rescan", "-w"]).arg(path)).map(drop)
}

pub fn disable_quotas(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["quota", "disable"]).arg(path)).map(drop)
}

/// Commits the file system at `path` and wakes the kernel's thread that removes what is left of deleted
/// subvolumes, which otherwise waits up to 30 s.
pub fn begin_clean_up(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["filesystem", "sync"]).arg(path)).map(drop)
}

/// The paths of all subvolumes of the file system at `path`, from its root.
pub fn list(path: &Path) -> Result<Vec<String>> {
    let listed = btrfs(Command::new("btrfs").args(["subvolume", "list"]).arg(path))?;
    Ok(listed.lines().filter_map(|line| line.split_once(" path ")).map(|(_, path)| path.to_owned()).collect())
}

/// The quota group of the subvolume at `path`, as the tool shows it after a commit: bytes referenced,
/// and their limit.
pub fn group(path: &Path) -> Result<(u64, Option<u64>)> {
    let shown = btrfs(Command::new("btrfs").args(["qgroup", "show", "--sync", "--raw", "-rf"]).arg(path))?;
    let line = shown.lines().find(|line| line.starts_with("0/")).with_context(|| shown.clone())?;
    let columns: Vec<&str> = line.split_whitespace().collect();
    let column = |index: usize| columns.get(index).copied().with_context(|| shown.clone());
    Ok((column(1)?.parse()?, column(3)?.parse().ok()))
}

/// The numbers of all subvolumes that have a quota group on the file system at `path`.
pub fn groups(path: &Path) -> Result<Vec<u64>> {
    let shown = btrfs(Command::new("btrfs").args(["qgroup", "show", "--raw"]).arg(path))?;
    let numbers = shown.lines().filter_map(|line| line.strip_prefix("0/")?.split_whitespace().next());
    numbers.map(|number| number.parse().with_context(|| shown.clone())).collect()
}

/// What it prints.
fn btrfs(command: &mut Command) -> Result<String> {
    let output = command.output().context("start btrfs (package btrfs-progs)")?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
