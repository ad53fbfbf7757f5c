//! configMap, secret, projected and downwardAPI volumes: written when a pod starts, and again while
//! it runs, as soon as one of their objects changes.
//!
//! Invariants:
//! - The volumes of one pod are written one after the other, each with the objects of that moment, so
//!   an older content never replaces a newer one.
//! - Once [`ConfigurationVolumes::unmount_all`] of a pod has started, nothing is written for it.
//! - No pod's update waits longer than [`UPDATE_TIMEOUT`] for another pod's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use linux::mount::{self, MountFlags, UnmountMode};
use nix::errno::Errno;
use nix::sys::statfs::TMPFS_MAGIC;
use runtime::Locks;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};
use tokio::task::JoinHandle;

use super::atomic_dir::AtomicDir;
use super::budget::{self, Budget};
use super::error::Error;
use super::layout::Layout;
use super::projected::Source;
use super::{Shared, Volumes, files};
use crate::backoff::Backoff;
use crate::objects::{Kind, Pod, Volume, VolumeSource};
use crate::pod::fields::Capacity;
use crate::store::{Change, Store};

/// As an emptyDir's: containers see these volumes read-only.
const ROOT_MODE: u32 = 0o777;
/// Of a tmpfs: the old content stays until the new one is complete.
const TMPFS_BYTES: usize = 2 * budget::MOST_BYTES;
/// Enough for a disk under load.
const UPDATE_TIMEOUT: Duration = Duration::from_secs(5);
const INTERRUPTED: Error = Error::Interrupted { what: "the write of a volume" };

#[derive(Debug, Default)]
pub(super) struct ConfigurationVolumes {
    /// By pod uid; locked during each write.
    writing: Locks<String, Mutex<()>>,
    budget: Arc<Budget>,
    /// Updates that took longer than [`UPDATE_TIMEOUT`], by pod uid. They go on.
    late: Mutex<BTreeMap<String, JoinHandle<Outcomes>>>,
}

/// How each volume of an update was written.
type Outcomes = Vec<(Target, Result<(), Error>)>;

/// One volume of a pod.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) dir: PathBuf,
    pub(super) source: Source,
    pub(super) pod: Arc<Pod>,
    /// The volume's name.
    name: String,
}

/// Which volumes a call writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    Always,
    /// Those that have been written before: the pod's start writes the others.
    IfWritten,
}

impl Target {
    /// `None` for volumes of other types.
    pub(super) fn of(layout: &Layout, pod: &Arc<Pod>, volume: &Volume) -> Option<Self> {
        let source = match volume.source()? {
            VolumeSource::ConfigMap(source) => Source::ConfigMap(source.clone()),
            VolumeSource::Secret(source) => Source::Secret(source.clone()),
            VolumeSource::Downward(source) => Source::Downward(source.clone()),
            VolumeSource::Projected(source) => Source::Projected(source.clone()),
            _ => return None,
        };
        let plugin = match &source {
            Source::ConfigMap(_) => "kubernetes.io~configmap",
            Source::Secret(_) => "kubernetes.io~secret",
            Source::Downward(_) => "kubernetes.io~downward-api",
            Source::Projected(_) => "kubernetes.io~projected",
        };
        let dir = layout.plugin_volumes_dir(&pod.metadata.uid, plugin).join(&volume.name);
        Some(Self { dir, source, pod: Arc::clone(pod), name: volume.name.clone() })
    }

    fn write(&self, store: &Store, node: Capacity, budget: &Budget, when: When) -> Result<(), Error> {
        if when == When::IfWritten && !is_written(&self.dir)? {
            return Ok(());
        }
        // It may have changed since the caller began: this write may be the last for long.
        let metadata = &self.pod.metadata;
        let current = store.pod(&metadata.namespace, &metadata.name);
        let current = current.filter(|pod| pod.metadata.uid == metadata.uid);
        let files = self.source.files(store, current.as_ref().unwrap_or(&self.pod), node)?;
        budget.take(&self.pod.metadata.uid, &self.dir, &files)?;
        if when == When::Always {
            self.make_root()?;
        }
        AtomicDir::open(&self.dir)?.write(&files, self.pod.spec.security_context.fs_group)
    }

