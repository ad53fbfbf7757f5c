//! The child's steps, decoded from the OCI specification.

use std::ffi::CString;
use std::fs::File;
use std::path::PathBuf;

use linux::cgroup::Limits;
use linux::cgroup::view::View;
use linux::device_rules::Policy;
use linux::process::{BpfInstruction, Capabilities};
use linux::rootfs::{Attributes, MountsBelow, Propagation};
use nix::sched::CloneFlags;
use oci_spec::runtime::{
    LinuxDeviceType, LinuxNamespaceType, LinuxResources, Mount, PosixRlimit, PosixRlimitType, Process, Spec,
};

use super::error::{LaunchError, Result};
use super::{device_policy, seccomp, sysctl};
use crate::spec::capabilities;
use crate::spec::mount_policy::MountPolicy;

#[derive(Debug)]
pub(super) struct Plan {
    pub(super) new_namespaces: CloneFlags,
    pub(super) joined_namespaces: Vec<(PathBuf, CloneFlags)>,
    /// Entered after joining the container's group, which becomes the namespace's root.
    pub(super) own_cgroup_namespace: bool,
    pub(super) cgroup_path: PathBuf,
    /// The content of a mount of type `cgroup`; set once the group exists.
    pub(super) cgroup_view: View,
    pub(super) limits: Limits,
    /// `None`: no device control.
    pub(super) devices_policy: Option<Policy>,
    pub(super) read_only_root: bool,
    /// Device nodes work in the container's own /dev alone.
    pub(super) nodev: bool,
    pub(super) mounts: Vec<PlannedMount>,
    pub(super) devices: Vec<WantedDevice>,
    /// Stdin, stdout and stderr are a terminal.
    pub(super) has_terminal: bool,
    /// Name below /proc/sys, and value.
    pub(super) sysctls: Vec<(String, String)>,
    pub(super) mount_policy: MountPolicy,
    pub(super) masked: Vec<PathBuf>,
    pub(super) read_only: Vec<PathBuf>,
    pub(super) oom_score_adj: Option<i32>,
    pub(super) rlimits: Vec<Rlimit>,
    pub(super) seccomp: Vec<Vec<BpfInstruction>>,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
    pub(super) capabilities: Capabilities,
    pub(super) no_new_privileges: bool,
    pub(super) cwd: PathBuf,
    pub(super) args: Vec<CString>,
    pub(super) env: Vec<CString>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct PlannedMount {
    pub(super) target: PathBuf,
    pub(super) what: What,
    pub(super) attributes: Attributes,
    pub(super) propagation: Option<Propagation>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum What {
    Bind {
        source: PathBuf,
        below: MountsBelow,
    },
    FileSystem {
        fs_type: String,
        options: Vec<String>,
    },
    /// The container's cgroups, of either version.
    Cgroup,
}

#[derive(Debug)]
pub(super) struct WantedDevice {
    pub(super) path: PathBuf,
    pub(super) device: linux::rootfs::Device,
    pub(super) mode: u32,
    /// User and group.
    pub(super) owner: (u32, u32),
}

/// The arguments of setrlimit(2).
#[derive(Debug)]
pub(super) struct Rlimit {
    /// The kernel's number.
    pub(super) resource: u32,
    pub(super) soft: u64,
    pub(super) hard: u64,
}

impl Plan {
    pub(super) fn new(spec: &Spec) -> Result<Self> {
        let missing = |field| LaunchError::NoField { field };
        let process = spec.process().as_ref().ok_or_else(|| missing("process"))?;
        let linux = spec.linux().as_ref().ok_or_else(|| missing("linux"))?;
        let root = spec.root().as_ref().ok_or_else(|| missing("root"))?;
        let mut new_namespaces = CloneFlags::empty();
        let mut joined_namespaces = Vec::new();
        let mut own_cgroup_namespace = false;
        for namespace in linux.namespaces().iter().flatten() {
            let flag = namespace_flag(namespace.typ())?;
            match namespace.path() {
                Some(path) => joined_namespaces.push((path.clone(), flag)),
                None if flag == CloneFlags::CLONE_NEWCGROUP => own_cgroup_namespace = true,
                None => new_namespaces |= flag,
            }
        }
        if !new_namespaces.contains(CloneFlags::CLONE_NEWNS) {
            return Err(LaunchError::NoMountNamespace);
        }
        let seccomp = linux.seccomp().as_ref().map(seccomp::compile).transpose()?.unwrap_or_default();
        let paths = |list: &Option<Vec<String>>| list.iter().flatten().map(PathBuf::from).collect();
        let user = process.user();
        Ok(Self {
            new_namespaces,
            joined_namespaces,
            own_cgroup_namespace,
            cgroup_view: View::default(),
            cgroup_path: linux.cgroups_path().clone().ok_or_else(|| missing("linux.cgroupsPath"))?,
            limits: linux.resources().as_ref().map(limits).unwrap_or_default(),
            devices_policy: device_policy::policy(
                linux.resources().as_ref().and_then(|r| r.devices().as_deref()),
            )?,
            read_only_root: root.readonly().unwrap_or(false),
            nodev: false,
            mounts: spec.mounts().iter().flatten().map(planned_mount).collect::<Result<_>>()?,
            has_terminal: process.terminal().unwrap_or(false),
            devices: linux.devices().iter().flatten().map(device).collect::<Result<_>>()?,
            sysctls: sysctl::checked(linux)?,
            mount_policy: MountPolicy::of(spec),
            masked: paths(linux.masked_paths()),
            read_only: paths(linux.readonly_paths()),
            oom_score_adj: process.oom_score_adj(),
            rlimits: process.rlimits().iter().flatten().map(rlimit).collect(),
            seccomp,
            uid: user.uid(),
            gid: user.gid(),
            groups: user.additional_gids().clone().unwrap_or_default(),
            capabilities: capability_sets(process)?,
            no_new_privileges: process.no_new_privileges().unwrap_or(false),
            cwd: process.cwd().clone(),
            args: c_strings("process.args", process.args().iter().flatten())?,
            env: c_strings("process.env", process.env().iter().flatten())?,
        })
    }
}

impl Plan {
    /// Its arguments, in the place of the specification's.
    pub(super) fn with_args(self, args: &[String]) -> Result<Self> {
        Ok(Self { args: c_strings("cmd", args.iter())?, ..self })
    }

    /// A program on a terminal finds a name of its kind (term(7)).
    pub(super) fn with_terminal(mut self) -> Self {
        if !self.env.iter().any(|entry| entry.to_bytes().starts_with(b"TERM=")) {
            self.env.push(c"TERM=xterm".to_owned());
        }
        self
    }

    /// The existing PID namespace in which the container's process starts, if any.
    pub(super) fn pid_namespace(&self) -> Result<Option<File>> {
        let shared = self.joined_namespaces.iter().find(|(_, kind)| *kind == CloneFlags::CLONE_NEWPID);
        let open = |(path, _): &(PathBuf, CloneFlags)| {
            File::open(path).map_err(|source| LaunchError::Namespace { path: path.clone(), source })
        };
        shared.map(open).transpose()
    }

    /// The container's namespaces that are not the host's.
    pub(super) fn namespaces(&self) -> CloneFlags {
        let mut all = self.new_namespaces;
        all.set(CloneFlags::CLONE_NEWCGROUP, self.own_cgroup_namespace);
        self.joined_namespaces.iter().fold(all, |all, (_, kind)| all | *kind)
    }
}

fn namespace_flag(kind: LinuxNamespaceType) -> Result<CloneFlags> {
    Ok(match kind {
        LinuxNamespaceType::Mount => CloneFlags::CLONE_NEWNS,
        LinuxNamespaceType::Pid => CloneFlags::CLONE_NEWPID,
        LinuxNamespaceType::Network => CloneFlags::CLONE_NEWNET,
        LinuxNamespaceType::Ipc => CloneFlags::CLONE_NEWIPC,
        LinuxNamespaceType::Uts => CloneFlags::CLONE_NEWUTS,
        LinuxNamespaceType::Cgroup => CloneFlags::CLONE_NEWCGROUP,
        LinuxNamespaceType::User | LinuxNamespaceType::Time => {
            return Err(LaunchError::NamespaceKind { kind });
        }
    })
}

fn planned_mount(mount: &Mount) -> Result<PlannedMount> {
    let mut attributes = Attributes::default();
    let mut propagation = None;
    let mut fs_options = Vec::new();
    let mut bind = mount.typ().as_deref() == Some("bind");
    let mut below = MountsBelow::Without;
    for option in mount.options().iter().flatten() {
        match option.as_str() {
            "bind" => bind = true,
            "rbind" => (bind, below) = (true, MountsBelow::With),
            "ro" => attributes.read_only = true,
            "rro" => (attributes.read_only, attributes.recursive) = (true, true),
            "nosuid" => attributes.nosuid = true,
            "nodev" => attributes.nodev = true,
            "noexec" => attributes.noexec = true,
            "private" | "rprivate" => propagation = Some(Propagation::Private),
            "slave" | "rslave" => propagation = Some(Propagation::Slave),
            "shared" | "rshared" => propagation = Some(Propagation::Shared),
            // The defaults of a new mount.
            "rw" | "suid" | "dev" | "exec" | "relatime" | "strictatime" | "atime" => {}
            other => fs_options.push(other.to_owned()),
        }
    }
    let target = mount.destination().clone();
    let what = if bind {
        if let Some(option) = fs_options.first() {
            return Err(LaunchError::BindOption { option: option.clone() }.mounting(target));
        }
        let source = mount.source().clone().ok_or_else(|| LaunchError::NoSource.mounting(&target))?;
        What::Bind { source, below }
    } else {
        let fs_type = mount.typ().clone().ok_or_else(|| LaunchError::NoType.mounting(&target))?;
        match fs_type.as_str() {
            "cgroup" => What::Cgroup,
            _ => What::FileSystem { fs_type, options: fs_options },
        }
    };
    Ok(PlannedMount { target, what, attributes, propagation })
}

fn device(device: &oci_spec::runtime::LinuxDevice) -> Result<WantedDevice> {
    let number = |number: i64| {
        u32::try_from(number).map_err(|_| LaunchError::DeviceNumber { path: device.path().clone(), number })
    };
    Ok(WantedDevice {
        path: device.path().clone(),
        device: linux::rootfs::Device {
            block: device.typ() == LinuxDeviceType::B,
            major: number(device.major())?,
            minor: number(device.minor())?,
        },
        mode: device.file_mode().unwrap_or(0o666),
        owner: (device.uid().unwrap_or(0), device.gid().unwrap_or(0)),
    })
}

pub(super) fn limits(resources: &LinuxResources) -> Limits {
    let cpu = resources.cpu().as_ref();
    Limits {
        memory_bytes: resources.memory().as_ref().and_then(|m| m.limit()),
        memory_and_swap_bytes: resources.memory().as_ref().and_then(|m| m.swap()),
        cpu_shares: cpu.and_then(|c| c.shares()),
        cpu_quota: cpu.and_then(|c| c.quota()),
        cpu_period: cpu.and_then(|c| c.period()),
        pids: resources.pids().as_ref().map(|p| p.limit()),
        cpuset_cpus: cpu.and_then(|c| c.cpus().clone()),
        cpuset_mems: cpu.and_then(|c| c.mems().clone()),
        hugepages: resources
            .hugepage_limits()
            .iter()
            .flatten()
            .map(|h| (h.page_size().clone(), h.limit().cast_unsigned()))
            .collect(),
        unified: resources.unified().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect(),
    }
}

fn rlimit(limit: &PosixRlimit) -> Rlimit {
    Rlimit { resource: rlimit_number(limit.typ()), soft: limit.soft(), hard: limit.hard() }
}

fn rlimit_number(kind: PosixRlimitType) -> u32 {
    match kind {
        PosixRlimitType::RlimitCpu => libc::RLIMIT_CPU,
        PosixRlimitType::RlimitFsize => libc::RLIMIT_FSIZE,
        PosixRlimitType::RlimitData => libc::RLIMIT_DATA,
        PosixRlimitType::RlimitStack => libc::RLIMIT_STACK,
        PosixRlimitType::RlimitCore => libc::RLIMIT_CORE,
        PosixRlimitType::RlimitRss => libc::RLIMIT_RSS,
        PosixRlimitType::RlimitNproc => libc::RLIMIT_NPROC,
        PosixRlimitType::RlimitNofile => libc::RLIMIT_NOFILE,
        PosixRlimitType::RlimitMemlock => libc::RLIMIT_MEMLOCK,
        PosixRlimitType::RlimitAs => libc::RLIMIT_AS,
        PosixRlimitType::RlimitLocks => libc::RLIMIT_LOCKS,
        PosixRlimitType::RlimitSigpending => libc::RLIMIT_SIGPENDING,
        PosixRlimitType::RlimitMsgqueue => libc::RLIMIT_MSGQUEUE,
        PosixRlimitType::RlimitNice => libc::RLIMIT_NICE,
        PosixRlimitType::RlimitRtprio => libc::RLIMIT_RTPRIO,
        PosixRlimitType::RlimitRttime => libc::RLIMIT_RTTIME,
    }
}

fn capability_sets(process: &Process) -> Result<Capabilities> {
    let Some(sets) = process.capabilities() else { return Ok(Capabilities::default()) };
    let bits = |set: &Option<oci_spec::runtime::Capabilities>| {
        set.iter().flatten().try_fold(0, |bits, capability| {
            let name = capability.to_string();
            capabilities::bit(&name).map(|bit| bits | bit).ok_or(LaunchError::Capability { name })
        })
    };
    Ok(Capabilities {
        bounding: bits(sets.bounding())?,
        effective: bits(sets.effective())?,
        permitted: bits(sets.permitted())?,
        inheritable: bits(sets.inheritable())?,
        ambient: bits(sets.ambient())?,
    })
}

fn c_strings<'a>(field: &'static str, texts: impl Iterator<Item = &'a String>) -> Result<Vec<CString>> {
    texts
        .map(|t| CString::new(t.as_bytes()).map_err(|_| LaunchError::NulByte { field, text: t.clone() }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(text: &str) -> Result<PlannedMount> {
        planned_mount(&serde_json::from_str(text).unwrap())
    }

    #[test]
    fn mount_options_are_attributes_propagation_and_the_file_systems_own() {
        let planned = mount(
            r#"{"destination":"/dev","type":"tmpfs","source":"tmpfs","options":["nosuid","strictatime","mode=755","rslave"]}"#,
        )
        .unwrap();
        assert!(planned.attributes.nosuid && !planned.attributes.read_only);
        assert_eq!(planned.propagation, Some(Propagation::Slave));
        let options = vec!["mode=755".to_owned()];
        assert_eq!(planned.what, What::FileSystem { fs_type: "tmpfs".to_owned(), options });
    }

    #[test]
    fn an_option_that_a_bind_mount_does_not_know_is_refused() {
        let err = mount(r#"{"destination":"/a","type":"bind","source":"/b","options":["rbind","size=1"]}"#)
            .unwrap_err();
        assert_eq!(crate::error::chain(&err), "mount /a: option \"size=1\" is not one of a bind mount");
    }
}
