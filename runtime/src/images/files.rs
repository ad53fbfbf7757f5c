//! Opens the files of image layouts without following links and without blocking.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::error::{ImageError, Result};

/// Links and mounts in a layout may lead to a file system that does not answer, or to a file of the
/// node.
const WITHIN_LAYOUT: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// Opens a regular file; opening another type could block.
pub(crate) fn open(path: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    regular(path, opened)
}

/// Opens a regular file in the layout `dir`. Links and mounts on the way are refused.
pub(crate) fn open_within(dir: &Path, inner: &Path) -> Result<File> {
    let opened = open_dir(dir).and_then(|dir| {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        rustix::fs::openat2(dir, inner, flags, Mode::empty(), WITHIN_LAYOUT)
    });
    let opened = opened.map_err(|errno| match errno {
        rustix::io::Errno::LOOP => {
            std::io::Error::other("a symbolic link, which an image layout may not have")
        }
        errno => errno.into(),
    });
    regular(inner, opened.map(File::from))
}

fn regular(path: &Path, opened: std::io::Result<File>) -> Result<File> {
    let path = path.to_owned();
    match opened.and_then(|file| Ok((file.metadata()?, file))) {
        Ok((metadata, file)) if metadata.is_file() => Ok(file),
        Ok(_) => Err(ImageError::NoRegularFile { path }),
        Err(source) => Err(ImageError::Open { path, source }),
    }
}

/// Opens a layout's directory, only as the start of further lookups.
pub(crate) fn open_dir(dir: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}
