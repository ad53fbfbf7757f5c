//! Containers: creation makes the bundle on disk; the shim does everything else at the start.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::cgroup::{Cgroup, Hierarchies};
use proto::cri::{ContainerConfig, ContainerEventType, CreateContainerRequest};
use tokio::task::JoinSet;

use crate::blocking::blocking;
use crate::calls::namespaces;
use crate::disk::record;
use crate::disk::record::new_id;
use crate::error::{Error, Result, chain};
use crate::images::Image;
use crate::launcher::Overlay;
use crate::runtime::group;
use crate::runtime::state::{Container, ContainerRecord, Ended, Phase, RunState, Sandbox, save_container};
use crate::runtime::{Runtime, START_ERROR};
use crate::shim::protocol::{Answer, Call, START_ERROR_CODE, Start, now};
use crate::shim_client::error::ShimProblem;
use crate::shim_client::{self, ANSWER_DEADLINE, START_DEADLINE};
use crate::spec::mount_policy::cleaned;
use crate::spec::pod;
use crate::spec::stop_signal::stop_signal;
use crate::spec::{self, PidNamespace, SandboxView};

/// Longer waits after SIGKILL mean that the process hangs in the kernel.
const KILL_DEADLINE: Duration = Duration::from_secs(30);
/// Interval between rounds of SIGKILL: on cgroup v1, the processes may freeze themselves again.
const KILL_ROUND: Duration = Duration::from_millis(500);
/// Limit for the shim to send SIGKILL.
const SHIM_SIGNAL: Duration = Duration::from_secs(1);
/// Between looks whether a program catches the signal that it has lost.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Limit for the shim to report an exit. After that, the control group's state counts.
const EXIT_REPORT_TIMEOUT: Duration = Duration::from_secs(5);

/// CreateContainer: returns the new container's id. Leaves nothing after a failure.
pub(crate) async fn create(runtime: &Arc<Runtime>, request: CreateContainerRequest) -> Result<String> {
    let config = request.config.ok_or_else(|| Error::invalid("config", "missing"))?;
    let sandbox = runtime.sandbox(&request.pod_sandbox_id)?;
    let _changing = sandbox.changing.lock().await;
    sandbox.ready()?;
    let metadata = config.metadata.clone().ok_or_else(|| Error::invalid("config.metadata", "missing"))?;
    if metadata.name.is_empty() {
        return Err(Error::invalid("config.metadata.name", "empty"));
    }
    let same = |c: &Arc<Container>| c.record.config.metadata.as_ref() == Some(&metadata);
    if let Some(known) = runtime.containers_of(&sandbox.id).into_iter().find(same) {
        let name = format!("{}_{}", metadata.name, metadata.attempt);
        return Err(Error::AlreadyExists { kind: "container", name, id: known.id.clone() });
    }
    let pids = namespaces::pids(runtime, &sandbox, &config).await?;
    let id = new_id()?;
    let (rt, sb, container_id) = (Arc::clone(runtime), Arc::clone(&sandbox), id.clone());
    blocking("create container", move || {
        let dir = sb.container_dir(&container_id);
        let wanted = config.image.clone().unwrap_or_default();
        let image_name = rt.images.resolve(&wanted)?.map_or(wanted.image, |image| image.id);
        // Until the container is known, only the pins show that its layers are in use.
        let (image, _pins) = rt.images.get_pinned(&image_name)?;
        let made = make(&rt, &sb, &container_id, config, image, pids)
            .map_err(|cause| cause.after_rollback(record::remove_tree(&dir).err().into_iter().collect()))?;
        rt.insert_container(Arc::new(Container::new(made, RunState::Created)));
        Ok(())
    })
    .await?;
    runtime.announce(&id, &sandbox.id, ContainerEventType::ContainerCreatedEvent);
    Ok(id)
}

