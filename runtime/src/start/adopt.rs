//! Starts a runtime on an existing root directory: adopts what runs, records what ended meanwhile,
//! and undoes what was incomplete.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::calls::container;
use crate::calls::sandbox;
use crate::disk::record::{self, Found};
use crate::error::{Error, Result, chain};
use crate::runtime::state::{
    Container, ContainerRecord, Phase, RunState, Sandbox, SandboxRecord, UpdatedResources,
};
use crate::runtime::{Runtime, ended, running};
use crate::shim::protocol::ShimStatus;
use crate::shim_client::{self, ANSWER_DEADLINE, Listener, START_DEADLINE, ShimClient};
use crate::start::unreadable::{self, Remains};

/// How long pods wait until incomplete sandboxes are undone and unreadable ones released. After that, both
/// continue while calls are served: otherwise a hanging network plugin would stop the node.
const UNDO_TIMEOUT: Duration = Duration::from_secs(3);

/// The shim's record of a container.
const STATUS: &str = "status.json";

/// Between two attempts to connect to a shim.
const CONNECT_PAUSE: Duration = Duration::from_millis(500);

/// An `Err` if a record cannot be read although it is not damaged, for example for lack of descriptors:
/// its pod may run, and a runtime that did not know it would run it twice.
pub(crate) async fn adopt(runtime: &Arc<Runtime>) -> Result<()> {
    let mut undoing = JoinSet::new();
    let mut releasing = Vec::new();
    for rest in adopt_all(runtime).await? {
        match rest {
            Rest::Nothing => {}
            Rest::Undo(sandbox) => {
                undoing.spawn(undo(Arc::clone(runtime), sandbox));
            }
            Rest::Release(remains) => {
                let pending = remains.pending();
                releasing.push((undoing.spawn(release(Arc::clone(runtime), remains)), pending));
            }
            Rest::AwaitShim(sandbox, connecting) => {
                tokio::spawn(await_shim(Arc::clone(runtime), sandbox, connecting));
            }
        }
    }
    let undone = async { while undoing.join_next().await.is_some() {} };
    if tokio::time::timeout(UNDO_TIMEOUT, undone).await.is_err() {
        tracing::warn!(sandboxes = undoing.len(), "pod sandboxes are still being removed");
        // A kubelet asks for unreadable records once, when it starts.
        for (_, pending) in releasing.into_iter().filter(|(task, _)| !task.is_finished()) {
            runtime.report_unreadable(pending);
        }
        undoing.detach_all();
    }
    runtime.images.remove_unused_layers_later(&|layer| runtime.uses_layer(layer))
}

/// What is left to do for a sandbox after its adoption.
enum Rest {
    Nothing,
    /// It is incomplete.
    Undo(Arc<Sandbox>),
    /// Its record is unreadable.
    Release(Remains),
    AwaitShim(Arc<Sandbox>, Connecting),
}

async fn adopt_all(runtime: &Arc<Runtime>) -> Result<Vec<Rest>> {
    // At the same time, so that no pod waits for another pod's silent shim.
    let mut adopting = JoinSet::new();
    for id in record::names(&runtime.root_dir.join("sandboxes"))? {
        let runtime = Arc::clone(runtime);
        adopting.spawn(async move {
            let adopted = adopt_sandbox(&runtime, &id).await;
            adopted.map_err(|source| Error::Adopt { sandbox: id, source: Box::new(source) })
        });
    }
    let (mut adopted, mut failed) = (Vec::new(), None);
    while let Some(joined) = adopting.join_next().await {
        match joined {
            Ok(Ok(rest)) => adopted.push(rest),
            Ok(Err(error)) => failed = failed.or(Some(error)),
            Err(error) => tracing::error!(%error, "adopt pod sandbox"),
        }
    }
    failed.map_or(Ok(adopted), Err)
}

async fn undo(runtime: Arc<Runtime>, sandbox: Arc<Sandbox>) {
    let _changing = sandbox.changing.lock().await;
    // A caller may have stopped it meanwhile.
    if sandbox.record().phase != Phase::Creating {
        return;
    }
    let undone = match sandbox::take_down(&runtime, &sandbox).await {
        Ok(()) => sandbox::forget(&runtime, &sandbox),
        failed => failed,
    };
    if let Err(error) = undone {
        tracing::error!(sandbox = sandbox.id, error = %chain(&error), "remove an incomplete pod sandbox");
    }
}

