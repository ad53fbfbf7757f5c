//! What a launcher needs on this node before it can start a daemon: looked at, and made, when
//! the driver starts, so that a mistyped flag is reported there and not by the first stage.

use std::io;
use std::path::Path;

use linux::cgroup::Hierarchies;
use rustix::fs::{Access, access};

use crate::config::{ConfigError, KeeperBinary, LauncherKind, wrong};
use crate::error::chain;

pub(crate) fn check(launcher: &LauncherKind, keeper: &KeeperBinary) -> Result<(), ConfigError> {
    if let KeeperBinary::At(binary) = keeper {
        let wanted = "the program hawser-keeper is wanted";
        check_program(binary).map_err(|e| refused("--keeper-binary", binary, &e, wanted))?;
    }
    let (flag, path, found, wanted) = match launcher {
        LauncherKind::Manifest { manifests, .. } => (
            "--manifests",
            manifests,
            check_directory(manifests),
            "the directory is wanted that the kubelet takes static pods from",
        ),
        LauncherKind::Process { volume_binary, .. } => (
            "--volume-binary",
            volume_binary,
            check_program(volume_binary),
            "the program hawser-volume is wanted",
        ),
    };
    found.map_err(|e| refused(flag, path, &e, wanted))?;
    match launcher {
        LauncherKind::Process { cgroup_root: Some(root), .. } => make_parent(root).map_err(|e| {
            wrong("--cgroup-root", &root.to_string_lossy(), format!("{}; {WITHOUT_GROUPS}", chain(&e)))
        }),
        LauncherKind::Process { cgroup_root: None, .. } | LauncherKind::Manifest { .. } => Ok(()),
    }
}

fn refused(flag: &'static str, path: &Path, e: &io::Error, wanted: &str) -> ConfigError {
    wrong(flag, &path.to_string_lossy(), format!("{}: {wanted}", linux::reason(e)))
}

const WITHOUT_GROUPS: &str = "`--cgroup-root none` starts daemons without control groups";

/// Makes the group below which the daemons' are. It stays, with what an administrator sets there.
fn make_parent(root: &Path) -> linux::Result<()> {
    Hierarchies::detect()?.ensure_parent(root).map(drop)
}

/// The driver makes files in it.
fn check_directory(path: &Path) -> io::Result<()> {
    if !std::fs::metadata(path)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    // Of root, what a read-only file system refuses.
    Ok(access(path, Access::WRITE_OK)?)
}

fn check_program(path: &Path) -> io::Result<()> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a file"));
    }
    // Of root, what no mode bit, or a noexec file system, allows.
    Ok(access(path, Access::EXEC_OK)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_or_something_else_is_named_with_its_flag() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let [plain, missing] = ["plain", "missing"].map(path);
        std::fs::write(&plain, "").unwrap();
        let manifests =
            |path: &Path| LauncherKind::Manifest { manifests: path.to_owned(), mount_image: "i".to_owned() };
        let process =
            |path: &Path| LauncherKind::Process { volume_binary: path.to_owned(), cgroup_root: None };
        let none = KeeperBinary::None;
        check(&manifests(dir.path()), &none).unwrap();
        check(&process(Path::new("/bin/true")), &KeeperBinary::At("/bin/true".into())).unwrap();
        let message =
            check(&manifests(dir.path()), &KeeperBinary::At(missing.clone())).unwrap_err().to_string();
        let wanted =
            format!("--keeper-binary {missing:?}: no such file or directory: the program hawser-keeper");
        assert!(message.starts_with(&wanted), "{message}");
        for (launcher, flag, path, reason) in [
            (manifests(&missing), "--manifests", &*missing, "no such file or directory: the directory is"),
            (manifests(&plain), "--manifests", &plain, "not a directory: the directory is wanted"),
            (process(&missing), "--volume-binary", &missing, "no such file or directory: the program"),
            (process(&plain), "--volume-binary", &plain, "permission denied: the program"),
            (process(dir.path()), "--volume-binary", dir.path(), "not a file: the program"),
        ] {
            let message = check(&launcher, &none).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{flag} {path:?}: {reason}")), "{message}");
        }
    }
}
