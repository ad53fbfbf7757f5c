//! Unreadable records: torn by a power cut, or damaged by the disk.
//!
//! Invariant: all processes that such a record describes end before the runtime serves its first
//! call. The caller sees no sandbox or container and makes another one, which must never run beside
//! the first. A network plugin may take minutes, so a sandbox's network, mounts and files may be
//! released later. Then the record is moved to `unreadable/`, so that an administrator can find the
//! cause.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use linux::cgroup::{Cgroup, Hierarchies};
use linux::netns::NetNs;
use linux::process;
use serde_json::Value;

use crate::blocking::blocking;
use crate::calls::sandbox;
use crate::cni::{self, Attachment};
use crate::disk::record::{self, Found};
use crate::error::{Error, Result, chain};
use crate::runtime::Runtime;
use crate::runtime::state::ContainerRecord;
use crate::shim_client::{self, ANSWER_DEADLINE};
use crate::spec::pod::POD_INTERFACE;

const ENDED: &str = "what it described was ended";

/// How long a process may take to end after SIGKILL.
const END_DEADLINE: Duration = Duration::from_secs(5);

/// A sandbox with an unreadable record, after the end of its processes.
#[derive(Debug)]
pub(crate) struct Remains {
    pub(crate) id: String,
    dir: PathBuf,
    why: Error,
    /// Of processes that did not end.
    errors: Vec<Error>,
}

impl Remains {
    /// For a report before [`release`] has returned.
    pub(crate) fn pending(&self) -> String {
        format!(
            "{}: the network, mounts and files of what it described are still being removed",
            chain(&self.why)
        )
    }
}

/// Ends the processes of a sandbox with an unreadable record. [`release`] must follow.
pub(crate) async fn end_sandbox(runtime: &Arc<Runtime>, id: &str, dir: &Path, why: Error) -> Remains {
    tracing::error!(sandbox = id, error = %chain(&why), "unreadable record: ending its processes");
    let errors = end_processes(runtime, id, dir).await;
    Remains { id: id.to_owned(), dir: dir.to_owned(), why, errors }
}

/// Releases the network and the mounts of such a sandbox, and removes it. Parts that cannot be ended or
/// released stay, and the next start continues.
pub(crate) async fn release(runtime: &Arc<Runtime>, remains: Remains) -> Result<()> {
    let Remains { id, dir, why, mut errors } = remains;
    // Before the network: an image layer that no container has mounted may be removed meanwhile.
    let below = dir.clone();
    errors.extend(blocking("unmount", move || unmount_below(&below)).await.err());
    let detached = detach(runtime, &id).await;
    // As always, the namespace stays until DEL has succeeded.
    let netns = detached.is_empty().then(|| runtime.netns.entry(&id));
    errors.extend(detached);
    let rt = Arc::clone(runtime);
    blocking("release sandbox", move || {
        errors.extend(sandbox::release_mounts(&rt, &id, netns.as_deref()).err());
        if errors.is_empty() {
            rt.set_aside(&dir.join("sandbox.json"), &format!("sandbox-{id}.json"), &why, ENDED);
            return rt.trash.remove_later(&dir);
        }
        rt.report_unreadable(format!("{}: what it described did not end cleanly", chain(&why)));
        let first = errors.remove(0);
        Err(first.after_rollback(errors))
    })
    .await
}

/// [`end_sandbox`] and [`release`] for one container of an intact sandbox. `pid` comes from the shim.
pub(crate) fn end_container(
    runtime: &Runtime,
    id: &str,
    dir: &Path,
    pid: Option<i32>,
    why: &Error,
) -> Result<()> {
    tracing::error!(container_id = id, error = %chain(why), "unreadable record: ending its processes");
    let ended = pid.map_or(Ok(()), end_process).and(end_group(dir)).and(unmount_below(dir));
    if let Err(error) = ended {
        runtime.report_unreadable(format!("{}: what it described did not end cleanly", chain(why)));
        return Err(error);
    }
    runtime.set_aside(&dir.join("container.json"), &format!("container-{id}.json"), why, ENDED);
    runtime.trash.remove_later(dir)
}

