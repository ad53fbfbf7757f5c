//! The backend `local`: a directory a volume in a pool on this node.
//!
//! `<pool>/volumes/<id>/data` is a volume's root, `<pool>/trash/<id>` one that
//! is being removed. Both parents are 0700: on the host only root gets in, and
//! the modes within a volume are its users' own affair.

mod removal;

use std::fs::{DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::{Result, Step};
use crate::volume::VolumeId;

/// Users of a volume need not be root: whoever mounts it may create files.
const ROOT_MODE: u32 = 0o777;

#[derive(Debug)]
pub(crate) struct Pool {
    volumes: PathBuf,
    trash: PathBuf,
    /// As configured; `None`: the size of the file system.
    capacity_bytes: Option<u64>,
}

impl Pool {
    /// Makes the pool's directories where they are missing.
    pub(crate) fn open(dir: &Path, capacity_bytes: Option<u64>) -> Result<Self> {
        let pool = Self { volumes: dir.join("volumes"), trash: dir.join("trash"), capacity_bytes };
        for dir in [&pool.volumes, &pool.trash] {
            private_dir_all(dir).step("create pool")?;
        }
        Ok(pool)
    }

    /// What all volumes together may claim.
    pub(crate) fn capacity_bytes(&self) -> Result<u64> {
        match self.capacity_bytes {
            Some(bytes) => Ok(bytes),
            None => nix::sys::statvfs::statvfs(&self.volumes)
                .map(|fs| fs.blocks().saturating_mul(fs.fragment_size()))
                .map_err(|e| linux::Error::at("statvfs", &self.volumes, e))
                .step("measure pool"),
        }
    }

    /// Makes the volume's directory; one that is there already is right.
    pub(crate) fn ensure(&self, id: &VolumeId) -> Result<()> {
        let data = self.data_dir(id);
        private_dir_all(&data)
            .and_then(|()| {
                std::fs::set_permissions(&data, Permissions::from_mode(ROOT_MODE))
                    .map_err(|e| linux::Error::at("chmod", &data, e))
            })
            .step("create volume directory")
    }

    /// The directory that the volume's daemon is to serve.
    pub(crate) fn data_dir(&self, id: &VolumeId) -> PathBuf {
        id.under(&self.volumes).join("data")
    }

    /// Removes the volume's data. Its name vanishes first and at once; killed
    /// after that, a repetition removes the rest.
    pub(crate) fn remove(&self, id: &VolumeId) -> Result<()> {
        let (live, trash) = (id.under(&self.volumes), id.under(&self.trash));
        // Left by a deletion that was killed: a rename onto it would fail.
        removal::remove_tree(&trash).step("remove volume data")?;
        match std::fs::rename(&live, &trash) {
            Ok(()) => removal::remove_tree(&trash).step("remove volume data"),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
            Err(e) => Err(linux::Error::at("move to trash", &live, e)).step("remove volume data"),
        }
    }

    /// Removes what killed deletions and probes left. No deletion may be under way.
    pub(crate) fn sweep(&self) -> Result<()> {
        let listed = |e| linux::Error::at("list", &self.trash, e);
        for entry in std::fs::read_dir(&self.trash).map_err(listed).step("sweep pool")? {
            let entry = entry.map_err(listed).step("sweep pool")?;
            let path = entry.path();
            if entry.file_name().to_str().is_some_and(|name| VolumeId::parse(name).is_some()) {
                removal::remove_tree(&path).step("sweep pool")?;
            } else if path.extension().is_some_and(|e| e == "tmp") {
                linux::atomic_file::remove(&path).step("sweep pool")?;
            }
        }
        Ok(())
    }

    /// Writes and removes a file: whether the pool is there and takes data.
    pub(crate) fn probe(&self) -> linux::Result<()> {
        probe_dir(&self.trash)
    }
}

/// Creates and removes a file in `dir`: what a read-only or vanished file system refuses.
pub(crate) fn probe_dir(dir: &Path) -> linux::Result<()> {
    let path = dir.join(format!(".probe.{}.tmp", std::process::id()));
    std::fs::write(&path, b"probe")
        .and_then(|()| std::fs::remove_file(&path))
        .map_err(|e| linux::Error::at("write", &path, e))
}

/// `dir` and its parents, each new one 0700.
pub(crate) fn private_dir_all(dir: &Path) -> linux::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(|e| linux::Error::at("create", dir, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::VolumeName;

    #[test]
    fn a_volume_comes_and_goes_and_both_may_be_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::open(dir.path(), None).unwrap();
        let id = VolumeId::for_name(&VolumeName::parse("a").unwrap());
        pool.ensure(&id).unwrap();
        std::fs::write(pool.data_dir(&id).join("file"), "content").unwrap();
        pool.ensure(&id).unwrap();
        assert_eq!(std::fs::read(pool.data_dir(&id).join("file")).unwrap(), b"content");
        assert_eq!(std::fs::metadata(pool.data_dir(&id)).unwrap().permissions().mode() & 0o7777, ROOT_MODE);
        pool.remove(&id).unwrap();
        pool.remove(&id).unwrap();
        assert_eq!(std::fs::read_dir(&pool.volumes).unwrap().count(), 0);
        assert_eq!(std::fs::read_dir(&pool.trash).unwrap().count(), 0);
    }

    #[test]
    fn a_removal_that_was_killed_is_finished_beside_a_volume_of_the_same_id() {
        let dir = tempfile::tempdir().unwrap();
        let pool = Pool::open(dir.path(), None).unwrap();
        let id = VolumeId::for_name(&VolumeName::parse("a").unwrap());
        std::fs::create_dir_all(id.under(&pool.trash).join("data/half")).unwrap();
        pool.ensure(&id).unwrap();
        pool.remove(&id).unwrap();
        assert_eq!(std::fs::read_dir(&pool.trash).unwrap().count(), 0);
    }

    #[test]
    fn the_size_is_the_file_systems_unless_it_is_configured() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Pool::open(dir.path(), None).unwrap().capacity_bytes().unwrap() > 0);
        assert_eq!(Pool::open(dir.path(), Some(5)).unwrap().capacity_bytes().unwrap(), 5);
    }
}
