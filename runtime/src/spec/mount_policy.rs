//! Where in a container a request may mount: the table of refused and allowed mounts on and below
//! /dev, /proc and /sys, and on masked paths.
//!
//! Everything that isolates a container from its node is there. A volume mounted over it would show
//! the container files that another container wrote (CVE-2025-31133).
//! docs/decisions/0020-mounts-on-kernel-paths.md has the table for users.
//!
//! Invariant: pure, and checked twice with the same specification: at creation with the path in the
//! request, and at the start with the place that this path leads to.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use oci_spec::runtime::Spec;
use rustix::fs::FileType;

/// kubelet's annotation of the path at which it mounts a file of its own.
const TERMINATION_MESSAGE_PATH: &str = "io.kubernetes.container.terminationMessagePath";
const DEFAULT_TERMINATION_MESSAGE_PATH: &str = "/dev/termination-log";

/// The files that lxcfs provides in place of the node's (runc, libcontainer, `checkProcMount`).
const LXCFS_FILES: &[&str] = &[
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/loadavg",
    "/proc/meminfo",
    "/proc/slabinfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/sys/crypto/fips_enabled",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/uptime",
];
/// lxcfs has one file for /sys too.
const LXCFS_SYS_FILE: &str = "/sys/devices/system/cpu/online";

/// Every container's entries in /dev, beside /dev/shm and /dev/mqueue.
const DEFAULT_DEVICES: &[&str] = &[
    "console", "core", "fd", "full", "null", "ptmx", "pts", "random", "stderr", "stdin", "stdout", "tty",
    "urandom", "zero",
];

/// The kind of file that is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Directory,
    File,
    Socket,
    Device,
    Pipe,
}

