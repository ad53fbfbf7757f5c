//! A container's mounts: the defaults and those of the request.
//!
//! Invariant: nothing is made on the host before every mount of the request was allowed.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use proto::cri::{ContainerConfig, MountPropagation};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use serde_json::{Value, json};

use super::host_path::HostPathProblem;
use super::mount_policy::{MountPolicy, Source, cleaned};
use super::{SandboxView, propagation};
use crate::error::{Error, Result};

/// All mounts, in the order in which they are made.
pub(super) fn build(
    config: &ContainerConfig,
    privileged: bool,
    sandbox: &SandboxView<'_>,
    policy: &MountPolicy,
) -> Result<Value> {
    let mut wanted =
        config.mounts.iter().map(|mount| Requested::new(mount, policy)).collect::<Result<Vec<_>>>()?;
    // A mount below another one must come after it.
    wanted.sort_by_key(|m| m.target.components().count());
    let replaces = |dir: &str| wanted.iter().any(|m| m.target == Path::new(dir));
    let (replaces_dev, replaces_sys) = (replaces("/dev"), replaces("/sys"));
    let mut mounts = defaults(config, privileged, sandbox);
    // As in containerd: a mount of the request replaces a default one, and nothing is added to a
    // requested /dev.
    let replaced = |target: &Path| {
        wanted.iter().any(|m| m.target == target)
            || (replaces_dev && target.starts_with("/dev"))
            || (replaces_sys && target.starts_with("/sys"))
    };
    mounts.retain(|(target, _)| !replaced(Path::new(target)));
    let mut mounts: Vec<Value> = mounts.into_iter().map(|(_, mount)| mount).collect();
    for mount in wanted {
        mounts.push(mount.into_json()?);
    }
    Ok(Value::Array(mounts))
}

fn defaults(config: &ContainerConfig, privileged: bool, sandbox: &SandboxView<'_>) -> Vec<(String, Value)> {
    let sys_mode = if privileged { "rw" } else { "ro" };
    let file_system = |target: &str, kind: &str, options: &[&str]| {
        (target.to_owned(), json!({"destination": target, "type": kind, "source": kind, "options": options}))
    };
    let bind = |source: &Path, target: &str, options: &[&str]| {
        // The launcher follows no link in a source.
        let source = std::fs::canonicalize(source).unwrap_or_else(|_| source.to_owned());
        (
            target.to_owned(),
            json!({"destination": target, "type": "bind", "source": source, "options": options}),
        )
    };
    let mut mounts = vec![
        file_system("/proc", "proc", &["nosuid", "noexec", "nodev"]),
        file_system("/dev", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        file_system(
            "/dev/pts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        file_system("/dev/mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        file_system("/sys", "sysfs", &["nosuid", "noexec", "nodev", sys_mode]),
        file_system("/sys/fs/cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", sys_mode]),
        bind(
            sandbox.shm.unwrap_or(Path::new("/dev/shm")),
            "/dev/shm",
            &["rbind", "rprivate", "nosuid", "nodev", "noexec"],
        ),
    ];
    // As in containerd. All containers of the pod have these files.
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let mode = if context.is_some_and(|context| context.readonly_rootfs) { "ro" } else { "rw" };
    for name in ["resolv.conf", "hostname", "hosts"] {
        mounts.push(bind(&sandbox.dir.join(name), &format!("/etc/{name}"), &["rbind", "rprivate", mode]));
    }
    mounts
}

/// A mount of the request that is allowed.
struct Requested<'a> {
    mount: &'a proto::cri::Mount,
    target: PathBuf,
    /// The resolved path, so that a link at the source is not mounted itself. `None`: it does not
    /// exist.
    source: Option<PathBuf>,
}

impl<'a> Requested<'a> {
    fn new(mount: &'a proto::cri::Mount, policy: &MountPolicy) -> Result<Self> {
        let field = |name| field(mount, name);
        if !mount.container_path.starts_with('/') {
            return Err(Error::invalid(field("container_path"), "is not absolute"));
        }
        if mount.image.is_some() {
            return Err(Error::Unsupported { field: "mounts.image", value: mount.container_path.clone() });
        }
        if !(mount.uid_mappings.is_empty() && mount.gid_mappings.is_empty()) {
            return Err(Error::Unsupported {
                field: "mounts.uidMappings",
                value: mount.container_path.clone(),
            });
        }
        if !mount.host_path.starts_with('/') {
            return Err(Error::invalid(field("host_path"), format!("{:?} is not absolute", mount.host_path)));
        }
        if mount.recursive_read_only && !mount.readonly {
            return Err(Error::invalid(field("recursive_read_only"), "needs readonly"));
        }
        if mount.recursive_read_only && mount.propagation() != MountPropagation::PropagationPrivate {
            let problem = format!("needs PROPAGATION_PRIVATE, not {}", mount.propagation().as_str_name());
            return Err(Error::invalid(field("recursive_read_only"), problem));
        }
        let (source, kind) = match linux::rootfs::find_source(Path::new(&mount.host_path)) {
            Ok((source, kind)) => (Some(source), Source::of(kind)),
            Err(e) if e.errno() == Errno::ENOENT => (None, Source::Directory),
            Err(e) => return Err(unusable(mount, HostPathProblem::Find(e.source))),
        };
        let target = cleaned(Path::new(&mount.container_path));
        policy
            .check(&target, kind)
            .map_err(|source| Error::MountRefused { field: field("container_path"), source })?;
        let existing = source.clone().or_else(|| existing_above(Path::new(&mount.host_path)));
        if let Some(existing) = existing {
            propagation::check(field("propagation"), mount.propagation(), &existing)?;
        }
        Ok(Self { mount, target, source })
    }

