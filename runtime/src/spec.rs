//! Translates CRI messages to an OCI runtime specification: all decisions about a container, before
//! anything is made.
//!
//! Invariant: changes nothing. It reads the image's passwd and group files, and this machine's limits,
//! devices, mounts and seccomp profiles. Values that the machine does not allow are clamped here and
//! listed in `warnings`.

pub(crate) mod bandwidth;
pub(crate) mod capabilities;
pub(crate) mod host_path;
pub(crate) mod mount_policy;
mod mounts;
pub(crate) mod pod;
mod propagation;
pub(crate) mod seccomp;
pub(crate) mod stop_signal;
pub(crate) mod user;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use oci_spec::runtime::Spec;
use proto::cri::security_profile::ProfileType;
use proto::cri::{ContainerConfig, LinuxContainerResources, SecurityProfile};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::images::ImageConfig;
use mount_policy::MountPolicy;
use user::User;

const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Hidden from containers that are not privileged, unless the request lists other paths.
const MASKED_PATHS: &[&str] = &[
    "/proc/asound",
    "/proc/acpi",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
];

/// Read-only for the same containers, unless the request lists other paths.
const READONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/dynamic_debug", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// A rule of `linux.resources.devices`; `None` stands for every number.
struct AllowedDevices {
    kind: &'static str,
    major: Option<i64>,
    minor: Option<i64>,
    access: &'static str,
}

impl AllowedDevices {
    const fn make(kind: &'static str) -> Self {
        Self { kind, major: None, minor: None, access: "m" }
    }

    const fn open(major: i64, minor: Option<i64>) -> Self {
        Self { kind: "c", major: Some(major), minor, access: "rwm" }
    }
}

/// Every container may open null, zero, full, random, urandom, tty, ptmx and pts, and may make
/// device nodes.
const ALLOWED_DEVICES: &[AllowedDevices] = &[
    AllowedDevices::make("c"),
    AllowedDevices::make("b"),
    AllowedDevices::open(1, Some(3)),
    AllowedDevices::open(1, Some(5)),
    AllowedDevices::open(1, Some(7)),
    AllowedDevices::open(1, Some(8)),
    AllowedDevices::open(1, Some(9)),
    AllowedDevices::open(5, Some(0)),
    AllowedDevices::open(5, Some(2)),
    AllowedDevices::open(136, None),
];

/// In a directory that a container asks for as a device.
const MAX_DEVICE_FILES: usize = 4096;

/// The properties of the sandbox that a container's specification uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SandboxView<'a> {
    /// Parent group and the container's id: `/kubepods/podX/<id>`.
    pub(crate) cgroup_path: &'a Path,
    pub(crate) cgroups: CgroupLimits,
    /// `None`: the host's.
    pub(crate) network_namespace: Option<&'a Path>,
    /// The shim's ipc and uts namespaces belong to the pod.
    pub(crate) ipc_namespace: Option<&'a Path>,
    pub(crate) uts_namespace: Option<&'a Path>,
    pub(crate) pids: PidNamespace,
    pub(crate) hostname: &'a str,
    /// Has resolv.conf, hostname and hosts.
    pub(crate) dir: &'a Path,
    /// `None`: the host's /dev/shm.
    pub(crate) shm: Option<&'a Path>,
    pub(crate) sysctls: &'a HashMap<String, String>,
}

/// Which limits the machine's control groups have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CgroupLimits {
    /// Files of cgroup v2.
    pub(crate) v2: bool,
    pub(crate) huge_pages: bool,
}

/// Which processes a container sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PidNamespace {
    Own,
    Node,
    /// That of this process, a child of the pod's shim.
    Of(i32),
}

/// The path by which a specification names the PID namespace of a process.
pub(crate) fn pid_namespace_of(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/ns/pid"))
}

#[derive(Debug)]
pub(crate) struct ContainerSpec {
    pub(crate) spec: Spec,
    pub(crate) user: User,
    /// Requests that this machine does not allow, as messages.
    pub(crate) warnings: Vec<String>,
}

