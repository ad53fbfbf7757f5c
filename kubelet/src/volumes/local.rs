//! Volumes without a driver: emptyDir and hostPath.

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use linux::mount::{self, MountFlags, UnmountMode};
use linux::mountinfo;

use super::error::Error;
use super::files;
use crate::objects::{EmptyDirVolume, HostPathType, HostPathVolume};

/// Makes the directory (or tmpfs) anew or finds it; returns its path.
pub(super) fn ensure_empty_dir(dir: &Path, volume: &EmptyDirVolume) -> Result<PathBuf, Error> {
    files::make_dir(dir, 0o750)?;
    match volume.medium.as_str() {
        "" => {}
        "Memory" => ensure_tmpfs(dir, volume)?,
        other => {
            let field = format!("spec.volumes[].emptyDir.medium {other:?}");
            return Err(Error::Unsupported { field });
        }
    }
    // Whatever the umask: every user of the pod writes here.
    fs::set_permissions(dir, Permissions::from_mode(0o777))
        .map_err(|e| Error::io("set permissions of", dir, e))?;
    Ok(dir.to_owned())
}

fn ensure_tmpfs(dir: &Path, volume: &EmptyDirVolume) -> Result<(), Error> {
    if mountinfo::at(dir).map_err(Error::Kernel)?.is_some() {
        return Ok(());
    }
    let size = volume.size_limit.as_ref().map(|q| format!("size={}", q.value())).unwrap_or_default();
    mount::mount_fs("tmpfs", "tmpfs", dir, MountFlags::default(), &size).map_err(Error::Kernel)
}

/// Frees what an emptyDir of medium Memory holds.
pub(super) fn unmount_empty_dir(dir: &Path) -> Result<(), Error> {
    match mountinfo::at(dir).map_err(Error::Kernel)? {
        Some(found) if found.fs_type == "tmpfs" => {
            mount::unmount(dir, UnmountMode::Plain).map_err(Error::Kernel)
        }
        _ => Ok(()),
    }
}

/// Checks (and, for the `OrCreate` types, makes) what is at the path.
pub(super) fn ensure_host_path(volume: &HostPathVolume) -> Result<PathBuf, Error> {
    let path = Path::new(&volume.path);
    if !path.is_absolute() || path.components().any(|c| c == Component::ParentDir) {
        return Err(Error::HostPathRelative { found: volume.path.clone() });
    }
    match volume.path_type {
        HostPathType::DirectoryOrCreate if !path.exists() => {
            files::make_dir(path, 0o755)?;
        }
        HostPathType::FileOrCreate if !path.exists() => {
            fs::File::create_new(path).map_err(|e| Error::io("create", path, e))?;
        }
        _ => {}
    }
    check_host_path(path, volume.path_type)?;
    Ok(path.to_owned())
}

fn check_host_path(path: &Path, wanted: HostPathType) -> Result<(), Error> {
    let found = fs::metadata(path).ok().map(|m| m.file_type());
    let (fits, wanted) = match wanted {
        HostPathType::Unset => return Ok(()),
        HostPathType::Directory | HostPathType::DirectoryOrCreate => (found.map(|t| t.is_dir()), "directory"),
        HostPathType::File | HostPathType::FileOrCreate => (found.map(|t| t.is_file()), "file"),
        HostPathType::Socket => (found.map(|t| t.is_socket()), "socket"),
        HostPathType::CharDevice => (found.map(|t| t.is_char_device()), "character device"),
        HostPathType::BlockDevice => (found.map(|t| t.is_block_device()), "block device"),
    };
    if fits == Some(true) { Ok(()) } else { Err(Error::HostPathType { path: path.to_owned(), wanted }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_dir_is_open_to_all_users_and_found_again() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("pods/u/volumes/kubernetes.io~empty-dir/scratch");
        let volume = EmptyDirVolume::default();
        for _ in 0..2 {
            ensure_empty_dir(&dir, &volume).unwrap();
            assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o777);
        }
    }

    #[test]
    fn a_host_path_must_be_what_its_type_says() {
        let root = tempfile::tempdir().unwrap();
        let volume =
            |path: &Path, path_type| HostPathVolume { path: path.to_str().unwrap().to_owned(), path_type };
        ensure_host_path(&volume(root.path(), HostPathType::Directory)).unwrap();
        let err = ensure_host_path(&volume(root.path(), HostPathType::Socket)).unwrap_err();
        assert!(err.to_string().contains("is not a socket"), "{err}");
        let made = root.path().join("a/b");
        ensure_host_path(&volume(&made, HostPathType::DirectoryOrCreate)).unwrap();
        assert!(made.is_dir());
        let err = ensure_host_path(&volume(Path::new("/tmp/../etc"), HostPathType::Unset)).unwrap_err();
        assert!(matches!(err, Error::HostPathRelative { .. }));
    }
}
