//! The privileges that the process drops before it learns which volume it serves.
//!
//! In a mount pod, a container runtime has made the namespaces and dropped capabilities. A child
//! process of the driver makes its own namespaces and an empty root.

use std::path::Path;

use linux::credentials::{self, CapabilitySet};
use linux::fs_at::DescriptorDir;
use linux::mount::{self, MountFlags, UnmountMode};
use nix::sched::CloneFlags;
use rustix::process::{Resource, Rlimit};

use crate::service::Network;
use crate::{Error, Result};

/// With fewer descriptors, the daemon could not keep the directories on a path open.
const LEAST_DESCRIPTORS: u64 = 64;

/// The isolation of the process from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isolation {
    ByTheRuntime,
    Own,
}

/// Descriptors that the parent left open are not ours. Must come first in `main`.
pub(crate) fn close_inherited_descriptors() -> Result<()> {
    credentials::close_inherited_descriptors().map_err(step("inherited descriptors"))
}

/// In a container, whose /proc is used.
pub(crate) fn in_given_namespaces() -> Result<DescriptorDir> {
    DescriptorDir::open().map_err(step("own descriptors"))
}

/// Leaves the host: makes own mount, IPC and UTS namespaces, an own, empty network namespace unless
/// the backend needs the node's, and an empty, read-only tmpfs as root directory. The new mount
/// namespace has no other mount. In particular, a copy of the FUSE mount would keep the session
/// alive after the host's unmount.
pub(crate) fn in_own_namespaces(network: Network) -> Result<DescriptorDir> {
    let always = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS;
    let (namespaces, names) = match network {
        Network::None => (always | CloneFlags::CLONE_NEWNET, "mount, net, ipc and uts namespaces"),
        Network::Node => (always, "mount, ipc and uts namespaces"),
    };
    nix::sched::unshare(namespaces)
        .map_err(|e| linux::Error::new("unshare", names, e))
        .map_err(step("own namespaces"))?;
    mount::make_private(Path::new("/")).map_err(step("own mount namespace"))?;
    let descriptors = DescriptorDir::open_detached().map_err(step("own descriptors"))?;
    empty_root().map_err(step("empty root directory"))?;
    descriptors.make_working_directory().map_err(step("own descriptors"))?;
    Ok(descriptors)
}

fn empty_root() -> linux::Result<()> {
    // Every host has /proc; any directory would do, since it is detached below.
    let place = Path::new("/proc");
    let flags = MountFlags { nosuid: true, nodev: true, noexec: true, ..MountFlags::default() };
    mount::mount_fs("tmpfs", "none", place, flags, "size=4k,nr_inodes=2,mode=0555")?;
    nix::unistd::chdir(place).map_err(|e| linux::Error::at("change directory to", place, e))?;
    // The old root is stacked on the new one, and unmounted (pivot_root(2), NOTES).
    nix::unistd::pivot_root(".", ".").map_err(|e| linux::Error::at("pivot_root to", place, e))?;
    mount::unmount(Path::new("."), UnmountMode::Detach)?;
    let root = Path::new("/");
    nix::unistd::chdir(root).map_err(|e| linux::Error::at("change directory to", root, e))?;
    mount::remount_bind(root, MountFlags { read_only: true, ..flags })
}

/// Requests contain the umask of their caller; the process's own must not remove further bits.
pub(crate) fn clear_umask() {
    rustix::process::umask(rustix::fs::Mode::empty());
}

/// Raises the limit of descriptors to the hard limit, and returns it.
pub(crate) fn raise_descriptor_limit() -> Result<u64> {
    let hard = rustix::process::getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    if hard < LEAST_DESCRIPTORS {
        return Err(Error::DescriptorLimit { hard, least: LEAST_DESCRIPTORS });
    }
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(hard), maximum: Some(hard) })
        .map_err(|e| linux::Error::new("raise", "RLIMIT_NOFILE", e))
        .map_err(step("open files"))?;
    Ok(hard)
}

/// Leaves the groups that the parent had: the kernel would take the process for a member of files of
/// these groups, and leave them the setgid bit when others write. Before [`drop_privileges`].
pub(crate) fn leave_groups() -> Result<()> {
    credentials::leave_supplementary_groups().map_err(step("supplementary groups"))
}

/// Keeps exactly `kept` in the effective, permitted and bounding sets, and sets no_new_privs. A
/// child of the driver keeps CAP_BPF until its filter is installed: other processes' filters may
/// use up the kernel's memory for unprivileged filters (net.core.bpf_jit_limit).
pub(crate) fn drop_privileges(kept: CapabilitySet) -> Result<()> {
    credentials::limit_capabilities_but(CapabilitySet::BPF, kept)
        .and_then(|()| credentials::set_no_new_privs())
        .map_err(step("privileges"))
}

/// Drops the capability that only the system call filter needed.
pub(crate) fn drop_the_last(kept: CapabilitySet) -> Result<()> {
    credentials::keep_capabilities(kept).map_err(step("privileges"))
}

fn step(step: &'static str) -> impl Fn(linux::Error) -> Error {
    move |source| Error::Kernel { step, source }
}
