//! How full the volumes of pods are (kubelet, server/stats/volume_stat_calculator.go): measured in the
//! background, so that no reader of the figures waits for a volume.
//!
//! Claims have their drivers' last answers (`stats.rs`). The kubelet measures the directories of a pod itself.
//!
//! Invariants:
//! - A pod's directory delays others once, for [`DIRECTORIES`].
//! - A pod has at most one measurement at a time, which has a time limit. File systems hold at most [`MAX_LATE`]
//!   threads.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use linux::disk_usage::{self, Bounds};
use proto::csi::NodeGetVolumeStatsResponse;
use proto::csi::volume_usage::Unit;
use rustix::fs::{CWD, Mode, OFlags};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::configuration::Target;
use super::error::Error;
use super::layout;
use super::{Volumes, resolve};
use crate::objects::{Pod, Volume, VolumeSource};

/// kubelet's volumeStatsAggPeriod.
const PERIOD: Duration = Duration::from_secs(60);
/// Pods that start are measured together, and not while they start.
const SETTLING: Duration = Duration::from_secs(3);
/// Pods whose directories are measured.
const AT_ONCE: usize = 4;
/// For the directories of one pod.
const DIRECTORIES: Duration = Duration::from_secs(5);
/// Threads that file systems may hold, over all pods.
const MAX_LATE: usize = 32;
/// For the count of one directory of a pod; beyond, its usage is left out.
const ENTRIES: u64 = 200_000;
const COUNT: Duration = Duration::from_secs(1);
/// For the counts of all directories of a pod.
const COUNTS: Duration = Duration::from_secs(3);

/// One volume of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VolumeFigures {
    /// In the pod.
    pub(crate) name: String,
    /// In the pod's namespace.
    pub(crate) claim: Option<String>,
    pub(crate) space: Space,
    /// `None`: the driver reports no condition.
    pub(crate) is_abnormal: Option<bool>,
    pub(crate) time: Timestamp,
}

/// Bytes and inodes; `None`: unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) capacity: Option<u64>,
    pub(crate) available: Option<u64>,
    pub(crate) used: Option<u64>,
    pub(crate) inodes: Option<u64>,
    pub(crate) inodes_free: Option<u64>,
    pub(crate) inodes_used: Option<u64>,
}

/// By the pod's uid.
pub(crate) type Figures = HashMap<String, Arc<[VolumeFigures]>>;

/// The last figures of pods' own directories.
#[derive(Debug)]
pub(super) struct Measured {
    figures: watch::Sender<Figures>,
    /// A pod's volumes have been mounted.
    mounted: Notify,
    turns: Semaphore,
    /// Pods whose directories a thread measures, by uid.
    threads: Mutex<HashSet<String>>,
}

impl Default for Measured {
    fn default() -> Self {
        let (figures, mounted, threads) = (watch::Sender::default(), Notify::new(), Mutex::default());
        Self { figures, mounted, turns: Semaphore::new(AT_ONCE), threads }
    }
}

impl Measured {
    fn threads(&self) -> MutexGuard<'_, HashSet<String>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a thread may begin for the pod, which is then counted.
    fn begin(&self, uid: &str) -> bool {
        let mut threads = self.threads();
        threads.len() < MAX_LATE && threads.insert(uid.to_owned())
    }

    /// Measures the pod's volumes soon.
    pub(super) fn measure_soon(&self, uid: &str) {
        self.figures.send_modify(|figures| drop(figures.remove(uid)));
        self.mounted.notify_one();
    }
}

impl Volumes {
    /// The last figures.
    pub(crate) fn figures(&self) -> Figures {
        let mut figures = self.shared.measured.figures.borrow().clone();
        for pod in self.shared.store.pods().iter().filter(|pod| is_measured(pod)) {
            let claims = pod.spec.volumes.iter().filter_map(|volume| self.of_claim(pod, volume));
            let mut claims = claims.peekable();
            if claims.peek().is_some() {
                let all = figures.entry(pod.metadata.uid.clone()).or_default();
                *all = all.iter().cloned().chain(claims).collect();
            }
        }
        figures
    }

    /// Never ends.
    pub(crate) async fn keep_measuring(self) {
        let measured = &self.shared.measured;
        let mut running = JoinSet::new();
        let mut busy = HashSet::new();
        let mut next_round = Instant::now();
        loop {
            let is_round = Instant::now() >= next_round;
            if is_round {
                next_round = Instant::now() + PERIOD;
            }
            let mut next = next_round;
            let mut pods = self.shared.store.pods();
            measured.figures.send_modify(|figures| {
                figures.retain(|uid, _| pods.iter().any(|pod| pod.metadata.uid == *uid));
            });
            pods.retain(|pod| is_measured(pod));
            for pod in pods {
                let uid = pod.metadata.uid.clone();
                if (is_round || !measured.figures.borrow().contains_key(&uid)) && busy.insert(uid.clone()) {
                    let this = self.clone();
                    running.spawn(async move {
                        this.measure(pod).await;
                        uid
                    });
                }
            }
            loop {
                tokio::select! {
                    () = sleep_until(next) => break,
                    () = measured.mounted.notified() => next = next.min(Instant::now() + SETTLING),
                    Some(ended) = running.join_next() => {
                        // A task that panicked is not repeated.
                        if let Ok(uid) = ended {
                            busy.remove(&uid);
                        }
                    }
                }
            }
        }
    }

