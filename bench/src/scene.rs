//! Parts of a bench, each in a sandbox of its own.

use std::thread;

use ::tests::loop_device::{FileSystem, LoopMount};
use ::tests::{Network, NodeOptions, Sandbox};
use anyhow::{Result, anyhow, ensure};
use xtask::progress::{complain, say};

use super::rows::{Row, Table};

/// Measures in a sandbox; the number is that of runs.
pub(super) type Scene = fn(&Sandbox, usize) -> Result<Vec<Row>>;

/// What a bench of pods writes, several times; sparse.
const DISK_BYTES: u64 = 4 << 30;

/// Nothing is written behind the bench's back.
const INITIALISED: [&str; 2] = ["-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0"];

/// The node has its files on a new file system, with a journal. On the machine's own, what other programs have removed
/// may be measured too: an ext4 without a journal passes over each inode that was freed within the last minutes
/// when it makes a file or a directory (fs/ext4/ialloc.c, `recently_deleted`).
pub(super) fn on_new_disk(sandbox: &Sandbox, options: NodeOptions) -> Result<NodeOptions> {
    let new = |name| LoopMount::with_options(sandbox, name, FileSystem::Ext4, DISK_BYTES, &INITIALISED);
    new("pool")?;
    let disk = new("disk")?;
    Ok(NodeOptions { disk: Some(disk.dir().to_owned()), ..options })
}

/// Those whose name contains `only`.
pub(super) fn named(all: &[(&'static str, Scene)], only: Option<&str>) -> Result<Vec<(&'static str, Scene)>> {
    let wanted: Vec<_> =
        all.iter().filter(|(name, _)| only.is_none_or(|word| name.contains(word))).copied().collect();
    let names: Vec<&str> = all.iter().map(|(name, _)| *name).collect();
    let word = only.unwrap_or_default();
    ensure!(!wanted.is_empty(), "--only {word}: no part of this bench; they are {}", names.join(", "));
    Ok(wanted)
}

/// Runs the scenes, each with its name, and prints one table. A scene that fails does not keep the next from
/// running; the error names each of them.
pub(super) fn run(scenes: &[(&str, Scene)], runs: usize) -> Result<()> {
    let mut table = Table::default();
    let mut failed = Vec::new();
    for (name, scene) in scenes {
        // Entering a sandbox is for a thread's whole life.
        let rows = thread::scope(|scope| {
            let scene = scope.spawn(move || scene(&Sandbox::enter(Network::Own)?, runs));
            scene.join().map_err(|_| anyhow!("its thread panicked"))?
        });
        match rows {
            Ok(rows) => table.0.extend(rows),
            Err(error) => {
                complain(&format!("error: {name}: {error:#}"));
                failed.push(*name);
            }
        }
    }
    say(&table.to_string());
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    Ok(())
}
