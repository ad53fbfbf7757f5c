//! Writes a record's new version on a full disk, into the blocks of the old one.
//!
//! Invariant: called only after a write failed for want of space. A power cut during the write can
//! tear the record; a reader then treats it as missing.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;

use crate::error::Error;

/// Size of the units that [`MetadataExt::blocks`] counts.
const BLOCK_BYTES: u64 = 512;

pub(super) fn is_cause(error: &Error) -> bool {
    matches!(error, Error::Kernel(e) if matches!(e.errno(), Errno::ENOSPC | Errno::EDQUOT))
}

/// Returns whether `content` fitted into the existing file.
pub(super) fn overwrite(path: &Path, content: &[u8]) -> bool {
    let has_room = fs::metadata(path).is_ok_and(|m| m.blocks() * BLOCK_BYTES >= content.len() as u64);
    let write = || {
        let mut file = OpenOptions::new().write(true).open(path)?;
        // Padded with blanks, which JSON ignores: a reader never sees the rest of the old version.
        let old = usize::try_from(file.metadata()?.len()).unwrap_or(usize::MAX);
        let mut padded = content.to_vec();
        padded.resize(content.len().max(old.min(MAX_PADDED)), b' ');
        file.write_all(&padded)?;
        file.set_len(content.len() as u64)?;
        file.sync_data()
    };
    has_room && write().is_ok()
}

/// Far longer than any record.
const MAX_PADDED: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_and_a_shorter_version_take_the_place_of_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        assert!(!overwrite(&path, b"{}"), "there is no old version");
        fs::write(&path, "{\"a\": 1}").unwrap();
        for version in ["{\"a\": 1, \"b\": 2}", "{}"] {
            assert!(overwrite(&path, version.as_bytes()));
            assert_eq!(fs::read_to_string(&path).unwrap(), version);
        }
        assert!(!overwrite(&path, &[b'x'; 1 << 20]), "the old version has too few blocks");
    }
}
