//! The same bundle through an OCI runtime's command line (`runc`, `crun`,
//! `youki`): create, start, delete. The shim still owns output and reaping.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use linux::cgroup::{Cgroup, Hierarchies};
use linux::mount::UnmountMode;
use linux::rootfs;
use oci_spec::runtime::Spec;

use crate::error::chain;
use crate::launcher::Overlay;
use crate::spec::mount_policy::{MountPolicy, Source};

#[derive(Debug)]
pub(super) struct OciRuntime<'a> {
    pub(super) program: &'a Path,
    /// Where it keeps its own state: in the sandbox's directory.
    pub(super) state_dir: &'a Path,
}

impl OciRuntime<'_> {
    /// `create`: the container's process exists and waits. Its pid, and its cgroup.
    pub(super) fn create(
        &self,
        container: &str,
        bundle: &Path,
        spec: &Spec,
        overlay: &Overlay,
        (stdout, stderr): (OwnedFd, OwnedFd),
    ) -> Result<(i32, Cgroup), String> {
        mount_root(bundle, overlay)?;
        if let Err(problem) = check_links(bundle, spec) {
            unmount_root(bundle);
            return Err(problem);
        }
        let pid_file = bundle.join("pid");
        let output = self
            .command(&["create", "--bundle"])
            .arg(bundle)
            .arg("--pid-file")
            .arg(&pid_file)
            .arg(container)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .status()
            .map_err(|e| format!("{}: {e}", self.program.display()))?;
        if !output.success() {
            unmount_root(bundle);
            return Err(format!("{} create: {output}", self.program.display()));
        }
        let text =
            std::fs::read_to_string(&pid_file).map_err(|e| format!("read {}: {e}", pid_file.display()))?;
        let pid = text.trim().parse().map_err(|_| format!("{}: {text:?} is no pid", pid_file.display()))?;
        let path = spec.linux().as_ref().and_then(|l| l.cgroups_path().clone()).unwrap_or_default();
        let hierarchies = Hierarchies::detect().map_err(|e| chain(&e))?;
        Ok((pid, Cgroup::find(&hierarchies, &path)))
    }

    /// `start`: the process goes on to execve(2).
    pub(super) fn start(&self, container: &str) -> Result<(), String> {
        self.run(&["start", container])
    }

    /// `delete --force`, and the root file system unmounted.
    pub(super) fn delete(&self, container: &str, bundle: &Path) -> Result<(), String> {
        let deleted = self.run(&["delete", "--force", container]);
        unmount_root(bundle);
        deleted
    }

    fn run(&self, args: &[&str]) -> Result<(), String> {
        let output: Output = self
            .command(args)
            .stdin(Stdio::null())
            .output()
            .map_err(|e| format!("{}: {e}", self.program.display()))?;
        if output.status.success() {
            return Ok(());
        }
        Err(format!("{} {}: {}", self.program.display(), args[0], last_message(&output.stderr)))
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.program);
        command.arg("--root").arg(self.state_dir).args(args);
        command
    }
}

/// The last line of an OCI runtime's stderr, without its log decoration.
pub(super) fn last_message(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no error message").trim();
    let message = line.split_once("msg=\"").and_then(|(_, rest)| rest.strip_suffix('"'));
    message.map_or_else(|| line.to_owned(), |m| m.replace("\\\"", "\""))
}

/// What the native launcher refuses when it mounts, refused before the OCI
/// runtime sees the specification: mounts and a working directory that the
/// image's links lead to where a request may not mount.
fn check_links(bundle: &Path, spec: &Spec) -> Result<(), String> {
    let root = rootfs::open_root(&bundle.join("rootfs")).map_err(|e| chain(&e))?;
    let policy = MountPolicy::of(spec);
    for mount in spec.mounts().iter().flatten() {
        let target = mount.destination();
        let problem = |problem: String| format!("mount {}: {problem}", target.display());
        let place = rootfs::resolve(&root, target).map_err(|e| problem(chain(&e)))?;
        let source = mount.source().as_deref().filter(|_| mount.typ().as_deref() == Some("bind"));
        let Some(source) = source else {
            if place == *target {
                continue;
            }
            return Err(problem(format!("the image has a link there, to {}", place.display())));
        };
        let (_, kind) = rootfs::find_source(source).map_err(|e| problem(chain(&e)))?;
        policy
            .check(&place, Source::of(kind))
            .map_err(|reason| problem(format!("it leads to {}: refused: {reason}", place.display())))?;
        check_volumes_above(spec, target).map_err(problem)?;
    }
    let cwd = spec.process().as_ref().map(|p| p.cwd().as_path()).unwrap_or(Path::new("/"));
    let place =
        rootfs::resolve(&root, cwd).map_err(|e| format!("chdir to {}: {}", cwd.display(), chain(&e)))?;
    // Its links would be followed with the descriptors of the OCI runtime (CVE-2024-21626).
    if place.starts_with("/proc") && place.components().count() > 2 {
        return Err(format!("chdir to {}: it leads to {}", cwd.display(), place.display()));
    }
    Ok(())
}

/// A volume may have a link where another mount is to stand. Its users can put
/// one there later, too: against that only the OCI runtime itself can do something.
fn check_volumes_above(spec: &Spec, target: &Path) -> Result<(), String> {
    for volume in spec.mounts().iter().flatten().filter(|m| m.typ().as_deref() == Some("bind")) {
        let Ok(below) = target.strip_prefix(volume.destination()) else { continue };
        let Some(source) = volume.source().as_deref().filter(|s| s.is_dir() && *below != *Path::new(""))
        else {
            continue;
        };
        let wanted = Path::new("/").join(below);
        let found =
            rootfs::open_root(source).and_then(|dir| rootfs::resolve(dir, below)).map_err(|e| chain(&e))?;
        if found != wanted {
            return Err(format!(
                "a link in the volume at {} leads elsewhere",
                volume.destination().display()
            ));
        }
    }
    Ok(())
}

fn mount_root(bundle: &Path, overlay: &Overlay) -> Result<(), String> {
    let path = bundle.join("rootfs");
    let target: OwnedFd = File::open(&path).map_err(|e| format!("open {}: {e}", path.display()))?.into();
    let tree = overlay.view().mount().map_err(|e| chain(&e))?;
    rootfs::attach(tree, target, &path).map_err(|e| chain(&e))
}

fn unmount_root(bundle: &Path) {
    // EINVAL when it is not mounted; a mount that stays is found and reported by RemoveContainer.
    drop(linux::mount::unmount(&bundle.join("rootfs"), UnmountMode::Detach));
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
