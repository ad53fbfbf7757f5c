//! Container ids that the next kubelet must know: a file in the pod's directory, one id a line.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::Path;

/// None if there is no file; one that cannot be read is a warning.
pub(crate) fn read(path: &Path) -> BTreeSet<String> {
    let text = linux::atomic_file::read_text(path).unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            tracing::warn!(%error, path = %path.display(), "cannot read ids of containers");
        }
        String::new()
    });
    text.lines().map(str::to_owned).collect()
}

/// Replaces the file. Blocks.
pub(crate) fn write(path: &Path, ids: &BTreeSet<String>) -> linux::Result<()> {
    let lines: String = ids.iter().map(|id| format!("{id}\n")).collect();
    linux::atomic_file::replace(path, lines.as_bytes(), 0o600)
}
