//! Daemons as child processes of the driver, which outlive it: each in a PID namespace, a
//! process group and a control group of its own, found again by what it was started with.

use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use linux::cgroup::Cgroup;
use proto::handover::NONCE_VARIABLE;

use super::daemon_log::DaemonLogs;
use super::group::{self, GroupParent};
use super::program::{FileId, Program};
use super::{LaunchId, LaunchSpec, Launched, Launcher, memory};
use crate::daemon::dial::DialDir;
use crate::error::chain;
use crate::model::launch::{LaunchKey, ProcessId};

/// `hawser-volume serve --confine --socket PATH --log-level LEVEL [--wait]`.
const ARGUMENTS: [&str; 3] = ["serve", "--confine", "--socket"];
/// For a daemon that is started ahead of its volume.
pub(super) const WAIT: &str = "--wait";

#[derive(Debug)]
pub(crate) struct ProcessLauncher {
    pub volume_binary: PathBuf,
    pub run_dir: PathBuf,
    pub logs: DaemonLogs,
    /// `None`: daemons stay in the driver's control group, without limits.
    pub groups: Option<GroupParent>,
}

impl Launcher for ProcessLauncher {
    fn ensure(&self, spec: LaunchSpec<'_>) -> linux::Result<LaunchId> {
        let dial = DialDir::of(&self.run_dir, spec.key);
        let log = self.logs.start(spec.key)?;
        let log_too = log.try_clone().map_err(|e| linux::Error::at("duplicate", &dial.log_fifo(), e))?;
        let group = self.group(spec)?;
        let link = spec.program.map(|program| self.link(&dial, program)).transpose()?;
        let mut command = tokio::process::Command::new(link.as_ref().unwrap_or(&self.volume_binary));
        command
            .args(ARGUMENTS)
            .arg(dial.socket())
            .args(["--log-level", spec.settings.log_level.as_str()])
            .args(spec.volume_id.is_none().then_some(WAIT))
            .env_clear()
            .env(NONCE_VARIABLE, spec.nonce)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_too)
            .current_dir("/")
            // A terminal's Ctrl-C is for the driver alone.
            .process_group(0)
            .kill_on_drop(false);
        let runtime = tokio::runtime::Handle::current();
        let started = linux::pid_namespace::start_first(group.as_ref(), || {
            let _entered = runtime.enter();
            command.spawn()
        })
        .and_then(|spawned| spawned.map_err(|e| linux::Error::at("start", &self.volume_binary, e)));
        // With it goes the driver's own end of the log.
        drop(command);
        if let Some(link) = link
            && let Err(error) = std::fs::remove_file(&link)
        {
            tracing::warn!(link = %link.display(), %error, "remove the link to an earlier program");
        }
        let mut child = started.inspect_err(|_| self.clear_or_say(spec.key))?;
        let pid = child.id().map_or(0, u32::cast_signed);
        let admitted = group.map_or(Ok(()), |group| group.admit(pid));
        // Not reaped before the task below waits for it, so the pid is still its own.
        let process = admitted.and_then(|()| ProcessId::of(pid)).and_then(|child| {
            child.ok_or_else(|| linux::Error::new("find child", pid, nix::errno::Errno::ESRCH))
        });
        // Otherwise it would be lost. That it has ended already is as good.
        let process = process.inspect_err(|_| {
            let _has_ended = child.start_kill();
        });
        let key = spec.key.clone();
        tokio::spawn(async move {
            match child.wait().await {
                Ok(status) => tracing::debug!(%key, pid, %status, "daemon reaped"),
                Err(error) => tracing::warn!(%key, pid, %error, "reap daemon"),
            }
        });
        process.map(LaunchId::Process).inspect_err(|_| self.clear_or_say(spec.key))
    }

    fn list(&self) -> linux::Result<Vec<Launched>> {
        let mut launched = Vec::new();
        let Ok(ours) = FileId::at(&self.volume_binary) else { return Ok(launched) };
        for daemon in self.daemons()? {
            // First: the command line of another program may lie in memory that is never served.
            let exe = format!("/proc/{}/exe", daemon.pid);
            if FileId::at(Path::new(&exe)).is_ok_and(|running| running == ours) {
                launched.extend(self.launch_by(daemon)?);
            }
        }
        Ok(launched)
    }

    fn launch_of(&self, key: &LaunchKey, daemon: ProcessId) -> linux::Result<Option<LaunchId>> {
        let launched = self.launch_by(daemon)?.filter(|launched| launched.key == *key);
        Ok(launched.map(|launched| launched.id))
    }

    fn daemons(&self) -> linux::Result<Vec<ProcessId>> {
        processes_of_root(name_of_process(&self.volume_binary))
    }

    fn launch_by(&self, daemon: ProcessId) -> linux::Result<Option<Launched>> {
        let command_line = std::fs::read(format!("/proc/{}/cmdline", daemon.pid)).unwrap_or_default();
        let Some(key) = self.launched_as(&command_line) else { return Ok(None) };
        // Checked afterwards: only then the pid was still the daemon's.
        Ok(daemon.is_alive()?.then_some(Launched { key, id: LaunchId::Process(daemon) }))
    }

    fn remove_leftovers(&self) -> linux::Result<()> {
        // A process is not written.
        Ok(())
    }

    fn configured_program(&self) -> linux::Result<Program> {
        Program::open(&self.volume_binary, self.volume_binary.clone())
    }

    fn program_of(&self, id: &LaunchId, daemon: ProcessId) -> linux::Result<Option<Program>> {
        if id.process().is_none() {
            return Ok(None);
        }
        let exe = PathBuf::from(format!("/proc/{}/exe", daemon.pid));
        let name = std::fs::read_link(&exe).map_err(|e| linux::Error::at("read link", &exe, e))?;
        let program = Program::open(&exe, name)?;
        // Checked afterwards: only then the pid was still the daemon's.
        Ok(daemon.is_alive()?.then_some(program))
    }

    fn stands(&self, id: &LaunchId) -> linux::Result<bool> {
        // No other party can remove a child process.
        Ok(id.process().is_some())
    }

    fn remove(&self, id: &LaunchId) -> linux::Result<()> {
        // Its connection's end ends the daemon; the caller waits for it and kills what stays.
        match id {
            LaunchId::Process(_) | LaunchId::StaticPod(_) => Ok(()),
        }
    }

    fn adopt(&self, key: &LaunchKey) -> linux::Result<()> {
        self.logs.adopt(key)
    }

    fn last_log_line(&self, key: &LaunchKey) -> Option<String> {
        self.logs.last_line(key)
    }

    fn clear(&self, key: &LaunchKey) -> linux::Result<()> {
        self.groups.as_ref().map_or(Ok(()), |groups| groups.remove(key))
    }

    fn describe(&self, _spec: LaunchSpec<'_>) -> String {
        format!("a process of {}", self.volume_binary.display())
    }
}