async fn end_processes(runtime: &Arc<Runtime>, id: &str, dir: &Path) -> Vec<Error> {
    let mut pids = BTreeSet::new();
    if let Ok((_shim, containers)) = shim_client::connect(id, dir, runtime.listener(), ANSWER_DEADLINE).await
    {
        pids.extend(containers.values().filter(|status| status.exit.is_none()).map(|status| status.pid));
    }
    let mut errors = Vec::new();
    // The holder of the pod's PID namespace has a group beside its containers.
    let mut holders = BTreeSet::new();
    let containers = match record::examine_names(&dir.join("containers")) {
        Ok(Found::Intact(names)) => names,
        Ok(Found::Missing | Found::Damaged(_)) => Vec::new(),
        Err(error) => {
            errors.push(error);
            Vec::new()
        }
    };
    for container in containers {
        let dir = dir.join("containers").join(container);
        match group_of(&dir) {
            Ok(path) => holders.extend(path.map(|path| path.with_file_name(id))),
            Err(error) => errors.push(error),
        }
        errors.extend(end_group(&dir).err());
    }
    for pid in pids {
        errors.extend(end_process(pid).err());
    }
    // The shim last: it reaps its containers.
    match shim_client::shims_of(dir) {
        Ok(shims) => errors.extend(shims.iter().filter_map(|shim| end(shim).err())),
        Err(error) => errors.push(error),
    }
    let hierarchies = Hierarchies::known();
    for path in holders {
        let ended = hierarchies.as_ref().map(|found| Cgroup::find(found, &path).end(END_DEADLINE));
        errors.extend(ended.ok().and_then(|ended| ended.err()).map(Error::from));
    }
    errors
}

/// The group of the container in `dir`, named in its record or else in its bundle.
fn group_of(dir: &Path) -> Result<Option<PathBuf>> {
    let path = match record::examine::<ContainerRecord>(&dir.join("container.json"))? {
        Found::Intact(found) => Some(found.cgroup_path),
        Found::Missing | Found::Damaged(_) => match record::examine::<Value>(&dir.join("config.json"))? {
            Found::Intact(spec) => spec["linux"]["cgroupsPath"].as_str().map(PathBuf::from),
            Found::Missing | Found::Damaged(_) => None,
        },
    };
    // A container's group has the container's name: no other group is ever ended.
    Ok(path.filter(|path| path.file_name() == dir.file_name()))
}

fn end_group(dir: &Path) -> Result<()> {
    let Some(path) = group_of(dir)? else { return Ok(()) };
    Ok(Cgroup::find(&Hierarchies::known()?, &path).end(END_DEADLINE)?)
}

fn end_process(pid: i32) -> Result<()> {
    process::open_pidfd(pid)?.map_or(Ok(()), |pidfd| end(&pidfd))
}

fn end(pidfd: &OwnedFd) -> Result<()> {
    process::signal_pidfd(pidfd, libc::SIGKILL)?;
    process::wait_for_end(pidfd, END_DEADLINE)?;
    Ok(())
}

/// Calls DEL for every cached result of ADD of the sandbox. If there is none, calls DEL for the
/// configured network: an ADD may have been interrupted, or its result torn.
async fn detach(runtime: &Runtime, id: &str) -> Vec<Error> {
    let without_result = |ifname| Attachment {
        container_id: id.to_owned(),
        netns: Some(runtime.root_dir.join("netns").join(id)).filter(|path| NetNs::open(path).is_ok()),
        ifname,
        args: vec![("IgnoreUnknown".to_owned(), "1".to_owned())],
        capabilities: serde_json::Map::new(),
    };
    let mut attachments = runtime.cni.attachments_of(id, POD_INTERFACE);
    if attachments.is_empty()
        && let Ok(network) = runtime.cni.network()
    {
        attachments.push((network, without_result(POD_INTERFACE)));
    }
    attachments.push((cni::loopback(), without_result("lo")));
    let mut errors = Vec::new();
    for (list, attachment) in attachments {
        errors.extend(runtime.cni.delete(&list, &attachment).await.err());
    }
    errors
}

/// Unmounts everything in a directory that only the runtime mounts in, the last mount first.
fn unmount_below(dir: &Path) -> Result<()> {
    let mounts = linux::mountinfo::read()?;
    let below = mounts.iter().rev().map(|mount| &mount.mount_point).filter(|point| point.starts_with(dir));
    Ok(below.into_iter().try_for_each(|point| linux::mount::unmount_if_mounted(point))?)
}
