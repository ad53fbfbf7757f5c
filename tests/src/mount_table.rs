//! What is mounted.

use std::fs;

use anyhow::{Context, Result};
use linux::mountinfo::MountEntry;

/// The mounts that the calling thread sees.
pub fn mounts() -> Result<Vec<MountEntry>> {
    let file = "/proc/thread-self/mountinfo";
    linux::mountinfo::parse(&fs::read(file).context(file)?).with_context(|| format!("{file}: not understood"))
}