fn make(
    runtime: &Runtime,
    sandbox: &Sandbox,
    id: &str,
    config: ContainerConfig,
    image: Image,
    pids: PidNamespace,
) -> Result<ContainerRecord> {
    let sandbox_record = sandbox.record();
    let lower = runtime.images.lower_dirs(&image.layers);
    let cgroup_path = pod::cgroup_parent(&sandbox_record.config).join(id);
    let sharing = pod::sharing(&sandbox_record.config);
    let shim_pid = sandbox_record.shim.map(|p| p.pid).ok_or(Error::Task { task: "shim" })?;
    let namespace = |kind: &str| PathBuf::from(format!("/proc/{shim_pid}/ns/{kind}"));
    let (ipc, uts) = (namespace("ipc"), namespace("uts"));
    let shm = runtime.shm_dir(sandbox);
    let hostname = pod::hostname(&sandbox_record.config);
    let sysctls = sandbox_record.config.linux.as_ref().map(|l| l.sysctls.clone()).unwrap_or_default();
    let view = SandboxView {
        cgroup_path: &cgroup_path,
        cgroups: runtime.cgroups,
        network_namespace: sandbox_record.netns.as_deref(),
        ipc_namespace: (!sharing.host_ipc).then_some(&*ipc),
        uts_namespace: (!sharing.host_network).then_some(&*uts),
        pids,
        hostname: &hostname,
        dir: &sandbox.dir,
        shm: (!sharing.host_ipc).then_some(&*shm),
        sysctls: &sysctls,
    };
    let built = spec::build(&config, &image.config, &lower, view)?;
    // A mount needs a place of its own kind there, which the launcher makes.
    let is_mounted =
        |path: &PathBuf| built.spec.mounts().iter().flatten().any(|mount| mount.destination() == path);
    let image_volumes = image.config.volumes.iter().map(|path| cleaned(Path::new(path)));
    let image_volumes = image_volumes.filter(|path| !is_mounted(path)).collect();
    let stop_signal = stop_signal(&config, &image.config.stop_signal)?;
    let log_directory = &sandbox_record.config.log_directory;
    let log_path = (!log_directory.is_empty() && !config.log_path.is_empty())
        .then(|| PathBuf::from(log_directory).join(&config.log_path));

    let dir = sandbox.container_dir(id);
    for sub in ["rootfs", "upper", "work"] {
        record::ensure_dir(&dir.join(sub))?;
    }
    // The container's root directory; every user in it may enter it.
    let upper = dir.join("upper");
    std::fs::set_permissions(&upper, std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .map_err(|e| Error::io("set mode of", &upper, e))?;
    let config_path = dir.join("config.json");
    record::save(&config_path, &built.spec)?;
    let made = ContainerRecord {
        id: id.to_owned(),
        sandbox_id: sandbox.id.clone(),
        created_at: now(),
        image_id: image.id.clone(),
        image_ref: image.repo_digests.first().cloned().unwrap_or(image.id),
        image_tag: image.repo_tags.first().cloned().unwrap_or_default(),
        layers: image.layers,
        image_volumes,
        user: built.user,
        cgroup_path,
        stop_signal,
        log_path,
        warnings: built.warnings,
        ended: None,
        config,
    };
    save_container(&dir, &made)?;
    for warning in &made.warnings {
        tracing::warn!(container_id = id, "{warning}");
    }
    Ok(made)
}

/// StartContainer: returns once the program runs, or with the reason why it does not.
pub(crate) async fn start(runtime: &Arc<Runtime>, id: &str) -> Result<()> {
    let container = runtime.container(id)?;
    let sandbox = runtime.sandbox(&container.record.sandbox_id)?;
    let _changing = sandbox.changing.lock().await;
    let state = container.state();
    if state != RunState::Created {
        let state = state.cri().as_str_name().to_owned();
        return Err(Error::WrongState {
            kind: "container",
            id: container.id.clone(),
            state,
            wanted: "created",
        });
    }
    let not_ready = || Error::WrongState {
        kind: "pod sandbox",
        id: sandbox.id.clone(),
        state: "not ready".to_owned(),
        wanted: "ready",
    };
    let shim = sandbox.shim().filter(|_| sandbox.record().phase == Phase::Ready).ok_or_else(not_ready)?;
    let dir = sandbox.container_dir(&container.id);
    let overlay = Overlay {
        lower: runtime.images.lower_dirs(&container.record.layers),
        upper: dir.join("upper"),
        work: dir.join("work"),
        directories: container.record.image_volumes.clone(),
    };
    let config = &container.record.config;
    let _until_then = Starting::new(&container);
    let call = Call::Start(Start {
        container: container.id.clone(),
        log: container.record.log_path.clone(),
        overlay,
        allow_without_device_control: runtime.allow_without_device_control,
        stdin: config.stdin,
        stdin_once: config.stdin_once,
    });
    let answer = if (config.stdin || config.tty) && !shim.can_attach() {
        Err(ShimProblem::CannotAttach)
    } else {
        shim.ask(call, &[], START_DEADLINE).await
    };
    let problem = match answer {
        Ok(Answer::Started { warnings, status, .. }) => {
            for warning in warnings.into_iter().chain(status.not_enforced) {
                tracing::warn!(container_id = container.id, "{warning}");
            }
            return Ok(());
        }
        Ok(other) => shim_client::unexpected(&other),
        Err(problem) => problem,
    };
    // If no answer came, the shim may still find the call, and its process may still wait in execve(2)
    // for a file that another process holds.
    if matches!(problem, ShimProblem::NoAnswer { .. })
        && let Err(error) = withdraw(&dir)
    {
        tracing::warn!(container_id = container.id, error = %chain(&error), "withdraw the start of a container");
    }
    group::end_left_over(&container).await;
    Err(start_failed(runtime, &sandbox, &container, problem))
}

/// A shim that finds a call to start the container, of a caller that has given up, refuses it.
fn withdraw(dir: &Path) -> Result<()> {
    Ok(linux::atomic_file::discard(&dir.join("config.json"))?)
}

/// Marks a container as starting, until this is dropped.
struct Starting<'a>(&'a Container);

