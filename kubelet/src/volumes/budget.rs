//! How much the configMap, secret, projected and downwardAPI volumes of one pod hold together.
//!
//! Most of them are in memory that cannot be swapped and is charged to the kubelet: a Secret of 1 MiB, named
//! by hundreds of volumes, must not take gigabytes. kubelet has no such limit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::error::Error;
use super::projected::Files;

/// Of one pod.
pub(super) const MOST_BYTES: usize = 32 << 20;
/// What a tmpfs takes at least for a file, and about what it takes for a directory.
const PAGE_BYTES: usize = 4096;

/// The space of the volumes that have been written, in bytes.
#[derive(Debug, Default)]
pub(super) struct Budget {
    /// By the pod's uid and the volume's directory.
    by_pod: Mutex<BTreeMap<String, BTreeMap<PathBuf, usize>>>,
}

impl Budget {
    /// Counts `files` as the content of the pod's volume at `dir`, in place of its earlier content; an error
    /// changes nothing.
    pub(super) fn take(&self, uid: &str, dir: &Path, files: &Files) -> Result<(), Error> {
        let mut by_pod = self.by_pod();
        let volumes = by_pod.get(uid).into_iter().flatten();
        let others: usize = volumes.filter(|(other, _)| *other != dir).map(|(_, bytes)| bytes).sum();
        let bytes = space(files);
        if others.saturating_add(bytes) > MOST_BYTES {
            return Err(Error::PodTooLarge { limit: MOST_BYTES, page: PAGE_BYTES });
        }
        by_pod.entry(uid.to_owned()).or_default().insert(dir.to_owned(), bytes);
        Ok(())
    }

    /// The pod's volumes are gone.
    pub(super) fn release(&self, uid: &str) {
        self.by_pod().remove(uid);
    }

    /// No panic leaves the map half changed.
    fn by_pod(&self) -> MutexGuard<'_, BTreeMap<String, BTreeMap<PathBuf, usize>>> {
        self.by_pod.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whole pages for each file, and one for each directory of its path.
fn space(files: &Files) -> usize {
    let of_file = |path: &str, content: &[u8]| {
        let directories = path.matches('/').count();
        content.len().max(1).next_multiple_of(PAGE_BYTES).saturating_add(directories * PAGE_BYTES)
    };
    files.iter().fold(0, |sum: usize, (path, file)| sum.saturating_add(of_file(path, &file.content)))
}

#[cfg(test)]
mod tests {
    use super::super::projected::File;
    use super::*;

    fn files(number: usize, path: &str, bytes: usize) -> Files {
        (0..number).map(|n| (format!("{path}{n}"), File { content: vec![0; bytes], mode: 0o644 })).collect()
    }

    #[test]
    fn the_volumes_of_a_pod_share_a_budget() {
        let budget = Budget::default();
        let quarter = files(8, "", 1 << 20);
        let dirs = ["a", "b", "c", "d", "e"].map(Path::new);
        for dir in &dirs[..4] {
            budget.take("u", dir, &quarter).unwrap();
        }
        budget.take("u", dirs[0], &quarter).unwrap();
        let error = budget.take("u", dirs[4], &files(1, "", 0)).unwrap_err();
        assert!(error.to_string().contains("more than 33554432 bytes"), "{error}");
        assert!(error.depends_on_configuration());
        budget.take("other", dirs[4], &quarter).unwrap();
        budget.take("u", dirs[0], &Files::new()).unwrap();
        budget.take("u", dirs[4], &quarter).unwrap();
        budget.take("u", dirs[0], &quarter).unwrap_err();
        budget.release("u");
        budget.take("u", dirs[0], &quarter).unwrap();
    }

    #[test]
    fn files_and_directories_take_whole_pages() {
        assert_eq!(space(&files(2, "", 0)), 2 * PAGE_BYTES);
        assert_eq!(space(&files(1, "", PAGE_BYTES + 1)), 2 * PAGE_BYTES);
        assert_eq!(space(&files(2, "x/y/", 1)), 6 * PAGE_BYTES);
    }
}
