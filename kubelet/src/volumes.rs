//! The volume manager: mounts and unmounts the volumes of pods.
//!
//! The state is on disk (kubelet's directory layout and vol_data.json), not in memory; a restarted
//! kubelet reads it with [`Volumes::reconstruct`]. Operations on one volume run one after the
//! other, but for the walk that gives a volume to a pod's fsGroup, which only that pod waits for;
//! operations on different volumes run concurrently. A started operation is never cancelled: it runs
//! in its own task, and a caller can only stop waiting for it.

mod atomic_dir;
mod budget;
mod capability;
mod configuration;
mod csi_mount;
mod csi_unmount;
mod dead_mount;
mod device;
mod empty_dirs;
mod ephemeral;
mod error;
mod expand;
mod figures;
mod files;
mod health;
mod host_paths;
mod layout;
mod mounted;
mod ownership;
mod projected;
mod reconstruct;
mod republish;
mod resolve;
mod retry;
mod stats;
mod sub_paths;
mod teardown;
mod unreadable;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, SetOnce};
use tokio::task::{JoinHandle, JoinSet};
use tracing::{Instrument, info_span};

pub(crate) use capability::{of_claim as capabilities_of_claim, of_volume as capability_of_volume};
pub(crate) use error::Error;
pub(crate) use expand::FILE_SYSTEM_PENDING;
pub(crate) use figures::{Figures, Space, VolumeFigures};
#[cfg(test)]
pub(crate) use host_paths::mount_silent_at;
pub(crate) use sub_paths::SubPath;

use crate::capacity::critical::serves_volumes;
use crate::clients::csi::Driver;
use crate::clients::plugins::Plugins;
use crate::command_line::called_as::called_as;
use crate::objects::{EventType, FsGroupChangePolicy, Object, PersistentVolume, Pod, Volume, VolumeSource};
use crate::pod::fields::Capacity;
use crate::sink::Sinks;
use crate::store::Store;
use configuration::{ConfigurationVolumes, Target};
use csi_mount::{CsiMount, Published};
use device::{Device, DeviceKey, Devices, Stage, Turn};
use empty_dirs::EmptyDirs;
use host_paths::HostPaths;
use layout::Layout;
use ownership::{GroupChange, Stop};
use resolve::Resolved;
use retry::Retry;

/// The host path of a pod's volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mounted {
    pub(crate) host_path: PathBuf,
    /// In addition to the container's volumeMount.
    pub(crate) read_only: bool,
    /// The kubelet writes it: a ConfigMap, Secret or fields of the pod.
    pub(crate) is_configuration: bool,
}

/// By the volume's name in the pod.
pub(crate) type MountedVolumes = BTreeMap<String, Mounted>;

/// Clones share everything.
#[derive(Debug, Clone)]
pub(crate) struct Volumes {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    layout: Layout,
    store: Store,
    sinks: Sinks,
    plugins: Plugins,
    devices: Devices,
    /// Set once `devices` contains the volumes of an earlier kubelet.
    reconstructed: SetOnce<()>,
    /// Pods in teardown: no mount may start for them.
    stopping: Mutex<BTreeSet<String>>,
    /// Set when a pod ends, by its uid.
    stops: Mutex<BTreeMap<String, Arc<Stop>>>,
    /// Unmounts for pods whose processes survived SIGKILL, by pod uid.
    survivor_unmounts: Mutex<BTreeMap<String, JoinHandle<()>>>,
    republish: republish::Due,
    answers: stats::Answers,
    /// A pod has released a volume, or an unused volume is unstaged.
    released: Notify,
    measured: figures::Measured,
    empty_dirs: EmptyDirs,
    configuration: ConfigurationVolumes,
    sub_paths: sub_paths::Mounting,
    host_paths: HostPaths,
    /// For mount pods: other pods' paths must not delay a volume.
    mount_pods_paths: HostPaths,
}

