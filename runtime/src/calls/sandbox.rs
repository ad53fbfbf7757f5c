//! A pod's sandbox: network namespace, shim (which holds ipc and uts), cgroup parent, and the files
//! that all its containers see.
//!
//! Invariant: [`take_down`] undoes any prefix of [`run`], any number of times. A failed `run` and a
//! stop use the same code.

use std::path::Path;
use std::sync::Arc;

use linux::mount::MountFlags;
use linux::netns;
use proto::cri::{ContainerEventType, DnsConfig, PodSandboxConfig, Protocol, RunPodSandboxRequest};
use proto::mount_pod::NETWORK_ANNOTATION;
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;

use crate::blocking::blocking;
use crate::calls::container;
use crate::calls::namespaces;
use crate::cni::{self, Attachment};
use crate::disk::record::{self, new_id};
use crate::error::{Error, Result};
use crate::runtime::Runtime;
use crate::runtime::group;
use crate::runtime::state::{Phase, Sandbox, SandboxRecord, former_shm};
use crate::shim::protocol::{ShimConfig, now};
use crate::shim_client::{self, ANSWER_DEADLINE, START_DEADLINE};
use crate::spec::bandwidth;
use crate::spec::pod::{POD_INTERFACE, cgroup_parent, hostname, sharing};

/// RunPodSandbox: returns the new sandbox's id. Leaves nothing after a failure.
pub(crate) async fn run(runtime: &Arc<Runtime>, request: RunPodSandboxRequest) -> Result<String> {
    let config = request.config.ok_or_else(|| Error::invalid("config", "missing"))?;
    check_handler(&request.runtime_handler)?;
    check(&config)?;
    let id = new_id()?;
    let dir = runtime.root_dir.join("sandboxes").join(&id);
    let netns = runtime.netns.entry(&id);
    let record = SandboxRecord {
        id: id.clone(),
        phase: Phase::Creating,
        created_at: now(),
        runtime_handler: request.runtime_handler,
        netns: (!sharing(&config).host_network).then_some(netns),
        config,
        boot_id: runtime.boot_id.clone(),
        network: None,
        ips: Vec::new(),
        shim: None,
    };
    let sandbox = Arc::new(Sandbox::new(dir, record));
    let _changing = sandbox.changing.lock().await;
    reserve_name(runtime, &sandbox)?;
    if let Err(cause) = set_up(runtime, &sandbox).await {
        let mut rollback = Vec::new();
        rollback.extend(take_down(runtime, &sandbox).await.err());
        if rollback.is_empty() {
            rollback.extend(forget(runtime, &sandbox).err());
        }
        return Err(cause.after_rollback(rollback));
    }
    runtime.announce(&id, &id, ContainerEventType::ContainerCreatedEvent);
    runtime.announce(&id, &id, ContainerEventType::ContainerStartedEvent);
    Ok(id)
}

/// A RuntimeClass names a handler for a reason, such as a kernel of the pod's own: another one must not take its
/// place.
fn check_handler(handler: &str) -> Result<()> {
    if handler.is_empty() {
        return Ok(());
    }
    Err(Error::invalid(
        "runtime_handler",
        format!("{handler:?}: this runtime has only the default one, \"\""),
    ))
}

fn check(config: &PodSandboxConfig) -> Result<()> {
    let metadata = config.metadata.as_ref().ok_or_else(|| Error::invalid("config.metadata", "missing"))?;
    for (field, value) in
        [("name", &metadata.name), ("uid", &metadata.uid), ("namespace", &metadata.namespace)]
    {
        if value.is_empty() {
            return Err(Error::invalid(format!("config.metadata.{field}"), "empty"));
        }
    }
    let linux = config.linux.clone().unwrap_or_default();
    let parent = Path::new(&linux.cgroup_parent);
    let plain = parent.components().all(|c| !matches!(c, std::path::Component::ParentDir));
    let acceptable = linux.cgroup_parent.is_empty() || (parent.is_absolute() && plain);
    if !acceptable {
        return Err(Error::invalid(
            "config.linux.cgroup_parent",
            format!(
                "{:?} is not an absolute cgroup path (this runtime's cgroup driver is cgroupfs)",
                linux.cgroup_parent
            ),
        ));
    }
    namespaces::check(config)?;
    if !sharing(config).host_network {
        bandwidth::capability(config)?;
    }
    match config.annotations.get(NETWORK_ANNOTATION).map(String::as_str) {
        None | Some("none" | "") => Ok(()),
        Some(other) => Err(Error::invalid(
            format!("config.annotations[{NETWORK_ANNOTATION}]"),
            format!("{other:?}: only \"none\" is known"),
        )),
    }
}