    async fn measure(&self, pod: Arc<Pod>) {
        let uid = &pod.metadata.uid;
        let mut figures = Vec::new();
        for (name, space) in self.own_directories(&pod).await {
            figures.push(VolumeFigures {
                name,
                claim: None,
                space,
                is_abnormal: None,
                time: Timestamp::now(),
            });
        }
        self.shared.measured.figures.send_modify(|all| drop(all.insert(uid.clone(), figures.into())));
    }

    /// As the driver reports it. `None` for volumes that are not mounted, and drivers that report none.
    fn of_claim(&self, pod: &Pod, volume: &Volume) -> Option<VolumeFigures> {
        let shared = &self.shared;
        let claim = claim_of(pod, volume)?;
        let resolved = resolve::claim_in_use(&shared.store, pod, &claim).ok()?;
        let dir = shared.layout.csi_volume_dir(&pod.metadata.uid, &resolved.volume.metadata.name);
        let answer = shared.answers.get(&layout::target(&dir))?;
        let (space, is_abnormal) = of_stats(&answer.stats);
        let (name, time) = (volume.name.clone(), answer.time);
        Some(VolumeFigures { name, claim: Some(claim), space, is_abnormal, time })
    }

    /// emptyDirs, and the files that the kubelet writes.
    async fn own_directories(&self, pod: &Arc<Pod>) -> Vec<(String, Space)> {
        let layout = &self.shared.layout;
        let directory = |volume: &Volume| match volume.source()? {
            VolumeSource::EmptyDir(_) => Some(layout.empty_dir(&pod.metadata.uid, &volume.name)),
            _ => Target::of(layout, pod, volume).map(|target| target.dir),
        };
        let volumes = pod.spec.volumes.iter();
        let wanted: Vec<(String, PathBuf)> =
            volumes.filter_map(|volume| Some((volume.name.clone(), directory(volume)?))).collect();
        if wanted.is_empty() {
            return Vec::new();
        }
        // The semaphore is never closed.
        let _turn = self.shared.measured.turns.acquire().await;
        if !self.shared.measured.begin(&pod.metadata.uid) {
            return Vec::new();
        }
        let (shared, uid) = (Arc::clone(&self.shared), pod.metadata.uid.clone());
        let measured = tokio::task::spawn_blocking(move || {
            let end = std::time::Instant::now() + COUNTS;
            let of = |(name, dir): (String, PathBuf)| {
                let time = end.saturating_duration_since(std::time::Instant::now()).min(COUNT);
                Some((name, of_directory(&dir, Bounds { entries: ENTRIES, time }).ok()?))
            };
            let measured: Vec<_> = wanted.into_iter().filter_map(of).collect();
            shared.measured.threads().remove(&uid);
            measured
        });
        match timeout(DIRECTORIES, measured).await {
            Ok(measured) => measured.unwrap_or_default(),
            Err(_elapsed) => {
                debug!(pod = pod.metadata.name, "the file systems of the pod's volumes do not answer");
                Vec::new()
            }
        }
    }
}

/// The volumes of a pod that has ended are unmounted.
fn is_measured(pod: &Pod) -> bool {
    !pod.spec.volumes.is_empty() && !pod.status.phase.has_ended()
}

fn claim_of(pod: &Pod, volume: &Volume) -> Option<String> {
    match volume.source()? {
        VolumeSource::Claim(source) => Some(source.claim_name.clone()),
        VolumeSource::Ephemeral(_) => volume.claim_name(&pod.metadata.name),
        _ => None,
    }
}

/// The file system of `dir`, and what of it the directory uses.
fn of_directory(dir: &Path, bounds: Bounds) -> Result<Space, Error> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat(CWD, dir, flags, Mode::empty());
    let found = opened.and_then(rustix::fs::fstatvfs);
    let found = found.map_err(|errno| Error::io("measure", dir, errno.into()))?;
    let used = disk_usage::measure(dir, bounds).map_err(Error::Kernel)?;
    let bytes = |blocks: u64| Some(blocks.saturating_mul(found.f_frsize));
    Ok(Space {
        capacity: bytes(found.f_blocks),
        available: bytes(found.f_bavail),
        used: used.is_complete.then_some(used.bytes),
        inodes: Some(found.f_files),
        inodes_free: Some(found.f_ffree),
        inodes_used: used.is_complete.then_some(used.inodes),
    })
}