pub(crate) fn build(
    config: &ContainerConfig,
    image: &ImageConfig,
    lower_dirs: &[PathBuf],
    sandbox: SandboxView<'_>,
) -> Result<ContainerSpec> {
    refuse_unsupported(config)?;
    let linux = config.linux.clone().unwrap_or_default();
    let context = linux.security_context.unwrap_or_default();
    let resources = linux.resources.unwrap_or_default();
    check_limits("linux.resources", &resources)?;
    let wanted = context.capabilities.clone().unwrap_or_default();
    let mut warnings = Vec::new();

    let user = user::resolve(&context, &image.user, lower_dirs)?;
    let capability_set = allowed_capabilities(
        capabilities::resolve(&wanted.add_capabilities, &wanted.drop_capabilities, context.privileged)?,
        &mut warnings,
    );
    let caps = capabilities::names(capability_set);
    let ambient = capabilities::resolve(&wanted.add_ambient_capabilities, &["ALL".to_owned()], false)?;
    let ambient = capabilities::names(ambient & capability_set);
    let devices = devices(config, context.privileged)?;
    let mut spec = json!({
        "ociVersion": "1.0.2",
        "process": {
            "terminal": config.tty,
            "user": {"uid": user.uid, "gid": user.gid, "additionalGids": user.groups},
            "args": args(config, image)?,
            "env": env(config, image, sandbox.hostname, &user)?,
            "cwd": cwd(config, image)?,
            "noNewPrivileges": context.no_new_privs,
            "oomScoreAdj": oom_score_adj(resources.oom_score_adj, &mut warnings),
            "capabilities": {
                "bounding": caps, "effective": caps, "permitted": caps, "inheritable": ambient, "ambient": ambient,
            },
        },
        "root": {"path": "rootfs", "readonly": context.readonly_rootfs},
        "linux": {
            "cgroupsPath": sandbox.cgroup_path,
            "namespaces": namespaces(&sandbox, context.privileged),
            "devices": devices.nodes,
            "resources": resources_json(&resources, context.privileged, devices.rules, sandbox.cgroups),
            "rootfsPropagation": mounts::rootfs_propagation(config),
        },
    });
    if !sandbox.sysctls.is_empty() {
        spec["linux"]["sysctl"] = json!(sandbox.sysctls);
    }
    if !sandbox.cgroups.huge_pages && resources.hugepage_limits.iter().any(|limit| limit.limit > 0) {
        warnings.push("hugetlb: there is no such cgroup controller that the runtime can use".to_owned());
    }
    if !context.privileged {
        spec["linux"]["maskedPaths"] = or_default(&context.masked_paths, MASKED_PATHS);
        spec["linux"]["readonlyPaths"] = or_default(&context.readonly_paths, READONLY_PATHS);
        if let Some(profile) =
            seccomp_profile(context.seccomp.as_ref(), &context.seccomp_profile_path, &caps)?
        {
            spec["linux"]["seccomp"] = profile;
        }
    }
    if let Some((name, value)) = MountPolicy::annotation(&config.annotations) {
        spec["annotations"] = json!({name: value});
    }
    let path = Path::new("config.json");
    let policy = MountPolicy::of(&parsed(path, &spec)?);
    spec["mounts"] = mounts::build(config, context.privileged, &sandbox, &policy)?;
    let spec = parsed(path, &spec)?;
    Ok(ContainerSpec { spec, user, warnings })
}

/// `path`: where the specification is, for an error.
pub(crate) fn parsed(path: &Path, config: &Value) -> Result<Spec> {
    Spec::deserialize(config).map_err(|source| Error::Record { path: path.to_owned(), source })
}

/// The new namespaces of a container, and those that it shares.
fn namespaces(sandbox: &SandboxView<'_>, privileged: bool) -> Vec<Value> {
    let mut namespaces = vec![json!({"type": "mount"})];
    match sandbox.pids {
        PidNamespace::Own => namespaces.push(json!({"type": "pid"})),
        PidNamespace::Of(pid) => {
            namespaces.push(json!({"type": "pid", "path": pid_namespace_of(pid)}));
        }
        PidNamespace::Node => {}
    }
    if !privileged {
        namespaces.push(json!({"type": "cgroup"}));
    }
    for (kind, path) in [
        ("network", sandbox.network_namespace),
        ("ipc", sandbox.ipc_namespace),
        ("uts", sandbox.uts_namespace),
    ] {
        if let Some(path) = path {
            namespaces.push(json!({"type": kind, "path": path}));
        }
    }
    namespaces
}

