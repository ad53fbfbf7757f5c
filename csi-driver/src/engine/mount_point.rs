//! The directories that volumes are mounted on, and their state while nothing is mounted there.

use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Dir, FileType, Mode};
use rustix::io::Errno;

use crate::error::{Error, Result, Step};
use crate::kernel::place::Place;

/// Keeps pods' processes out while the volume is not mounted. Root can still remove the directory.
const BARE_MODE: u32 = 0;

/// Closes the directory that the caller made. Nothing may be mounted on it.
pub(crate) fn close(place: &Place) -> Result<()> {
    open_empty(place)?
        .set_permissions(Permissions::from_mode(BARE_MODE))
        .map_err(|e| linux::Error::at("chmod", place.path(), e))
        .step("close mount point")
}

/// Checks that [`make`] can do its work. Nothing may be mounted there.
pub(crate) fn check(place: &Place) -> Result<()> {
    match place.stat() {
        Err(Errno::NOENT) => Ok(()),
        Err(e) => failed("look at", place, e),
        Ok(_) => open_empty(place).map(drop),
    }
}

fn failed<T>(op: &'static str, place: &Place, source: Errno) -> Result<T> {
    Err(linux::Error::at(op, place.path(), source)).step("look at mount point")
}

fn open_empty(place: &Place) -> Result<File> {
    let unusable = |reason: String| Error::unusable(place.field(), place.path(), reason);
    let dir = match place.open_dir() {
        Ok(dir) => dir,
        // A link is neither followed nor mounted on: the bind mount would end up outside the pod's
        // directory.
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(unusable("not a directory".to_owned())),
        Err(e @ Errno::NOENT) => return Err(unusable(std::io::Error::from(e).to_string())),
        Err(e) => return failed("open", place, e),
    };
    // Existing files would be hidden, and would block the removal of the directory later.
    let mut entries = match Dir::read_from(&dir) {
        Ok(entries) => entries,
        Err(e) => return failed("list", place, e),
    };
    if entries.any(|entry| entry.is_ok_and(|entry| ![c".", c".."].contains(&entry.file_name()))) {
        return Err(unusable("not an empty directory".to_owned()));
    }
    Ok(dir)
}

/// Makes the directory, or closes an existing one. CSI spec, NodePublishVolume: the caller makes
/// the parent, the plugin makes the target.
pub(crate) fn make(place: &Place) -> Result<()> {
    match place.make_dir(Mode::from(BARE_MODE)) {
        Ok(()) => Ok(()),
        Err(Errno::EXIST) => close(place),
        // The parent was removed after it was opened.
        Err(Errno::NOENT) => Err(parent_missing(place.field(), place.path())),
        Err(e) => Err(linux::Error::at("create", place.path(), e)).step("create mount point"),
    }
}

pub(crate) fn parent_missing(field: &'static str, path: &Path) -> Error {
    Error::unusable(field, path, "its parent is missing, or not a directory")
}

/// Removes a directory of [`make`] that no journal entry names, as after a power cut: empty, closed
/// and owned by root. Leaves everything else alone. Nothing may be mounted there.
pub(crate) fn remove_left(place: &Place) -> Result<()> {
    let is_ours = match place.stat() {
        Ok(found) => {
            FileType::from_raw_mode(found.st_mode) == FileType::Directory
                && found.st_mode & 0o7777 == BARE_MODE
                && found.st_uid == 0
        }
        Err(Errno::NOENT) => false,
        Err(e) => return failed("look at", place, e),
    };
    if !is_ours {
        return Ok(());
    }
    match place.remove_dir() {
        Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
        Err(e) => failed("remove", place, e),
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::OFlags;

    use super::*;

    fn place(field: &'static str, path: &Path) -> Place {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let parent = rustix::fs::open(path.parent().unwrap(), flags, Mode::empty()).unwrap();
        Place::new(field, parent, path.file_name().unwrap().to_owned(), path.to_owned()).unwrap()
    }

    #[test]
    fn only_an_empty_closed_directory_is_taken_for_what_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        make(&place("target_path", &at("left"))).unwrap();
        make(&place("target_path", &at("used"))).unwrap();
        std::fs::write(at("used").join("file"), "").unwrap();
        std::fs::create_dir(at("open")).unwrap();
        std::fs::write(at("plain"), "").unwrap();
        std::os::unix::fs::symlink(at("left"), at("link")).unwrap();
        for name in ["link", "left", "left", "used", "open", "plain", "absent"] {
            remove_left(&place("target_path", &at(name))).unwrap();
        }
        let mut kept: Vec<_> =
            std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        kept.sort();
        assert_eq!(kept, ["link", "open", "plain", "used"]);
    }

    #[test]
    fn what_is_no_directory_is_refused_and_what_is_becomes_closed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o7777;
        make(&place("target_path", &at("new"))).unwrap();
        std::fs::create_dir(at("found")).unwrap();
        make(&place("target_path", &at("found"))).unwrap();
        close(&place("staging_target_path", &at("found"))).unwrap();
        assert_eq!((mode("new"), mode("found")), (0, 0));

        std::fs::create_dir(at("linked")).unwrap();
        std::os::unix::fs::symlink(at("linked"), at("link")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        let before = mode("linked");
        std::fs::create_dir(at("used")).unwrap();
        std::fs::write(at("used/precious"), "").unwrap();
        for act in [make, close] {
            let message = act(&place("target_path", &at("used"))).unwrap_err().to_string();
            assert!(message.ends_with("used: not an empty directory"), "{message}");
        }
        assert_eq!(mode("used"), before, "it is left as it was");
        for wrong in ["link", "file"] {
            let message = make(&place("target_path", &at(wrong))).unwrap_err().to_string();
            assert!(message.starts_with("target_path ") && message.ends_with("not a directory"), "{message}");
        }
        assert_eq!(mode("linked"), before, "a link is not followed");
        let message = close(&place("staging_target_path", &at("absent"))).unwrap_err().to_string();
        assert!(message.contains("absent") && message.contains("No such file"), "{message}");
    }
}