async fn release(runtime: Arc<Runtime>, remains: Remains) {
    let id = remains.id.clone();
    if let Err(error) = unreadable::release(&runtime, remains).await {
        tracing::error!(sandbox = id, error = %chain(&error), "end an unreadable pod sandbox");
    }
    runtime.remove_unused_cgroups();
}

async fn adopt_sandbox(runtime: &Arc<Runtime>, id: &str) -> Result<Rest> {
    let dir = runtime.root_dir.join("sandboxes").join(id);
    let end = async |why| Rest::Release(unreadable::end_sandbox(runtime, id, &dir, why).await);
    let mut found = match record::examine::<SandboxRecord>(&dir.join("sandbox.json"))? {
        Found::Intact(found) => found,
        // The record is written first: without it nothing else exists.
        Found::Missing => return Ok(discard(runtime, &dir)),
        Found::Damaged(why) => return Ok(end(why).await),
    };
    let containers = match record::examine_names(&dir.join("containers"))? {
        Found::Intact(names) => names,
        // Killed during the sandbox's removal.
        Found::Missing => Vec::new(),
        Found::Damaged(why) => return Ok(end(why).await),
    };
    found.network = found.network.map(|network| runtime.shared_network(Arc::unwrap_or_clone(network)));
    let sandbox = Arc::new(Sandbox::new(dir, found));
    runtime.insert_sandbox(Arc::clone(&sandbox));
    let record = sandbox.record();
    let shim = match record.phase {
        Phase::Ready | Phase::Broken => reconnect(runtime, &sandbox, &record).await,
        Phase::Creating | Phase::Stopped => Shim::Gone,
    };
    if record.phase == Phase::Ready && matches!(shim, Shim::Gone) {
        tracing::warn!(sandbox = id, "the pod's shim is gone");
        sandbox.update_on_the_way_down(|r| r.phase = Phase::Broken);
    }
    let (alive, connecting) = match shim {
        Shim::Gone => (Some(BTreeMap::new()), None),
        Shim::Knows(containers) => (Some(containers), None),
        Shim::Silent(connecting) => {
            tracing::warn!(
                sandbox = id,
                "the pod's shim does not answer: adopting its containers from their records"
            );
            (None, Some(connecting))
        }
    };
    adopt_containers(runtime, &sandbox, &containers, alive).await?;
    Ok(match connecting {
        Some(connecting) => Rest::AwaitShim(sandbox, connecting),
        None if record.phase == Phase::Creating => Rest::Undo(sandbox),
        None => Rest::Nothing,
    })
}

/// Removes what has no record. If that fails, the next start tries again.
fn discard(runtime: &Runtime, dir: &Path) -> Rest {
    if let Err(error) = runtime.trash.remove_later(dir) {
        tracing::error!(error = %chain(&error), "remove a directory without a record");
    }
    Rest::Nothing
}

/// A shim, and the statuses of its containers.
type Connected = (ShimClient, BTreeMap<String, ShimStatus>);
type Connecting = Pin<Box<dyn Future<Output = Result<Connected>> + Send>>;

/// The result of connecting to an earlier runtime's shim.
enum Shim {
    Gone,
    Knows(BTreeMap<String, ShimStatus>),
    /// No answer yet. A pod may keep its shim from answering; other pods must not wait for it. A
    /// shim may also wait for a slow disk; its pod must not be ended for that.
    Silent(Connecting),
}

async fn reconnect(runtime: &Arc<Runtime>, sandbox: &Arc<Sandbox>, record: &SandboxRecord) -> Shim {
    if record.boot_id != runtime.boot_id {
        return Shim::Gone;
    }
    let mut connecting: Connecting = Box::pin(connect(Arc::clone(sandbox), runtime.listener()));
    match tokio::time::timeout(ANSWER_DEADLINE, &mut connecting).await {
        Ok(Ok((shim, containers))) => {
            sandbox.set_shim(Some(shim));
            Shim::Knows(containers)
        }
        // A pod that is being taken down needs no answer.
        Err(_) if record.phase == Phase::Ready => Shim::Silent(connecting),
        Ok(Err(_)) | Err(_) => Shim::Gone,
    }
}

