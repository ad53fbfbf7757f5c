//! Runs the same bundle through an OCI runtime's command line (`runc`, `crun`, `youki`): create,
//! start, delete. The shim still reads the output and reaps.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{self, Command, Output};

use linux::cgroup::{Cgroup, Hierarchies};
use linux::mount::UnmountMode;
use linux::rootfs;
use oci_spec::runtime::Spec;

use super::terminal::Console;
use crate::launcher::error::{LaunchError, Result};
use crate::launcher::{Overlay, Stdio};
use crate::spec::mount_policy::{MountPolicy, Source};

#[derive(Debug)]
pub(super) struct OciRuntime<'a> {
    pub(super) program: &'a Path,
    /// The OCI runtime's own state directory, in the sandbox's directory.
    pub(super) state_dir: &'a Path,
}

/// What an OCI runtime makes a container from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bundle<'a> {
    /// The container's id.
    pub(super) container: &'a str,
    pub(super) dir: &'a Path,
    pub(super) spec: &'a Spec,
    pub(super) overlay: &'a Overlay,
}

impl OciRuntime<'_> {
    /// `create`: returns the pid of the container's process, which waits, and its cgroup. With
    /// `console`, the process gets a terminal, which the OCI runtime sends there.
    pub(super) fn create(
        &self,
        bundle: &Bundle<'_>,
        stdio: Stdio,
        console: Option<&Console>,
    ) -> Result<(i32, Cgroup)> {
        let Bundle { container, dir, spec, overlay } = *bundle;
        mount_root(dir, overlay)?;
        if let Err(problem) = check_links(dir, spec) {
            unmount_root(dir);
            return Err(problem);
        }
        let pid_file = dir.join("pid");
        let mut command = self.command(&["create"]);
        if console.is_some() {
            // Relative to the bundle, which is the OCI runtime's working directory, too.
            command.args(["--console-socket", Console::NAME]).current_dir(dir);
        }
        let output = command
            .arg("--bundle")
            .arg(dir)
            .arg("--pid-file")
            .arg(&pid_file)
            .arg(container)
            .stdin(stdio.stdin.map_or_else(process::Stdio::null, process::Stdio::from))
            .stdout(stdio.stdout)
            .stderr(stdio.stderr)
            .status()
            .map_err(|source| self.failed(source))?;
        if !output.success() {
            unmount_root(dir);
            return Err(LaunchError::Create { program: self.program.to_owned(), status: output });
        }
        let text = std::fs::read_to_string(&pid_file).map_err(|source| LaunchError::File {
            op: "read",
            path: pid_file.clone(),
            source,
        })?;
        let Ok(pid) = text.trim().parse() else { return Err(LaunchError::Pid { path: pid_file, text }) };
        let path = spec.linux().as_ref().and_then(|l| l.cgroups_path().clone()).unwrap_or_default();
        let hierarchies = Hierarchies::detect()?;
        Ok((pid, Cgroup::find(&hierarchies, &path)))
    }

    /// `start`: the process continues to execve(2).
    pub(super) fn start(&self, container: &str) -> Result<()> {
        self.run(&["start", container])
    }

    /// `delete --force`, and unmounts the root file system.
    pub(super) fn delete(&self, container: &str, bundle: &Path) -> Result<()> {
        let deleted = self.run(&["delete", "--force", container]);
        unmount_root(bundle);
        deleted
    }

    fn run(&self, args: &[&str]) -> Result<()> {
        let output: Output = self
            .command(args)
            .stdin(process::Stdio::null())
            .output()
            .map_err(|source| self.failed(source))?;
        if output.status.success() {
            return Ok(());
        }
        let (program, action) = (self.program.to_owned(), args[0].to_owned());
        Err(LaunchError::Action { program, action, said: last_message(&output.stderr) })
    }

    fn failed(&self, source: std::io::Error) -> LaunchError {
        LaunchError::Program { program: self.program.to_owned(), source }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.arg("--root").arg(self.state_dir).args(args);
        command
    }
}

/// The last line of an OCI runtime's stderr, without its log prefix.
pub(super) fn last_message(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no error message").trim();
    let message = line.split_once("msg=\"").and_then(|(_, rest)| rest.strip_suffix('"'));
    message.map_or_else(|| line.to_owned(), |m| m.replace("\\\"", "\""))
}