/// Only one sandbox may exist for each pod attempt.
fn reserve_name(runtime: &Runtime, sandbox: &Arc<Sandbox>) -> Result<()> {
    let Some(known) = runtime.insert_new_sandbox(sandbox) else { return Ok(()) };
    let m = sandbox.metadata.clone().unwrap_or_default();
    let name = format!("{}_{}_{}_{}", m.name, m.namespace, m.uid, m.attempt);
    Err(Error::AlreadyExists { kind: "pod sandbox", name, id: known.id.clone() })
}

async fn set_up(runtime: &Arc<Runtime>, sandbox: &Arc<Sandbox>) -> Result<()> {
    let record = sandbox.record();
    let sb = Arc::clone(sandbox);
    blocking("prepare sandbox", move || make_dir(&sb)).await?;
    let own_network = record.netns.is_some();
    let shim_config = ShimConfig {
        hostname: own_network.then(|| hostname(&record.config)),
        own_ipc: !sharing(&record.config).host_ipc,
        oci_runtime: runtime.oci_runtime.clone(),
        log_ceiling: runtime.log_ceiling,
        cgroup_mounts: String::from_utf8(runtime.cgroup_mounts.clone()).ok(),
    };
    let wants_cni =
        own_network && record.config.annotations.get(NETWORK_ANNOTATION).is_none_or(|v| v != "none");
    let network = async {
        let (rt, sb) = (Arc::clone(runtime), Arc::clone(sandbox));
        blocking("make network namespace", move || make_netns(&rt, &sb)).await?;
        if !wants_cni {
            return Ok(Vec::new());
        }
        let list = runtime.shared_network(runtime.cni.network()?);
        // Before ADD: whatever happens then, DEL has the arguments.
        sandbox.update(|r| r.network = Some(list))?;
        attach(runtime, &sandbox.record()).await
    };
    let shim = async {
        let sb = Arc::clone(sandbox);
        // A spawn waits for the shim's execve(2). Meanwhile the network's plugins start.
        let start = blocking("start shim", move || {
            let process = shim_client::start(&sb.id, &sb.dir, &shim_config)?;
            sb.update(|r| r.shim = Some(process))
        });
        start.await?;
        // The shim answers only after it has entered its namespaces.
        let (shim, _) =
            shim_client::connect(&sandbox.id, &sandbox.dir, runtime.listener(), START_DEADLINE).await?;
        sandbox.set_shim(Some(shim));
        Ok::<(), Error>(())
    };
    let (rt, sb) = (Arc::clone(runtime), Arc::clone(sandbox));
    let for_containers = blocking("prepare sandbox for containers", move || prepare_for_containers(&rt, &sb));
    let (ips, shim, prepared) = tokio::join!(network, shim, for_containers);
    let (ips, (), ()) = (ips?, shim?, prepared?);
    sandbox.update(|r| (r.phase, r.ips) = (Phase::Ready, ips))
}

/// Makes what must exist before any process is started.
fn make_dir(sandbox: &Sandbox) -> Result<()> {
    record::ensure_dir(&sandbox.dir.join("containers"))?;
    sandbox.update(|_| ())
}

/// While the shim starts, which does not need it.
fn make_netns(runtime: &Runtime, sandbox: &Sandbox) -> Result<()> {
    match &sandbox.record().netns {
        Some(path) => runtime.netns.use_for(|| Ok(netns::create_persistent(path).map(drop)?)),
        None => Ok(()),
    }
}

/// Makes groups, files and mounts that only containers need, while plugins and shim start.
fn prepare_for_containers(runtime: &Runtime, sandbox: &Sandbox) -> Result<()> {
    let record = sandbox.record();
    runtime.ensure_cgroup_parent(&cgroup_parent(&record.config))?;
    let files = [
        ("resolv.conf", resolv_conf(record.config.dns_config.as_ref())?),
        ("hostname", format!("{}\n", hostname(&record.config))),
        (
            "hosts",
            std::fs::read_to_string("/etc/hosts").unwrap_or_else(|_| "127.0.0.1\tlocalhost\n".to_owned()),
        ),
    ];
    for (name, content) in files {
        let path = sandbox.dir.join(name);
        std::fs::write(&path, content).map_err(|e| Error::io("write", &path, e))?;
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .map_err(|e| Error::io("set mode of", &path, e))?;
    }
    if !sharing(&record.config).host_ipc {
        runtime.shm.use_for(|| mount_shm(&runtime.shm.entry(&sandbox.id)))?;
    }
    Ok(())
}