    fn make_root(&self) -> Result<(), Error> {
        files::make_dir(&self.dir, 0o750)?;
        if self.source.is_in_memory() && mount::type_at(&self.dir).map_err(Error::Kernel)?.is_none() {
            mount_tmpfs(&self.dir)?;
        }
        fs::set_permissions(&self.dir, Permissions::from_mode(ROOT_MODE))
            .map_err(|e| Error::io("set permissions of", &self.dir, e))
    }
}

impl ConfigurationVolumes {
    /// Writes a volume for a pod that starts.
    pub(super) async fn write(&self, target: Target, store: Store, node: Capacity) -> Result<(), Error> {
        let wanted = Arc::new(());
        let writing = self.writing.of(target.pod.metadata.uid.as_str());
        let budget = Arc::clone(&self.budget);
        let is_wanted = Arc::downgrade(&wanted);
        let written = tokio::task::spawn_blocking(move || {
            let _writing = lock(&writing);
            // The caller is gone and may have unmounted everything.
            is_wanted.upgrade().ok_or(INTERRUPTED)?;
            target.write(&store, node, &budget, When::Always)
        });
        written.await.unwrap_or(Err(INTERRUPTED))
    }

    fn late(&self) -> MutexGuard<'_, BTreeMap<String, JoinHandle<Outcomes>>> {
        self.late.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unmounts those volumes of a pod that are in memory.
    pub(super) async fn unmount_all(&self, layout: &Layout, uid: &str) -> Result<(), Error> {
        let writing = self.writing.of(uid);
        let (budget, pod) = (Arc::clone(&self.budget), uid.to_owned());
        let plugins = ["kubernetes.io~secret", "kubernetes.io~downward-api", "kubernetes.io~projected"];
        let dirs = plugins.map(|plugin| layout.plugin_volumes_dir(uid, plugin));
        let unmounted = tokio::task::spawn_blocking(move || {
            // A write in progress ends first; later ones find their pod stopping.
            let _writing = lock(&writing);
            for dir in dirs {
                files::subdirectories(&dir)?.iter().try_for_each(|dir| unmount(dir))?;
            }
            budget.release(&pod);
            Ok(())
        });
        unmounted.await.unwrap_or(Err(INTERRUPTED))
    }
}

impl Volumes {
    /// Writes volumes of running pods again when their objects change; never returns.
    pub(crate) async fn keep_configuration_current(self) {
        let mut changes = self.shared.store.subscribe();
        let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
        // Objects may have changed while no kubelet ran.
        let mut changed = Changed::Anything;
        loop {
            changed = if self.update(&changed).await {
                backoff.reset();
                next_changes(&mut changes).await
            } else {
                // What failed is tried again too.
                tokio::select! {
                    _ = next_changes(&mut changes) => {}
                    () = tokio::time::sleep(backoff.step()) => {}
                }
                Changed::Anything
            };
        }
    }

    /// Returns whether every volume could be written.
    async fn update(&self, changed: &Changed) -> bool {
        let shared = &self.shared;
        let mut are_written = true;
        for pod in changed.pods(&shared.store) {
            let has_ended = pod.status.phase.has_ended();
            if pod.metadata.is_deleted() || has_ended {
                continue;
            }
            let volumes = pod.spec.volumes.iter();
            let targets = volumes.filter_map(|volume| Target::of(&shared.layout, &pod, volume));
            let targets: Vec<Target> = targets.filter(|target| changed.concerns(target)).collect();
            if targets.is_empty() {
                continue;
            }
            let Some(outcomes) = self.update_pod(&pod, targets).await else {
                are_written = false;
                continue;
            };
            for (target, outcome) in outcomes {
                if let Err(error) = outcome {
                    self.report(&pod, "FailedMount", &target.name, &error);
                    // A missing object announces its return; space in the budget does not.
                    are_written &=
                        error.depends_on_configuration() && !matches!(error, Error::PodTooLarge { .. });
                }
            }
        }
        are_written
    }