fn refuse_unsupported(config: &ContainerConfig) -> Result<()> {
    let unsupported = |field, value: &str| Err(Error::Unsupported { field, value: value.to_owned() });
    if !config.cdi_devices.is_empty() {
        return unsupported("CDI_devices", &config.cdi_devices[0].name);
    }
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let Some(context) = context else { return Ok(()) };
    // As containerd where AppArmor is not enabled: a container must not be less confined than it asks to be.
    match &context.apparmor {
        Some(profile) => match profile.profile_type() {
            ProfileType::Unconfined => Ok(()),
            ProfileType::RuntimeDefault => unsupported("security_context.apparmor", "RuntimeDefault"),
            ProfileType::Localhost => unsupported("security_context.apparmor", &profile.localhost_ref),
        },
        None if matches!(&*context.apparmor_profile, "" | "unconfined") => Ok(()),
        None => unsupported("security_context.apparmor_profile", &context.apparmor_profile),
    }
}

/// The image's entry point and command, unless the request replaces them.
fn args(config: &ContainerConfig, image: &ImageConfig) -> Result<Vec<String>> {
    let mut args = if config.command.is_empty() { image.entrypoint.clone() } else { config.command.clone() };
    if config.args.is_empty() && config.command.is_empty() {
        args.extend(image.cmd.iter().cloned());
    } else {
        args.extend(config.args.iter().cloned());
    }
    if args.is_empty() {
        return Err(Error::invalid(
            "command",
            "no command specified: neither the request nor the image has one",
        ));
    }
    Ok(args)
}

/// A repeated name keeps its first place and gets its last value.
fn env(config: &ContainerConfig, image: &ImageConfig, hostname: &str, user: &User) -> Result<Vec<String>> {
    let path = DEFAULT_PATH.split_once('=').expect("the constant has one");
    let defaults = [path, ("HOSTNAME", hostname), ("HOME", &user.home)];
    let of_image = image.env.iter().map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    // The image's value was for another terminal.
    let of_terminal = config.tty.then_some(("TERM", "xterm"));
    let of_request = config.envs.iter().map(|pair| {
        let value = std::str::from_utf8(&pair.value)
            .map_err(|_| Error::invalid(format!("envs {:?}", pair.key), "the value is not UTF-8"))?;
        Ok((pair.key.as_str(), value))
    });
    let of_request: Vec<(&str, &str)> = of_request.collect::<Result<_>>()?;
    let mut env: Vec<(&str, &str)> = Vec::new();
    let mut places: HashMap<&str, usize> = HashMap::new();
    for (name, value) in defaults.into_iter().chain(of_image).chain(of_terminal).chain(of_request) {
        let place = *places.entry(name).or_insert(env.len());
        if place == env.len() {
            env.push((name, value));
        } else {
            env[place].1 = value;
        }
    }
    Ok(env.into_iter().map(|(name, value)| format!("{name}={value}")).collect())
}

fn cwd(config: &ContainerConfig, image: &ImageConfig) -> Result<String> {
    let cwd = [&config.working_dir, &image.working_dir].into_iter().find(|dir| !dir.is_empty());
    match cwd {
        None => Ok("/".to_owned()),
        Some(dir) if dir.contains('\0') => {
            Err(Error::invalid("working_dir", format!("{dir:?} has a NUL byte")))
        }
        Some(dir) if dir.starts_with('/') => Ok(dir.clone()),
        Some(dir) => Err(Error::invalid("working_dir", format!("{dir:?} is not absolute"))),
    }
}

/// Removes capabilities that this process lacks, since it cannot grant them.
fn allowed_capabilities(wanted: u64, warnings: &mut Vec<String>) -> u64 {
    let allowed = linux::process::bounding_set();
    let refused = wanted & !allowed;
    if refused != 0 {
        warnings.push(format!(
            "capabilities: left out {}, which this machine does not allow",
            capabilities::names(refused).join(", ")
        ));
    }
    wanted & allowed
}

/// Lowering one's own value needs CAP_SYS_RESOURCE (fs/proc/base.c, `__set_oom_adj`).
pub(crate) fn oom_score_adj(wanted: i64, warnings: &mut Vec<String>) -> i64 {
    let wanted = wanted.clamp(-1000, 1000);
    let may_lower =
        capabilities::bit("SYS_RESOURCE").is_some_and(|bit| linux::process::bounding_set() & bit != 0);
    let current = std::fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|t| t.trim().parse().ok())
        .unwrap_or(0);
    if may_lower || wanted >= current {
        return wanted;
    }
    warnings
        .push(format!("oom_score_adj: {current} instead of {wanted}, lowering it takes CAP_SYS_RESOURCE"));
    current
}