fn mount_shm(dir: &Path) -> Result<()> {
    record::ensure_dir(dir)?;
    let flags = MountFlags { nosuid: true, nodev: true, noexec: true, ..MountFlags::default() };
    Ok(linux::mount::mount_fs("tmpfs", "shm", dir, flags, "mode=1777,size=65536k")?)
}

/// Attaches lo and eth0 at the same time, as containerd does. Returns the pod's addresses.
async fn attach(runtime: &Runtime, record: &SandboxRecord) -> Result<Vec<String>> {
    let Some(list) = &record.network else { return Ok(Vec::new()) };
    let loopback = cni::loopback();
    let lo = attachment(record, "lo");
    let eth0 = attachment(record, POD_INTERFACE);
    // The one that takes longer begins first.
    let (eth0, lo) = tokio::join!(runtime.cni.add(list, &eth0), runtime.cni.add(&loopback, &lo));
    lo?;
    let ips = cni::addresses(&eth0?, POD_INTERFACE);
    if ips.is_empty() {
        return Err(Error::NetworkConfig {
            problem: format!("network {:?} ({}) gave the pod no address", list.name, list.file.display()),
        });
    }
    Ok(ips)
}

fn attachment(record: &SandboxRecord, ifname: &'static str) -> Attachment {
    let metadata = record.config.metadata.clone().unwrap_or_default();
    let args = [
        ("IgnoreUnknown", "1".to_owned()),
        ("K8S_POD_NAMESPACE", metadata.namespace),
        ("K8S_POD_NAME", metadata.name),
        ("K8S_POD_INFRA_CONTAINER_ID", record.id.clone()),
        ("K8S_POD_UID", metadata.uid),
    ];
    Attachment {
        container_id: record.id.clone(),
        netns: record.netns.clone().filter(|path| netns::NetNs::open(path).is_ok()),
        ifname,
        args: args.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
        capabilities: if ifname == POD_INTERFACE { capabilities(&record.config) } else { Map::new() },
    }
}

/// The capability arguments that containerd passes too.
fn capabilities(config: &PodSandboxConfig) -> Map<String, Value> {
    let mut offered = Map::new();
    let ports: Vec<Value> = config
        .port_mappings
        .iter()
        .filter(|p| p.host_port > 0)
        .map(|p| {
            let protocol = match p.protocol() {
                Protocol::Tcp => "tcp",
                Protocol::Udp => "udp",
                Protocol::Sctp => "sctp",
            };
            json!({"hostPort": p.host_port, "containerPort": p.container_port, "protocol": protocol, "hostIP": p.host_ip})
        })
        .collect();
    if !ports.is_empty() {
        offered.insert("portMappings".to_owned(), Value::Array(ports));
    }
    if let Some(dns) = &config.dns_config {
        let dns = json!({"servers": dns.servers, "searches": dns.searches, "options": dns.options});
        offered.insert("dns".to_owned(), dns);
    }
    if let Some(linux) = config.linux.as_ref().filter(|l| !l.cgroup_parent.is_empty()) {
        offered.insert("cgroupPath".to_owned(), json!(linux.cgroup_parent));
    }
    // A pod of an earlier version may have a value that is refused now.
    if let Ok(Some(limits)) = bandwidth::capability(config) {
        offered.insert("bandwidth".to_owned(), limits);
    }
    offered.insert("io.kubernetes.cri.pod-annotations".to_owned(), json!(config.annotations));
    offered
}

/// StopPodSandbox: releases everything except the directory. Repeating it is a success.
pub(crate) async fn stop(runtime: &Arc<Runtime>, id: &str) -> Result<()> {
    let Some(sandbox) = runtime.find_sandbox(id) else { return Ok(()) };
    let _changing = sandbox.changing.lock().await;
    if sandbox.record().phase == Phase::Stopped {
        return Ok(());
    }
    take_down(runtime, &sandbox).await?;
    runtime.announce(&sandbox.id, &sandbox.id, ContainerEventType::ContainerStoppedEvent);
    Ok(())
}

