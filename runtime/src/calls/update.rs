//! UpdateContainerResources and UpdatePodSandboxResources.
//!
//! Invariant: after an error the former limits count, in the kernel and in the records; only a file of
//! `unified` that was not set before keeps what it got.

use std::collections::HashMap;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::Arc;

use linux::cgroup::{Cgroup, Hierarchies, Limits};
use proto::cri::{
    LinuxContainerResources, UpdateContainerResourcesRequest, UpdatePodSandboxResourcesRequest,
};
use serde_json::{Value, json};

use crate::blocking::blocking;
use crate::disk::record;
use crate::error::{Error, Result};
use crate::launcher;
use crate::runtime::Runtime;
use crate::runtime::state::{Container, RunState, UpdatedResources};
use crate::spec;

/// Limits of the maps and lists, which grow with each update.
const MAX_UNIFIED: usize = 128;
const MAX_HUGEPAGE_SIZES: usize = 16;

/// UpdateContainerResources: fields that are not set stay as they are. A container that has not
/// started has the limits from its start on.
pub(crate) async fn container(
    runtime: &Arc<Runtime>,
    request: UpdateContainerResourcesRequest,
) -> Result<()> {
    let container = runtime.container(&request.container_id)?;
    let asked = request.linux.ok_or_else(|| Error::invalid("linux", "missing"))?;
    let sandbox = runtime.sandbox(&container.record.sandbox_id)?;
    let _changing = sandbox.changing.lock().await;
    let state = container.state();
    if let RunState::Exited(_) = state {
        let (id, state) = (container.id.clone(), state.cri().as_str_name().to_owned());
        return Err(Error::WrongState { kind: "container", id, state, wanted: "created or running" });
    }
    let former = container.resources().unwrap_or_default();
    let wanted = merged(&former, &asked)?;
    let dir = sandbox.container_dir(&container.id);
    let (rt, changed) = (Arc::clone(runtime), Arc::clone(&container));
    let is_running = state.is_running();
    blocking("update limits", move || change(&rt, &changed, &dir, (&former, wanted), is_running)).await
}

fn change(
    runtime: &Runtime,
    container: &Container,
    dir: &Path,
    (former, wanted): (&LinuxContainerResources, LinuxContainerResources),
    is_running: bool,
) -> Result<()> {
    let config_path = dir.join("config.json");
    let mut config: Value = record::load(&config_path)?;
    let limits_before = launcher::limits_of(&spec::parsed(&config_path, &config)?);
    spec::limits_json(&mut config["linux"]["resources"], &wanted, runtime.cgroups);
    let mut warnings = Vec::new();
    if wanted.oom_score_adj != former.oom_score_adj {
        config["process"]["oomScoreAdj"] = json!(spec::oom_score_adj(wanted.oom_score_adj, &mut warnings));
    }
    let limits = launcher::limits_of(&spec::parsed(&config_path, &config)?);
    let new_score = (wanted.oom_score_adj != former.oom_score_adj).then_some(wanted.oom_score_adj);
    let updated = UpdatedResources { resources: wanted };
    let save = || {
        let path = dir.join(UpdatedResources::FILE);
        record::save(&path, &updated)?;
        record::save(&config_path, &config).map_err(|cause| {
            let undone = record::save(&path, &UpdatedResources { resources: former.clone() });
            cause.after_rollback(undone.err().into_iter().collect())
        })
    };
    if is_running {
        let hierarchies = Hierarchies::detect()?;
        let path = &container.record.cgroup_path;
        let former_limits = restored(&limits_before, &limits, &hierarchies.cpuset(path));
        let back = |cause: Error| {
            let mut undone: Vec<Error> = Vec::new();
            undone.extend(
                hierarchies.update(path, &difference(&limits, &former_limits)).err().map(Error::from),
            );
            if new_score.is_some() {
                undone.extend(set_oom_score_adj(&hierarchies, container, former.oom_score_adj).err());
            }
            cause.after_rollback(undone)
        };
        let unmet = hierarchies.update(path, &difference(&limits_before, &limits));
        warnings.extend(unmet.map_err(Error::from).map_err(back)?);
        if let Some(score) = new_score {
            warnings.extend(set_oom_score_adj(&hierarchies, container, score).map_err(back)?);
        }
        save().map_err(back)?;
    } else {
        save()?;
    }
    container.set_resources(updated);
    for warning in warnings {
        tracing::warn!(container_id = container.id, "{warning}");
    }
    Ok(())
}