struct Devices {
    nodes: Vec<Value>,
    rules: Vec<Value>,
}

fn devices(config: &ContainerConfig, privileged: bool) -> Result<Devices> {
    let mut devices = Devices { nodes: Vec::new(), rules: Vec::new() };
    if privileged {
        for path in host_devices(Path::new("/dev")) {
            devices.nodes.extend(node_unless_gone(&path, &path)?);
        }
        return Ok(devices);
    }
    for device in &config.devices {
        let host = Path::new(&device.host_path);
        let target = if device.container_path.is_empty() { host } else { Path::new(&device.container_path) };
        let access = if device.permissions.is_empty() { "rwm" } else { &device.permissions };
        let found = if host.is_dir() {
            devices_below(host, target)?
        } else {
            let problem = || format!("{} is not a device", device.host_path);
            vec![node(host, target)?.ok_or_else(|| Error::invalid("devices.host_path", problem()))?]
        };
        for node in found {
            devices.rules.push(json!({"allow": true, "type": node["type"], "major": node["major"],
                                      "minor": node["minor"], "access": access}));
            devices.nodes.push(node);
        }
    }
    Ok(devices)
}

/// Those in the directory `host`, as containerd finds them: without links, terminals and shared memory.
fn devices_below(host: &Path, target: &Path) -> Result<Vec<Value>> {
    use std::os::unix::fs::FileTypeExt;
    const LEFT_OUT: &[&str] =
        &["pts", "ptmx", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev", "console"];
    let mut found = Vec::new();
    let mut todo = vec![PathBuf::new()];
    let mut looked_at = 0;
    while let Some(dir) = todo.pop() {
        let path = host.join(&dir);
        let entries = match std::fs::read_dir(&path) {
            // Devices come and go at any time, with their directories.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && path != host => continue,
            entries => entries.map_err(|e| Error::io("read directory", &path, e))?,
        };
        for entry in entries {
            let entry = entry.map_err(|e| Error::io("read directory", &path, e))?;
            looked_at += 1;
            if looked_at > MAX_DEVICE_FILES {
                let problem = format!("{} has more than {MAX_DEVICE_FILES} files", host.display());
                return Err(Error::invalid("devices.host_path", problem));
            }
            let name = dir.join(entry.file_name());
            if entry.file_name().to_str().is_none_or(|name| LEFT_OUT.contains(&name)) {
                continue;
            }
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => todo.push(name),
                Ok(kind) if kind.is_char_device() || kind.is_block_device() => {
                    found.extend(node_unless_gone(&entry.path(), &target.join(name))?);
                }
                _ => {}
            }
        }
    }
    Ok(found)
}

/// Devices come and go at any time.
fn node_unless_gone(host: &Path, target: &Path) -> Result<Option<Value>> {
    match node(host, target) {
        Err(Error::Kernel(e)) if e.errno() == Errno::ENOENT => Ok(None),
        found => found,
    }
}

fn node(host: &Path, target: &Path) -> Result<Option<Value>> {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    let stat = std::fs::metadata(host).map_err(|e| Error::io("stat device", host, e))?;
    let kind = if stat.file_type().is_char_device() {
        "c"
    } else if stat.file_type().is_block_device() {
        "b"
    } else {
        return Ok(None);
    };
    let (major, minor) = (rustix::fs::major(stat.rdev()), rustix::fs::minor(stat.rdev()));
    Ok(Some(json!({"path": target, "type": kind, "major": major, "minor": minor,
                   "fileMode": stat.mode() & 0o7777, "uid": stat.uid(), "gid": stat.gid()})))
}

/// Device nodes below /dev, except those that every container has.
fn host_devices(dir: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::FileTypeExt;
    const OWN: &[&str] = &[
        "pts", "shm", "fd", "mqueue", "ptmx", "console", "null", "zero", "full", "random", "urandom", "tty",
    ];
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if entry.file_name().to_str().is_none_or(|name| OWN.contains(&name)) {
            continue;
        }
        if kind.is_dir() {
            found.extend(host_devices(&entry.path()));
        } else if kind.is_char_device() || kind.is_block_device() {
            found.push(entry.path());
        }
    }
    found
}