impl ProcessLauncher {
    fn group(&self, spec: LaunchSpec<'_>) -> linux::Result<Option<Cgroup>> {
        let Some(groups) = &self.groups else { return Ok(None) };
        let known_inodes = spec.settings.known_inodes();
        let default_memory = memory::default_limit_bytes(spec.inode_limit, known_inodes);
        groups.make(spec.key, &group::limits(spec.settings, default_memory)).map(Some)
    }

    /// A link to an earlier program with the name of the configured one: the kernel calls the process
    /// by it. It leads to a descriptor of the process that follows it, so of the child.
    fn link(&self, dial: &DialDir, program: &Program) -> linux::Result<PathBuf> {
        let link = dial.path().join(self.volume_binary.file_name().unwrap_or_default());
        let Program::File { file, .. } = program else {
            return Err(linux::Error::new("start", program, nix::errno::Errno::ENOEXEC));
        };
        let open = format!("/proc/self/fd/{}", file.as_raw_fd());
        std::os::unix::fs::symlink(open, &link).map_err(|e| linux::Error::at("link", &link, e))?;
        Ok(link)
    }

    /// After a failed start, whose cause is what the caller needs.
    fn clear_or_say(&self, key: &LaunchKey) {
        if let Err(error) = self.clear(key) {
            tracing::warn!(%key, error = chain(&error), "remove control group");
        }
    }

    /// Which launch a command line is of: ours dial into our run directory.
    fn launched_as(&self, command_line: &[u8]) -> Option<LaunchKey> {
        let mut arguments = command_line.split(|b| *b == 0).skip(1);
        let is_daemon = ARGUMENTS.iter().all(|wanted| arguments.next() == Some(wanted.as_bytes()));
        let socket = Path::new(std::str::from_utf8(arguments.next().filter(|_| is_daemon)?).ok()?);
        let dial_dir = socket.parent()?;
        let key = LaunchKey::parse(dial_dir.file_name()?.to_str()?)?;
        (DialDir::of(&self.run_dir, &key).socket() == socket).then_some(key)
    }
}

/// The processes of root with this name. Neither their memory is read, nor a file system asked: a daemon
/// may never answer.
///
/// A caller that follows a link in a process's directory must have compared the name before. The kernel
/// makes a reader of the link wait while the process executes another program, and that closes files, which
/// may wait for a daemon. Until then, such a process has the name of the program that it came from.
pub(super) fn processes_of_root(name: &[u8]) -> linux::Result<Vec<ProcessId>> {
    let proc = Path::new("/proc");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(proc).map_err(|e| linux::Error::at("list", proc, e))? {
        let entry = entry.map_err(|e| linux::Error::at("list", proc, e))?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let status = linux::procfs::read(&entry.path().join("status")).unwrap_or_default();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim();
        let is_root = field("Uid:").split_whitespace().take(2).eq(["0", "0"]);
        if is_root && field("Name:").as_bytes() == name {
            // A process that ends meanwhile is none of ours any more.
            found.extend(ProcessId::of(pid)?);
        }
    }
    Ok(found)
}

/// What the kernel calls a process that executes this program: 15 bytes of its file's name.
fn name_of_process(program: &Path) -> &[u8] {
    let name = program.file_name().unwrap_or_default().as_bytes();
    &name[..name.len().min(15)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_daemons_of_this_run_directory_are_ours() {
        let launcher = ProcessLauncher {
            volume_binary: "/bin/hawser-volume".into(),
            run_dir: "/run/h".into(),
            logs: DaemonLogs::new(Path::new("/run/h")),
            groups: None,
        };
        let key = "0123456789abcdef0123456789abcdef";
        let line = |socket: String| {
            format!("/bin/hawser-volume\0serve\0--confine\0--socket\0{socket}\0--log-level\0info\0")
        };
        let ours = line(format!("/run/h/{key}/dial.sock"));
        assert_eq!(launcher.launched_as(ours.as_bytes()), LaunchKey::parse(key));
        for other in [
            line(format!("/run/other/{key}/dial.sock")),
            line("/run/h/x/dial.sock".into()),
            "sleep\0ten\0".into(),
            String::new(),
        ] {
            assert_eq!(launcher.launched_as(other.as_bytes()), None, "{other:?}");
        }
    }
}
