//! The child between clone3(2) and execve(2): from the shim's copy to the
//! container's first process.
//!
//! Invariant: the order. Sources are opened before anything is made a slave
//! (Bidirectional needs the peer group), the cgroup is joined before the
//! namespaces change what is visible, privileges go last.

use std::convert::Infallible;
use std::ffi::{CString, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use linux::cgroup::Cgroup;
use linux::process;
use linux::rootfs::{self, Attributes, Kind, Propagation};
use nix::errno::Errno;

use super::Overlay;
use super::plan::{Plan, PlannedMount, What};
use crate::error::chain;

#[derive(Debug)]
pub(super) struct Stdio {
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

/// Name, major, minor of what every container has in /dev.
const DEVICES: &[(&str, (u32, u32))] = &[
    ("null", (1, 3)),
    ("zero", (1, 5)),
    ("full", (1, 7)),
    ("random", (1, 8)),
    ("urandom", (1, 9)),
    ("tty", (5, 0)),
];
const DEVICE_LINKS: &[(&str, &str)] = &[
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];

/// Does not return but with the reason why the program does not run.
pub(super) fn run(
    plan: &Plan,
    overlay: &Overlay,
    cgroup: &Cgroup,
    stdio: &Stdio,
) -> Result<Infallible, String> {
    process::set_undumpable().map_err(text)?;
    process::new_session().map_err(text)?;
    cgroup.join().map_err(text)?;
    if let Some(wanted) = plan.oom_score_adj {
        set_oom_score_adj(wanted)?;
    }
    for (path, kind) in &plan.joined_namespaces {
        let file =
            std::fs::File::open(path).map_err(|e| format!("open namespace {}: {e}", path.display()))?;
        process::enter_namespace(file, *kind).map_err(text)?;
    }
    build_root(plan, overlay)?;
    for (resource, soft, hard) in &plan.rlimits {
        process::set_rlimit(*resource, *soft, *hard).map_err(text)?;
    }
    process::set_stdio(&stdio.stdin, &stdio.stdout, &stdio.stderr).map_err(text)?;
    std::env::set_current_dir(&plan.cwd)
        .map_err(|e| format!("chdir to {}: {}", plan.cwd.display(), words(&e)))?;
    rustix::process::umask(rustix::fs::Mode::from(0o022));
    give_up_privileges(plan)?;
    process::reset_signals().map_err(text)?;
    process::close_on_exec_from(3).map_err(text)?;
    exec(&plan.args, &plan.env)
}

fn build_root(plan: &Plan, overlay: &Overlay) -> Result<(), String> {
    let sources = plan.mounts.iter().map(source).collect::<Result<Vec<_>, _>>()?;
    rootfs::make_all_slaves().map_err(text)?;
    let mount_point = rootfs::open_root(&plan.rootfs).map_err(text)?;
    let tree = overlay.view().mount().map_err(text)?;
    rootfs::attach(tree, mount_point, &plan.rootfs).map_err(text)?;
    let root = rootfs::open_root(&plan.rootfs).map_err(text)?;
    for (mount, tree) in plan.mounts.iter().zip(sources) {
        attach(&root, mount, tree)
            .map_err(|problem| format!("mount {}: {problem}", mount.target.display()))?;
    }
    make_devices(plan, &root)?;
    for (name, value) in &plan.sysctls {
        let path = Path::new("/proc/sys").join(name);
        std::fs::write(&path, value).map_err(|e| format!("sysctl {name}={value}: {}", words(&e)))?;
    }
    rootfs::ensure_in_root(&root, &plan.cwd, Kind::Directory).map_err(text)?;
    for path in &plan.masked {
        rootfs::mask(&root, path).map_err(text)?;
    }
    for path in &plan.read_only {
        rootfs::make_read_only(&root, path).map_err(text)?;
    }
    if plan.read_only_root {
        rootfs::set_attributes(&root, Attributes { read_only: true, ..Attributes::default() })
            .map_err(text)?;
    }
    rootfs::pivot_into(root).map_err(text)
}

/// A bind mount's tree, while its peers are still known; file systems are made later.
fn source(mount: &PlannedMount) -> Result<Option<OwnedFd>, String> {
    let What::Bind { source, recursive } = &mount.what else { return Ok(None) };
    let problem = |e: linux::Error| format!("mount {}: {}", mount.target.display(), text(e));
    let tree = rootfs::clone_tree(source, *recursive).map_err(problem)?;
    if let Some(propagation) = mount.propagation.filter(|p| *p != Propagation::Shared) {
        // A shared tree is left as it is: it is in its source's peer group already.
        let change =
            Attributes { propagation: Some(propagation), recursive: *recursive, ..Attributes::default() };
        rootfs::set_attributes(&tree, change).map_err(problem)?;
    }
    Ok(Some(tree))
}

fn attach(root: &OwnedFd, mount: &PlannedMount, tree: Option<OwnedFd>) -> Result<(), String> {
    let tree = match (&mount.what, tree) {
        (_, Some(tree)) => tree,
        (What::FileSystem { fs_type, options }, None) => rootfs::new_fs(fs_type, options).map_err(text)?,
        (What::Bind { .. }, None) => return Err("the source was not opened".to_owned()),
    };
    if mount.attributes != Attributes::default() {
        rootfs::set_attributes(&tree, mount.attributes).map_err(text)?;
    }
    let kind = if rootfs::is_directory(&tree).map_err(text)? { Kind::Directory } else { Kind::File };
    let target = rootfs::ensure_in_root(root, &mount.target, kind).map_err(text)?;
    if rootfs::is_same_file(root, &target).map_err(text)? {
        // It would lie on top of the root, where nobody in the container finds it.
        return Err("a container's root cannot be mounted over".to_owned());
    }
    rootfs::attach(tree, target, &mount.target).map_err(text)
}

fn make_devices(plan: &Plan, root: &OwnedFd) -> Result<(), String> {
    let dev = rootfs::open_in_root(root, Path::new("dev")).map_err(text)?;
    // umask would take bits away from the modes of the nodes.
    rustix::process::umask(rustix::fs::Mode::empty());
    for (name, numbers) in DEVICES {
        rootfs::make_node(&dev, name, false, *numbers, 0o666).map_err(text)?;
    }
    for (name, target) in DEVICE_LINKS {
        rootfs::make_link(&dev, name, target).map_err(text)?;
    }
    rustix::process::umask(rustix::fs::Mode::from(0o022));
    for device in &plan.devices {
        let (Some(dir), Some(name)) = (device.path.parent(), device.path.file_name().and_then(OsStr::to_str))
        else {
            return Err(format!("device {}: not a path", device.path.display()));
        };
        let dir = rootfs::ensure_in_root(root, dir, Kind::Directory).map_err(text)?;
        rootfs::make_node(dir, name, device.block, device.numbers, device.mode).map_err(text)?;
    }
    Ok(())
}

/// The value that was clamped before is set as it is; a kernel that still
/// refuses keeps the inherited one, which the caller has reported.
fn set_oom_score_adj(wanted: i32) -> Result<(), String> {
    match std::fs::write("/proc/self/oom_score_adj", wanted.to_string()) {
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        other => other.map_err(|e| format!("set oom_score_adj {wanted}: {}", words(&e))),
    }
}

fn give_up_privileges(plan: &Plan) -> Result<(), String> {
    process::limit_bounding_set(plan.capabilities.bounding).map_err(text)?;
    // A filter needs CAP_SYS_ADMIN or no_new_privs: whichever of the two there is.
    if !plan.no_new_privileges {
        install_seccomp(plan)?;
    }
    process::become_user(plan.uid, plan.gid, &plan.groups).map_err(text)?;
    process::set_capabilities(plan.capabilities).map_err(text)?;
    if plan.no_new_privileges {
        linux::credentials::set_no_new_privs().map_err(text)?;
        install_seccomp(plan)?;
    }
    Ok(())
}

fn install_seccomp(plan: &Plan) -> Result<(), String> {
    plan.seccomp.iter().try_for_each(|program| process::install_seccomp(program).map_err(text))
}

/// The words are those that users know from runc and from Go.
fn exec(args: &[CString], env: &[CString]) -> Result<Infallible, String> {
    let Some(name) = args.first() else { return Err("process.args is empty".to_owned()) };
    let name = OsStr::from_bytes(name.as_bytes());
    let mut found_but_denied = false;
    for candidate in candidates(name, env) {
        if !rootfs::is_plain_path(&candidate) {
            return Err(format!("exec: {name:?}: leads out of the container"));
        }
        let error = process::exec(&candidate, args, env);
        match error.errno() {
            Errno::ENOENT | Errno::ENOTDIR if candidate.exists() => {
                return Err(format!("exec: {name:?}: its interpreter is missing in the image"));
            }
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => found_but_denied = true,
            _ => return Err(format!("exec: {name:?}: {}", words(&error.source))),
        }
    }
    Err(match (found_but_denied, name.as_bytes().contains(&b'/')) {
        (true, _) => format!("exec: {name:?}: permission denied"),
        (false, true) => format!("exec: {name:?}: no such file or directory"),
        (false, false) => format!("exec: {name:?}: executable file not found in $PATH"),
    })
}

fn candidates(name: &OsStr, env: &[CString]) -> Vec<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return vec![PathBuf::from(name)];
    }
    let path = env.iter().find_map(|pair| pair.as_bytes().strip_prefix(b"PATH=")).unwrap_or_default();
    std::env::split_paths(OsStr::from_bytes(path))
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .collect()
}

fn text(error: linux::Error) -> String {
    chain(&error)
}

/// `no such file or directory`, as Go writes it, without the number.
fn words(error: &std::io::Error) -> String {
    let text = error.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_lowercase()
}