fn resources_json(
    resources: &LinuxContainerResources,
    privileged: bool,
    more_devices: Vec<Value>,
    cgroups: CgroupLimits,
) -> Value {
    let mut out = json!({});
    let mut rules = vec![json!({"allow": privileged, "access": "rwm"})];
    if !privileged {
        rules.extend(ALLOWED_DEVICES.iter().map(|allowed| {
            let mut rule = json!({"allow": true, "type": allowed.kind, "access": allowed.access});
            for (key, number) in [("major", allowed.major), ("minor", allowed.minor)] {
                if let Some(number) = number {
                    rule[key] = json!(number);
                }
            }
            rule
        }));
        rules.extend(more_devices);
    }
    out["devices"] = Value::Array(rules);
    limits_json(&mut out, resources, cgroups);
    out
}

/// Replaces all of `out`, an OCI `linux.resources`, except its device rules.
pub(crate) fn limits_json(out: &mut Value, resources: &LinuxContainerResources, cgroups: CgroupLimits) {
    *out = json!({"devices": out["devices"].take()});
    if resources.memory_limit_in_bytes != 0 {
        out["memory"] = json!({"limit": resources.memory_limit_in_bytes});
        if resources.memory_swap_limit_in_bytes != 0 {
            out["memory"]["swap"] = json!(resources.memory_swap_limit_in_bytes);
        }
    }
    let mut cpu = json!({});
    if resources.cpu_shares > 0 {
        cpu["shares"] = json!(resources.cpu_shares);
    }
    if resources.cpu_quota != 0 {
        cpu["quota"] = json!(resources.cpu_quota);
    }
    if resources.cpu_period > 0 {
        cpu["period"] = json!(resources.cpu_period);
    }
    for (key, value) in [("cpus", &resources.cpuset_cpus), ("mems", &resources.cpuset_mems)] {
        if !value.is_empty() {
            cpu[key] = json!(value);
        }
    }
    if cpu != json!({}) {
        out["cpu"] = cpu;
    }
    // Every container of kubelet has them, and OCI runtimes refuse them without the controller.
    if cgroups.huge_pages && !resources.hugepage_limits.is_empty() {
        out["hugepageLimits"] = resources
            .hugepage_limits
            .iter()
            .map(|h| json!({"pageSize": h.page_size, "limit": i64::try_from(h.limit).unwrap_or(i64::MAX)}))
            .collect();
    }
    if let Some(limit) = resources.unified.get("pids.max").and_then(|v| v.parse::<i64>().ok()) {
        out["pids"] = json!({"limit": limit});
    }
    let mut unified = resources.unified.clone();
    unified.remove("pids.max");
    // v1 has none of these files, and OCI runtimes refuse them there.
    if cgroups.v2 && !unified.is_empty() {
        out["unified"] = json!(unified);
    }
}

/// Refuses limits that contradict each other. `field`: where they stand in the request.
pub(crate) fn check_limits(field: &str, resources: &LinuxContainerResources) -> Result<()> {
    let LinuxContainerResources { memory_limit_in_bytes: memory, memory_swap_limit_in_bytes: both, .. } =
        *resources;
    if both > 0 && memory > both {
        let problem = format!("{both} is below memory_limit_in_bytes, {memory}: it counts memory and swap");
        return Err(Error::invalid(format!("{field}.memory_swap_limit_in_bytes"), problem));
    }
    Ok(())
}

/// `None`: unconfined, which is also kubelet's default.
fn seccomp_profile(
    profile: Option<&SecurityProfile>,
    deprecated_path: &str,
    capabilities: &[String],
) -> Result<Option<Value>> {
    let localhost = |path: &str| {
        let path = Path::new(path);
        let bytes = std::fs::read(path).map_err(|e| Error::io("read seccomp profile", path, e))?;
        serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|source| Error::Record { path: path.to_owned(), source })
    };
    match profile.map(|p| (p.profile_type(), &p.localhost_ref)) {
        Some((ProfileType::RuntimeDefault, _)) => Ok(Some(seccomp::runtime_default(capabilities))),
        Some((ProfileType::Unconfined, _)) => Ok(None),
        Some((ProfileType::Localhost, path)) => localhost(path),
        None => match deprecated_path {
            "" | "unconfined" => Ok(None),
            "runtime/default" | "docker/default" => Ok(Some(seccomp::runtime_default(capabilities))),
            other => localhost(other.strip_prefix("localhost/").unwrap_or(other)),
        },
    }
}

fn or_default(wanted: &[String], default: &[&str]) -> Value {
    if wanted.is_empty() { json!(default) } else { json!(wanted) }
}