/// A driver's numbers are not trusted: a negative one is unknown.
fn of_stats(stats: &NodeGetVolumeStatsResponse) -> (Space, Option<bool>) {
    let mut space = Space::default();
    let amount = |number: i64| u64::try_from(number).ok();
    for usage in &stats.usage {
        match usage.unit() {
            Unit::Bytes => {
                space.capacity = amount(usage.total);
                // Otherwise the driver knows only the size: it cannot ask the volume.
                if usage.available != 0 || usage.used != 0 {
                    space.available = amount(usage.available);
                    space.used = amount(usage.used);
                }
            }
            Unit::Inodes => {
                space.inodes = amount(usage.total);
                space.inodes_free = amount(usage.available);
                space.inodes_used = amount(usage.used);
            }
            Unit::Unknown => {}
        }
    }
    (space, stats.volume_condition.as_ref().map(|condition| condition.abnormal))
}

#[cfg(test)]
mod tests {
    use proto::csi::{VolumeCondition, VolumeUsage};

    use super::*;
    use crate::clients::plugins::Plugins;
    use crate::sink::Sinks;
    use crate::store::{Source, Store};
    use crate::volumes::host_paths::mount_silent;

    #[test]
    fn a_drivers_numbers_are_taken_by_their_unit() {
        let usage =
            |unit: Unit, total, available, used| VolumeUsage { unit: unit.into(), total, available, used };
        let stats = NodeGetVolumeStatsResponse {
            usage: vec![
                usage(Unit::Inodes, 100, 90, 10),
                usage(Unit::Bytes, 4096, -1, 1024),
                usage(Unit::Unknown, 7, 7, 7),
            ],
            volume_condition: Some(VolumeCondition { abnormal: true, message: "slow".to_owned() }),
        };
        let expected = Space {
            capacity: Some(4096),
            available: None,
            used: Some(1024),
            inodes: Some(100),
            inodes_free: Some(90),
            inodes_used: Some(10),
        };
        assert_eq!(of_stats(&stats), (expected, Some(true)));
        assert_eq!(of_stats(&NodeGetVolumeStatsResponse::default()), (Space::default(), None));
        let stats = NodeGetVolumeStatsResponse { usage: vec![usage(Unit::Bytes, 4096, 0, 0)], ..stats };
        let size_alone = Space { capacity: Some(4096), ..Space::default() };
        assert_eq!(of_stats(&stats), (size_alone, Some(true)), "of a volume that was not measured");
    }

    fn pod(name: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\nspec:\n  containers: [{{name: c, image: i}}]\n  \
             volumes: [{{name: scratch, emptyDir: {{}}}}, {{name: host, hostPath: {{path: /}}}}]\n"
        )
    }

    /// Runs on one thread: a blocking measurement would stop everything.
    #[tokio::test]
    async fn a_hanging_directory_delays_no_other_pods_figures() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        for name in ["hung", "other"] {
            let parsed = crate::manifest::parse(pod(name).as_bytes(), "test");
            for manifest in parsed.manifests {
                store.apply(manifest.described(), Source::Api).unwrap();
            }
        }
        let sinks = Sinks::new(store.clone(), Vec::new());
        let volumes = Volumes::new(root.path(), store.clone(), sinks, Plugins::new());
        let dir = |name: &str| {
            let uid = &store.pod("default", name).unwrap().metadata.uid;
            (uid.clone(), volumes.empty_dir(uid, "scratch"))
        };
        let ((hung, hung_dir), (other, other_dir)) = (dir("hung"), dir("other"));
        for dir in [&other_dir, &hung_dir] {
            std::fs::create_dir_all(dir).unwrap();
        }
        std::fs::write(other_dir.join("file"), vec![1; 64 << 10]).unwrap();
        // A privileged container can mount a file system over its emptyDir.
        let (silent, connection) = mount_silent(root.path());
        linux::mount::bind(&silent, &hung_dir).unwrap();

        let measuring = tokio::spawn(volumes.clone().keep_measuring());
        let mut figures = volumes.shared.measured.figures.subscribe();
        let both = figures.wait_for(|figures| figures.contains_key(&other) && figures.contains_key(&hung));
        let found = timeout(Duration::from_secs(60), both).await.map(|found| found.unwrap().clone());
        measuring.abort();
        drop(connection);
        for mounted in [&hung_dir, &silent] {
            linux::mount::unmount(mounted, linux::mount::UnmountMode::Detach).unwrap();
        }
        let found = found.expect("both pods are measured");
        assert_eq!(found.get(&hung).map(|figures| figures.len()), Some(0), "{found:?}");
        let figures = &found[&other];
        assert_eq!(figures.len(), 1, "a hostPath has no figures: {figures:?}");
        assert_eq!((figures[0].name.as_str(), &figures[0].claim), ("scratch", &None));
        let space = figures[0].space;
        assert!(space.used >= Some(64 << 10) && space.capacity > space.used, "{space:?}");
        assert_eq!(space.inodes_used, Some(2));
    }
}