impl Volumes {
    pub(crate) fn new(root: &Path, store: Store, sinks: Sinks, plugins: Plugins) -> Self {
        let shared = Shared {
            layout: Layout::new(root),
            store,
            sinks,
            plugins,
            devices: Devices::default(),
            reconstructed: SetOnce::new(),
            stopping: Mutex::default(),
            stops: Mutex::default(),
            survivor_unmounts: Mutex::default(),
            republish: republish::Due::default(),
            answers: stats::Answers::default(),
            released: Notify::new(),
            measured: figures::Measured::default(),
            empty_dirs: EmptyDirs::default(),
            configuration: ConfigurationVolumes::default(),
            sub_paths: sub_paths::Mounting::default(),
            host_paths: HostPaths::default(),
            mount_pods_paths: HostPaths::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn pod_dir(&self, uid: &str) -> PathBuf {
        self.shared.layout.pod_dir(uid)
    }

    pub(crate) fn empty_dir(&self, uid: &str, volume: &str) -> PathBuf {
        self.shared.layout.empty_dir(uid, volume)
    }

    /// Mounts a pod's volumes concurrently and retries until all succeed; events on the pod report
    /// failures. Dropping the future stops the wait, not the running operations.
    pub(crate) async fn mount_pod(&self, pod: &Arc<Pod>) -> MountedVolumes {
        let mut mounts = JoinSet::new();
        let local_turn = Arc::new(Turn::default());
        for volume in &pod.spec.volumes {
            let (this, pod, volume) = (self.clone(), Arc::clone(pod), volume.clone());
            let local_turn = Arc::clone(&local_turn);
            let span = info_span!("volume_mount", pod = pod.metadata.name, volume = volume.name);
            mounts.spawn(
                async move { (volume.name.clone(), this.mount_until_done(&pod, &volume, &local_turn).await) }
                    .instrument(span),
            );
        }
        let mut mounted = MountedVolumes::new();
        while let Some(finished) = mounts.join_next().await {
            // A task fails only by a panic, which is on stderr. The pod then lacks the volume and
            // reports it.
            if let Ok((name, place)) = finished {
                mounted.insert(name, place);
            }
        }
        self.shared.measured.measure_soon(&pod.metadata.uid);
        self.shared.answers.ask_about_new();
        mounted
    }

    /// `local_turn` serializes the pod's volumes without a driver.
    async fn mount_until_done(&self, pod: &Arc<Pod>, volume: &Volume, local_turn: &Turn) -> Mounted {
        let mut retry = Retry::new(&self.shared.store, &self.shared.plugins);
        loop {
            // Before the attempt, so that no release is missed.
            let mut released = std::pin::pin!(self.shared.released.notified());
            released.as_mut().enable();
            match self.mount(pod, volume, local_turn).await {
                Ok(mounted) => return mounted,
                Err(error) => {
                    // Give other operations a moment before this counts as a failure.
                    let has_changed = retry.wait_briefly(&error).await;
                    if !has_changed {
                        self.report(pod, "FailedMount", &volume.name, &error);
                        tokio::select! {
                            () = retry.wait(&error) => {}
                            () = released, if matches!(error, Error::InUseByOtherPod) => {}
                        }
                    }
                }
            }
        }
    }

    async fn mount(&self, pod: &Arc<Pod>, volume: &Volume, local_turn: &Turn) -> Result<Mounted, Error> {
        let uid = &pod.metadata.uid;
        match volume.source() {
            None => Err(Error::Unsupported { field: format!("spec.volumes[name={}]", volume.name) }),
            Some(VolumeSource::EmptyDir(source)) => {
                let dir = self.shared.layout.empty_dir(uid, &volume.name);
                let turn = local_turn.lock().await;
                let marker = self.shared.layout.empty_dir_ready(uid, &volume.name);
                let host_path = self.shared.empty_dirs.ensure(dir, source.clone(), marker.clone()).await?;
                drop(turn);
                if let Some(group) = pod.spec.security_context.fs_group {
                    // Like kubelet, change a pod's own volumes even if the root's group is right.
                    let policy = FsGroupChangePolicy::Always;
                    let (root, volume) = (host_path.clone(), host_path.clone());
                    let change =
                        GroupChange { root, volume, group, policy, marker, stop: self.shared.stop_of(uid) };
                    // A task of its own, so that a walk is counted though its caller goes.
                    let (shared, pod) = (Arc::clone(&self.shared), Arc::clone(pod));
                    let walk = async move { ownership::change_group(change, shared.paths_of(&pod)).await };
                    let finished = tokio::spawn(walk.in_current_span()).await;
                    finished.unwrap_or(Err(Error::Interrupted { what: "the change of group" }))?;
                }
                Ok(Mounted { host_path, read_only: false, is_configuration: false })
            }
            Some(VolumeSource::HostPath(source)) => {
                let _turn = local_turn.lock().await;
                let host_path = self.shared.paths_of(pod).ensure(uid, source).await?;
                Ok(Mounted { host_path, read_only: false, is_configuration: false })
            }
            Some(VolumeSource::Ephemeral(source)) => {
                let name = volume.claim_name(&pod.metadata.name).expect("an ephemeral volume has a claim");
                ephemeral::ensure_claim(&self.shared.store, pod, &name, &source.volume_claim_template)?;
                let resolved = resolve::claim(&self.shared.store, pod, &name)?;
                self.mount_csi(pod, resolved, false).await
            }
            Some(VolumeSource::Claim(source)) => {
                let resolved = resolve::claim(&self.shared.store, pod, &source.claim_name)?;
                self.mount_csi(pod, resolved, source.read_only).await
            }
            Some(
                VolumeSource::ConfigMap(_)
                | VolumeSource::Secret(_)
                | VolumeSource::Downward(_)
                | VolumeSource::Projected(_),
            ) => {
                let target = Target::of(&self.shared.layout, pod, volume).expect("a source of these types");
                let host_path = target.dir.clone();
                let (store, capacity) = (self.shared.store.clone(), self.shared.capacity());
                self.shared.configuration.write(target, store, capacity).await?;
                Ok(Mounted { host_path, read_only: true, is_configuration: true })
            }
        }
    }

    async fn mount_csi(&self, pod: &Arc<Pod>, resolved: Resolved, read_only: bool) -> Result<Mounted, Error> {
        let shared = Arc::clone(&self.shared);
        let Resolved { volume, key } = resolved;
        let driver = shared
            .plugins
            .driver(&key.driver)
            .ok_or_else(|| Error::DriverMissing { driver: key.driver.clone() })?;
        let device = shared.devices.get(&key, Stage::No);
        device.add_user(&pod.metadata.uid);
        let mount = shared.csi_mount(pod, &device, driver, Arc::clone(&volume), read_only);
        let operation = async move {
            let turn = device.turn_of(&mount.pod.metadata.uid);
            let _turn = turn.lock().await;
            let mut stage = device.stage.lock().await;
            if shared.is_stopping(&mount.pod.metadata.uid) {
                return Err(Error::Interrupted { what: "the mount" });
            }
            let Published { target, change } = mount.run(&mut stage).await?;
            // A walk has no time limit: the volume's other pods must not wait for it.
            drop(stage);
            if let Some(change) = change {
                let paths = shared.paths_of(&mount.pod);
                ownership::change_group_in_turn(change, &device.group_turn, paths).await?;
            }
            Ok(target)
        };
        let finished = tokio::spawn(operation.in_current_span()).await;
        let host_path = finished.unwrap_or(Err(Error::Interrupted { what: "the mount" }))?;
        if !read_only {
            self.expand_if_pending(&volume).await?;
        }
        Ok(Mounted { host_path, read_only, is_configuration: false })
    }

    /// The pods for which this PV is, or may be, mounted.
    pub(crate) fn users(&self, driver: &str, volume_handle: &str) -> BTreeSet<String> {
        let key = DeviceKey { driver: driver.to_owned(), volume_handle: volume_handle.to_owned() };
        self.shared.devices.all().iter().find(|d| d.key == key).map(|d| d.users()).unwrap_or_default()
    }

    /// Waits until the volume is certainly not staged here: NodeUnstageVolume comes before DeleteVolume.
    pub(crate) async fn until_unstaged(&self, driver: &str, volume_handle: &str) {
        let key = DeviceKey { driver: driver.to_owned(), volume_handle: volume_handle.to_owned() };
        let Some(device) = self.shared.devices.all().into_iter().find(|device| device.key == key) else {
            return;
        };
        loop {
            // Before the look, so that no release is missed.
            let mut released = std::pin::pin!(self.shared.released.notified());
            released.as_mut().enable();
            if *device.stage.lock().await == Stage::No {
                return;
            }
            released.await;
        }
    }

    /// Handles the death of a volume's daemon: records events on the volume's users, and makes the next
    /// pod stage the volume again, if its driver calls it abnormal: another daemon may continue. `None`:
    /// the pod may have served any volume, so only the next poll finds out.
    pub(crate) async fn daemon_died(&self, volume_handle: Option<&str>, daemon: &Pod) {
        let name = format!("{}/{}", daemon.metadata.namespace, daemon.metadata.name);
        let devices = self.shared.devices.all();
        for device in devices.iter().filter(|device| Some(&*device.key.volume_handle) == volume_handle) {
            if device.is_staging() {
                let message = format!(
                    "mount pod {name} of volume {} ended before it served the volume: \
                     see its state and log ({command} describe pod, {command} logs)",
                    device.key.volume_handle,
                    command = called_as()
                );
                self.warn_users(device, "FailedMount", &message);
            } else {
                self.report_end(device, &name).await;
            }
        }
        self.shared.answers.ask_about_conditions();
    }

    async fn report_end(&self, device: &Device, mount_pod: &str) {
        // Not under the lock: the answer comes when another daemon serves.
        let condition = self.condition(device).await.filter(|condition| condition.abnormal);
        let Some(condition) = condition.map(|condition| condition.message) else { return };
        // A running Unstage may have ended the daemon: check the state after it.
        let mut stage = device.stage.lock().await;
        if *stage == Stage::No {
            return;
        }
        *stage = Stage::Uncertain;
        drop(stage);
        let remedy = if self.shared.republish_is_required(device) {
            self.shared.republish.add(&device.key);
            "the kubelet publishes it again now for containers that start later"
        } else {
            "delete this pod and apply it again to mount the volume again"
        };
        let volume_handle = &device.key.volume_handle;
        let message = format!("mount pod {mount_pod} of volume {volume_handle} ended: {condition}; {remedy}");
        self.warn_users(device, "VolumeConditionAbnormal", &message);
    }

    fn warn_users(&self, device: &Device, reason: &str, message: &str) {
        let users = device.users();
        for pod in self.shared.store.pods().iter().filter(|p| users.contains(&p.metadata.uid)) {
            self.shared.sinks.record(&pod.reference(), EventType::Warning, reason, message);
        }
    }

    fn report(&self, pod: &Pod, reason: &str, volume: &str, error: &Error) {
        let message = format!("volume \"{volume}\": {}", error.text());
        self.shared.sinks.record(&pod.reference(), EventType::Warning, reason, &message);
    }
}

impl Shared {
    fn csi_mount(
        &self,
        pod: &Arc<Pod>,
        device: &Arc<Device>,
        driver: Driver,
        volume: Arc<PersistentVolume>,
        read_only: bool,
    ) -> CsiMount {
        CsiMount {
            layout: self.layout.clone(),
            node_name: self.store.node_name().to_owned(),
            driver_object: self.store.csi_driver(&device.key.driver),
            driver,
            device: Arc::clone(device),
            pod: Arc::clone(pod),
            volume,
            read_only,
            store: self.store.clone(),
            stop: self.stop_of(&pod.metadata.uid),
        }
    }

    fn capacity(&self) -> Capacity {
        crate::pod::resources::node_capacity(self.layout.root())
    }

    fn paths_of(&self, pod: &Pod) -> &HostPaths {
        if serves_volumes(pod) { &self.mount_pods_paths } else { &self.host_paths }
    }

    fn is_stopping(&self, uid: &str) -> bool {
        self.stopping.lock().unwrap_or_else(PoisonError::into_inner).contains(uid)
    }

    fn survivor_unmounts(&self) -> MutexGuard<'_, BTreeMap<String, JoinHandle<()>>> {
        self.survivor_unmounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ask [`Self::is_stopping`] afterwards: the next pod with this uid gets another one.
    fn stop_of(&self, uid: &str) -> Arc<Stop> {
        Arc::clone(self.stops().entry(uid.to_owned()).or_default())
    }

    fn stops(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Stop>>> {
        self.stops.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on no mount starts for the pod, and walks that change its volumes' group end.
    fn begin_stopping(&self, uid: &str) {
        let mut all = self.stopping.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(uid.to_owned());
        if let Some(stop) = self.stops().remove(uid) {
            stop.set();
        }
    }

    fn end_stopping(&self, uid: &str) {
        self.stopping.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }
}