#[cfg(test)]
mod tests {
    use proto::cri::{KeyValue, LinuxContainerConfig, LinuxContainerSecurityContext, Mount};

    use super::*;

    const ALL: CgroupLimits = CgroupLimits { v2: true, huge_pages: true };

    fn spec_of(config: &ContainerConfig, image: &ImageConfig) -> Result<Value> {
        spec_on(ALL, config, image)
    }

    fn spec_on(cgroups: CgroupLimits, config: &ContainerConfig, image: &ImageConfig) -> Result<Value> {
        let sandbox = SandboxView {
            cgroup_path: Path::new("/pods/a"),
            cgroups,
            network_namespace: Some(Path::new("/run/ns")),
            ipc_namespace: None,
            uts_namespace: None,
            pids: PidNamespace::Own,
            hostname: "pod",
            dir: Path::new("/sandbox"),
            shm: None,
            sysctls: &HashMap::new(),
        };
        build(config, image, &[], sandbox).map(|s| serde_json::to_value(s.spec).unwrap())
    }

    fn command(words: &[&str]) -> ContainerConfig {
        ContainerConfig { command: words.iter().map(|w| (*w).to_owned()).collect(), ..Default::default() }
    }

    #[test]
    fn a_command_replaces_entry_point_and_cmd_and_args_replace_cmd_only() {
        let image =
            ImageConfig { entrypoint: vec!["/e".into()], cmd: vec!["c".into()], ..Default::default() };
        let args = |config: &ContainerConfig| spec_of(config, &image).unwrap()["process"]["args"].clone();
        assert_eq!(args(&ContainerConfig::default()), json!(["/e", "c"]));
        assert_eq!(args(&command(&["/x"])), json!(["/x"]));
        assert_eq!(
            args(&ContainerConfig { args: vec!["a".into()], ..Default::default() }),
            json!(["/e", "a"])
        );
    }

    #[test]
    fn a_working_directory_with_a_nul_byte_is_refused() {
        let config = ContainerConfig { working_dir: "/a\0b".into(), ..command(&["/x"]) };
        let err = spec_of(&config, &ImageConfig::default()).unwrap_err();
        assert_eq!(err.to_string(), "working_dir: \"/a\\0b\" has a NUL byte");
    }

    #[test]
    fn an_image_without_a_command_is_refused() {
        let err = spec_of(&ContainerConfig::default(), &ImageConfig::default()).unwrap_err();
        assert_eq!(
            err.to_string(),
            "command: no command specified: neither the request nor the image has one"
        );
    }

    #[test]
    fn the_requests_environment_wins_over_the_images() {
        let image = ImageConfig { env: vec!["PATH=/bin".into(), "A=image".into()], ..Default::default() };
        let envs = vec![KeyValue { key: "A".into(), value: b"pod=1".to_vec() }];
        let spec = spec_of(&ContainerConfig { envs, ..command(&["/x"]) }, &image).unwrap();
        assert_eq!(spec["process"]["env"], json!(["PATH=/bin", "HOSTNAME=pod", "HOME=/", "A=pod=1"]));
    }

    /// A linear search for each name would take minutes.
    #[test]
    fn a_variable_of_many_keeps_its_place_and_has_its_last_value() {
        const COUNT: usize = 300_000;
        let pairs = |value: &str| (0..COUNT).map(|n| format!("NAME{n}={value}")).collect::<Vec<_>>();
        let image = ImageConfig { env: [pairs("first"), pairs("last")].concat(), ..Default::default() };
        let user = User { uid: 0, gid: 0, groups: Vec::new(), home: "/".to_owned() };
        let found = env(&ContainerConfig::default(), &image, "pod", &user).unwrap();
        assert_eq!(found[3..], pairs("last"));
    }

