//! Subvolumes of Btrfs, made by the tool (package btrfs-progs): any process that owns the
//! directory may do the same.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

pub fn create(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["subvolume", "create"]).arg(path))
}

/// A read-only snapshot of the subvolume `from`.
pub fn snapshot(from: &Path, to: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["subvolume", "snapshot", "-r"]).args([from, to]))
}

pub fn make_read_only(path: &Path) -> Result<()> {
    btrfs(Command::new("btrfs").args(["property", "set", "-ts"]).arg(path).args(["ro", "true"]))
}

fn btrfs(command: &mut Command) -> Result<()> {
    let output = command.output().context("start btrfs (package btrfs-progs)")?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}