    fn into_json(self) -> Result<Value> {
        let mount = self.mount;
        let mut options = vec!["rbind"];
        options.push(match mount.propagation() {
            MountPropagation::PropagationPrivate => "rprivate",
            MountPropagation::PropagationHostToContainer => "rslave",
            MountPropagation::PropagationBidirectional => "rshared",
        });
        options.push(match (mount.readonly, mount.recursive_read_only) {
            (true, true) => "rro",
            (true, false) => "ro",
            (false, _) => "rw",
        });
        options.extend(mount.mount_options.iter().map(String::as_str));
        let source = self.source.map_or_else(|| make_source(mount), Ok)?;
        Ok(json!({"destination": self.target, "type": "bind", "source": source, "options": options}))
    }
}

fn field(mount: &proto::cri::Mount, name: &str) -> String {
    format!("mounts {:?} {name}", mount.container_path)
}

fn unusable(mount: &proto::cri::Mount, source: HostPathProblem) -> Error {
    Error::HostPath { field: field(mount, "host_path"), path: PathBuf::from(&mount.host_path), source }
}

/// Makes a missing host path as a directory with mode 0755, as containerd does: kubelet does not
/// check a hostPath without a type. The missing part is made below the first existing directory,
/// without following links. A kubelet's volume is never made: it is missing because it is not
/// mounted, and its data would go to the node's disk.
fn make_source(mount: &proto::cri::Mount) -> Result<PathBuf> {
    let problem = |problem| unusable(mount, problem);
    let path = Path::new(&mount.host_path);
    if path.components().any(|c| c == Component::ParentDir) {
        return Err(problem(HostPathProblem::ParentDir));
    }
    let is_volume =
        path.components().any(|c| c.as_os_str().as_encoded_bytes().starts_with(b"kubernetes.io~"));
    if is_volume {
        return Err(problem(HostPathProblem::NotMounted));
    }
    let ancestors = path.ancestors().skip(1);
    let mut existing = ancestors.filter_map(|dir| Some((dir, std::fs::canonicalize(dir).ok()?)));
    let (ancestor, found) = existing.next().ok_or_else(|| problem(HostPathProblem::NoParent))?;
    let missing = path.strip_prefix(ancestor).expect("an ancestor is a prefix");
    make_below(&found, missing).map_err(|source| problem(HostPathProblem::Create { source }))?;
    Ok(found.join(missing))
}

/// The first existing directory above `path`, without links.
fn existing_above(path: &Path) -> Option<PathBuf> {
    path.ancestors().skip(1).find_map(|dir| linux::rootfs::find_source(dir).ok()).map(|(dir, _)| dir)
}

fn make_below(dir: &Path, missing: &Path) -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = |parent: &dyn AsFd, path: &Path| {
        rustix::fs::openat2(parent.as_fd(), path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
    };
    let mut at: OwnedFd = open(&rustix::fs::CWD, dir)?;
    for name in missing.components() {
        let name = Path::new(name.as_os_str());
        match rustix::fs::mkdirat(&at, name, Mode::from(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(e) => return Err(e),
        }
        at = open(&at, name)?;
    }
    Ok(())
}

pub(super) fn rootfs_propagation(config: &ContainerConfig) -> &'static str {
    let any = |wanted| config.mounts.iter().any(|m| m.propagation() == wanted);
    if any(MountPropagation::PropagationBidirectional) {
        "rshared"
    } else if any(MountPropagation::PropagationHostToContainer) {
        "rslave"
    } else {
        "rprivate"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    fn mount(host_path: &Path) -> proto::cri::Mount {
        proto::cri::Mount {
            container_path: "/data".into(),
            host_path: host_path.display().to_string(),
            ..Default::default()
        }
    }

    #[test]
    fn a_host_path_that_does_not_exist_is_made_as_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink(&dir, dir.join("link")).unwrap();
        assert_eq!(make_source(&mount(&dir.join("link/a/b"))).unwrap(), dir.join("a/b"));
        assert!(dir.join("a/b").is_dir());
    }

    #[test]
    fn a_host_path_is_not_made_through_a_dangling_link() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        std::os::unix::fs::symlink(dir.join("elsewhere"), dir.join("link")).unwrap();
        for path in ["link", "link/sub"] {
            let text = chain(&make_source(&mount(&dir.join(path))).unwrap_err());
            assert!(text.contains("create directory: "), "{text}");
        }
        assert!(!dir.join("elsewhere").exists());
    }

    #[test]
    fn a_volume_that_is_not_mounted_is_not_made() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("pods/u/volumes/kubernetes.io~csi/pv/mount");
        let text = chain(&make_source(&mount(&volume)).unwrap_err());
        assert!(text.ends_with("this volume of a pod is not mounted"), "{text}");
        assert!(!dir.path().join("pods").exists());
    }

    #[test]
    fn recursive_read_only_with_propagation_is_refused() {
        let policy = MountPolicy::of(&oci_spec::runtime::Spec::default());
        let mut mount = mount(Path::new("/"));
        mount.readonly = true;
        mount.recursive_read_only = true;
        Requested::new(&mount, &policy).map(drop).unwrap();
        mount.set_propagation(MountPropagation::PropagationHostToContainer);
        let text = Requested::new(&mount, &policy).err().unwrap().to_string();
        assert_eq!(
            text,
            "mounts \"/data\" recursive_read_only: needs PROPAGATION_PRIVATE, not PROPAGATION_HOST_TO_CONTAINER"
        );
    }
}
