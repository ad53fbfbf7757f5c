//! The shared dependencies of all workers.

use std::net::UdpSocket;
#[cfg(test)]
use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};

use super::own_files::{FileWork, OwnFiles};
use crate::capacity::admission::Admission;
use crate::capacity::critical::serves_volumes;

use crate::clients::cri::Cri;
use crate::container_config::Node;
use crate::logs::{log_directory, log_path};
use crate::objects::{ObjectMeta, Pod, QosClass};
use crate::pod::cgroup::{self, Hierarchies, Limits, shares};
use crate::pod::resources;
use crate::sink::Sinks;
use crate::store::Store;
use crate::volumes::Volumes;

#[derive(Debug)]
pub(crate) struct Tools {
    pub(crate) cri: Cri,
    /// As in the `Version` reply: the scheme of container ids.
    pub(crate) runtime_name: String,
    /// The images directory of the embedded runtime.
    pub(crate) images: Option<(PathBuf, runtime::ImageLimits)>,
    pub(crate) store: Store,
    pub(crate) sinks: Sinks,
    pub(crate) volumes: Volumes,
    pub(crate) hierarchies: Hierarchies,
    pub(crate) node_name: String,
    pub(crate) host_ip: String,
    pub(crate) cgroup_root: String,
    pub(crate) pod_pids_limit: Option<i64>,
    pub(crate) seccomp_default: bool,
    /// The runtime can do it.
    pub(crate) recursive_read_only: bool,
    pub(crate) log_dir: PathBuf,
    pub(crate) root_dir: PathBuf,
    pub(crate) starts: Starts,
    pub(crate) admission: Admission,
    pub(crate) file_work: FileWork,
}

/// Limits how many sandboxes and containers the runtime starts concurrently: hundreds at once would
/// each take longer and use much memory.
///
/// Invariants:
/// - Mount pods need no permit, so that no pod waits for a volume behind pods that wait for the
///   same volume.
/// - No permit lasts long, since a pod can block its own starts (a lease on its program, a hostile
///   daemon). After a slow start, a pod uses separate permits.
#[derive(Debug)]
pub(crate) struct Starts {
    permits: Arc<Semaphore>,
    /// For pods that have held a permit too long.
    slow_permits: Arc<Semaphore>,
}

/// Whether a start of one pod held its permit too long.
#[derive(Debug, Clone, Default)]
pub(crate) struct IsSlow(Arc<AtomicBool>);

/// Held until it is dropped or times out.
#[derive(Debug)]
#[must_use]
pub(crate) struct StartPermit(
    #[expect(dead_code, reason = "dropping it releases the permit")] oneshot::Sender<()>,
);

impl Starts {
    /// A start mostly waits: for netlink, for namespaces, for the disk.
    const PER_CPU: usize = 4;
    /// A start takes about 20 ms. With one hanging start in each of 110 pods, another pod waits
    /// seven seconds on two processors.
    const MAX_HOLD: Duration = Duration::from_millis(500);

    pub(crate) fn new() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let permits = || Arc::new(Semaphore::new(cpus * Self::PER_CPU));
        Self { permits: permits(), slow_permits: permits() }
    }

    /// Waits for a permit for `pod`; `is_slow` records its slow starts.
    pub(crate) async fn permit(&self, pod: &Pod, is_slow: &IsSlow) -> Option<StartPermit> {
        if serves_volumes(pod) {
            return None;
        }
        let permits = if is_slow.0.load(Ordering::Relaxed) { &self.slow_permits } else { &self.permits };
        // The semaphore is never closed.
        let permit = Arc::clone(permits).acquire_owned().await.ok()?;
        let (release, released) = oneshot::channel();
        let is_slow = is_slow.clone();
        tokio::spawn(async move {
            // The permit ends at the timeout or when it is dropped.
            if tokio::time::timeout(Self::MAX_HOLD, released).await.is_err() {
                is_slow.0.store(true, Ordering::Relaxed);
            }
            drop(permit);
        });
        Some(StartPermit(release))
    }
}

impl Tools {
    /// With a runtime at `socket`, and without drivers.
    #[cfg(test)]
    pub(crate) fn of_test(root: &Path, socket: &Path, store: Store) -> Self {
        let sinks = Sinks::new(store.clone(), Vec::new());
        let capacity = crate::capacity::admission::Capacity {
            cpu_millis: 1000,
            memory_bytes: 1 << 30,
            huge_pages: std::collections::BTreeMap::new(),
            storage_bytes: 1 << 30,
            pods: 1,
        };
        let plugins = crate::clients::plugins::Plugins::new();
        Self {
            cri: Cri::new(socket),
            runtime_name: "test".to_owned(),
            images: None,
            volumes: Volumes::new(root, store.clone(), sinks.clone(), plugins),
            store,
            sinks,
            hierarchies: Hierarchies::mounted().expect("control groups"),
            node_name: "node".to_owned(),
            host_ip: "127.0.0.1".to_owned(),
            cgroup_root: "/".to_owned(),
            pod_pids_limit: None,
            seccomp_default: false,
            recursive_read_only: true,
            log_dir: root.join("logs"),
            root_dir: root.to_owned(),
            starts: Starts::new(),
            admission: Admission::new("node", capacity, crate::capacity::pressure::NodePressure::default()),
            file_work: FileWork::default(),
        }
    }

