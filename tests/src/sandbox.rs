//! A place of its own for one test: mount and network namespace of the calling
//! thread, a short directory, a cgroup that knows every process, and a guard
//! over its FUSE mounts.
//!
//! Invariant: what is started through [`Sandbox::command`] from the thread that
//! entered lives in the sandbox, and is dead when the sandbox is dropped.

use std::collections::hash_map::RandomState;
use std::fs;
use std::hash::{BuildHasher, Hasher};
use std::io::ErrorKind;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use linux::mount::UnmountMode;
use nix::sched::{CloneFlags, unshare};

use crate::cgroups::Tag;
use crate::fuse_guard::FuseGuard;
use crate::mount_table::mounts;
use crate::netlink;

/// Whose network a sandbox has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// A namespace of its own, loopback up.
    Own,
    /// The one the caller is in.
    Callers,
}

/// Where a sandbox has its mount of fusectl.
pub(crate) const FUSECTL: &str = "fusectl";

#[derive(Debug)]
pub struct Sandbox {
    /// `/tmp/hw-XXXX`: short, since the path of a unix socket ends at 107 bytes.
    dir: PathBuf,
    tag: Tag,
    name: String,
    fuse_guard: FuseGuard,
    keep: bool,
    /// The namespaces are the entering thread's: the value must not leave it.
    _thread_bound: PhantomData<*const ()>,
}

impl Sandbox {
    /// Moves the calling thread into a new sandbox. Needs root.
    pub fn enter(network: Network) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "not root: namespaces, mounts and cgroups need it");
        let (name, dir) = Self::free_name()?;
        Self::enter_at(dir, name, network)
    }

    /// With its new directory. A test that was killed may have left either of the two.
    fn free_name() -> Result<(String, PathBuf)> {
        loop {
            let name = format!("hw-{:04x}", RandomState::new().build_hasher().finish() & 0xffff);
            let dir = Path::new("/tmp").join(&name);
            match fs::create_dir(&dir) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => continue,
                made => made.with_context(|| dir.display().to_string())?,
            }
            if !Tag::is_left(&name)? {
                return Ok((name, dir));
            }
            fs::remove_dir(&dir).with_context(|| dir.display().to_string())?;
        }
    }

    /// The same in a directory that may have been another sandbox's before, and stays:
    /// for what must outlive a reboot.
    pub fn enter_standing(dir: &Path, network: Network) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        let name = dir.file_name().context("a directory with a name")?.to_string_lossy().into_owned();
        let mut sandbox = Self::enter_at(dir.to_path_buf(), name, network)?;
        sandbox.keep_directory();
        Ok(sandbox)
    }

    fn enter_at(dir: PathBuf, name: String, network: Network) -> Result<Self> {
        let own_network =
            if network == Network::Own { CloneFlags::CLONE_NEWNET } else { CloneFlags::empty() };
        unshare(CloneFlags::CLONE_NEWNS | own_network).context("unshare the mount and network namespace")?;
        linux::mount::make_private(Path::new("/")).context("make / private")?;
        if network == Network::Own {
            netlink::set_loopback_up()?;
        }
        let tag = Tag::join(&name)?;
        let fuse_guard = FuseGuard::start(&dir.join(FUSECTL))?;
        Ok(Self { dir, tag, name, fuse_guard, keep: false, _thread_bound: PhantomData })
    }

    /// The sandbox of a test: network of its own.
    pub fn new() -> Self {
        Self::enter(Network::Own).unwrap_or_else(|error| panic!("enter a sandbox: {error:#}"))
    }

    /// From here on no FUSE mount that hangs is aborted before the sandbox is
    /// dropped: for tests of who else ends what waits for a daemon.
    pub fn switch_fuse_guard_off(&self) {
        self.fuse_guard.switch_off();
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// A new directory in the sandbox.
    pub fn make_dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.path(name);
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        Ok(dir)
    }

    /// The absolute cgroup path under which pods are to be put.
    pub fn cgroup_root(&self) -> PathBuf {
        Path::new("/").join(&self.name).join("pods")
    }

    /// The absolute cgroup path under which a driver is to put daemons that it starts itself.
    pub fn volumes_cgroup_root(&self) -> PathBuf {
        Path::new("/").join(&self.name).join("volumes")
    }

    pub fn tag(&self) -> &Tag {
        &self.tag
    }

    /// A command with a quiet environment, to be started from this thread.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.current_dir(&self.dir);
        command
    }

    /// Leaves the directory (logs, traces) behind when dropped; processes, mounts
    /// and cgroups go all the same.
    pub fn keep_directory(&mut self) {
        self.keep = true;
    }

    fn clean_up(&mut self) -> Result<()> {
        let killed = self.tag.kill_all();
        self.fuse_guard.finish();
        unmount_all_under(&self.dir)?;
        killed?;
        self.tag.remove()?;
        if !self.keep {
            fs::remove_dir_all(&self.dir).with_context(|| self.dir.display().to_string())?;
        }
        Ok(())
    }
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Sandbox {
    /// What is left behind fails the test, unless it has failed already.
    #[expect(clippy::print_stderr, clippy::panic, reason = "a drop returns nothing")]
    fn drop(&mut self) {
        if let Err(error) = self.clean_up() {
            let problem = format!("test support: clean up {}: {error:#}", self.dir.display());
            if std::thread::panicking() {
                eprintln!("{problem}");
            } else {
                panic!("{problem}");
            }
        }
    }
}

/// Latest first, so that what stands on another mount goes before it.
fn unmount_all_under(dir: &Path) -> Result<()> {
    let mut under: Vec<PathBuf> = mounts()?.into_iter().map(|mount| mount.mount_point).collect();
    under.retain(|path| path.starts_with(dir));
    for path in under.iter().rev() {
        // Under a shared mount one unmount takes its peer along.
        let _gone_with_its_peer = linux::mount::unmount(path, UnmountMode::Detach);
    }
    let left: Vec<PathBuf> = mounts()?.into_iter().map(|mount| mount.mount_point).collect();
    let left: Vec<&PathBuf> = left.iter().filter(|path| path.starts_with(dir)).collect();
    ensure!(left.is_empty(), "still mounted: {left:?}");
    Ok(())
}
