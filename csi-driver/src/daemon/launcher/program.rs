//! What a launch executes: what the driver is configured with, or what an earlier daemon executes.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, statx};

#[derive(Debug)]
pub(crate) enum Program {
    /// Open, so that it stays when another file takes its place.
    File { file: OwnedFd, id: FileId, path: PathBuf },
    /// Of a mount pod.
    Image(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FileId {
    device_major: u32,
    device_minor: u32,
    inode: u64,
}

impl Program {
    /// The file at `path`, which is shown as `shown`.
    pub(super) fn open(path: &Path, shown: PathBuf) -> linux::Result<Self> {
        let failed = |e| linux::Error::at("open", path, e);
        let file = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
        let found = statx(&file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::INO);
        Ok(Self::File { id: found.map(FileId::of).map_err(failed)?, file, path: shown })
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::File { id, .. }, Self::File { id: others, .. }) => id == others,
            (Self::Image(image), Self::Image(others)) => image == others,
            (Self::File { .. } | Self::Image(_), _) => false,
        }
    }
}

/// For administrators.
impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, .. } => write!(f, "{}", path.display()),
            Self::Image(image) => f.write_str(image),
        }
    }
}

impl FileId {
    /// As the kernel has it, without a question to the file system.
    pub(super) fn at(path: &Path) -> rustix::io::Result<Self> {
        statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).map(Self::of)
    }

    fn of(found: rustix::fs::Statx) -> Self {
        Self { device_major: found.stx_dev_major, device_minor: found.stx_dev_minor, inode: found.stx_ino }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_takes_a_programs_place_is_another_program() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("p"), dir.path().join("q"));
        std::fs::write(&path, "1").unwrap();
        let open = |path: &Path| Program::open(path, path.to_owned()).unwrap();
        let first = open(&path);
        assert!(first.is_same(&open(&path)));
        std::fs::write(&other, "1").unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert!(!first.is_same(&open(&path)));
        let image = |name: &str| Program::Image(name.to_owned());
        assert!(image("i:1").is_same(&image("i:1")) && !image("i:1").is_same(&image("i:2")));
        assert!(!image("i:1").is_same(&first));
    }
}