    pub(crate) fn node(&self) -> Node<'_> {
        Node {
            name: &self.node_name,
            root_dir: &self.root_dir,
            log_dir: &self.log_dir,
            cgroup_root: &self.cgroup_root,
            hierarchies: &self.hierarchies,
            seccomp_default: self.seccomp_default,
            recursive_read_only: self.recursive_read_only,
        }
    }

    /// Ensures the pod's cgroup and its parents.
    pub(crate) fn ensure_pod_cgroup(&self, pod: &Pod) -> Result<(), cgroup::Error> {
        let kubepods = self.kubepods();
        match resources::qos_class(pod) {
            QosClass::Guaranteed => {}
            QosClass::BestEffort => {
                let least = Limits { cpu_shares: shares(0), ..Limits::default() };
                self.hierarchies.ensure(&format!("{kubepods}/besteffort"), &least)?;
            }
            QosClass::Burstable => {
                let limits = Limits { cpu_shares: self.burstable_shares(), ..Limits::default() };
                self.hierarchies.ensure(&format!("{kubepods}/burstable"), &limits)?;
            }
        }
        let path = resources::cgroup_path(&self.cgroup_root, pod);
        self.hierarchies.ensure(&path, &resources::pod_limits(pod, self.pod_pids_limit))
    }

    /// Removes the pod's cgroup in any QoS class.
    pub(crate) async fn remove_pod_cgroup(&self, uid: &str) -> Result<(), cgroup::Error> {
        for path in resources::cgroup_paths_of_uid(&self.cgroup_root, uid) {
            self.hierarchies.remove(&path).await?;
        }
        Ok(())
    }

    /// Removes the cgroups that all pods share, after the last pod is gone.
    pub(crate) async fn remove_shared_cgroups(&self) -> Result<(), cgroup::Error> {
        self.hierarchies.remove(&self.kubepods()).await?;
        if self.cgroup_root.trim_matches('/').is_empty() {
            return Ok(());
        }
        self.hierarchies.remove(&self.cgroup_root).await
    }

    fn kubepods(&self) -> String {
        format!("{}/kubepods", self.cgroup_root.trim_end_matches('/'))
    }

    /// The burstable cgroup gets the sum of the burstable pods' requests.
    fn burstable_shares(&self) -> i64 {
        let pods = self.store.pods();
        let burstable = pods.iter().filter(|p| resources::qos_class(p) == QosClass::Burstable);
        burstable.map(|p| resources::pod_limits(p, None).cpu_shares).sum()
    }

    /// The files of start `number` of a pod's container.
    pub(crate) fn own_files(&self, uid: &str, container: &str, number: u32) -> OwnFiles {
        OwnFiles::new(&self.own_files_dir(uid, container), number)
    }

    /// The directory for all starts of the container.
    pub(crate) fn own_files_dir(&self, uid: &str, container: &str) -> PathBuf {
        self.volumes.pod_dir(uid).join("containers").join(container)
    }

    /// Removes container `id` with its logs: the ended instance `number` of the pod's container
    /// `name`.
    pub(crate) async fn remove_instance(
        &self,
        pod: &ObjectMeta,
        id: &str,
        name: &str,
        number: u32,
    ) -> crate::clients::cri::Result<()> {
        self.cri.remove_container(id).await?;
        let log = log_directory(&self.log_dir, pod).join(log_path(name, number));
        if let Err(error) = crate::logs::remove(&log) {
            let error = linux::chain(&error);
            tracing::warn!(error, log = %log.display(), "a log of an old instance of a container was not removed");
        }
        let files = self.own_files(&pod.uid, name, number);
        let remove = move || files.remove().map_err(std::io::Error::other);
        if let Err(error) = self.file_work.run(&pod.uid, remove).await {
            let error = linux::chain(&error);
            tracing::warn!(
                error,
                pod = pod.name,
                container = name,
                "files of an old instance were not removed"
            );
        }
        Ok(())
    }
}

/// The node's address on its default route; loopback without one.
pub(crate) fn host_ip() -> String {
    // Connecting a datagram socket only queries the routing table; it sends nothing.
    let route = |local: &str, remote: &str| {
        let socket = UdpSocket::bind((local, 0)).ok()?;
        socket.connect((remote, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    // Documentation addresses are reachable only through a default route.
    route("0.0.0.0", "192.0.2.1").or_else(|| route("::", "2001:db8::1")).unwrap_or("127.0.0.1".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pods_whose_starts_hang_delay_others_once() {
        let starts = Starts::new();
        let pod =
            r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}}"#;
        let pod = serde_json::from_str(pod).unwrap();
        let hanging: Vec<_> = (0..100).map(|_| IsSlow::default()).collect();
        let mut held = Vec::new();
        for _round in 0..2 {
            for is_slow in &hanging {
                held.push(starts.permit(&pod, is_slow).await);
            }
        }
        let before = tokio::time::Instant::now();
        let quick = IsSlow::default();
        drop(starts.permit(&pod, &quick).await.unwrap());
        assert!(before.elapsed() <= Starts::MAX_HOLD, "{:?}", before.elapsed());
        for _again in 0..20 {
            let before = tokio::time::Instant::now();
            drop(starts.permit(&pod, &quick).await.unwrap());
            assert_eq!(before.elapsed(), Duration::ZERO, "slow pods delay only each other");
        }
    }
}