/// Tries for [`START_DEADLINE`], unless the shim is gone. The answer has all exits so far; the listener
/// gets the later ones.
async fn connect(sandbox: Arc<Sandbox>, listener: Arc<dyn Listener>) -> Result<Connected> {
    let end = Instant::now() + START_DEADLINE;
    loop {
        // It may be polled again only after `end`: the last attempt gets an answer's time too.
        let left = end.saturating_duration_since(Instant::now()).max(ANSWER_DEADLINE);
        let connected = shim_client::connect(&sandbox.id, &sandbox.dir, Arc::clone(&listener), left).await;
        match connected {
            Err(error) if !is_gone(&error) && Instant::now() + CONNECT_PAUSE < end => {
                tracing::warn!(sandbox = sandbox.id, error = %chain(&error), "connect to the pod's shim: trying again");
                tokio::time::sleep(CONNECT_PAUSE).await;
            }
            connected => return connected,
        }
    }
}

/// Whether the shim has ended. Any other error may be this process's own, such as too few free
/// descriptors, and the pod runs.
fn is_gone(error: &Error) -> bool {
    match error {
        Error::Shim { source, .. } => source.is_end(),
        // Without its socket, no runtime can ever reach it.
        Error::Kernel(error) => error.errno() == Errno::ENOENT,
        _ => false,
    }
}

/// Updates a sandbox that was adopted from its record, or ends its pod if the shim stays silent.
async fn await_shim(runtime: Arc<Runtime>, sandbox: Arc<Sandbox>, connecting: Connecting) {
    match connecting.await {
        Ok((shim, containers)) => hear(&runtime, &sandbox, shim, &containers).await,
        Err(error) => {
            tracing::warn!(sandbox = sandbox.id, error = %chain(&error), "the pod's shim does not answer: treating it as gone");
            sandbox::break_down(&runtime, &sandbox).await;
        }
    }
}

async fn hear(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    shim: ShimClient,
    alive: &BTreeMap<String, ShimStatus>,
) {
    let _changing = sandbox.changing.lock().await;
    // A caller may have stopped it meanwhile.
    if sandbox.record().phase != Phase::Ready {
        return;
    }
    sandbox.set_shim(Some(shim));
    tracing::info!(sandbox = sandbox.id, "the pod's shim answers");
    let containers = runtime.containers_of(&sandbox.id);
    for container in &containers {
        if let Some(status) = alive.get(&container.id) {
            runtime.exited(&container.id, status);
        }
    }
    lose_unless_alive(runtime, sandbox, containers, alive).await;
}

/// The processes may not exist: a start was abandoned, or the shim was killed just before it ran.
async fn lose_unless_alive(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    containers: Vec<Arc<Container>>,
    alive: &BTreeMap<String, ShimStatus>,
) {
    let has_shim = sandbox.shim().is_some();
    let is_lost = |container: &Arc<Container>| {
        let has_process = alive.get(&container.id).is_some_and(|status| status.exit.is_none());
        !has_shim || container.state().is_running() != has_process
    };
    container::lose(runtime, sandbox, containers.into_iter().filter(is_lost)).await;
}

/// `alive`: the containers that the shim knows; `None` while it is silent: then the records decide.
async fn adopt_containers(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    names: &[String],
    alive: Option<BTreeMap<String, ShimStatus>>,
) -> Result<()> {
    let (mut adopted, mut damaged) = (Vec::new(), Vec::new());
    for id in names {
        let status = alive.as_ref().and_then(|alive| alive.get(id));
        let Some((container, damage)) = adopt_container(runtime, sandbox, id, status)? else { continue };
        adopted.push(container);
        damaged.extend(damage.map(|why| (id, why)));
    }
    // Nothing is on record while the shim is silent, and the next start must find the same.
    let Some(alive) = alive else { return Ok(()) };
    // Once all are known: what is lost may take seconds to end.
    lose_unless_alive(runtime, sandbox, adopted, &alive).await;
    // Once the ends of those containers are on record: without either, they would start again.
    for (id, why) in damaged {
        let status_path = sandbox.container_dir(id).join(STATUS);
        runtime.set_aside(&status_path, &format!("status-{id}.json"), &why, "the container counts as killed");
    }
    Ok(())
}

