//! The container's root file system, from the overlay to the point where the
//! child moves into it.
//!
//! Volumes belong to others, who may change them meanwhile. So the place of
//! each mount is held by a descriptor from the moment it is decided on, and what
//! isolates the container (proc, sysfs, devices, masks) is verified after the
//! last mount.
//!
//! Invariant: the order. The container's own /dev gets its nodes before any
//! volume is mounted, masks come after every volume, [`Root::verify`] comes last.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use linux::rootfs::{self, Attributes, KernelFs, Kind, Masks};

use super::Overlay;
use super::cgroup_mount::CgroupTree;
use super::plan::{Plan, PlannedMount, What};
use super::problem::text;
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

#[derive(Debug)]
pub(super) struct Root<'a> {
    plan: &'a Plan,
    fd: OwnedFd,
    masks: Masks,
}

impl<'a> Root<'a> {
    /// The overlay, with nothing mounted in it yet. This process's mount
    /// namespace must be its own, and a slave.
    pub(super) fn mount(plan: &'a Plan, overlay: &Overlay) -> Result<Self, String> {
        // It would take bits away from the modes of device nodes.
        rustix::process::umask(rustix::fs::Mode::empty());
        let mount_point = rootfs::open_root(&plan.rootfs).map_err(text)?;
        // Below the root, where no process of the container finds it.
        let masks = Masks::mount(&mount_point, &plan.rootfs).map_err(text)?;
        let tree = overlay.view().mount().map_err(text)?;
        rootfs::attach(tree, mount_point, &plan.rootfs).map_err(text)?;
        let fd = rootfs::open_root(&plan.rootfs).map_err(text)?;
        Ok(Self { plan, fd, masks })
    }

    /// `tree` is a bind mount's; a file system is made here.
    pub(super) fn attach(&self, mount: &PlannedMount, tree: Option<OwnedFd>) -> Result<(), String> {
        match (&mount.what, tree) {
            (What::FileSystem { fs_type, options }, None) => {
                let tree = rootfs::new_fs(fs_type, options).map_err(text)?;
                set_attributes(mount, &tree)?;
                self.attach_file_system(mount, &tree)
            }
            (What::Cgroup, None) => {
                let cgroups = CgroupTree::new(&self.plan.cgroup_view, mount.attributes)?;
                self.attach_file_system(mount, &cgroups.tree).and_then(|()| cgroups.attach_below())
            }
            (What::Bind { .. }, Some(tree)) => self.attach_bind(mount, tree),
            _ => Err("the source was not opened".to_owned()),
        }
        .map_err(|problem| format!("mount {}: {problem}", mount.target.display()))
    }

    /// One of the container's own (a request has bind mounts only): it must
    /// stand at its very path, whatever links the image has there.
    fn attach_file_system(&self, mount: &PlannedMount, tree: &OwnedFd) -> Result<(), String> {
        let place = rootfs::ensure_target(&self.fd, &mount.target, Kind::Directory).map_err(text)?;
        if place.path != mount.target {
            return Err(format!("the image has a link there, to {}", place.path.display()));
        }
        rootfs::attach(tree, place.fd, &mount.target).map_err(text)?;
        if mount.target == Path::new("/dev") { self.make_devices() } else { Ok(()) }
    }

    fn attach_bind(&self, mount: &PlannedMount, tree: OwnedFd) -> Result<(), String> {
        let source = rootfs::file_type(&tree).map_err(text)?;
        let source = Source::of(source);
        set_attributes(mount, &tree)?;
        let kind = if source == Source::Directory { Kind::Directory } else { Kind::File };
        let place = rootfs::ensure_target(&self.fd, &mount.target, kind).map_err(text)?;
        self.plan
            .mount_policy
            .check(&place.path, source)
            .map_err(|reason| format!("it leads to {}: refused: {reason}", place.path.display()))?;
        rootfs::attach(tree, place.fd, &mount.target).map_err(text)
    }

    /// Into a /dev that was mounted a moment ago and is empty.
    fn make_devices(&self) -> Result<(), String> {
        let dev = rootfs::open_in_root(&self.fd, Path::new("dev")).map_err(text)?;
        for (name, device) in DEVICES {
            rootfs::make_device(&dev, name, *device, 0o666).map_err(text)?;
        }
        for (name, target) in DEVICE_LINKS {
            rootfs::make_link(&dev, name, target).map_err(text)?;
        }
        for wanted in &self.plan.devices {
            let (Some(dir), Some(name)) =
                (wanted.path.parent(), wanted.path.file_name().and_then(OsStr::to_str))
            else {
                return Err(format!("device {}: not a path", wanted.path.display()));
            };
            let dir = rootfs::ensure_target(&self.fd, dir, Kind::Directory).map_err(text)?;
            rootfs::make_device(dir.fd, name, wanted.device, wanted.mode).map_err(text)?;
        }
        Ok(())
    }

    /// After the last mount.
    pub(super) fn protect(&mut self) -> Result<(), String> {
        for path in &self.plan.masked {
            self.masks.mask(&self.fd, path).map_err(text)?;
        }
        for path in &self.plan.read_only {
            self.masks.make_read_only(&self.fd, path).map_err(text)?;
        }
        if self.plan.read_only_root {
            rootfs::set_attributes(&self.fd, Attributes { read_only: true, ..Attributes::default() })
                .map_err(text)?;
        }
        self.verify()
    }

    /// That the container finds what isolates it, and not a volume in its place.
    fn verify(&self) -> Result<(), String> {
        self.masks.verify(&self.fd).map_err(text)?;
        for mount in &self.plan.mounts {
            let What::FileSystem { fs_type, .. } = &mount.what else { continue };
            let kind = match fs_type.as_str() {
                "proc" => KernelFs::Proc,
                "sysfs" => KernelFs::Sysfs,
                _ => continue,
            };
            rootfs::open_kernel_fs(&self.fd, &mount.target, kind).map_err(text)?;
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
            rootfs::verify_device(&self.fd, &Path::new("/dev").join(name), *device).map_err(text)?;
        }
        for wanted in &self.plan.devices {
            rootfs::verify_device(&self.fd, &wanted.path, wanted.device).map_err(text)?;
        }
        Ok(())
    }

    /// The directory in which the program starts, made if it is missing.
    pub(super) fn ensure_directory(&self, path: &Path) -> Result<(), String> {
        if rootfs::open_in_root(&self.fd, path).is_ok() {
            return Ok(());
        }
        rootfs::ensure_target(&self.fd, path, Kind::Directory).map(drop).map_err(text)
    }

    /// Makes it this process's root. From here on every path is the container's.
    pub(super) fn enter(self) -> Result<(), String> {
        rustix::process::umask(rustix::fs::Mode::from(0o022));
        rootfs::pivot_into(self.fd).map_err(text)
    }
}

fn set_attributes(mount: &PlannedMount, tree: &OwnedFd) -> Result<(), String> {
    if mount.attributes == Attributes::default() {
        return Ok(());
    }
    rootfs::set_attributes(tree, mount.attributes).map_err(text)
}