impl<'a> Starting<'a> {
    fn new(container: &'a Container) -> Self {
        container.is_starting.send_replace(true);
        Self(container)
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.0.is_starting.send_replace(false);
    }
}

/// As in containerd, a container that could not start has exited with 128 and `StartError`.
fn start_failed(runtime: &Runtime, sandbox: &Sandbox, container: &Container, source: ShimProblem) -> Error {
    let ended = Ended {
        started_at: 0,
        finished_at: now(),
        code: START_ERROR_CODE,
        reason: START_ERROR.to_owned(),
        message: chain(&source),
    };
    keep_end(sandbox, container, &ended);
    runtime.end(container, ended);
    Error::Start { container: container.name(), source }
}

/// Records an exit that the shim does not know.
fn keep_end(sandbox: &Sandbox, container: &Container, ended: &Ended) {
    let record = ContainerRecord { ended: Some(ended.clone()), ..container.record.clone() };
    if let Err(error) = save_container(&sandbox.container_dir(&container.id), &record) {
        tracing::warn!(container_id = container.id, error = %chain(&error), "record the container's end");
    }
}

/// StopContainer: the stop signal, then SIGKILL after `timeout`.
pub(crate) async fn stop(runtime: &Arc<Runtime>, id: &str, timeout: Duration) -> Result<()> {
    let Some(container) = runtime.find_container(id) else { return Ok(()) };
    // A program that is about to run is stopped as soon as it does. Otherwise it would run on although
    // its caller has stopped it.
    container.start_is_over().await;
    if !container.state().is_running() {
        return Ok(());
    }
    if !timeout.is_zero() && ends_by_signal(runtime, &container, timeout).await {
        return Ok(());
    }
    kill(runtime, &container).await
}