/// `status`: the shim's. The container, and how its own status is damaged; nothing if no container is
/// left.
fn adopt_container(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    id: &str,
    status: Option<&ShimStatus>,
) -> Result<Option<(Arc<Container>, Option<Error>)>> {
    let dir = sandbox.container_dir(id);
    let found = match record::examine::<ContainerRecord>(&dir.join("container.json"))? {
        Found::Intact(found) => found,
        // Killed during its removal, or before it was complete.
        Found::Missing => {
            discard(runtime, &dir);
            return Ok(None);
        }
        Found::Damaged(why) => {
            let pid = status.filter(|status| status.exit.is_none()).map(|status| status.pid);
            if let Err(error) = unreadable::end_container(runtime, id, &dir, pid, &why) {
                tracing::error!(container_id = id, error = %chain(&error), "end an unreadable container");
            }
            return Ok(None);
        }
    };
    let status_path = dir.join(STATUS);
    let (status, damage) = match status {
        Some(status) => (Some(status.clone()), None),
        None => match record::examine::<ShimStatus>(&status_path)? {
            Found::Intact(status) => (Some(status), None),
            Found::Missing => (None, None),
            // It was started, so it must not start again. Its exit status is unknown.
            Found::Damaged(why) => (Some(ShimStatus::unknown(found.created_at)), Some(why)),
        },
    };
    let state = match (&found.ended, &status) {
        (Some(ended), _) => RunState::Exited(ended.clone()),
        (None, None) => RunState::Created,
        (None, Some(status)) => ended(status).map_or_else(|| running(status), RunState::Exited),
    };
    let container = Arc::new(Container::new(found, state));
    // Only shown, so no error of it may hold the start.
    match record::find::<UpdatedResources>(&dir.join(UpdatedResources::FILE)) {
        Ok(updated) => updated.into_iter().for_each(|updated| container.set_resources(updated)),
        Err(why) => {
            runtime.report_unreadable(format!("{}: the status shows the limits of the start", chain(&why)));
        }
    }
    runtime.insert_container(Arc::clone(&container));
    notice_missed_exit(runtime, &container, &status_path)?;
    Ok(Some((container, damage)))
}

/// The shim reports an exit once, and a report that came before the container was known found none. But the shim saves
/// the exit before it reports it.
fn notice_missed_exit(runtime: &Runtime, container: &Container, status_path: &Path) -> Result<()> {
    if matches!(container.state(), RunState::Exited(_)) {
        return Ok(());
    }
    // A damaged record is reported where it is the only source.
    if let Found::Intact(status) = record::examine::<ShimStatus>(status_path)? {
        runtime.exited(&container.id, &status);
    }
    Ok(())
}

/// Logs a broken network configuration once, at the start.
pub(crate) fn report_network(runtime: &Runtime) {
    match runtime.cni.network() {
        Ok(list) => tracing::info!(network = list.name, file = %list.file.display(), "pod network"),
        Err(error) => tracing::warn!(error = %chain(&error), "pods will not get a network"),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::shim_client::error::ShimProblem;

    #[test]
    fn a_shim_is_gone_if_it_has_ended_and_not_if_this_process_cannot_connect() {
        let io = |errno: Errno| Error::io("connect", Path::new("shim.sock"), io::Error::from(errno));
        let shim = |source| Error::Shim { sandbox: "s".to_owned(), source };
        let send = |errno: Errno| shim(ShimProblem::Send { source: io::Error::from(errno) });
        for gone in [io(Errno::ENOENT), shim(ShimProblem::Ended), send(Errno::EPIPE), send(Errno::ECONNRESET)]
        {
            assert!(is_gone(&gone), "{gone:?}");
        }
        let own = [Errno::EMFILE, Errno::ENFILE, Errno::ENOMEM, Errno::EAGAIN];
        let silent = [
            shim(ShimProblem::NoAnswer { limit: ANSWER_DEADLINE }),
            shim(ShimProblem::UnexpectedAnswer { answer: String::new() }),
            Error::Task { task: "connect" },
        ];
        for other in own.into_iter().flat_map(|errno| [io(errno), send(errno)]).chain(silent) {
            assert!(!is_gone(&other), "{other:?}");
        }
    }
}
