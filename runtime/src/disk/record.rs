//! Records on disk: JSON files that exist completely or not at all.

mod full_disk;

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use nix::errno::Errno;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::blocking::in_place::while_others_go_on;
use crate::error::{Error, Result};

/// Atomic, and on disk when it returns: for records that must survive a power cut.
pub(crate) fn save_durably(path: &Path, value: &impl Serialize) -> Result<()> {
    let content = to_json(value);
    let written = while_others_go_on(|| linux::atomic_file::write(path, &content, 0o600));
    match written.map_err(Error::from) {
        Err(error) if full_disk::is_cause(&error) && full_disk::overwrite(path, &content) => Ok(()),
        saved => saved,
    }
}

/// Atomic, without a flush: for records of running processes and namespaces, which do not survive a
/// power cut either.
pub(crate) fn save(path: &Path, value: &impl Serialize) -> Result<()> {
    let content = to_json(value);
    match linux::atomic_file::replace(path, &content, 0o600).map_err(Error::from) {
        Err(error) if full_disk::is_cause(&error) && full_disk::overwrite(path, &content) => Ok(()),
        saved => saved,
    }
}

/// A record written by [`save`], held open: it can be flushed later without its path, even while
/// its directory is being removed.
#[derive(Debug)]
pub(crate) struct Unflushed {
    file: fs::File,
    dir: fs::File,
}

impl Unflushed {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let open = |path: &Path| fs::File::open(path).map_err(|e| Error::io("open", path, e));
        Ok(Self { file: open(path)?, dir: open(path.parent().unwrap_or(path))? })
    }

    /// Returns once content and name are on disk.
    pub(crate) fn flush(&self) -> std::io::Result<()> {
        self.file.sync_all()?;
        self.dir.sync_all()
    }
}

pub(crate) fn load<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let bytes = fs::read(path).map_err(|e| Error::io("read", path, e))?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Record { path: path.to_owned(), source })
}

/// `None` if there is no such file.
pub(crate) fn find<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match load(path) {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_absent(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What is at a record's path.
#[derive(Debug)]
pub(crate) enum Found<T> {
    Intact(T),
    Missing,
    Damaged(Error),
}

/// [`find`] for a caller that ends what a damaged record describes. An `Err` does not allow that.
pub(crate) fn examine<T: DeserializeOwned>(path: &Path) -> Result<Found<T>> {
    examined(load(path))
}

/// [`names`], as [`examine`] reads a record.
pub(crate) fn examine_names(dir: &Path) -> Result<Found<Vec<String>>> {
    examined(names(dir))
}

fn examined<T>(read: Result<T>) -> Result<Found<T>> {
    match read {
        Ok(value) => Ok(Found::Intact(value)),
        Err(error) if is_absent(&error) => Ok(Found::Missing),
        Err(error) if is_damaged(&error) => Ok(Found::Damaged(error)),
        Err(error) => Err(error),
    }
}

/// [`find`] for a record that can be made anew: a damaged file (torn by a power cut) is removed with
/// a warning, so that the node still starts.
pub(crate) fn find_or_drop<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    match examine(path)? {
        Found::Intact(value) => Ok(Some(value)),
        Found::Missing => Ok(None),
        Found::Damaged(error) => {
            tracing::warn!(error = %crate::error::chain(&error), "dropped");
            remove(path).map(|()| None)
        }
    }
}

/// Removes a record, and also a directory in its place; a missing one is a success.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match linux::atomic_file::remove(path) {
        Err(e) if e.errno() == Errno::EISDIR => remove_tree(path),
        removed => Ok(removed?),
    }
}

/// ENOTDIR: a file is in the place of its directory.
fn is_absent(error: &Error) -> bool {
    matches!(error, Error::Kernel(e) if matches!(e.errno(), Errno::ENOENT | Errno::ENOTDIR))
}

/// Whether the file itself is damaged. Any other error, such as that of a process without free
/// descriptors or memory, says nothing about the file.
fn is_damaged(error: &Error) -> bool {
    match error {
        Error::Record { .. } => true,
        // A bad block or a damaged file system: as a rule each later read fails too, and would hold a
        // pod, or the start of the runtime, for ever. Not `errno()`, which is EIO also for an error
        // that is not from a system call.
        Error::Kernel(e) => {
            let errno = e.source.raw_os_error().map(Errno::from_raw);
            matches!(
                errno,
                Some(
                    Errno::EIO
                        | Errno::EUCLEAN
                        | Errno::EBADMSG
                        // The block layer's: a medium error, one of the transport's target, a failed
                        // integrity check.
                        | Errno::ENODATA
                        | Errno::EREMOTEIO
                        | Errno::EILSEQ
                        // No file is there, but a directory or a loop of symbolic links.
                        | Errno::EISDIR
                        | Errno::ELOOP
                )
            )
        }
        _ => false,
    }
}