    /// Writes volumes of one pod; `None` while that takes too long.
    async fn update_pod(&self, pod: &Pod, targets: Vec<Target>) -> Option<Outcomes> {
        let (uid, first) = (&pod.metadata.uid, targets.first()?);
        let (name, path) = (first.name.clone(), first.dir.clone());
        {
            let mut late = self.shared.configuration.late();
            // Those of pods that are gone too.
            late.retain(|_, update| !update.is_finished());
            if late.contains_key(uid) {
                return None;
            }
        }
        let shared = Arc::clone(&self.shared);
        let mut update = tokio::task::spawn_blocking(move || shared.write_again(targets));
        match tokio::time::timeout(UPDATE_TIMEOUT, &mut update).await {
            Ok(written) => written.ok(),
            Err(_) => {
                self.report(
                    pod,
                    "FailedMount",
                    &name,
                    &Error::PathTimeout { what: "update the volume", path },
                );
                self.shared.configuration.late().insert(uid.clone(), update);
                None
            }
        }
    }
}

impl Shared {
    /// Those volumes of one pod that have been written before.
    fn write_again(&self, targets: Vec<Target>) -> Outcomes {
        let write = |target: Target| {
            let uid = target.pod.metadata.uid.as_str();
            let writing = self.configuration.writing.of(uid);
            let _writing = lock(&writing);
            let budget = &self.configuration.budget;
            let written = if self.is_stopping(uid) {
                Ok(())
            } else {
                target.write(&self.store, self.capacity(), budget, When::IfWritten)
            };
            (target, written)
        };
        targets.into_iter().map(write).collect()
    }
}

/// What has changed in the store.
#[derive(Debug, PartialEq, Eq)]
enum Changed {
    Anything,
    Objects(BTreeSet<(Kind, String, String)>),
}

impl Changed {
    /// The pods whose volumes may show it. A pod's volumes show no other pod.
    fn pods(&self, store: &Store) -> Vec<Arc<Pod>> {
        match self {
            Self::Objects(objects) if objects.iter().all(|(kind, ..)| *kind == Kind::Pod) => {
                objects.iter().filter_map(|(_, namespace, name)| store.pod(namespace, name)).collect()
            }
            Self::Objects(_) | Self::Anything => store.pods(),
        }
    }

    fn concerns(&self, target: &Target) -> bool {
        let pod = &target.pod.metadata;
        match self {
            Self::Anything => true,
            Self::Objects(objects) => objects.iter().any(|(kind, namespace, name)| {
                *namespace == pod.namespace
                    && (*kind != Kind::Pod || *name == pod.name)
                    && target.source.depends_on(*kind, name)
            }),
        }
    }
}

/// Waits for a change of a kind that such volumes show, and adds those that are waiting.
async fn next_changes(changes: &mut Receiver<Change>) -> Changed {
    let mut objects = BTreeSet::new();
    loop {
        let change = if objects.is_empty() {
            changes.recv().await
        } else {
            match changes.try_recv() {
                Err(TryRecvError::Empty) => return Changed::Objects(objects),
                Err(TryRecvError::Lagged(lost)) => Err(RecvError::Lagged(lost)),
                Err(TryRecvError::Closed) => Err(RecvError::Closed),
                Ok(change) => Ok(change),
            }
        };
        match change {
            Ok(change) if matches!(change.kind, Kind::ConfigMap | Kind::Secret | Kind::Pod) => {
                objects.insert((change.kind, change.namespace, change.name));
            }
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => return Changed::Anything,
            Err(RecvError::Closed) => std::future::pending().await,
        }
    }
}