/// Sends the stop signal, and waits for the exit.
///
/// The first process of a PID namespace loses a signal that it does not catch (pid_namespaces(7)), and a program that
/// has just started may not catch it yet. So it gets the signal again once it does.
async fn ends_by_signal(runtime: &Runtime, container: &Container, timeout: Duration) -> bool {
    let (begun, stop_signal) = (Instant::now(), container.record.stop_signal);
    let left = || timeout.saturating_sub(begun.elapsed());
    // Asked before: a program that begins to catch it right after has lost it all the same.
    let mut is_lost = !catches(container, stop_signal).await;
    send_stop(runtime, container, stop_signal).await;
    while is_lost && !left().is_zero() {
        if wait_for_exit(container, left().min(LOOK_AGAIN)).await {
            return true;
        }
        if catches(container, stop_signal).await {
            send_stop(runtime, container, stop_signal).await;
            is_lost = false;
        }
    }
    wait_for_exit(container, left()).await
}

/// If the shim cannot send the signal, the container is still killed after the timeout.
async fn send_stop(runtime: &Runtime, container: &Container, stop_signal: i32) {
    if let Err(error) = signal(runtime, container, stop_signal, ANSWER_DEADLINE).await {
        tracing::warn!(container_id = container.id, error = %chain(&error), "stop signal");
    }
}

/// Whether the container's first process catches the signal, or blocks it until it takes it (signalfd(2)). Without a
/// process: yes, since none loses it.
async fn catches(container: &Container, signal: i32) -> bool {
    let RunState::Running { pid, .. } = container.state() else { return true };
    let bit = u32::try_from(signal - 1).ok().and_then(|at| 1_u64.checked_shl(at)).unwrap_or(0);
    let look = move || {
        let status = linux::procfs::read(&Path::new("/proc").join(pid.to_string()).join("status"));
        let status = status.unwrap_or_default();
        let masks = status.lines().filter_map(|line| {
            let mask = line.strip_prefix("SigCgt:").or_else(|| line.strip_prefix("SigBlk:"))?;
            u64::from_str_radix(mask.trim(), 16).ok()
        });
        let masks: Vec<u64> = masks.collect();
        Ok(masks.is_empty() || masks.iter().any(|mask| mask & bit != 0))
    };
    blocking("read the signals of a container", look).await.unwrap_or(true)
}

/// Sends SIGKILL and waits for the exit. A container that does not run is a success.
pub(crate) async fn kill(runtime: &Runtime, container: &Container) -> Result<()> {
    if !container.state().is_running() {
        return Ok(());
    }
    // The shim may wait for a disk; killing the control group does not need it.
    if let Err(error) = signal(runtime, container, libc::SIGKILL, SHIM_SIGNAL).await {
        tracing::warn!(container_id = container.id, error = %chain(&error), "SIGKILL by the shim");
    }
    let begun = Instant::now();
    loop {
        let path = container.record.cgroup_path.clone();
        let killed = blocking("kill cgroup", move || Ok(Cgroup::find(&Hierarchies::known()?, &path).kill()?));
        if let Err(error) = killed.await {
            tracing::warn!(container_id = container.id, error = %chain(&error), "kill cgroup");
        }
        let left = KILL_DEADLINE.saturating_sub(begun.elapsed());
        if wait_for_exit(container, left.min(KILL_ROUND)).await {
            return Ok(());
        }
        if begun.elapsed() > EXIT_REPORT_TIMEOUT && has_no_process(container).await {
            tracing::warn!(container_id = container.id, "killed, but the pod's shim does not report its end");
            let sandbox = runtime.sandbox(&container.record.sandbox_id)?;
            end_as_killed(runtime, &sandbox, container, "it was killed, and the pod's shim is silent");
            return Ok(());
        }
        if left.is_zero() {
            break;
        }
    }
    Err(Error::WrongState {
        kind: "container",
        id: container.id.clone(),
        state: "running despite SIGKILL".to_owned(),
        wanted: "exited",
    })
}

/// Whether its control group could be removed. An error counts as no: the next round tries again.
async fn has_no_process(container: &Container) -> bool {
    let path = container.record.cgroup_path.clone();
    let ended = move || Ok(Cgroup::find(&Hierarchies::known()?, &path).end(KILL_ROUND)?);
    blocking("remove cgroup", ended).await.is_ok()
}

