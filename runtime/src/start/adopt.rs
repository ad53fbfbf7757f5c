//! Starts a runtime on an existing root directory: adopts what runs, records what ended meanwhile,
//! and undoes what was incomplete.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::calls::container;
use crate::calls::sandbox;
use crate::disk::record;
use crate::error::{Result, chain};
use crate::runtime::state::{
    Container, ContainerRecord, Phase, RunState, Sandbox, SandboxRecord, UpdatedResources,
};
use crate::runtime::{Runtime, ended, running};
use crate::shim::protocol::ShimStatus;
use crate::shim_client::{self, ANSWER_DEADLINE, START_DEADLINE, ShimClient};
use crate::start::unreadable;

/// How long pods wait until incomplete sandboxes are undone. After that, undoing continues while
/// calls are served: otherwise a hanging network plugin would stop the node.
const UNDO_TIMEOUT: Duration = Duration::from_secs(3);

pub(crate) async fn adopt(runtime: &Arc<Runtime>) -> Result<()> {
    // At the same time, so that no pod waits for another pod's silent shim.
    let mut adopting = JoinSet::new();
    for id in record::names(&runtime.root_dir.join("sandboxes"))? {
        let runtime = Arc::clone(runtime);
        adopting.spawn(async move { (adopt_sandbox(&runtime, &id).await, id) });
    }
    let mut undoing = JoinSet::new();
    while let Some(adopted) = adopting.join_next().await {
        match adopted {
            Ok((Ok(None), _)) => {}
            Ok((Ok(Some(half_made)), _)) => {
                undoing.spawn(undo(Arc::clone(runtime), half_made));
            }
            // One pod that cannot be adopted must not stop the others.
            Ok((Err(error), id)) => {
                tracing::error!(sandbox = id, error = %chain(&error), "adopt pod sandbox");
            }
            Err(error) => tracing::error!(%error, "adopt pod sandbox"),
        }
    }
    let undone = async { while undoing.join_next().await.is_some() {} };
    if tokio::time::timeout(UNDO_TIMEOUT, undone).await.is_err() {
        tracing::warn!(sandboxes = undoing.len(), "incomplete pod sandboxes are still being removed");
        undoing.detach_all();
    }
    if !runtime.unreadable().is_empty() {
        runtime.remove_unused_cgroups();
    }
    runtime.images.remove_unused_layers_later(&|layer| runtime.uses_layer(layer))
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

/// Returns the sandbox if it is incomplete.
async fn adopt_sandbox(runtime: &Arc<Runtime>, id: &str) -> Result<Option<Arc<Sandbox>>> {
    let dir = runtime.root_dir.join("sandboxes").join(id);
    let found = match record::find::<SandboxRecord>(&dir.join("sandbox.json")) {
        Err(why) => return unreadable::end_sandbox(runtime, id, &dir, &why).await.map(|()| None),
        Ok(found) => found,
    };
    let Some(mut found) = found else {
        // The record is written first: without it nothing else exists.
        return runtime.trash.remove_later(&dir).map(|()| None);
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
    match shim {
        Shim::Gone => adopt_containers(runtime, &sandbox, Some(BTreeMap::new())).await?,
        Shim::Knows(containers) => adopt_containers(runtime, &sandbox, Some(containers)).await?,
        Shim::Silent(connecting) => {
            tracing::warn!(
                sandbox = id,
                "the pod's shim does not answer: adopting its containers from their records"
            );
            adopt_containers(runtime, &sandbox, None).await?;
            tokio::spawn(await_shim(Arc::clone(runtime), Arc::clone(&sandbox), connecting));
        }
    }
    Ok((record.phase == Phase::Creating).then_some(sandbox))
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
    // This answer has all exits so far; the listener gets the later ones.
    let (listener, of) = (runtime.listener(), Arc::clone(sandbox));
    let mut connecting =
        Box::pin(async move { shim_client::connect(&of.id, &of.dir, listener, START_DEADLINE).await });
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

/// Updates a sandbox that was adopted from its record, or ends its pod if the shim stays silent.
async fn await_shim(runtime: Arc<Runtime>, sandbox: Arc<Sandbox>, connecting: Connecting) {
    let outcome = match connecting.await {
        Ok((shim, containers)) => hear(&runtime, &sandbox, shim, &containers).await,
        Err(error) => {
            tracing::warn!(sandbox = sandbox.id, error = %chain(&error), "the pod's shim does not answer: treating it as gone");
            sandbox::break_down(&runtime, &sandbox).await
        }
    };
    if let Err(error) = outcome {
        tracing::error!(sandbox = sandbox.id, error = %chain(&error), "adopt the pod after its shim's late answer");
    }
}

async fn hear(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    shim: ShimClient,
    alive: &BTreeMap<String, ShimStatus>,
) -> Result<()> {
    let _changing = sandbox.changing.lock().await;
    // A caller may have stopped it meanwhile.
    if sandbox.record().phase != Phase::Ready {
        return Ok(());
    }
    sandbox.set_shim(Some(shim));
    tracing::info!(sandbox = sandbox.id, "the pod's shim answers");
    for container in runtime.containers_of(&sandbox.id) {
        let status = alive.get(&container.id);
        if let Some(status) = status {
            runtime.exited(&container.id, status);
        }
        lose_unless_alive(runtime, sandbox, &container, status).await?;
    }
    Ok(())
}

/// The process may not exist: its start was abandoned, or its shim was killed just before it ran.
async fn lose_unless_alive(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    container: &Arc<Container>,
    status: Option<&ShimStatus>,
) -> Result<()> {
    let has_process = status.is_some_and(|status| status.exit.is_none());
    if container.state().is_running() == has_process && sandbox.shim().is_some() {
        return Ok(());
    }
    container::lose(runtime, sandbox, container).await
}

/// `alive`: the containers that the shim knows; `None` while it is silent: then the records decide.
async fn adopt_containers(
    runtime: &Arc<Runtime>,
    sandbox: &Arc<Sandbox>,
    alive: Option<BTreeMap<String, ShimStatus>>,
) -> Result<()> {
    let status_of = |id: &str| alive.as_ref().and_then(|alive| alive.get(id));
    for id in record::names(&sandbox.dir.join("containers"))? {
        let dir = sandbox.container_dir(&id);
        let found = match record::find::<ContainerRecord>(&dir.join("container.json")) {
            Err(why) => {
                let pid = status_of(&id).filter(|status| status.exit.is_none()).map(|status| status.pid);
                if let Err(error) = unreadable::end_container(runtime, &id, &dir, pid, &why) {
                    tracing::error!(container_id = id, error = %chain(&error), "end an unreadable container");
                }
                continue;
            }
            Ok(found) => found,
        };
        let Some(found) = found else {
            // Killed during its removal, or before it was complete.
            runtime.trash.remove_later(&dir)?;
            continue;
        };
        let status_path = dir.join("status.json");
        let (status, unreadable) = match status_of(&id) {
            Some(status) => (Some(status.clone()), None),
            None => match record::find::<ShimStatus>(&status_path) {
                // It was started, so it must not start again. Its exit status is unknown.
                Err(why) => (Some(ShimStatus::unknown(found.created_at)), Some(why)),
                Ok(status) => (status, None),
            },
        };
        let state = match (&found.ended, &status) {
            (Some(ended), _) => RunState::Exited(ended.clone()),
            (None, None) => RunState::Created,
            (None, Some(status)) => ended(status).map_or_else(|| running(status), RunState::Exited),
        };
        let container = Arc::new(Container::new(found, state));
        match record::find::<UpdatedResources>(&dir.join(UpdatedResources::FILE)) {
            Ok(updated) => updated.into_iter().for_each(|updated| container.set_resources(updated)),
            Err(why) => {
                runtime
                    .report_unreadable(format!("{}: the status shows the limits of the start", chain(&why)));
            }
        }
        runtime.insert_container(Arc::clone(&container));
        if alive.is_some() {
            lose_unless_alive(runtime, sandbox, &container, status_of(&id)).await?;
        }
        notice_missed_exit(runtime, &container, &status_path);
        if let Some(why) = unreadable {
            runtime.set_aside(
                &status_path,
                &format!("status-{id}.json"),
                &why,
                "the container counts as killed",
            );
        }
    }
    Ok(())
}

/// The shim reports an exit once, and a report that came before the container was known found none. But the shim saves
/// the exit before it reports it.
fn notice_missed_exit(runtime: &Runtime, container: &Container, status_path: &Path) {
    if matches!(container.state(), RunState::Exited(_)) {
        return;
    }
    // An unreadable record is reported where it is the only source.
    if let Ok(Some(status)) = record::find::<ShimStatus>(status_path) {
        runtime.exited(&container.id, &status);
    }
}

/// Logs a broken network configuration once, at the start.
pub(crate) fn report_network(runtime: &Runtime) {
    match runtime.cni.network() {
        Ok(list) => tracing::info!(network = list.name, file = %list.file.display(), "pod network"),
        Err(error) => tracing::warn!(error = %chain(&error), "pods will not get a network"),
    }
}