/// The lock guards no data that a panic could corrupt.
fn lock(writing: &Mutex<()>) -> MutexGuard<'_, ()> {
    writing.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_written(dir: &Path) -> Result<bool, Error> {
    match AtomicDir::open(dir) {
        Ok(dir) => dir.is_written(),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Its pages are never written to swap space, if the kernel can do that (Linux 6.3).
fn mount_tmpfs(dir: &Path) -> Result<(), Error> {
    let mount = |options| mount::mount_fs("tmpfs", "tmpfs", dir, MountFlags::default(), options);
    match mount(&format!("noswap,size={TMPFS_BYTES}")) {
        Err(error) if error.errno() == Errno::EINVAL => mount(&format!("size={TMPFS_BYTES}")),
        mounted => mounted,
    }
    .map_err(Error::Kernel)
}

fn unmount(dir: &Path) -> Result<(), Error> {
    match mount::type_at(dir).map_err(Error::Kernel)? {
        Some(TMPFS_MAGIC) => mount::unmount(dir, UnmountMode::Plain).map_err(Error::Kernel),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::manifest;
    use crate::store::Source as Origin;

    fn apply(store: &Store, text: &str) {
        for object in manifest::parse(text.as_bytes(), "test.yaml").manifests {
            store.apply(object.described(), Origin::Api).unwrap();
        }
    }

    fn secret(value: &str) -> String {
        format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: token}}\nstringData: {{a: {value}}}\n")
    }

    fn target(root: &Path) -> Target {
        let pod: Pod = from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"containers": [], "volumes": [{"name": "v", "secret": {"secretName": "token"}}]}
        }))
        .unwrap();
        let pod = Arc::new(pod);
        Target::of(&Layout::new(root), &pod, &pod.spec.volumes[0]).unwrap()
    }

    #[tokio::test]
    async fn a_secret_is_in_memory_until_it_is_unmounted() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let (volumes, dir) = (ConfigurationVolumes::default(), target(root.path()).dir);
        let write = || volumes.write(target(root.path()), store.clone(), Capacity::default());
        let error = write().await.unwrap_err();
        assert!(error.to_string().starts_with("secret \"token\" not found"), "{error}");
        assert!(!dir.exists(), "nothing is made before all objects exist");
        for value in ["first", "second"] {
            apply(&store, &secret(value));
            write().await.unwrap();
            assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), value);
        }
        assert_eq!(mount::type_at(&dir).unwrap(), Some(TMPFS_MAGIC));
        let size = nix::sys::statvfs::statvfs(&dir).unwrap();
        assert_eq!(size.blocks() * size.fragment_size(), 64 << 20);
        let layout = Layout::new(root.path());
        volumes.unmount_all(&layout, "u").await.unwrap();
        assert_eq!((mount::type_at(&dir).unwrap(), fs::read_dir(&dir).unwrap().count()), (None, 0));
        volumes.unmount_all(&layout, "u").await.unwrap();
    }

    #[tokio::test]
    async fn labels_are_those_of_the_moment_of_the_write() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let labelled = |label: &str| {
            let volume =
                "{name: v, downwardAPI: {items: [{path: l, fieldRef: {fieldPath: metadata.labels}}]}}";
            let spec = format!("{{containers: [{{name: c, image: a}}], volumes: [{volume}]}}");
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: web, labels: {{is: {label}}}}}\nspec: {spec}\n"
            )
        };
        apply(&store, &labelled("old"));
        let pod = store.pod("default", "web").unwrap();
        let target = Target::of(&Layout::new(root.path()), &pod, &pod.spec.volumes[0]).unwrap();
        let (volumes, dir) = (ConfigurationVolumes::default(), target.dir.clone());
        apply(&store, &labelled("new"));
        volumes.write(target, store, Capacity::default()).await.unwrap();
        assert_eq!(fs::read_to_string(dir.join("l")).unwrap(), "is=\"new\"");
        volumes.unmount_all(&Layout::new(root.path()), &pod.metadata.uid).await.unwrap();
    }

    #[tokio::test]
    async fn too_many_volumes_of_a_large_object_are_refused_before_anything_is_written() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let large = "x".repeat(1 << 20);
        apply(
            &store,
            &format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: large}}\ndata: {{a: {large}}}\n"),
        );
        let items = [0, 1, 2, 3].map(|file| json!({"key": "a", "path": file.to_string()}));
        let volume =
            |n: usize| json!({"name": format!("v{n}"), "configMap": {"name": "large", "items": items}});
        let pod: Pod = from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"containers": [], "volumes": (0..9).map(volume).collect::<Vec<_>>()}
        }))
        .unwrap();
        let (pod, layout) = (Arc::new(pod), Layout::new(root.path()));
        let volumes = ConfigurationVolumes::default();
        let write = |n: usize| {
            let target = Target::of(&layout, &pod, &pod.spec.volumes[n]).unwrap();
            volumes.write(target, store.clone(), Capacity::default())
        };
        for n in 0..8 {
            write(n).await.unwrap();
        }
        let error = write(8).await.unwrap_err();
        assert!(matches!(error, Error::PodTooLarge { .. }), "{error}");
        assert!(!Target::of(&layout, &pod, &pod.spec.volumes[8]).unwrap().dir.exists());
        volumes.unmount_all(&layout, "u").await.unwrap();
        write(8).await.unwrap();
    }

    /// Runs on one thread: a blocking wait for the file system would stop both pods.
    #[tokio::test]
    async fn a_volume_that_does_not_answer_keeps_no_other_pod_from_its_update() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let sinks = crate::sink::Sinks::new(store.clone(), Vec::new());
        let volumes =
            Volumes::new(root.path(), store.clone(), sinks, crate::clients::plugins::Plugins::new());
        let map = |value: &str| {
            format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: settings}}\ndata: {{a: {value}}}\n")
        };
        apply(&store, &map("old"));
        for name in ["a", "b"] {
            let volume = "{name: silent, configMap: {name: settings}}";
            let spec = format!("{{containers: [{{name: c, image: i}}], volumes: [{volume}]}}");
            apply(&store, &format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec: {spec}\n"));
        }
        let layout = Layout::new(root.path());
        let pods = store.pods();
        let dir = |pod: &Arc<Pod>| Target::of(&layout, pod, &pod.spec.volumes[0]).unwrap().dir;
        for pod in &pods {
            volumes.mount_pod(pod).await;
        }
        let (hung, other) = (dir(&pods[0]), dir(&pods[1]));
        fs::remove_dir_all(&hung).unwrap();
        let (silent, connection) = super::super::host_paths::mount_silent(hung.parent().unwrap());
        assert_eq!(silent, hung);
        apply(&store, &map("new"));
        let update = || tokio::time::timeout(2 * UPDATE_TIMEOUT, volumes.update(&Changed::Anything));
        let first = update().await;
        let updated = fs::read_to_string(other.join("a")).unwrap();
        apply(&store, &map("newest"));
        let begun = std::time::Instant::now();
        let second = update().await;
        let waited = begun.elapsed();
        drop(connection);
        mount::unmount(&silent, UnmountMode::Detach).unwrap();

        assert_eq!((first, updated.as_str(), second), (Ok(false), "new", Ok(false)));
        assert!(waited < UPDATE_TIMEOUT, "it is asked once: {waited:?}");
        assert_eq!(fs::read_to_string(other.join("a")).unwrap(), "newest");
        let message = "volume \"silent\": update the volume: the file system of ";
        assert!(store.events().iter().any(|event| event.message.starts_with(message)));
        // Its thread ends with the connection, and its volume is tried again.
        fs::remove_dir(&hung).unwrap();
        let begun = std::time::Instant::now();
        while !volumes.update(&Changed::Anything).await {
            assert!(begun.elapsed() < Duration::from_secs(60), "the thread never ends");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_change_concerns_the_volumes_that_show_it() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let mut changes = store.subscribe();
        apply(&store, &secret("x"));
        apply(&store, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: token}\n");
        let target = target(root.path());
        let changed = next_changes(&mut changes).await;
        assert!(changed.concerns(&target), "{changed:?}");
        apply(&store, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: token}\ndata: {a: b}\n");
        let changed = next_changes(&mut changes).await;
        assert!(!changed.concerns(&target), "{changed:?}");
    }
}
