//! The container's root file system, from the overlay to the point where the
//! child moves into it.
//!
//! Volumes belong to other processes, which may change them at any time. So each mount's place is
//! held by a descriptor once it is chosen, and everything that isolates the container (proc, sysfs,
//! devices, masks) is verified after the last mount.
//!
//! Invariant: the order. The container's own /dev gets its nodes before any volume is mounted.
//! Masks come after every volume. [`Root::verify`] comes last.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use linux::mount::AccessTimes;
use linux::rootfs::{self, Attributes, EmptyMounts, KernelFs, Kind, Masks, MountsBelow, Propagation};

use super::cgroup_mount::CgroupTree;
use super::error::{LaunchError, Result};
use super::plan::{Plan, PlannedMount, What};
use crate::spec::mount_policy;

/// What every container has in /dev.
const DEVICES: &[(&str, rootfs::Device)] = &[
    ("null", rootfs::Device::character(1, 3)),
    ("zero", rootfs::Device::character(1, 5)),
    ("full", rootfs::Device::character(1, 7)),
    ("random", rootfs::Device::character(1, 8)),
    ("urandom", rootfs::Device::character(1, 9)),
    ("tty", rootfs::Device::character(5, 0)),
];
const DEVICE_LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Of a mount with those below.
const NODEV: Attributes = Attributes {
    read_only: false,
    nosuid: false,
    nodev: true,
    noexec: false,
    access_times: AccessTimes::Kernels,
    nodiratime: false,
    propagation: None,
    recursive: true,
};

/// What is mounted, not attached yet.
#[derive(Debug)]
pub(super) enum Source {
    /// A new one of the container's own.
    FileSystem(OwnedFd),
    Cgroups(CgroupTree),
    Bind(OwnedFd),
}

impl Source {
    /// Called in the host's mount namespace, whose paths sources have.
    pub(super) fn open(plan: &Plan, mount: &PlannedMount) -> Result<Self> {
        let opened = match &mount.what {
            What::FileSystem { fs_type, options } => {
                rootfs::new_fs(fs_type, options).map(Self::FileSystem).map_err(LaunchError::from)
            }
            What::Cgroup => CgroupTree::new(&plan.cgroup_view, mount.attributes).map(Self::Cgroups),
            What::Bind { source, below } => bind_source(mount, source, *below).map(Self::Bind),
        };
        opened.map_err(|problem| problem.mounting(&mount.target))
    }
}

fn bind_source(mount: &PlannedMount, source: &Path, below: MountsBelow) -> Result<OwnedFd> {
    let tree = rootfs::clone_tree_without_links(source, below)?;
    if let Some(propagation) = mount.propagation.filter(|p| *p != Propagation::Shared) {
        // A shared tree is left unchanged: it is already in its source's peer group.
        let recursive = below == MountsBelow::With;
        let change = Attributes { propagation: Some(propagation), recursive, ..Attributes::default() };
        rootfs::set_attributes(&tree, change)?;
    }
    Ok(tree)
}

#[derive(Debug)]
pub(super) struct Root<'a> {
    plan: &'a Plan,
    fd: OwnedFd,
    masks: Masks,
}

impl<'a> Root<'a> {
    /// Moves this process into a mount namespace of its own, and mounts the overlay there; nothing is
    /// mounted in it yet.
    pub(super) fn mount(plan: &'a Plan, overlay: OwnedFd, mounts: &EmptyMounts) -> Result<Self> {
        // A umask would remove bits from the modes of device nodes.
        rustix::process::umask(rustix::fs::Mode::empty());
        let (mount_point, name) = mounts.enter_copy()?;
        // Below the root, where the container's processes cannot see it.
        let masks = Masks::mount(&mount_point, name)?;
        if plan.nodev {
            rootfs::set_attributes(&overlay, NODEV)?;
        }
        rootfs::attach(&overlay, mount_point, name)?;
        Ok(Self { plan, fd: overlay, masks })
    }

    pub(super) fn attach(&self, mount: &PlannedMount, source: Source) -> Result<()> {
        match source {
            Source::FileSystem(tree) => {
                set_attributes(mount, &tree)?;
                self.attach_file_system(mount, &tree)
            }
            Source::Cgroups(cgroups) => {
                self.attach_file_system(mount, &cgroups.tree).and_then(|()| cgroups.attach_below())
            }
            Source::Bind(tree) => self.attach_bind(mount, tree),
        }
        .map_err(|problem| problem.mounting(&mount.target))
    }