async fn signal(runtime: &Runtime, container: &Container, signal: i32, limit: Duration) -> Result<()> {
    let sandbox = runtime.sandbox(&container.record.sandbox_id)?;
    // Without a shim, `sandbox::break_down` is about to end it.
    let Some(shim) = sandbox.shim() else { return Ok(()) };
    shim.call_within(Call::Signal { container: container.id.clone(), signal }, limit).await.map(drop)
}

/// `false` if it still runs after `timeout`.
async fn wait_for_exit(container: &Container, timeout: Duration) -> bool {
    let mut state = container.state.subscribe();
    tokio::time::timeout(timeout, state.wait_for(|s| !s.is_running())).await.is_ok()
}

/// RemoveContainer, also of a running one. Only its log stays.
pub(crate) async fn remove(runtime: &Arc<Runtime>, id: &str) -> Result<()> {
    let Some(container) = runtime.find_container(id) else { return Ok(()) };
    kill(runtime, &container).await?;
    let sandbox = runtime.sandbox(&container.record.sandbox_id)?;
    let _changing = sandbox.changing.lock().await;
    // It may have been started before this call had the lock.
    kill(runtime, &container).await?;
    let dir = sandbox.container_dir(&container.id);
    let (rt, container_id, image_id) =
        (Arc::clone(runtime), container.id.clone(), container.record.image_id.clone());
    let group = container.record.cgroup_path.clone();
    blocking("remove container", move || {
        group::kill(&group)?;
        linux::mount::unmount_if_mounted(&dir.join("rootfs"))?;
        record::remove_tree(&dir)?;
        rt.forget_container(&container_id);
        // If the image was removed while this container used it, its layers must be removed here.
        if rt.images.find(&image_id)?.is_none() {
            rt.images.remove_unused_layers(&|layer| rt.uses_layer(layer))?;
        }
        Ok(())
    })
    .await?;
    runtime.announce(&container.id, &sandbox.id, ContainerEventType::ContainerDeletedEvent);
    Ok(())
}

/// Called when their shim is gone, or has a process of a container that has ended. Kills the
/// remaining processes, and records the exit of those that ran. At the same time, since a process that
/// hangs in the kernel takes the limit of [`group::kill`].
pub(crate) async fn lose(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    containers: impl IntoIterator<Item = Arc<Container>>,
) {
    let mut losing = JoinSet::new();
    for container in containers {
        let (runtime, sandbox) = (Arc::clone(runtime), Arc::clone(sandbox));
        losing.spawn(async move {
            let path = container.record.cgroup_path.clone();
            // One that cannot be killed keeps none of the others.
            if let Err(error) = blocking("kill cgroup", move || group::kill(&path)).await {
                tracing::warn!(container_id = container.id, error = %chain(&error), "kill the processes of a lost container");
            }
            end_as_killed(&runtime, &sandbox, &container, "the pod's shim ended, and its containers with it");
        });
    }
    while losing.join_next().await.is_some() {}
}

/// Its real exit status is unknown.
fn end_as_killed(runtime: &Runtime, sandbox: &Sandbox, container: &Container, message: &str) {
    let RunState::Running { started_at, .. } = container.state() else { return };
    let ended = Ended {
        started_at,
        finished_at: now(),
        code: 128 + libc::SIGKILL,
        reason: "Error".to_owned(),
        message: message.to_owned(),
    };
    keep_end(sandbox, container, &ended);
    runtime.end(container, ended);
}

pub(crate) async fn reopen_log(runtime: &Runtime, id: &str) -> Result<()> {
    let container = runtime.container(id)?;
    if !container.state().is_running() {
        let state = container.state().cri().as_str_name().to_owned();
        return Err(Error::WrongState {
            kind: "container",
            id: container.id.clone(),
            state,
            wanted: "running",
        });
    }
    let sandbox = runtime.sandbox(&container.record.sandbox_id)?;
    let shim = sandbox.shim().ok_or(Error::Task { task: "shim" })?;
    shim.call(Call::ReopenLog { container: container.id.clone() }).await.map(drop)
}
