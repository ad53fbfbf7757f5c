//! Files that exist completely or not at all. [`write()`], [`write_whole`] and [`remove`] guarantee
//! it also after a power cut; [`replace`], [`append`] and [`discard`] while the machine runs.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Far more than any file of ours has.
pub const MOST_READ: u64 = 64 << 20;

/// Replaces `path` by a file with `content` and `mode` (permission bits), and returns once both the
/// file and its name are on disk. Readers see the old content or the new one. The temporary name
/// starts with a dot: kubelet and similar programs ignore such names in the directories they watch.
pub fn write(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    write_whole(path, content, mode)?;
    sync_dir(&parent(path))
}

/// [`write()`] that waits for the content, but not for the name. After a power cut there may be the
/// old content, the new one, or no file if there was none before, but never a part of one.
pub fn write_whole(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    put(path, content, mode, true)
}

/// [`write()`] without waiting for the disk. Readers, also after a kill of the writer, see the old
/// content or the new one. After a power cut there may be either, an empty file, a part of one, or
/// none.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> Result<()> {
    put(path, content, mode, false)
}

/// The content of a file of at most [`MOST_READ`] bytes. A file that is not regular is an error;
/// opening it does not block.
pub fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut options = OpenOptions::new();
    content_of(options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?)
}

/// [`read`] for a file that was opened without blocking.
pub fn content_of(file: File) -> std::io::Result<Vec<u8>> {
    if !file.metadata()?.is_file() {
        return Err(std::io::Error::other("not a regular file"));
    }
    let mut content = Vec::new();
    file.take(MOST_READ + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MOST_READ {
        return Err(std::io::Error::other(format!("more than {MOST_READ} bytes")));
    }
    Ok(content)
}

/// [`read`] for UTF-8.
pub fn read_text(path: &Path) -> std::io::Result<String> {
    String::from_utf8(read(path)?).map_err(std::io::Error::other)
}

/// Appends `line`, which ends with a newline, to a file of such lines. It does not wait for the
/// disk, and is a hundred times cheaper than replacing the file. After a kill, a part of the line
/// without its newline may remain: the next writer must [`replace`] the file first. Returns false
/// and does nothing if there is no file, or if the line would make it longer than `most_bytes`.
pub fn append(path: &Path, line: &[u8], most_bytes: u64) -> Result<bool> {
    let file = match OpenOptions::new().append(true).open(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        opened => opened.map_err(|e| Error::at("open", path, e))?,
    };
    let before = file.metadata().map_err(|e| Error::at("stat", path, e))?.len();
    if before.saturating_add(line.len() as u64) > most_bytes {
        return Ok(false);
    }
    (&file).write_all(line).map(|()| true).map_err(|e| {
        // Truncated again, so that the next line does not follow a partial one.
        let _reported_below = file.set_len(before);
        Error::at("append to", path, e)
    })
}

/// Reserves disk space for a file that grows to `bytes`, if the file system supports that: then
/// appends up to that size succeed on a full disk.
pub fn reserve(path: &Path, bytes: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path).map_err(|e| Error::at("open", path, e))?;
    match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::KEEP_SIZE, 0, bytes) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(e) => Err(Error::at("fallocate", path, e)),
    }
}

/// Overwrites the bytes at `offset` of a longer file with `content`, and returns once they are on
/// disk. Takes no space, unless the file system copies on write. After a power cut there is the old
/// content or the new one, if it lies within one disk sector.
pub fn overwrite(path: &Path, offset: u64, content: &[u8]) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path).map_err(|e| Error::at("open", path, e))?;
    file.write_all_at(content, offset).map_err(|e| Error::at("overwrite", path, e))?;
    file.sync_data().map_err(|e| Error::at("fsync", path, e))
}