/// RemovePodSandbox: stops the sandbox if necessary and removes its containers. Leaves nothing.
pub(crate) async fn remove(runtime: &Arc<Runtime>, id: &str) -> Result<()> {
    let Some(sandbox) = runtime.find_sandbox(id) else { return Ok(()) };
    stop(runtime, &sandbox.id).await?;
    for container in runtime.containers_of(&sandbox.id) {
        container::remove(runtime, &container.id).await?;
    }
    let _changing = sandbox.changing.lock().await;
    let (rt, sb) = (Arc::clone(runtime), Arc::clone(&sandbox));
    blocking("remove sandbox", move || forget(&rt, &sb)).await?;
    runtime.announce_removed(Arc::clone(&sandbox));
    Ok(())
}

/// Kills its processes and releases its resources. Continues after a failure, so that one stuck
/// part does not keep the others.
pub(crate) async fn take_down(runtime: &Arc<Runtime>, sandbox: &Arc<Sandbox>) -> Result<()> {
    let mut record = sandbox.record();
    if record.phase == Phase::Ready {
        // From here on, the end of the shim is expected.
        sandbox.update_on_the_way_down(|r| r.phase = Phase::Broken);
        record.phase = Phase::Broken;
    }
    let mut errors = Vec::new();
    let containers = runtime.containers_of(&sandbox.id);
    let mut kills = JoinSet::new();
    for container in &containers {
        let (runtime, container) = (Arc::clone(runtime), Arc::clone(container));
        kills.spawn(async move { container::kill(&runtime, &container).await });
    }
    while let Some(killed) = kills.join_next().await {
        errors.extend(killed.unwrap_or(Err(Error::Task { task: "kill" })).err());
    }
    let shim = async {
        let result = end_shim(runtime, sandbox, &record).await;
        if result.is_ok() {
            sandbox.set_shim(None);
        }
        result
    };
    let (detached, shim) = tokio::join!(detach(runtime, &record), shim);
    let network_gone = detached.is_ok();
    errors.extend([detached, shim].into_iter().filter_map(Result::err));
    let dir = sandbox.dir.clone();
    let holder = namespaces::holders_group(&record);
    // The namespace stays until DEL succeeds: a retry may need it.
    let netns = record.netns.clone().filter(|_| network_gone);
    let (rt, id) = (Arc::clone(runtime), sandbox.id.clone());
    let released = blocking("release sandbox", move || {
        // Also for containers that have exited: their start may have been abandoned.
        let ended = containers.iter().map(|container| group::kill(&container.record.cgroup_path));
        let ended = ended.fold(Ok(()), Result::and).and(group::kill(&holder));
        release(&rt, &id, &dir, netns.as_deref()).and(ended)
    });
    errors.extend(released.await.err());
    if errors.is_empty() && sandbox.dir.is_dir() {
        sandbox.update_on_the_way_down(|r| (r.phase, r.shim) = (Phase::Stopped, None));
        let rt = Arc::clone(runtime);
        let removed = blocking("remove cgroups", move || {
            rt.remove_unused_cgroups();
            Ok(())
        });
        errors.extend(removed.await.err());
    }
    if errors.is_empty() {
        return Ok(());
    }
    let first = errors.remove(0);
    Err(first.after_rollback(errors))
}

async fn detach(runtime: &Runtime, record: &SandboxRecord) -> Result<()> {
    let Some(list) = &record.network else { return Ok(()) };
    let loopback = cni::loopback();
    let (lo, eth0) = (attachment(record, "lo"), attachment(record, POD_INTERFACE));
    // lo needs no DEL once its namespace is gone, but its cached result must be removed.
    let (lo, eth0) =
        tokio::join!(runtime.cni.delete(&loopback, &lo), runtime.cni.delete_attempted(list, &eth0));
    eth0?;
    lo
}

async fn end_shim(runtime: &Runtime, sandbox: &Sandbox, record: &SandboxRecord) -> Result<()> {
    if let Some(shim) = sandbox.shim() {
        return shim.shut_down().await;
    }
    if record.boot_id != runtime.boot_id {
        return Ok(());
    }
    // If the runtime was killed just after it started the shim, no record has its pid.
    let dialled = shim_client::connect(&sandbox.id, &sandbox.dir, runtime.listener(), ANSWER_DEADLINE);
    if let Ok((shim, _)) = dialled.await {
        return shim.shut_down().await;
    }
    let silent = match record.shim {
        Some(process) => process.open()?.into_iter().collect(),
        None => {
            let dir = sandbox.dir.clone();
            blocking("find shim", move || shim_client::shims_of(&dir)).await?
        }
    };
    for pidfd in silent {
        linux::process::signal_pidfd(&pidfd, libc::SIGKILL)?;
        shim_client::wait_for_end(&pidfd, std::time::Duration::from_secs(5)).await?;
    }
    Ok(())
}

