//! What the pool's file system supports.

use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Result, Step, chain};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Traits {
    /// `Err`: the reason why the test could not run, as on a full disk. It is repeated later.
    pub(super) can_reflink: std::result::Result<bool, String>,
    pub(super) fs_type: String,
}

/// Finds out what the pool's file system supports.
pub(super) fn traits_of(dir: &Path) -> Result<Traits> {
    let can_reflink = can_reflink(dir).step("try whether the pool can reflink").map_err(|e| chain(&e));
    Ok(Traits { can_reflink, fs_type: fs_type(dir).step("look at pool")? })
}

/// Clones one file in `dir` to see whether the file system supports it.
fn can_reflink(dir: &Path) -> linux::Result<bool> {
    let at_dir = |op| move |e: Errno| linux::Error::at(op, dir, e);
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let [source, copy] = [(); 2].map(|()| rustix::fs::open(dir, flags, Mode::RUSR | Mode::WUSR));
    let (source, copy) = match (source, copy) {
        // A file system without unnamed files has no reflinks either.
        (Err(Errno::OPNOTSUPP | Errno::ISDIR), _) => return Ok(false),
        (source, copy) => {
            (source.map_err(at_dir("open a file in"))?, copy.map_err(at_dir("open a file in"))?)
        }
    };
    rustix::io::pwrite(&source, &[1; 4096], 0).map_err(at_dir("write a file in"))?;
    match rustix::fs::ioctl_ficlone(&copy, &source) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY) => Ok(false),
        Err(e) => Err(at_dir("clone a file in")(e)),
    }
}

/// The names of the file systems that pools are used on, by their statfs(2) magic numbers.
pub(super) fn fs_type(dir: &Path) -> linux::Result<String> {
    let found = rustix::fs::statfs(dir).map_err(|e| linux::Error::at("statfs", dir, e))?;
    Ok(match found.f_type {
        0x9123_683e => "btrfs".to_owned(),
        0xef53 => "ext4".to_owned(),
        0x6969 => "nfs".to_owned(),
        0x794c_7630 => "overlay".to_owned(),
        0x0102_1994 => "tmpfs".to_owned(),
        0x5846_5342 => "xfs".to_owned(),
        0x2fc1_2fc1 => "zfs".to_owned(),
        other => format!("a file system of type {other:#x}"),
    })
}
