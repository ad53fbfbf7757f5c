//! Files that are there whole or not at all: [`write()`] and [`remove`] also after a
//! power cut, [`replace`] and [`discard`] as long as the machine runs.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Replaces `path` by a file with `content` and `mode` (permission bits), and
/// returns once both the file and its name are on disk. Readers see the old
/// content or the new one. The temporary name starts with a dot, which kubelet
/// and its like ignore in the directories they watch.
pub fn write(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    put(path, content, mode, true)?;
    sync_dir(&parent(path))
}

/// [`write()`] without waiting for the disk: readers, and whoever comes after a kill
/// of the writer, see the old content or the new one. After a power cut there may
/// be either, an empty file, a part of one, or none.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    put(path, content, mode, false)
}

fn put(path: &Path, content: &[u8], mode: u32, synced: bool) -> Result<()> {
    let temp = temp_path(path);
    write_temp(&temp, content, mode, synced)
        .and_then(|()| std::fs::rename(&temp, path).map_err(|e| Error::at("rename to", path, e)))
        .inspect_err(|_| {
            // Best effort: what is left is a dot-file that the next write replaces.
            drop(std::fs::remove_file(&temp));
        })
}

/// Removes `path`; its absence is a success. Returns once the removal is on disk.
pub fn remove(path: &Path) -> Result<()> {
    if unlink(path)? { sync_dir(&parent(path)) } else { Ok(()) }
}

/// [`remove`] without waiting for the disk: after a power cut it may be there again.
pub fn discard(path: &Path) -> Result<()> {
    unlink(path).map(drop)
}

/// Whether there was one.
fn unlink(path: &Path) -> Result<bool> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::at("remove", path, e)),
    }
}

fn write_temp(temp: &Path, content: &[u8], mode: u32, synced: bool) -> Result<()> {
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(temp)
        .map_err(|e| Error::at("create", temp, e))?;
    file.write_all(content).map_err(|e| Error::at("write", temp, e))?;
    if synced { file.sync_all().map_err(|e| Error::at("fsync", temp, e)) } else { Ok(()) }
}

fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::at("fsync", dir, e))
}

fn parent(path: &Path) -> PathBuf {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir.to_owned(),
        _ => PathBuf::from("."),
    }
}

fn temp_path(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    parent(path).join(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_replaces_the_whole_content_and_leaves_no_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        for write in [write, replace] {
            write(&path, b"a long first content", 0o600).unwrap();
            write(&path, b"short", 0o600).unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"short");
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        }
    }

    #[test]
    fn write_into_a_missing_directory_names_it() {
        let err = write(Path::new("/nonexistent/x"), b"", 0o600).unwrap_err();
        assert_eq!(err.op, "create");
        assert_eq!(err.errno(), nix::errno::Errno::ENOENT);
    }

    #[test]
    fn remove_twice_succeeds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for remove in [remove, discard] {
            write(&path, b"", 0o600).unwrap();
            remove(&path).unwrap();
            assert!(!path.exists());
            remove(&path).unwrap();
        }
    }
}