/// The limits after an update that asks for `asked`.
fn merged(
    former: &LinuxContainerResources,
    asked: &LinuxContainerResources,
) -> Result<LinuxContainerResources> {
    let mut merged = former.clone();
    let numbers = [
        (&mut merged.cpu_period, asked.cpu_period),
        (&mut merged.cpu_quota, asked.cpu_quota),
        (&mut merged.cpu_shares, asked.cpu_shares),
        (&mut merged.memory_limit_in_bytes, asked.memory_limit_in_bytes),
        (&mut merged.memory_swap_limit_in_bytes, asked.memory_swap_limit_in_bytes),
        (&mut merged.oom_score_adj, asked.oom_score_adj),
    ];
    for (number, asked) in numbers {
        if asked != 0 {
            *number = asked;
        }
    }
    for (text, asked) in
        [(&mut merged.cpuset_cpus, &asked.cpuset_cpus), (&mut merged.cpuset_mems, &asked.cpuset_mems)]
    {
        if !asked.is_empty() {
            asked.clone_into(text);
        }
    }
    for asked in &asked.hugepage_limits {
        merged.hugepage_limits.retain(|known| known.page_size != asked.page_size);
        merged.hugepage_limits.push(asked.clone());
    }
    merged.unified.extend(asked.unified.clone());
    keep_swap(former, asked, &mut merged);
    for (field, length, most) in [
        ("linux.unified", merged.unified.len(), MAX_UNIFIED),
        ("linux.hugepage_limits", merged.hugepage_limits.len(), MAX_HUGEPAGE_SIZES),
    ] {
        if length > most {
            return Err(Error::invalid(field, format!("{length} entries, more than {most}")));
        }
    }
    spec::check_limits("linux", &merged)?;
    Ok(merged)
}

/// If only memory changes, the container may use as much swap as before.
fn keep_swap(
    former: &LinuxContainerResources,
    asked: &LinuxContainerResources,
    merged: &mut LinuxContainerResources,
) {
    let both = former.memory_swap_limit_in_bytes;
    if asked.memory_swap_limit_in_bytes == 0 && asked.memory_limit_in_bytes > 0 && both > 0 {
        let swap = both.saturating_sub(former.memory_limit_in_bytes).max(0);
        merged.memory_swap_limit_in_bytes = asked.memory_limit_in_bytes.saturating_add(swap);
    }
}

/// What of `after` differs from `before`.
fn difference(before: &Limits, after: &Limits) -> Limits {
    let memory_differs = (before.memory_bytes, before.memory_and_swap_bytes)
        != (after.memory_bytes, after.memory_and_swap_bytes);
    let quota_differs = (before.cpu_quota, before.cpu_period) != (after.cpu_quota, after.cpu_period);
    let known: HashMap<_, _> = before.unified.iter().map(|(file, value)| (file, value)).collect();
    Limits {
        memory_bytes: after.memory_bytes.filter(|_| memory_differs),
        memory_and_swap_bytes: after.memory_and_swap_bytes.filter(|_| memory_differs),
        cpu_shares: after.cpu_shares.filter(|_| before.cpu_shares != after.cpu_shares),
        cpu_quota: after.cpu_quota.filter(|_| quota_differs),
        cpu_period: after.cpu_period.filter(|_| quota_differs),
        pids: after.pids.filter(|_| before.pids != after.pids),
        cpuset_cpus: after.cpuset_cpus.clone().filter(|_| before.cpuset_cpus != after.cpuset_cpus),
        cpuset_mems: after.cpuset_mems.clone().filter(|_| before.cpuset_mems != after.cpuset_mems),
        hugepages: after
            .hugepages
            .iter()
            .filter(|limit| !before.hugepages.contains(limit))
            .cloned()
            .collect(),
        unified: after
            .unified
            .iter()
            .filter(|(file, value)| known.get(file).is_none_or(|known| *known != value))
            .cloned()
            .collect(),
    }
}

/// Limits that undo an update to `after`: where there was none, the kernel's default, or what the
/// group had (`cpuset`).
fn restored(before: &Limits, after: &Limits, cpuset: &Limits) -> Limits {
    let has = |size: &String| before.hugepages.iter().any(|(known, _)| known == size);
    let unlimited = after.hugepages.iter().filter(|(size, _)| !has(size));
    let unlimited = unlimited.map(|(size, _)| (size.clone(), u64::MAX));
    Limits {
        cpuset_cpus: cpuset.cpuset_cpus.clone(),
        cpuset_mems: cpuset.cpuset_mems.clone(),
        hugepages: before.hugepages.iter().cloned().chain(unlimited).collect(),
        memory_bytes: before.memory_bytes.or(Some(-1)),
        memory_and_swap_bytes: before.memory_and_swap_bytes.or(Some(-1)),
        cpu_shares: before.cpu_shares.or(Some(1024)),
        cpu_quota: before.cpu_quota.or(Some(-1)),
        pids: before.pids.or(Some(-1)),
        ..before.clone()
    }
}

/// Sets the value of every process in the container, also of those that its processes start
/// meanwhile. Returns what the machine did not allow.
fn set_oom_score_adj(
    hierarchies: &Hierarchies,
    container: &Container,
    wanted: i64,
) -> Result<Option<String>> {
    let group = Cgroup::find(hierarchies, &container.record.cgroup_path);
    let mut refused = None;
    // A process forked before the first round has the former value; its parent had it then.
    for _round in 0..2 {
        for pid in group.pids()? {
            let path = Path::new("/proc").join(pid.to_string());
            let Ok(mut value) = std::fs::File::options().write(true).open(path.join("oom_score_adj")) else {
                continue; // it has ended
            };
            // Opened before this look: a process that has got the number since is not written to.
            let groups = linux::procfs::read(&path.join("cgroup")).unwrap_or_default();
            if !groups.contains(&container.id) {
                continue;
            }
            match value.write_all(wanted.clamp(-1000, 1000).to_string().as_bytes()) {
                Err(e) if e.kind() == ErrorKind::PermissionDenied => {
                    let lacks = "lowering it takes CAP_SYS_RESOURCE";
                    refused = Some(format!("oom_score_adj: not {wanted} for every process, {lacks}"));
                }
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => {}
                written => written.map_err(|e| Error::io("write", &path.join("oom_score_adj"), e))?,
            }
        }
    }
    Ok(refused)
}