impl Source {
    pub(crate) fn of(kind: FileType) -> Self {
        match kind {
            FileType::Directory => Self::Directory,
            FileType::RegularFile => Self::File,
            FileType::Socket => Self::Socket,
            FileType::CharacterDevice | FileType::BlockDevice => Self::Device,
            _ => Self::Pipe,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MountPolicy {
    privileged: bool,
    /// Masked and read-only paths.
    protected: Vec<PathBuf>,
    /// The requested devices.
    devices: Vec<PathBuf>,
    termination_log: PathBuf,
}

impl MountPolicy {
    /// A container without masked and read-only paths is privileged: [`super::build`] gives them to
    /// all others.
    pub(crate) fn of(spec: &Spec) -> Self {
        let linux = spec.linux().as_ref();
        let masked = linux.and_then(|l| l.masked_paths().as_ref());
        let read_only = linux.and_then(|l| l.readonly_paths().as_ref());
        let protected: Vec<PathBuf> =
            masked.into_iter().chain(read_only).flatten().map(PathBuf::from).collect();
        let devices = linux.and_then(|l| l.devices().as_ref()).into_iter().flatten();
        let annotations = spec.annotations().as_ref();
        let termination_log = annotations.and_then(|a| a.get(TERMINATION_MESSAGE_PATH));
        Self {
            privileged: protected.is_empty(),
            protected,
            devices: devices.map(|d| d.path().clone()).collect(),
            termination_log: termination_log
                .map_or_else(|| DEFAULT_TERMINATION_MESSAGE_PATH.into(), PathBuf::from),
        }
    }

    /// The request's annotations that [`Self::of`] uses.
    pub(crate) fn annotation(
        annotations: &std::collections::HashMap<String, String>,
    ) -> Option<(&str, &str)> {
        annotations.get(TERMINATION_MESSAGE_PATH).map(|path| (TERMINATION_MESSAGE_PATH, path.as_str()))
    }

    pub(crate) fn is_privileged(&self) -> bool {
        self.privileged
    }

    /// Whether `source` may be mounted on `target`, an absolute path without `..`; if not, the
    /// reason.
    pub(crate) fn check(&self, target: &Path, source: Source) -> Result<(), MountRefusal> {
        if target == Path::new("/") {
            return Err(MountRefusal::Root);
        }
        if target.starts_with("/proc") {
            return self.check_proc(target, source);
        }
        if self.privileged {
            return Ok(());
        }
        self.check_protected(target)?;
        if target.starts_with("/dev") {
            self.check_dev(target, source)
        } else if target.starts_with("/sys") {
            check_sys(target, source)
        } else {
            Ok(())
        }
    }

    fn check_proc(&self, target: &Path, source: Source) -> Result<(), MountRefusal> {
        self.check_protected(target)?;
        let is_of_lxcfs = LXCFS_FILES.iter().any(|file| target == Path::new(file));
        match (is_of_lxcfs, source) {
            (true, Source::File) => Ok(()),
            (true, _) => Err(MountRefusal::NoRegularFile),
            (false, _) => Err(MountRefusal::Proc),
        }
    }

    fn check_protected(&self, target: &Path) -> Result<(), MountRefusal> {
        match self.protected.iter().find(|path| path.starts_with(target)) {
            Some(path) => Err(MountRefusal::Protected { path: path.clone() }),
            None => Ok(()),
        }
    }

    fn check_dev(&self, target: &Path, source: Source) -> Result<(), MountRefusal> {
        let Some(Component::Normal(first)) = target.components().nth(2) else {
            return Err(MountRefusal::Itself { path: "/dev" });
        };
        if first.to_str().is_some_and(|name| DEFAULT_DEVICES.contains(&name)) {
            return Err(MountRefusal::DefaultDevice { name: first.to_owned() });
        }
        let requested = self.devices.iter().find(|device| device.starts_with(target));
        match (requested, source) {
            (Some(device), Source::Device) if device == target => Ok(()),
            (Some(device), _) => Err(MountRefusal::RequestedDevice { path: device.clone() }),
            (None, Source::Directory | Source::Socket) => Ok(()),
            (None, Source::File) if target == self.termination_log => Ok(()),
            (None, Source::File) => Err(MountRefusal::FileInDev),
            (None, Source::Device | Source::Pipe) => Err(MountRefusal::Device),
        }
    }
}

fn check_sys(target: &Path, source: Source) -> Result<(), MountRefusal> {
    if target == Path::new("/sys") {
        return Err(MountRefusal::Itself { path: "/sys" });
    }
    let is_of_lxcfs = target == Path::new(LXCFS_SYS_FILE) && source == Source::File;
    if source == Source::Directory || is_of_lxcfs { Ok(()) } else { Err(MountRefusal::FileInSys) }
}

/// The absolute path without `.` and `..`; links are not resolved.
pub(crate) fn cleaned(path: &Path) -> PathBuf {
    let mut clean = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::Normal(name) => clean.push(name),
            Component::ParentDir => {
                clean.pop();
            }
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
    clean
}

/// Why a mount is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MountRefusal {
    #[error("a container's root cannot be mounted over")]
    Root,
    #[error("nothing can be mounted on or below /proc but the files of lxcfs")]
    Proc,
    #[error("only a regular file can be mounted there")]
    NoRegularFile,
    #[error("it would cover {}, which is masked or read-only in an unprivileged container", .path.display())]
    Protected { path: PathBuf },
    #[error("only a privileged container can have a mount on {path} itself")]
    Itself { path: &'static str },
    #[error("/dev/{} belongs to the container's default devices", .name.display())]
    DefaultDevice { name: OsString },
    #[error("it would cover the requested device {}", .path.display())]
    RequestedDevice { path: PathBuf },
    #[error("the only regular file below /dev is that of terminationMessagePath")]
    FileInDev,
    #[error("an unprivileged container gets a device by request, not as a mount")]
    Device,
    #[error("only directories can be mounted below /sys")]
    FileInSys,
}

#[cfg(test)]
mod tests {
    use Source::{Device, Directory, File, Pipe, Socket};

    use super::*;

    /// The masked and read-only paths of kubelet's default.
    fn policy(privileged: bool) -> MountPolicy {
        let mut linux = serde_json::json!({"devices": [{"path": "/dev/bus/usb/1", "type": "c", "major": 189, "minor": 1}]});
        if !privileged {
            linux["maskedPaths"] = serde_json::json!(super::super::MASKED_PATHS);
            linux["readonlyPaths"] = serde_json::json!(super::super::READONLY_PATHS);
        }
        let spec = serde_json::json!({"ociVersion": "1.0.2", "linux": linux,
            "annotations": {TERMINATION_MESSAGE_PATH: "/dev/last-words"}});
        MountPolicy::of(&serde_json::from_value(spec).unwrap())
    }

    /// Target, source, whether an unprivileged and whether a privileged container may have it.
    const TABLE: &[(&str, Source, bool, bool)] = &[
        ("/", Directory, false, false),
        ("/data", Directory, true, true),
        ("/device", Device, true, true),
        ("/devices/null", File, true, true),
        ("/procedure", Directory, true, true),
        ("/dev", Directory, false, true),
        ("/dev/null", Device, false, true),
        ("/dev/zero", File, false, true),
        ("/dev/full", File, false, true),
        ("/dev/random", File, false, true),
        ("/dev/urandom", File, false, true),
        ("/dev/tty", File, false, true),
        ("/dev/console", File, false, true),
        ("/dev/ptmx", File, false, true),
        ("/dev/pts", Directory, false, true),
        ("/dev/pts/0", File, false, true),
        ("/dev/fd", Directory, false, true),
        ("/dev/stdin", File, false, true),
        ("/dev/stdout", File, false, true),
        ("/dev/stderr", File, false, true),
        ("/dev/core", File, false, true),
        ("/dev/shm", Directory, true, true),
        ("/dev/hugepages", Directory, true, true),
        ("/dev/mqueue", Directory, true, true),
        ("/dev/deep/directory", Directory, true, true),
        ("/dev/last-words", File, true, true),
        ("/dev/last-words", Pipe, false, true),
        ("/dev/other", File, false, true),
        ("/dev/log", Socket, true, true),
        ("/dev/fuse", Device, false, true),
        ("/dev/bus/usb/1", Device, true, true),
        ("/dev/bus/usb/1", File, false, true),
        ("/dev/bus/usb", Directory, false, true),
        ("/dev/bus", Directory, false, true),
        ("/proc", Directory, false, false),
        ("/proc/1", Directory, false, false),
        ("/proc/self/attr", Directory, false, false),
        ("/proc/net", Directory, false, false),
        ("/proc/bus", Directory, false, false),
        ("/proc/sys", Directory, false, false),
        ("/proc/sys/kernel", Directory, false, false),
        ("/proc/sys/kernel/ns_last_pid", File, true, true),
        ("/proc/sys/crypto/fips_enabled", File, true, true),
        ("/proc/sysrq-trigger", File, false, false),
        ("/proc/kcore", File, false, false),
        ("/proc/interrupts", File, false, false),
        ("/proc/cpuinfo", File, true, true),
        ("/proc/diskstats", File, true, true),
        ("/proc/loadavg", File, true, true),
        ("/proc/meminfo", File, true, true),
        ("/proc/meminfo", Device, false, false),
        ("/proc/meminfo", Socket, false, false),
        ("/proc/slabinfo", File, true, true),
        ("/proc/stat", File, true, true),
        ("/proc/swaps", File, true, true),
        ("/proc/uptime", File, true, true),
        ("/sys", Directory, false, true),
        ("/sys/fs", Directory, true, true),
        ("/sys/fs/cgroup", Directory, true, true),
        ("/sys/kernel/debug", Directory, true, true),
        ("/sys/kernel/file", File, false, true),
        ("/sys/devices/system/cpu/online", File, true, true),
        ("/sys/firmware", Directory, false, true),
        ("/sys/firmware/efi", Directory, true, true), // covered by the mask
        ("/sys/devices/virtual/powercap", Directory, false, true),
        ("/sys/devices/virtual", Directory, false, true),
        ("/sys/devices", Directory, false, true),
    ];

    #[test]
    fn each_row_of_the_table_is_decided_as_it_says() {
        for (target, source, unprivileged, privileged) in TABLE {
            for (policy, allowed) in [(policy(false), unprivileged), (policy(true), privileged)] {
                let answer = policy.check(Path::new(target), *source);
                assert_eq!(answer.is_ok(), *allowed, "{target} {source:?}: {answer:?} by {policy:?}");
            }
        }
    }

    #[test]
    fn masked_paths_of_a_request_are_protected_like_the_default_ones() {
        let spec = serde_json::json!({"ociVersion": "1.0.2", "linux": {"maskedPaths": ["/proc/stat", "/etc/secret/key"]}});
        let policy = MountPolicy::of(&serde_json::from_value(spec).unwrap());
        for (target, source) in
            [("/proc/stat", File), ("/etc/secret/key", File), ("/etc/secret", Directory), ("/etc", Directory)]
        {
            let reason = policy.check(Path::new(target), source).unwrap_err();
            assert!(reason.to_string().starts_with("it would cover "), "{target}: {reason}");
        }
        policy.check(Path::new("/etc/secret/other"), File).unwrap();
    }

    #[test]
    fn without_an_annotation_kubelets_default_path_is_the_termination_message() {
        let spec = serde_json::json!({"ociVersion": "1.0.2", "linux": {"maskedPaths": ["/proc/kcore"]}});
        let policy = MountPolicy::of(&serde_json::from_value(spec).unwrap());
        policy.check(Path::new("/dev/termination-log"), File).unwrap();
        policy.check(Path::new("/dev/last-words"), File).unwrap_err();
    }

    #[test]
    fn cleaned_paths_have_no_dots() {
        for (path, clean) in
            [("/", "/"), ("/..", "/"), ("/a/./b/../c//", "/a/c"), ("/tmp/../proc/sys", "/proc/sys")]
        {
            assert_eq!(cleaned(Path::new(path)), Path::new(clean));
        }
    }
}
