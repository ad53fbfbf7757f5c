//! File systems of a test's own, on loop devices.
//!
//! Loop devices belong to the whole machine: each is found, never chosen, and
//! is free again when its last mount goes (`LO_FLAGS_AUTOCLEAR`), so that a test
//! that panics or is killed leaves none behind.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::eventually;
use crate::mount_table::mounts;
use crate::sandbox::Sandbox;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileSystem {
    Btrfs,
    Ext4,
    Xfs,
}

impl FileSystem {
    pub fn name(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    /// Makes the file system without discarding first what is not there.
    fn mkfs_options(self) -> &'static [&'static str] {
        match self {
            Self::Btrfs => &["-q", "-K"],
            Self::Ext4 => &["-q", "-E", "nodiscard"],
            Self::Xfs => &["-q", "-K"],
        }
    }
}

/// Room for an empty XFS (at least 300 MiB) and a test's data; sparse.
pub const IMAGE_BYTES: u64 = 512 << 20;

/// A new file system in an image file of the sandbox, mounted in its mount namespace.
#[derive(Debug)]
pub struct LoopMount {
    image: PathBuf,
    dir: PathBuf,
    /// Of each mount(8).
    options: String,
}

impl LoopMount {
    /// Mounts a new file system of `bytes` on the sandbox's directory `name`.
    pub fn new(sandbox: &Sandbox, name: &str, kind: FileSystem, bytes: u64) -> Result<Self> {
        Self::with_options(sandbox, name, kind, bytes, &[])
    }

    /// The same, with more options of mkfs.
    pub fn with_options(
        sandbox: &Sandbox,
        name: &str,
        kind: FileSystem,
        bytes: u64,
        more: &[&str],
    ) -> Result<Self> {
        let image = sandbox.path(&format!("{name}.img"));
        Self::made(sandbox, image, name, kind, (bytes, more, "loop"))
    }

    /// With project quotas.
    pub fn with_project_quotas(sandbox: &Sandbox, name: &str, kind: FileSystem, bytes: u64) -> Result<Self> {
        let image = sandbox.path(&format!("{name}.img"));
        let features: &[&str] = if kind == FileSystem::Ext4 { &["-O", "quota,project"] } else { &[] };
        Self::made(sandbox, image, name, kind, (bytes, features, "loop,prjquota"))
    }

    fn made(
        sandbox: &Sandbox,
        image: PathBuf,
        name: &str,
        kind: FileSystem,
        (bytes, more, mounted): (u64, &[&str], &str),
    ) -> Result<Self> {
        let file = File::create_new(&image).with_context(|| image.display().to_string())?;
        file.set_len(bytes).with_context(|| image.display().to_string())?;
        let mkfs = format!("mkfs.{}", kind.name());
        let options = kind.mkfs_options().iter().map(OsStr::new);
        run(sandbox.command(Path::new(&mkfs)).args(options).args(more).arg(&image))
            .with_context(|| format!("{mkfs} (its package must be installed)"))?;
        let mount = Self { image, dir: sandbox.make_dir(name)?, options: mounted.to_owned() };
        mount.mount(sandbox, kind)?;
        Ok(mount)
    }

    /// Mounts the image: anew after [`Self::unmount`].
    pub fn mount(&self, sandbox: &Sandbox, kind: FileSystem) -> Result<()> {
        // `-o loop` takes a free device and tries the next if another test was
        // quicker; `-n` keeps it out of the machine's /run/mount.
        let mut mount = sandbox.command(Path::new("mount"));
        run(mount.args(["-n", "-t", kind.name(), "-o", &self.options]).arg(&self.image).arg(&self.dir))
    }

    /// Fails if something in it stays open.
    pub fn unmount(&self) -> Result<()> {
        // A child of another test holds copies of this process's files until its execve.
        eventually("the file system is unmounted", Duration::from_secs(30), || {
            linux::mount::unmount(&self.dir, linux::mount::UnmountMode::Plain).context("unmount")
        })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The device that is mounted now, as `/dev/loop0`.
    pub fn device(&self) -> Result<PathBuf> {
        let mounted = mounts()?.into_iter().rfind(|mount| mount.mount_point == self.dir);
        let mounted = mounted.with_context(|| format!("{}: not mounted", self.dir.display()))?;
        Ok(PathBuf::from(mounted.source))
    }
}

/// The file that a loop device stands for; `None` for one that is free.
pub fn backing_file(device: &Path) -> Option<PathBuf> {
    let name = device.file_name()?.to_str()?;
    let path = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()?;
    Some(PathBuf::from(path.trim_end()))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("start {:?}", command.get_program()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, said.trim());
    Ok(())
}
