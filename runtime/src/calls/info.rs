//! The additions of `verbose` to statuses: JSON texts by name, as tools read them of containerd.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Value, json};

use crate::disk::record;
use crate::runtime::Runtime;
use crate::runtime::state::{Container, Phase, RunState, Sandbox};
use crate::spec::pod::{cgroup_parent, hostname, sharing};

const INFO: &str = "info";
/// Limit of config.json in an answer, which has at most 4 MiB: environments may be large.
const MAX_SPEC_BYTES: u64 = 1 << 20;
/// In the status: a JSON list that describes unreadable records.
const UNREADABLE_RECORDS: &str = "unreadableRecords";

/// Pid, path and specification of the bundle, and requests that this machine did not allow.
pub(crate) fn of_container(
    runtime: &Runtime,
    container: &Container,
    bundle: &Path,
) -> HashMap<String, String> {
    let pid = match container.state() {
        RunState::Running { pid, .. } => pid,
        RunState::Created | RunState::Exited(_) => 0,
    };
    let info = json!({
        "sandboxID": container.record.sandbox_id,
        "pid": pid,
        "bundle": bundle,
        "cgroupsPath": container.record.cgroup_path,
        "snapshotKey": container.id,
        "snapshotter": "overlayfs",
        "runtimeType": runtime_type(runtime),
        "warnings": container.record.warnings,
        "runtimeSpec": specification(&bundle.join("config.json")),
    });
    HashMap::from([(INFO.to_owned(), info.to_string())])
}

/// `null` if it is too large or gone.
fn specification(path: &Path) -> Value {
    let is_small = std::fs::metadata(path).is_ok_and(|file| file.len() <= MAX_SPEC_BYTES);
    if !is_small {
        return Value::Null;
    }
    record::load(path).unwrap_or_default()
}

/// The pid of the pod's shim, and its namespaces.
pub(crate) fn of_sandbox(runtime: &Runtime, sandbox: &Sandbox) -> HashMap<String, String> {
    let record = sandbox.record();
    // The record of a broken pod has the process that was its shim.
    let pid = record.shim.filter(|_| record.phase == Phase::Ready).map_or(0, |shim| shim.pid);
    let sharing = sharing(&record.config);
    let of_shim = |kind: &str| json!({"type": kind, "path": format!("/proc/{pid}/ns/{kind}")});
    let mut namespaces = Vec::new();
    if let Some(netns) = &record.netns {
        namespaces.push(json!({"type": "network", "path": netns}));
    }
    if pid > 0 {
        namespaces.extend((!sharing.host_ipc).then(|| of_shim("ipc")));
        namespaces.extend((!sharing.host_network).then(|| of_shim("uts")));
    }
    let linux = record.config.linux.clone().unwrap_or_default();
    let info = json!({
        "pid": pid,
        "processStatus": if record.phase == Phase::Ready { "running" } else { "stopped" },
        "netNamespaceClosed": record.netns.as_deref().is_some_and(|path| !path.exists()),
        "runtimeHandler": record.runtime_handler,
        "runtimeType": runtime_type(runtime),
        "network": record.network.map(|network| network.name.clone()),
        "runtimeSpec": {
            "hostname": hostname(&record.config),
            "linux": {
                "cgroupsPath": cgroup_parent(&record.config),
                "namespaces": namespaces,
                "sysctl": linux.sysctls,
            },
            "annotations": record.config.annotations,
        },
    });
    HashMap::from([(INFO.to_owned(), info.to_string())])
}

/// The configuration, and what could not be read of the pods of earlier runtimes.
pub(crate) fn of_runtime(runtime: &Runtime) -> HashMap<String, String> {
    let config = json!({
        "rootDir": runtime.root_dir,
        "imagesDir": runtime.images.dir(),
        "cni": {"confDir": runtime.cni.conf_dir, "binDir": runtime.cni.bin_dir, "cacheDir": runtime.cni.cache_dir},
        "runtimeType": runtime_type(runtime),
        "cgroupDriver": "cgroupfs",
        "cgroupVersion": if runtime.cgroups.v2 { 2 } else { 1 },
        "allowWithoutDeviceControl": runtime.allow_without_device_control,
    });
    let mut info = HashMap::from([("config".to_owned(), config.to_string())]);
    let records = runtime.unreadable();
    if !records.is_empty() {
        info.insert(UNREADABLE_RECORDS.to_owned(), Value::from(records).to_string());
    }
    info
}

fn runtime_type(runtime: &Runtime) -> Value {
    runtime.oci_runtime.as_ref().map_or_else(|| json!("native"), |program| json!(program))
}
