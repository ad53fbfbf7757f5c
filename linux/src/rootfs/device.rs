//! Device nodes and links in a container's /dev.
//!
//! Invariant: an existing name is accepted only if it is the same node, checked by descriptor and
//! without following a link.

use std::os::fd::AsFd;
use std::path::Path;

use nix::errno::Errno;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};

use crate::{Error, Result};

/// The type and numbers of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    pub block: bool,
    pub major: u32,
    pub minor: u32,
}

/// The null device of the kernel (Documentation/admin-guide/devices.txt).
pub(super) const NULL: Device = Device::character(1, 3);

impl Device {
    pub const fn character(major: u32, minor: u32) -> Self {
        Self { block: false, major, minor }
    }

    fn file_type(self) -> FileType {
        if self.block { FileType::BlockDevice } else { FileType::CharacterDevice }
    }

    /// Checks an open file.
    pub(super) fn verify(self, file: impl AsFd, path: &Path) -> Result<()> {
        const OP: &str = "verify device";
        let stat = rustix::fs::fstat(file).map_err(|e| Error::at(OP, path, e))?;
        let numbers = (rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let found = FileType::from_raw_mode(stat.st_mode);
        if found == self.file_type() && numbers == (self.major, self.minor) {
            return Ok(());
        }
        let (major, minor) = (self.major, self.minor);
        let problem = format!(
            "it is not {:?} {major}:{minor} but {found:?} {}:{}",
            self.file_type(),
            numbers.0,
            numbers.1
        );
        Err(Error::at(OP, path, std::io::Error::other(problem)))
    }
}

/// Makes a device node in a directory with exactly `mode`: the caller's umask must be 0.
pub fn make_device(dir: impl AsFd, name: &str, device: Device, mode: u32) -> Result<()> {
    make_device_of(dir, name, device, mode, (0, 0))
}

/// [`make_device`] for a user and a group. A node that exists keeps its own.
pub fn make_device_of(
    dir: impl AsFd,
    name: &str,
    device: Device,
    mode: u32,
    owner: (u32, u32),
) -> Result<()> {
    let number = rustix::fs::makedev(device.major, device.minor);
    match rustix::fs::mknodat(&dir, name, device.file_type(), Mode::from(mode), number) {
        Ok(()) if owner == (0, 0) => {}
        Ok(()) => give_to(&dir, name, mode, owner)?,
        // The image may have the node; it is verified like the others.
        Err(rustix::io::Errno::EXIST) => {}
        Err(e) => return Err(Error::new("mknod", name, e)),
    }
    verify_device(dir, Path::new(name), device)
}

/// Of a new node, which no other process can have replaced yet.
fn give_to(dir: impl AsFd, name: &str, mode: u32, (uid, gid): (u32, u32)) -> Result<()> {
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    rustix::fs::chownat(&dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| Error::new("chown", name, e))?;
    // chown(2) removes the bits of set-user-ID and set-group-ID.
    rustix::fs::chmodat(&dir, name, Mode::from(mode), AtFlags::empty())
        .map_err(|e| Error::new("chmod", name, e))
}

/// Checks that `path` in `root` is that device, and not a link.
pub fn verify_device(root: impl AsFd, path: &Path, device: Device) -> Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let found = rustix::fs::openat2(root, path, flags, Mode::empty(), how)
        .map_err(|e| Error::at("verify device", path, e))?;
    device.verify(found, path)
}

/// A symbolic link in a directory; the same link is a success.
pub fn make_link(dir: impl AsFd, name: &str, target: &str) -> Result<()> {
    match rustix::fs::symlinkat(target, &dir, name) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::EXIST) => {
            let found =
                rustix::fs::readlinkat(&dir, name, Vec::new()).map_err(|e| Error::new("symlink", name, e))?;
            if found.as_bytes() == target.as_bytes() {
                Ok(())
            } else {
                Err(Error::new("symlink", name, Errno::EEXIST))
            }
        }
        Err(e) => Err(Error::new("symlink", name, e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rootfs::open_root;

    const ZERO: Device = Device::character(1, 5);

    #[test]
    fn only_the_very_device_is_taken_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        make_device(&root, "null", NULL, 0o666).unwrap();
        make_device(&root, "null", NULL, 0o666).unwrap();
        let error = make_device(&root, "null", ZERO, 0o666).unwrap_err();
        assert!(crate::reason(&error.source).ends_with("but CharacterDevice 1:3"), "{error:?}");
        std::fs::write(dir.path().join("zero"), "").unwrap();
        make_device(&root, "zero", ZERO, 0o666).unwrap_err();
    }

    #[test]
    fn a_new_device_gets_its_owner_and_mode_and_an_existing_one_keeps_them() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        let found = || {
            let stat = std::fs::symlink_metadata(dir.path().join("null")).unwrap();
            (stat.uid(), stat.gid(), stat.mode() & 0o7777)
        };
        // The umask of a test process is not 0.
        for (mode, owner) in [(0o2640, (12, 34)), (0o600, (56, 78))] {
            make_device_of(&root, "null", NULL, mode, owner).unwrap();
            assert_eq!(found(), (12, 34, 0o2640));
        }
    }

    #[test]
    fn a_link_to_the_device_is_not_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        make_device(&root, "real", NULL, 0o666).unwrap();
        std::os::unix::fs::symlink("real", dir.path().join("null")).unwrap();
        make_device(&root, "null", NULL, 0o666).unwrap_err();
        let error = verify_device(&root, Path::new("/null"), NULL).unwrap_err();
        assert!(crate::reason(&error.source).contains("but Symlink"), "{error:?}");
        std::os::unix::fs::symlink(".", dir.path().join("here")).unwrap();
        assert_eq!(verify_device(&root, Path::new("/here/real"), NULL).unwrap_err().errno(), Errno::ELOOP);
        verify_device(&root, Path::new("/real"), NULL).unwrap();
    }

    #[test]
    fn a_link_that_leads_elsewhere_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let root = open_root(dir.path()).unwrap();
        make_link(&root, "fd", "/proc/self/fd").unwrap();
        make_link(&root, "fd", "/proc/self/fd").unwrap();
        assert_eq!(make_link(&root, "fd", "/tmp").unwrap_err().errno(), Errno::EEXIST);
    }
}
