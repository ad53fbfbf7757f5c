//! Starts containers: by the native launcher, or by an OCI runtime.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use linux::process;
use oci_spec::runtime::Spec;

use super::container::Container;
use super::error::{Result, ShimError};
use super::log::{LogFile, Stream};
use super::oci::{self, Bundle, OciRuntime};
use super::outcome::Starting;
use super::protocol::{Answer, ShimStatus, Start, container_dir, now};
use super::terminal::{self, Console, ContainerStreams, StdinRequest, output_pipe};
use super::{Caller, Shim, note};
use crate::error::chain;
use crate::launcher::device_control::WithoutControl;
use crate::launcher::{self, Overlay, StandardStreams, Stdio, Surroundings};

/// A container whose log and streams are open, and which has no process yet.
struct Prepared {
    id: String,
    bundle: PathBuf,
    spec: Spec,
    overlay: Overlay,
    log: LogFile,
    streams: ContainerStreams,
}

impl Shim {
    pub(super) fn start(
        &mut self,
        caller: Caller,
        start: Start,
        stdin: Option<OwnedFd>,
    ) -> Result<Option<Answer>> {
        let Start { container: id, log, overlay, allow_without_device_control, stdin: has_stdin, stdin_once } =
            start;
        if self.containers.contains_key(&id) {
            return Err(ShimError::StartedBefore);
        }
        // Forgets removed containers: otherwise the list could exceed an answer's limit.
        let dir = &self.dir;
        self.containers.retain(|id, c| c.status.exit.is_none() || container_dir(dir, id).is_dir());
        let bundle = container_dir(&self.dir, &id);
        let spec =
            Spec::load(bundle.join("config.json")).map_err(|source| ShimError::Specification { source })?;
        self.check_pid_namespace(&spec)?;
        let log = LogFile::open(log.clone(), self.config.log_ceiling)
            .map_err(|source| ShimError::OpenLog { path: log.unwrap_or_default(), source })?;
        let streams = terminal::streams(&spec, StdinRequest { has_stdin, stdin_once, given: stdin })?;
        let prepared = Prepared { id, bundle, spec, overlay, log, streams };
        if let Some(program) = self.config.oci_runtime.clone() {
            return self.start_by_oci_runtime(&program, prepared).map(Some);
        }
        let without_device_control = match allow_without_device_control {
            true => WithoutControl::StartWithoutMknod,
            false => WithoutControl::Refuse,
        };
        self.start_native(caller, prepared, without_device_control).map(|()| None)
    }

    /// The caller gets its answer when the outcome of the start is known.
    fn start_native(
        &mut self,
        caller: Caller,
        prepared: Prepared,
        without_device_control: WithoutControl,
    ) -> Result<()> {
        let Prepared { id, bundle: _, spec, overlay, log, streams } = prepared;
        let ContainerStreams { programs, ours, output } = streams;
        let hierarchies = self.hierarchies()?;
        let with = Surroundings {
            overlay: &overlay,
            hierarchies: &hierarchies,
            mounts: &self.mounts,
            streams: programs,
            without_device_control,
        };
        let launched = launcher::launch(&spec, with)?;
        let status = ShimStatus {
            pid: launched.child.pid,
            started_at: now(),
            not_enforced: launched.not_enforced,
            exit: None,
        };
        let starting = Starting::new(caller, File::from(launched.outcome), launched.warnings);
        let container = Container {
            pidfd: Some(launched.child.pidfd),
            cgroup: launched.cgroup,
            log: Some(log),
            streams: output,
            ours,
            starting: Some(starting),
            status,
        };
        self.containers.insert(id, container);
        Ok(())
    }

    fn start_by_oci_runtime(&mut self, program: &Path, prepared: Prepared) -> Result<Answer> {
        let Prepared { id, bundle, spec, overlay, log, streams } = prepared;
        let ContainerStreams { programs, ours, mut output } = streams;
        let state_dir = self.dir.join("oci");
        let runtime = OciRuntime { program, state_dir: &state_dir };
        let (stdio, console) = match programs {
            StandardStreams::Pipes(stdio) => (stdio, None),
            StandardStreams::Terminal(_socket_of_the_launcher) => {
                let (said, stderr) = output_pipe("stderr")?;
                output.push(said);
                let stdout = stderr.try_clone();
                let stdout = stdout.map_err(|source| ShimError::Pipe { name: "stdout", source })?;
                (Stdio { stdin: None, stdout, stderr }, Some(Console::listen(&bundle)?))
            }
        };
        let described = Bundle { container: &id, dir: &bundle, spec: &spec, overlay: &overlay };
        let created = runtime.create(&described, stdio, console.as_ref());
        let (pid, cgroup) = created.map_err(|error| {
            // The OCI runtime writes its error message to the container's stderr.
            let said = output.last_mut().map(Stream::read_raw).unwrap_or_default();
            if said.is_empty() {
                ShimError::Launch(error)
            } else {
                ShimError::OciRuntime { said: oci::last_message(&said) }
            }
        })?;
        let pidfd = process::open_pidfd(pid)?.ok_or(ShimError::EndedEarly)?;
        // An OCI runtime restricts devices itself, or refuses.
        let status = ShimStatus { pid, started_at: now(), not_enforced: None, exit: None };
        let mut container = Container {
            pidfd: Some(pidfd),
            cgroup,
            log: Some(log),
            streams: output,
            ours,
            starting: None,
            status: status.clone(),
        };
        let connected = console.map(|console| container.connect_terminal(console.receive()?));
        let started = connected.unwrap_or(Ok(())).and_then(|()| Ok(runtime.start(&id)?));
        if let Err(problem) = started {
            // `delete` kills its process, which is reaped as an orphan.
            if let Err(also) = runtime.delete(&id, &bundle) {
                note(&format!("container {id}: {}", chain(&also)));
            }
            return Err(problem);
        }
        self.containers.insert(id.clone(), container);
        self.save(&id);
        Ok(Answer::Started { container: id, status, warnings: Vec::new() })
    }
}