fn release(runtime: &Runtime, id: &str, dir: &Path, netns: Option<&Path>) -> Result<()> {
    linux::mount::unmount_if_mounted(&former_shm(dir))?;
    release_mounts(runtime, id, netns)?;
    let socket = dir.join("shim.sock");
    match std::fs::remove_file(&socket) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", &socket, e)),
        _ => Ok(()),
    }
}

/// Removes its network namespace, if that is given, and its /dev/shm.
pub(crate) fn release_mounts(runtime: &Runtime, id: &str, netns: Option<&Path>) -> Result<()> {
    let shm = release_shm(runtime, &runtime.shm.entry(id));
    let netns = netns.map_or(Ok(()), netns::remove_persistent);
    runtime.netns.unmount_if_unused();
    shm.and(netns.map_err(Error::from))
}

fn release_shm(runtime: &Runtime, dir: &Path) -> Result<()> {
    linux::mount::unmount_if_mounted(dir)?;
    match std::fs::remove_dir(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io("remove", dir, e)),
        _ => runtime.shm.unmount_if_unused(),
    }
    Ok(())
}

/// Removes a sandbox that was taken down, from disk and memory.
pub(crate) fn forget(runtime: &Runtime, sandbox: &Sandbox) -> Result<()> {
    record::remove_tree(&sandbox.dir)?;
    runtime.forget_sandbox(&sandbox.id);
    runtime.remove_unused_cgroups();
    Ok(())
}

/// Cleans up after a shim that ended although its pod should run.
pub(crate) fn shim_is_lost(runtime: Arc<Runtime>, sandbox: Arc<Sandbox>) {
    tokio::spawn(async move {
        tracing::warn!(sandbox = sandbox.id, "the pod's shim ended unexpectedly");
        break_down(&runtime, &sandbox).await;
    });
}

/// Kills the containers of a dead shim, since no process reads their output or reaps them, and
/// marks the sandbox as not ready. The record still has the shim's process, which [`take_down`] ends if
/// it is only silent.
pub(crate) async fn break_down(runtime: &Arc<Runtime>, sandbox: &Arc<Sandbox>) {
    let _changing = sandbox.changing.lock().await;
    sandbox.set_shim(None);
    if sandbox.record().phase != Phase::Ready {
        return;
    }
    sandbox.update_on_the_way_down(|r| r.phase = Phase::Broken);
    container::lose(runtime, sandbox, runtime.containers_of(&sandbox.id)).await;
    runtime.announce(&sandbox.id, &sandbox.id, ContainerEventType::ContainerStoppedEvent);
}

fn resolv_conf(dns: Option<&DnsConfig>) -> Result<String> {
    let Some(dns) = dns.filter(|d| !(d.servers.is_empty() && d.searches.is_empty() && d.options.is_empty()))
    else {
        let host = Path::new("/etc/resolv.conf");
        return match std::fs::read_to_string(host) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("read", host, e)),
            found => Ok(found.unwrap_or_default()),
        };
    };
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text.push_str(&format!("search {}\n", dns.searches.join(" ")));
    }
    for server in &dns.servers {
        text.push_str(&format!("nameserver {server}\n"));
    }
    if !dns.options.is_empty() {
        text.push_str(&format!("options {}\n", dns.options.join(" ")));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_is_written_from_the_request() {
        let dns = DnsConfig {
            servers: vec!["10.0.0.1".into(), "fd00::1".into()],
            searches: vec!["a.svc".into(), "svc".into()],
            options: vec!["ndots:5".into()],
        };
        assert_eq!(
            resolv_conf(Some(&dns)).unwrap(),
            "search a.svc svc\nnameserver 10.0.0.1\nnameserver fd00::1\noptions ndots:5\n"
        );
    }

    #[test]
    fn a_systemd_slice_as_cgroup_parent_is_refused() {
        let config = PodSandboxConfig {
            metadata: Some(proto::cri::PodSandboxMetadata {
                name: "p".into(),
                uid: "u".into(),
                namespace: "n".into(),
                attempt: 0,
            }),
            linux: Some(proto::cri::LinuxPodSandboxConfig {
                cgroup_parent: "kubepods.slice".into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let text = check(&config).unwrap_err().to_string();
        assert!(
            text.starts_with("config.linux.cgroup_parent: \"kubepods.slice\" is not an absolute"),
            "{text}"
        );
    }
}