    /// Mounts one of the container's own file systems (a request has only bind mounts). It must be
    /// at its exact path, whatever links the image has there.
    fn attach_file_system(&self, mount: &PlannedMount, tree: &OwnedFd) -> Result<()> {
        let place = rootfs::ensure_target(&self.fd, &mount.target, Kind::Directory)?;
        if place.path != mount.target {
            return Err(LaunchError::LinkInImage { place: place.path });
        }
        rootfs::attach(tree, place.fd, &mount.target)?;
        if mount.target == Path::new("/dev") { self.make_devices() } else { Ok(()) }
    }

    fn attach_bind(&self, mount: &PlannedMount, tree: OwnedFd) -> Result<()> {
        let source = mount_policy::Source::of(rootfs::file_type(&tree)?);
        set_attributes(mount, &tree)?;
        if self.plan.nodev {
            rootfs::set_attributes(&tree, NODEV)?;
        }
        let kind = if source == mount_policy::Source::Directory { Kind::Directory } else { Kind::File };
        let place = rootfs::ensure_target(&self.fd, &mount.target, kind)?;
        self.plan
            .mount_policy
            .check(&place.path, source)
            .map_err(|source| LaunchError::Refused { place: place.path.clone(), source })?;
        Ok(rootfs::attach(tree, place.fd, &mount.target)?)
    }

    /// Makes the nodes in a new, empty /dev.
    fn make_devices(&self) -> Result<()> {
        let dev = rootfs::open_in_root(&self.fd, Path::new("dev"))?;
        for (name, device) in DEVICES {
            rootfs::make_device(&dev, name, *device, 0o666)?;
        }
        for (name, target) in DEVICE_LINKS {
            rootfs::make_link(&dev, name, target)?;
        }
        if self.plan.has_terminal {
            // The first one of the container's own devpts.
            rootfs::make_link(&dev, "console", "pts/0")?;
        }
        for wanted in &self.plan.devices {
            let (Some(dir), Some(name)) =
                (wanted.path.parent(), wanted.path.file_name().and_then(OsStr::to_str))
            else {
                return Err(LaunchError::DevicePath { path: wanted.path.clone() });
            };
            let dir = rootfs::ensure_target(&self.fd, dir, Kind::Directory)?;
            rootfs::make_device_of(dir.fd, name, wanted.device, wanted.mode, wanted.owner)?;
        }
        Ok(())
    }

    /// Called after the last mount.
    pub(super) fn protect(&mut self) -> Result<()> {
        for path in &self.plan.masked {
            self.masks.mask(&self.fd, path)?;
        }
        for path in &self.plan.read_only {
            self.masks.make_read_only(&self.fd, path)?;
        }
        if self.plan.read_only_root {
            rootfs::set_attributes(&self.fd, Attributes { read_only: true, ..Attributes::default() })?;
        }
        self.verify()
    }

    /// Verifies that the container sees its own isolation, and not a volume in its place.
    fn verify(&self) -> Result<()> {
        self.masks.verify(&self.fd)?;
        for mount in &self.plan.mounts {
            let What::FileSystem { fs_type, .. } = &mount.what else { continue };
            let kind = match fs_type.as_str() {
                "proc" => KernelFs::Proc,
                "sysfs" => KernelFs::Sysfs,
                _ => continue,
            };
            rootfs::open_kernel_fs(&self.fd, &mount.target, kind)?;
        }
        // A privileged container may have its devices covered.
        let has_own_dev = self
            .plan
            .mounts
            .iter()
            .any(|m| m.target == Path::new("/dev") && matches!(m.what, What::FileSystem { .. }));
        if self.plan.mount_policy.is_privileged() || !has_own_dev {
            return Ok(());
        }
        for (name, device) in DEVICES {
            rootfs::verify_device(&self.fd, &Path::new("/dev").join(name), *device)?;
        }
        for wanted in &self.plan.devices {
            rootfs::verify_device(&self.fd, &wanted.path, wanted.device)?;
        }
        Ok(())
    }

    /// Makes the directory in which the program starts, if it is missing.
    pub(super) fn ensure_directory(&self, path: &Path) -> Result<()> {
        if rootfs::open_in_root(&self.fd, path).is_ok() {
            return Ok(());
        }
        Ok(rootfs::ensure_target(&self.fd, path, Kind::Directory).map(drop)?)
    }

    /// Makes it this process's root. After that, every path is inside the container. Returns a null
    /// device, which a program without stdin reads.
    pub(super) fn enter(self) -> Result<OwnedFd> {
        rustix::process::umask(rustix::fs::Mode::from(0o022));
        rootfs::enter_over_root(self.fd)?;
        Ok(self.masks.into_null())
    }
}

fn set_attributes(mount: &PlannedMount, tree: &OwnedFd) -> Result<()> {
    if mount.attributes == Attributes::default() {
        return Ok(());
    }
    Ok(rootfs::set_attributes(tree, mount.attributes)?)
}