/// Makes a directory for root only (0700), with its parents.
pub(crate) fn ensure_dir(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|e| Error::io("create directory", path, e))
}

/// Removes a directory of any depth and content; a missing one is a success.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    Ok(linux::tree::remove(path)?)
}

/// Names in a directory, sorted.
pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(|e| Error::io("read directory", dir, e))? {
        let entry = entry.map_err(|e| Error::io("read directory", dir, e))?;
        names.extend(entry.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// 64 random hexadecimal digits, for a sandbox or a container.
pub(crate) fn new_id() -> Result<String> {
    Ok(linux::random::hexadecimal()? + &linux::random::hexadecimal()?)
}

fn to_json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec_pretty(value).expect("records have string keys and finite numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_flushed_while_its_directory_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        fs::create_dir(&own).unwrap();
        save(&own.join("record.json"), &["kept"]).unwrap();
        let unflushed = Unflushed::open(&own.join("record.json")).unwrap();
        fs::remove_file(own.join("record.json")).unwrap();
        unflushed.flush().unwrap();
        fs::remove_dir(&own).expect("nothing came into it");
    }

    #[test]
    fn a_torn_record_is_an_error_or_dropped_where_it_can_be_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        fs::write(&path, "").unwrap();
        assert!(matches!(find::<Vec<String>>(&path), Err(Error::Record { .. })));
        assert_eq!(find_or_drop::<Vec<String>>(&path).unwrap(), None);
        assert!(!path.exists());
        save(&path, &["kept"]).unwrap();
        assert_eq!(find_or_drop::<Vec<String>>(&path).unwrap().unwrap(), ["kept"]);
    }

    #[test]
    fn a_record_is_dropped_for_a_damaged_file_and_kept_after_any_other_error() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        // It can only be written: EINVAL.
        let unreadable = dir.path().join("unreadable.json");
        symlink("/proc/self/clear_refs", &unreadable).unwrap();
        match find_or_drop::<Vec<String>>(&unreadable).unwrap_err() {
            Error::Kernel(e) => assert_eq!(e.errno(), Errno::EINVAL),
            other => panic!("{other:?}"),
        }
        unreadable.symlink_metadata().expect("the link is still there");
        examine::<Vec<String>>(&unreadable).expect_err("it is not known whether the record is intact");

        let looped = dir.path().join("loop.json");
        symlink(&looped, &looped).unwrap();
        let directory = dir.path().join("directory.json");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), "").unwrap();
        for path in [&looped, &directory] {
            let found = examine::<Vec<String>>(path).unwrap();
            assert!(matches!(found, Found::Damaged(Error::Kernel(_))), "{found:?}");
            assert_eq!(find_or_drop::<Vec<String>>(path).unwrap(), None);
            path.symlink_metadata().expect_err("it is removed");
        }

        // A read of the address 0 fails with EIO.
        let bad_block = dir.path().join("bad-block.json");
        symlink("/proc/self/mem", &bad_block).unwrap();
        assert_eq!(find_or_drop::<Vec<String>>(&bad_block).unwrap(), None);
        bad_block.symlink_metadata().expect_err("the link is removed");
    }

    #[test]
    fn every_error_of_a_bad_medium_is_damage_and_a_lack_of_resources_is_not() {
        use Errno::{
            EACCES, EBADMSG, EILSEQ, EINTR, EIO, EMFILE, ENFILE, ENODATA, ENOMEM, EREMOTEIO, EUCLEAN,
        };
        let read = |errno: Errno| Error::io("read", Path::new("record.json"), std::io::Error::from(errno));
        for damage in [EIO, EUCLEAN, EBADMSG, ENODATA, EREMOTEIO, EILSEQ, Errno::EISDIR, Errno::ELOOP] {
            assert!(is_damaged(&read(damage)), "{damage}");
        }
        for passing in [EMFILE, ENFILE, ENOMEM, EINTR, EACCES] {
            assert!(!is_damaged(&read(passing)), "{passing}");
        }
    }

    #[test]
    fn a_record_is_examined_for_damage() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("record.json");
        let examined = || examine::<Vec<String>>(&path).unwrap();
        assert!(matches!(examined(), Found::Missing));
        fs::write(&path, "").unwrap();
        assert!(matches!(examined(), Found::Damaged(Error::Record { .. })));
        save(&path, &["kept"]).unwrap();
        assert!(matches!(examined(), Found::Intact(content) if content == ["kept"]));
        let below_a_file = examine::<Vec<String>>(&path.join("record.json")).unwrap();
        assert!(matches!(below_a_file, Found::Missing));
        assert!(matches!(examine_names(&path).unwrap(), Found::Missing));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/proc/self/mem", &path).unwrap();
        assert!(matches!(examined(), Found::Damaged(Error::Kernel(_))));
    }
}