    #[test]
    fn a_refused_mount_is_named_with_its_reason_and_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        let mount = |path: &str| Mount {
            container_path: path.into(),
            host_path: missing.display().to_string(),
            ..Default::default()
        };
        let mounts = vec![mount("/data"), mount("/tmp/../dev/")];
        let err =
            spec_of(&ContainerConfig { mounts, ..command(&["/x"]) }, &ImageConfig::default()).unwrap_err();
        assert_eq!(
            crate::error::chain(&err),
            "mounts \"/tmp/../dev/\" container_path: refused: only a privileged container can have a mount on /dev itself"
        );
        assert!(!missing.exists());
    }

    #[test]
    fn a_mount_of_the_request_takes_the_place_of_the_default_one() {
        let dir = tempfile::tempdir().unwrap();
        let targets = |wanted: &str, privileged| -> Vec<String> {
            let mount = Mount {
                container_path: wanted.into(),
                host_path: dir.path().display().to_string(),
                ..Default::default()
            };
            let context = LinuxContainerSecurityContext { privileged, ..Default::default() };
            let linux = LinuxContainerConfig { security_context: Some(context), ..Default::default() };
            let config = ContainerConfig { mounts: vec![mount], linux: Some(linux), ..command(&["/x"]) };
            let spec = spec_of(&config, &ImageConfig::default()).unwrap();
            spec["mounts"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| m["destination"].as_str().unwrap().to_owned())
                .collect()
        };
        let shm = targets("/dev/shm", false);
        assert_eq!(
            (shm.iter().filter(|t| *t == "/dev/shm").count(), shm.last().unwrap().as_str()),
            (1, "/dev/shm")
        );
        let dev = targets("/dev", true);
        assert_eq!(dev.iter().filter(|t| t.starts_with("/dev")).count(), 1, "{dev:?}");
    }

    #[test]
    fn files_of_cgroup_v2_are_passed_on_but_for_the_one_that_v1_has_too() {
        let mut config = command(&["/x"]);
        let unified = HashMap::from([
            ("pids.max".to_owned(), "7".to_owned()),
            ("memory.oom.group".to_owned(), "1".to_owned()),
        ]);
        let resources = LinuxContainerResources { unified, ..Default::default() };
        config.linux =
            Some(proto::cri::LinuxContainerConfig { resources: Some(resources), ..Default::default() });
        let resources = &spec_of(&config, &ImageConfig::default()).unwrap()["linux"]["resources"];
        assert_eq!(resources["pids"]["limit"], 7);
        assert_eq!(resources["unified"], json!({"memory.oom.group": "1"}));
    }

    #[test]
    fn a_device_that_has_gone_since_it_was_listed_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone");
        assert_eq!(node_unless_gone(&gone, &gone).unwrap(), None);
        let null = Path::new("/dev/null");
        assert_eq!(node_unless_gone(null, null).unwrap().unwrap()["minor"], 3);
    }

    #[test]
    fn a_directory_with_too_many_files_is_no_device() {
        let dir = tempfile::tempdir().unwrap();
        for n in 0..=MAX_DEVICE_FILES {
            std::fs::write(dir.path().join(n.to_string()), "").unwrap();
        }
        let error = devices_below(dir.path(), Path::new("/dev/x")).unwrap_err().to_string();
        assert_eq!(error, format!("devices.host_path: {} has more than 4096 files", dir.path().display()));
    }

    #[test]
    fn huge_pages_are_limited_only_where_the_machine_has_the_controller() {
        let mut config = command(&["/x"]);
        let hugepage_limits = vec![proto::cri::HugepageLimit { page_size: "2MB".to_owned(), limit: 0 }];
        let resources = LinuxContainerResources { hugepage_limits, ..Default::default() };
        config.linux = Some(LinuxContainerConfig { resources: Some(resources), ..Default::default() });
        let limits = |cgroups| {
            spec_on(cgroups, &config, &ImageConfig::default()).unwrap()["linux"]["resources"]["hugepageLimits"]
                .take()
        };
        assert_eq!(limits(ALL), json!([{"pageSize": "2MB", "limit": 0}]));
        assert_eq!(limits(CgroupLimits { huge_pages: false, ..ALL }), Value::Null);
    }

    #[test]
    fn a_terminal_has_a_name_of_its_kind_unless_the_request_has_another() {
        let image = ImageConfig { env: vec!["TERM=dumb".to_owned()], ..ImageConfig::default() };
        let mut config = ContainerConfig { tty: true, ..command(&["/x"]) };
        let spec = spec_of(&config, &image).unwrap();
        assert_eq!(spec["process"]["terminal"], true);
        let has = |spec: &Value, pair: &str| {
            spec["process"]["env"].as_array().unwrap().iter().any(|found| found == pair)
        };
        assert!(has(&spec, "TERM=xterm"), "{spec}");
        config.envs = vec![proto::cri::KeyValue { key: "TERM".to_owned(), value: b"vt100".to_vec() }];
        assert!(has(&spec_of(&config, &image).unwrap(), "TERM=vt100"));
    }
}