/// UpdatePodSandboxResources: kubelet limits the pod's group itself. They are recorded.
pub(crate) async fn sandbox(runtime: &Arc<Runtime>, request: UpdatePodSandboxResourcesRequest) -> Result<()> {
    let UpdatePodSandboxResourcesRequest { pod_sandbox_id, overhead, resources } = request;
    let sandbox = runtime.sandbox(&pod_sandbox_id)?;
    let _changing = sandbox.changing.lock().await;
    let changed = Arc::clone(&sandbox);
    blocking("record limits", move || {
        changed.update(|record| {
            let linux = record.config.linux.get_or_insert_default();
            linux.overhead = overhead.or(linux.overhead.take());
            linux.resources = resources.or(linux.resources.take());
        })
    })
    .await
}

#[cfg(test)]
mod tests {
    use proto::cri::HugepageLimit;

    use super::*;

    fn resources(change: impl FnOnce(&mut LinuxContainerResources)) -> LinuxContainerResources {
        let mut resources = LinuxContainerResources::default();
        change(&mut resources);
        resources
    }

    #[test]
    fn what_is_not_asked_for_stays() {
        let page = |page_size: &str, limit| HugepageLimit { page_size: page_size.to_owned(), limit };
        let former = resources(|r| {
            (r.cpu_shares, r.cpu_quota, r.cpu_period) = (102, 50_000, 200_000);
            r.cpuset_cpus = "0-1".to_owned();
            r.hugepage_limits = vec![page("2MB", 4), page("1GB", 5)];
            r.unified.insert("memory.high".to_owned(), "7".to_owned());
        });
        let asked = resources(|r| {
            r.cpu_quota = 80_000;
            r.hugepage_limits = vec![page("2MB", 6)];
            r.unified.insert("memory.low".to_owned(), "1".to_owned());
        });
        let found = merged(&former, &asked).unwrap();
        assert_eq!((found.cpu_shares, found.cpu_quota, found.cpu_period), (102, 80_000, 200_000));
        assert_eq!(found.cpuset_cpus, "0-1");
        assert_eq!(found.hugepage_limits, [page("1GB", 5), page("2MB", 6)]);
        assert_eq!(found.unified.len(), 2);
    }

    #[test]
    fn swap_stays_if_only_memory_changes_and_never_counts_less_than_memory() {
        let former = resources(|r| (r.memory_limit_in_bytes, r.memory_swap_limit_in_bytes) = (100, 130));
        let found = merged(&former, &resources(|r| r.memory_limit_in_bytes = 500)).unwrap();
        assert_eq!((found.memory_limit_in_bytes, found.memory_swap_limit_in_bytes), (500, 530));
        let wrong = resources(|r| (r.memory_limit_in_bytes, r.memory_swap_limit_in_bytes) = (500, 400));
        let text = merged(&former, &wrong).unwrap_err().to_string();
        assert!(text.starts_with("linux.memory_swap_limit_in_bytes: 400 is below"), "{text}");
    }

    #[test]
    fn updates_without_end_do_not_fill_the_record() {
        let many = resources(|r| {
            r.unified = (0..=MAX_UNIFIED).map(|n| (format!("memory.x{n}"), String::new())).collect();
        });
        let text = merged(&LinuxContainerResources::default(), &many).unwrap_err().to_string();
        assert_eq!(text, "linux.unified: 129 entries, more than 128");
    }

    #[test]
    fn only_what_differs_is_written_with_what_belongs_to_it() {
        let before = Limits { cpu_quota: Some(1), cpu_period: Some(2), pids: Some(3), ..Limits::default() };
        let after = Limits { cpu_quota: Some(9), ..before.clone() };
        let wanted = Limits { cpu_quota: Some(9), cpu_period: Some(2), ..Limits::default() };
        assert_eq!(difference(&before, &after), wanted);
        assert_eq!(difference(&before, &before), Limits::default());
        let after = Limits { memory_bytes: Some(5), hugepages: vec![("2MB".into(), 7)], ..before.clone() };
        let cpuset = Limits { cpuset_cpus: Some("0-3".into()), ..Limits::default() };
        let back = difference(&after, &restored(&before, &after, &cpuset));
        assert_eq!((back.memory_bytes, back.pids), (Some(-1), None));
        assert_eq!(back.cpuset_cpus.as_deref(), Some("0-3"));
        assert_eq!(back.hugepages, [("2MB".to_owned(), u64::MAX)]);
    }
}
