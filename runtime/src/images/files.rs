//! The files of image layouts, opened so that nothing is followed or waited for.

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::error::{ImageError, Result};

/// A layout's own links and mounts may lead to a file system that does not answer, or to a file of the node.
const WITHIN_LAYOUT: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// A regular file; opening anything else may wait.
pub(crate) fn open(path: &Path) -> Result<File> {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    regular(path, opened)
}

/// A regular file of the layout in `dir`. A link or a mount on the way is refused.
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

/// Of a layout: for what is opened in it, not to be read.
pub(crate) fn open_dir(dir: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}
