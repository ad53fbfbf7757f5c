//! Room on the disk. A test that finds the disk full fails with an error of its own, and so do
//! dozens after it; none of them says that the disk was full before.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::sys::statvfs::statvfs;

const GIB: u64 = 1 << 30;

/// Fails if the file system of `dir` has less than `least` bytes free. `what` needs them.
pub fn require(dir: &Path, least: u64, what: &str) -> Result<()> {
    let seen = statvfs(dir).with_context(|| format!("statvfs {}", dir.display()))?;
    let free = seen.blocks_available().saturating_mul(seen.fragment_size());
    ensure!(
        free >= least,
        "{} has {:.1} GiB free, and {what} need {:.1} GiB: free some, and try again",
        dir.display(),
        gib(free),
        gib(least)
    );
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "one digit behind the point is shown")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / GIB as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_little_room_is_an_error_that_says_where_and_how_much() {
        let dir = tempfile::tempdir().unwrap();
        require(dir.path(), 1, "the tests").unwrap();
        let error = require(dir.path(), u64::MAX, "the tests").unwrap_err().to_string();
        assert!(error.starts_with(&format!("{} has ", dir.path().display())), "{error}");
        assert!(error.ends_with("and the tests need 17179869184.0 GiB: free some, and try again"), "{error}");
    }
}