fn put(path: &Path, content: &[u8], mode: u32, synced: bool) -> Result<()> {
    let temp = temp_path(path);
    write_temp(&temp, content, mode, synced)
        .and_then(|()| std::fs::rename(&temp, path).map_err(|e| Error::at("rename to", path, e)))
        .inspect_err(|_| {
            // Best effort: the next write replaces the remaining dot-file.
            let _may_be_gone = std::fs::remove_file(&temp);
        })
}

/// Removes `path`; a missing file is a success. Returns once the removal is on disk.
pub fn remove(path: &Path) -> Result<()> {
    if unlink(path)? { sync_dir(&parent(path)) } else { Ok(()) }
}

/// [`remove`] without waiting for the disk: after a power cut the file may be there again.
pub fn discard(path: &Path) -> Result<()> {
    unlink(path).map(drop)
}

/// Returns whether there was a file.
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

/// When it returns, all earlier changes of the directory's names are on disk.
pub fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| Error::at("fsync", dir, e))
}

/// Removes temporary files that killed writers of `path` left beside it. No process may be writing
/// it. A missing directory is a success.
pub fn remove_leftovers(path: &Path) -> Result<()> {
    let dir = parent(path);
    let listed = |e| Error::at("list", &dir, e);
    let mut begins = OsString::from(".");
    begins.push(path.file_name().unwrap_or_default());
    begins.push(".");
    let entries = match std::fs::read_dir(&dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(listed)?,
    };
    for entry in entries {
        let name = entry.map_err(listed)?.file_name();
        let between = name
            .as_encoded_bytes()
            .strip_prefix(begins.as_encoded_bytes())
            .and_then(|rest| rest.strip_suffix(b".tmp"));
        if between.is_some_and(|pid| !pid.is_empty() && pid.iter().all(u8::is_ascii_digit)) {
            discard(&dir.join(name))?;
        }
    }
    Ok(())
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
    fn lines_are_appended_to_what_is_there_up_to_a_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines");
        assert!(!append(&path, b"one\n", 8).unwrap() && !path.exists());
        replace(&path, b"one\n", 0o600).unwrap();
        assert!(append(&path, b"two\n", 8).unwrap());
        assert!(!append(&path, b"\n", 8).unwrap());
        reserve(&path, 4096).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one\ntwo\n");
        assert_eq!(append(Path::new("/dev/full"), b"x\n", 8).unwrap_err().op, "append to");
    }

    #[test]
    fn a_part_of_a_file_is_overwritten_in_its_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        write(&path, b"is false, is it?", 0o600).unwrap();
        overwrite(&path, 3, b"true ").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"is true , is it?");
        let absent = overwrite(&dir.path().join("absent"), 0, b"x").unwrap_err();
        assert_eq!(absent.errno(), nix::errno::Errno::ENOENT);
    }

    #[test]
    fn write_into_a_missing_directory_names_it() {
        let err = write(Path::new("/nonexistent/x"), b"", 0o600).unwrap_err();
        assert_eq!(err.op, "create");
        assert_eq!(err.errno(), nix::errno::Errno::ENOENT);
    }

    #[test]
    fn only_what_killed_writers_of_the_file_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        write(&path, b"", 0o600).unwrap();
        for name in [".x.12.tmp", ".x.3.tmp", ".x.tmp", ".x..tmp", ".xy.12.tmp", ".x.y.12.tmp", "x.12.tmp"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        remove_leftovers(&path).unwrap();
        let mut left: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".x..tmp", ".x.tmp", ".x.y.12.tmp", ".xy.12.tmp", "x", "x.12.tmp"]);
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

    #[test]
    fn what_is_no_regular_file_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at("fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .unwrap();
        std::fs::write(at("file"), "x").unwrap();
        File::create(at("huge")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&at("file")).unwrap(), b"x");
        assert_eq!(read(&at("fifo")).unwrap_err().to_string(), "not a regular file");
        assert_eq!(read(&at("huge")).unwrap_err().to_string(), "more than 67108864 bytes");
        assert_eq!(read(&at("none")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    }
}