/// Makes the native launcher's checks before the OCI runtime reads the specification: refuses
/// mounts and a working directory that the image's links lead to places where a request may not
/// mount.
fn check_links(bundle: &Path, spec: &Spec) -> Result<()> {
    let root = rootfs::open_root(&bundle.join("rootfs"))?;
    let policy = MountPolicy::of(spec);
    for mount in spec.mounts().iter().flatten() {
        let target = mount.destination();
        let problem = |problem: LaunchError| problem.mounting(target);
        let place = rootfs::resolve(&root, target).map_err(|e| problem(e.into()))?;
        let source = mount.source().as_deref().filter(|_| mount.typ().as_deref() == Some("bind"));
        let Some(source) = source else {
            if place == *target {
                continue;
            }
            return Err(problem(LaunchError::LinkInImage { place }));
        };
        let (_, kind) = rootfs::find_source(source).map_err(|e| problem(e.into()))?;
        policy
            .check(&place, Source::of(kind))
            .map_err(|source| problem(LaunchError::Refused { place, source }))?;
        check_volumes_above(spec, target).map_err(problem)?;
    }
    let cwd = spec.process().as_ref().map(|p| p.cwd().as_path()).unwrap_or(Path::new("/"));
    let path = cwd.to_owned();
    let place = match rootfs::resolve(&root, cwd) {
        Ok(place) => place,
        Err(e) => return Err(LaunchError::WorkingDirectory { path, cause: e.source }),
    };
    // The OCI runtime would follow its links with its own descriptors (CVE-2024-21626).
    if place.starts_with("/proc") && place.components().count() > 2 {
        return Err(LaunchError::WorkingDirectoryInProc { path, place });
    }
    Ok(())
}

/// Refuses a mount whose path has a link in a volume. The volume's users can also make one later;
/// only the OCI runtime itself could prevent that.
fn check_volumes_above(spec: &Spec, target: &Path) -> Result<()> {
    for volume in spec.mounts().iter().flatten().filter(|m| m.typ().as_deref() == Some("bind")) {
        let Ok(below) = target.strip_prefix(volume.destination()) else { continue };
        let Some(source) = volume.source().as_deref().filter(|s| s.is_dir() && *below != *Path::new(""))
        else {
            continue;
        };
        let wanted = Path::new("/").join(below);
        let found = rootfs::open_root(source).and_then(|dir| rootfs::resolve(dir, below))?;
        if found != wanted {
            return Err(LaunchError::LinkInVolume { volume: volume.destination().clone() });
        }
    }
    Ok(())
}

fn mount_root(bundle: &Path, overlay: &Overlay) -> Result<()> {
    let path = bundle.join("rootfs");
    let target: OwnedFd = match File::open(&path) {
        Ok(file) => file.into(),
        Err(source) => return Err(LaunchError::File { op: "open", path, source }),
    };
    let tree = overlay.view().mount()?;
    make_directories(&tree, overlay)?;
    Ok(rootfs::attach(tree, target, &path)?)
}

fn make_directories(root: &OwnedFd, overlay: &Overlay) -> Result<()> {
    // The shim has one thread.
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    let made = overlay.directories.iter().try_for_each(|path| {
        let made = rootfs::ensure_target(root, path, rootfs::Kind::Directory);
        made.map(drop).map_err(|problem| LaunchError::from(problem).making_volume(path))
    });
    rustix::process::umask(umask);
    made
}

fn unmount_root(bundle: &Path) {
    // EINVAL if it is not mounted.
    let _remove_container_reports_what_stays =
        linux::mount::unmount(&bundle.join("rootfs"), UnmountMode::Detach);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runcs_decorated_line_is_reduced_to_its_message() {
        let stderr = b"time=\"2026\" level=warning msg=\"x\"\ntime=\"2026\" level=error msg=\"runc create failed: exec: \\\"/nope\\\": no such file\"\n";
        assert_eq!(last_message(stderr), "runc create failed: exec: \"/nope\": no such file");
        assert_eq!(last_message(b""), "no error message");
    }
}
