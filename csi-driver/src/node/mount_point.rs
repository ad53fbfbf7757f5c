//! Directories that a volume is mounted on, and what is seen in them where it is not.

use std::fs::{DirBuilder, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use rustix::fs::{Dir, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, Result, Step};

/// No pod's process gets in while the volume is not mounted; root may still remove it.
const BARE_MODE: u32 = 0;

/// The directory that the caller made, closed. Called with nothing mounted there.
pub(crate) fn close(field: &'static str, path: &Path) -> Result<()> {
    open_empty(field, path)?
        .set_permissions(Permissions::from_mode(BARE_MODE))
        .map_err(|e| linux::Error::at("chmod", path, e))
        .step("close mount point")
}

/// Whether [`make`] may do its work. Called with nothing mounted there.
pub(crate) fn check(field: &'static str, path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) if e.kind() != ErrorKind::NotADirectory => failed("look at", path, e),
        Ok(_) | Err(_) => open_empty(field, path).map(drop),
    }
}

fn failed<T>(op: &'static str, path: &Path, source: impl Into<std::io::Error>) -> Result<T> {
    Err(linux::Error::at(op, path, source)).step("look at mount point")
}

fn open_empty(field: &'static str, path: &Path) -> Result<File> {
    let unusable = |reason: String| Error::unusable(field, path, reason);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(dir) => dir,
        // A link is neither followed nor mounted on: a bind mount would lead out of the pod.
        Err(Errno::NOTDIR | Errno::LOOP) => return Err(unusable("not a directory".to_owned())),
        Err(e @ Errno::NOENT) => return Err(unusable(std::io::Error::from(e).to_string())),
        Err(e) => return failed("open", path, e),
    };
    // What is in there would be hidden, and in the way when the volume goes.
    let mut entries = match Dir::read_from(&dir) {
        Ok(entries) => entries,
        Err(e) => return failed("list", path, e),
    };
    if entries.any(|entry| entry.is_ok_and(|entry| ![c".", c".."].contains(&entry.file_name()))) {
        return Err(unusable("not an empty directory".to_owned()));
    }
    Ok(File::from(dir))
}

/// A closed directory, new or found. CSI spec, NodePublishVolume: the caller has
/// made the parent, the plugin makes the target.
pub(crate) fn make(field: &'static str, path: &Path) -> Result<()> {
    match DirBuilder::new().mode(BARE_MODE).create(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == ErrorKind::AlreadyExists => close(field, path),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Err(Error::unusable(field, path, format!("its parent: {e}")))
        }
        Err(e) => Err(linux::Error::at("create", path, e)).step("create mount point"),
    }
}

/// Removes what [`make`] made in a life that nobody remembers, as after a power cut:
/// an empty, closed directory of root's. All else is left alone. Called with nothing
/// mounted there.
pub(crate) fn remove_left(field: &'static str, path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() && found.mode() & 0o7777 == BARE_MODE && found.uid() == 0 => {}
        Ok(_) => return Ok(()),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) if e.kind() == ErrorKind::NotADirectory => {
            return Err(Error::unusable(field, path, e.to_string()));
        }
        Err(e) => return failed("look at", path, e),
    }
    match std::fs::remove_dir(path) {
        Err(e) if !matches!(e.kind(), ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty) => {
            failed("remove", path, e)
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_closed_directory_is_taken_for_what_was_left() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        make("target_path", &at("left")).unwrap();
        make("target_path", &at("used")).unwrap();
        std::fs::write(at("used").join("file"), "").unwrap();
        std::fs::create_dir(at("open")).unwrap();
        std::fs::write(at("plain"), "").unwrap();
        std::os::unix::fs::symlink(at("left"), at("link")).unwrap();
        for name in ["link", "left", "left", "used", "open", "plain", "absent/below"] {
            remove_left("target_path", &at(name)).unwrap();
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
        make("target_path", &at("new")).unwrap();
        std::fs::create_dir(at("found")).unwrap();
        make("target_path", &at("found")).unwrap();
        close("staging_target_path", &at("found")).unwrap();
        assert_eq!((mode("new"), mode("found")), (0, 0));

        std::fs::create_dir(at("linked")).unwrap();
        std::os::unix::fs::symlink(at("linked"), at("link")).unwrap();
        std::fs::write(at("file"), "").unwrap();
        let before = mode("linked");
        std::fs::create_dir(at("used")).unwrap();
        std::fs::write(at("used/precious"), "").unwrap();
        for act in [make, close] {
            let message = act("target_path", &at("used")).unwrap_err().to_string();
            assert!(message.ends_with("used: not an empty directory"), "{message}");
        }
        assert_eq!(mode("used"), before, "it is left as it was");
        for wrong in ["link", "file"] {
            let message = make("target_path", &at(wrong)).unwrap_err().to_string();
            assert!(message.starts_with("target_path ") && message.ends_with("not a directory"), "{message}");
        }
        assert_eq!(mode("linked"), before, "a link is not followed");
        let message = close("staging_target_path", &at("absent")).unwrap_err().to_string();
        assert!(message.contains("absent") && message.contains("No such file"), "{message}");
    }
}
