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
use linux::rootfs::{self, Attributes, KernelFs, Kind, Masks};

use super::Overlay;
use super::cgroup_mount::CgroupTree;
use super::error::{LaunchError, Result};
use super::plan::{Plan, PlannedMount, What};
use crate::spec::mount_policy::Source;

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

#[derive(Debug)]
pub(super) struct Root<'a> {
    plan: &'a Plan,
    fd: OwnedFd,
    masks: Masks,
}

impl<'a> Root<'a> {
    /// Mounts the overlay; nothing is mounted in it yet. This process's mount namespace must be its
    /// own, and a slave.
    pub(super) fn mount(plan: &'a Plan, overlay: &Overlay) -> Result<Self> {
        // A umask would remove bits from the modes of device nodes.
        rustix::process::umask(rustix::fs::Mode::empty());
        let mount_point = rootfs::open_root(&plan.rootfs)?;
        // Below the root, where the container's processes cannot see it.
        let masks = Masks::mount(&mount_point, &plan.rootfs)?;
        let tree = overlay.view().mount()?;
        if plan.nodev {
            rootfs::set_attributes(&tree, NODEV)?;
        }
        rootfs::attach(tree, mount_point, &plan.rootfs)?;
        let fd = rootfs::open_root(&plan.rootfs)?;
        Ok(Self { plan, fd, masks })
    }

    /// `tree` is set for a bind mount; other file systems are made here.
    pub(super) fn attach(&self, mount: &PlannedMount, tree: Option<OwnedFd>) -> Result<()> {
        match (&mount.what, tree) {
            (What::FileSystem { fs_type, options }, None) => {
                let tree = rootfs::new_fs(fs_type, options)?;
                set_attributes(mount, &tree)?;
                self.attach_file_system(mount, &tree)
            }
            (What::Cgroup, None) => {
                let cgroups = CgroupTree::new(&self.plan.cgroup_view, mount.attributes)?;
                self.attach_file_system(mount, &cgroups.tree).and_then(|()| cgroups.attach_below())
            }
            (What::Bind { .. }, Some(tree)) => self.attach_bind(mount, tree),
            _ => Err(LaunchError::SourceNotOpened),
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
        let source = rootfs::file_type(&tree)?;
        let source = Source::of(source);
        set_attributes(mount, &tree)?;
        if self.plan.nodev {
            rootfs::set_attributes(&tree, NODEV)?;
        }
        let kind = if source == Source::Directory { Kind::Directory } else { Kind::File };
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
            rootfs::make_device(dir.fd, name, wanted.device, wanted.mode)?;
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

    /// What a program without stdin reads.
    pub(super) fn open_null(&self) -> Result<OwnedFd> {
        Ok(self.masks.open_null()?)
    }

    /// Makes the directory in which the program starts, if it is missing.
    pub(super) fn ensure_directory(&self, path: &Path) -> Result<()> {
        if rootfs::open_in_root(&self.fd, path).is_ok() {
            return Ok(());
        }
        Ok(rootfs::ensure_target(&self.fd, path, Kind::Directory).map(drop)?)
    }

    /// Makes it this process's root. After that, every path is inside the container.
    pub(super) fn enter(self) -> Result<()> {
        rustix::process::umask(rustix::fs::Mode::from(0o022));
        Ok(rootfs::pivot_into(self.fd)?)
    }
}

fn set_attributes(mount: &PlannedMount, tree: &OwnedFd) -> Result<()> {
    if mount.attributes == Attributes::default() {
        return Ok(());
    }
    Ok(rootfs::set_attributes(tree, mount.attributes)?)
}
