//! Removes dead containers and unused images from a nearly full disk.
//!
//! Invariant: containers that the kubelet still needs for decisions stay.
//! - The containers of an ended pod are removed only after the pod's status is on disk.
//! - The newest instance of each container of a running pod stays.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::cri::{Container, ContainerState};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::disk::Space;
use super::image_directories::ImageDirectories;
use super::images::Images;
use crate::clients::cri::{CONTAINER_NAME_LABEL, POD_UID_LABEL};
use crate::objects::{EventType, ObjectRef};
use crate::worker::Tools;

/// How often the images in use are recorded while there is space.
const IMAGE_SCAN_PERIOD: Duration = Duration::from_secs(60);
/// How often an event says that the images that may go do not suffice (kubelet's ImageGCPeriod).
const REPORT_PERIOD: Duration = Duration::from_secs(5 * 60);
/// For the removal of dead containers, and for that of images: a pod determines how long its layer takes, and the
/// next step must not wait for that.
const REMOVAL_TIME: Duration = Duration::from_secs(10);

/// `--image-gc-high-threshold`, `--image-gc-low-threshold`, `--minimum-image-ttl-duration`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageGc {
    /// Usage in percent above which dead containers and unused images are removed.
    pub high_percent: u64,
    /// Usage in percent at which image removal stops.
    pub low_percent: u64,
    /// Images found or used more recently stay.
    pub min_age: Duration,
}

/// What is known of images; shared by all that remove them.
#[derive(Debug)]
pub(super) struct Garbage {
    limits: ImageGc,
    images: Mutex<Images>,
    /// Held while dead containers are removed.
    removing: Arc<Mutex<()>>,
    pub(super) directories: ImageDirectories,
}

impl Garbage {
    pub(super) fn new(limits: ImageGc) -> Self {
        let directories = ImageDirectories::new();
        Self { limits, images: Mutex::default(), removing: Arc::default(), directories }
    }

    /// Removes every dead container that may go. Returns at the end of [`REMOVAL_TIME`] at the latest; the removal
    /// goes on, once at a time.
    pub(super) async fn remove_dead_containers(&self, tools: &Arc<Tools>) {
        let removed = async {
            let turn = Arc::clone(&self.removing).lock_owned().await;
            let tools = Arc::clone(tools);
            let removal = async move {
                remove_dead_containers(&tools).await;
                drop(turn);
            };
            // A panic is reported by its hook.
            drop(tokio::spawn(removal).await);
        };
        if timeout(REMOVAL_TIME, removed).await.is_err() {
            warn!("dead containers are still being removed after {} s", REMOVAL_TIME.as_secs());
        }
    }

    /// Removes every unused image that may go, within [`REMOVAL_TIME`].
    pub(super) async fn remove_images(&self, tools: &Tools) {
        match timeout(REMOVAL_TIME, self.remove_unused_images(tools)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "unused images not removed"),
            Err(_late) => warn!("unused images not all removed within {} s", REMOVAL_TIME.as_secs()),
        }
    }

    async fn remove_unused_images(&self, tools: &Tools) -> crate::clients::cri::Result<()> {
        let present = tools.cri.images().await?;
        let containers = tools.cri.list_containers(None).await?;
        let mut images = self.images.lock().await;
        images.record_use(&present, &containers, Instant::now());
        for image in images.candidates(&present, &containers, self.limits.min_age, Instant::now()) {
            info!(image = image.id, tags = ?image.repo_tags, "removing an unused image: the node lacks disk space");
            if let Err(error) = tools.cri.remove_image(&image.id).await {
                warn!(%error, "unused image not removed");
            }
        }
        Ok(())
    }
}

pub(super) async fn collect_forever(tools: Arc<Tools>, garbage: Arc<Garbage>, period: Duration) {
    let limits = garbage.limits;
    let (mut scanned_at, mut reported_at): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        tokio::time::sleep(period).await;
        let directories = garbage.directories.known().unwrap_or_default();
        let is_full =
            |path: &PathBuf| Space::of(path).is_some_and(|s| s.percent_used() >= limits.high_percent);
        let has_full_images = directories.iter().any(is_full);
        let has_full_disk = has_full_images || [&tools.root_dir, &tools.log_dir].into_iter().any(is_full);
        if has_full_disk {
            garbage.remove_dead_containers(&tools).await;
        }
        if !has_full_disk && scanned_at.is_some_and(|at| at.elapsed() < IMAGE_SCAN_PERIOD) {
            continue;
        }
        scanned_at = Some(Instant::now());
        let mut images = garbage.images.lock().await;
        let collected = collect_images(&tools, limits, &mut images, &directories).await;
        drop(images);
        match collected {
            Ok(too_full) if reported_at.is_none_or(|at| at.elapsed() >= REPORT_PERIOD) => {
                let node = ObjectRef::node(tools.store.node_name());
                for message in too_full {
                    tools.sinks.record(&node, EventType::Warning, "FreeDiskSpaceFailed", &message);
                    reported_at = Some(Instant::now());
                }
            }
            Ok(_reported_recently) => {}
            Err(error) => warn!(%error, "unused images not removed"),
        }
    }
}

/// Returns a message for each directory whose disk stays too full.
async fn collect_images(
    tools: &Tools,
    limits: ImageGc,
    images: &mut Images,
    directories: &[PathBuf],
) -> crate::clients::cri::Result<Vec<String>> {
    let mut too_full = Vec::new();
    let present = tools.cri.images().await?;
    let containers = tools.cri.list_containers(None).await?;
    images.record_use(&present, &containers, Instant::now());
    // Most runtimes have one directory. Bring each one below its threshold.
    for directory in directories {
        let Some(space) = Space::of(directory).filter(|s| s.percent_used() >= limits.high_percent) else {
            continue;
        };
        let wanted = space.missing_for(limits.low_percent);
        for image in images.candidates(&present, &containers, limits.min_age, Instant::now()) {
            if Space::of(directory).is_none_or(|now| now.missing_for(limits.low_percent) == 0) {
                break;
            }
            info!(image = image.id, tags = ?image.repo_tags, "removing an unused image from a full disk");
            if let Err(error) = tools.cri.remove_image(&image.id).await {
                warn!(%error, "unused image not removed");
            }
        }
        let Some(now) = Space::of(directory).filter(|now| now.missing_for(limits.low_percent) > 0) else {
            continue;
        };
        // The first sentences are kubelet's.
        too_full.push(format!(
            "Failed to garbage collect required amount of images. Attempted to free {wanted} bytes, but only \
             found {} bytes eligible to free. The disk of {} is used to {} %, and images go until {} % are used.",
            wanted.saturating_sub(now.missing_for(limits.low_percent)),
            directory.display(),
            now.percent_used(),
            limits.low_percent,
        ));
    }
    Ok(too_full)
}

async fn remove_dead_containers(tools: &Tools) {
    let containers = match tools.cri.list_containers(None).await {
        Ok(containers) => containers,
        Err(error) => return warn!(%error, "dead containers not removed"),
    };
    let pods = tools.store.pods();
    for pod in pods.iter().filter(|pod| !pod.metadata.is_deleted()) {
        let uid = &pod.metadata.uid;
        let of_pod = containers.iter().filter(|c| label(c, POD_UID_LABEL) == uid);
        let mut dead: Vec<&Container> = of_pod.clone().filter(|c| is_dead(c)).collect();
        let newest = newest(of_pod.collect());
        let has_ended = pod.status.phase.has_ended();
        if has_ended {
            if dead.is_empty() || !tools.store.keep_pod_status(uid) {
                continue;
            }
        } else {
            dead.retain(|container| !newest.contains(container.id.as_str()));
        }
        for container in dead {
            info!(
                pod = pod.metadata.name,
                container = container.id,
                "removing a dead container from a full disk"
            );
            // Keep the log of the newest instance: it shows how the container ended.
            let removed = if newest.contains(container.id.as_str()) {
                tools.cri.remove_container(&container.id).await
            } else {
                let number = container.metadata.as_ref().map_or(0, |m| m.attempt);
                let name = label(container, CONTAINER_NAME_LABEL);
                tools.remove_instance(&pod.metadata, &container.id, name, number).await
            };
            if let Err(error) = removed {
                warn!(%error, "dead container not removed");
            }
        }
    }
}

/// The ids of the newest instance of each container.
fn newest(mut of_pod: Vec<&Container>) -> BTreeSet<&str> {
    of_pod.sort_by_key(|c| std::cmp::Reverse((c.metadata.as_ref().map_or(0, |m| m.attempt), c.created_at)));
    let mut names = BTreeSet::new();
    of_pod.retain(|container| names.insert(label(container, CONTAINER_NAME_LABEL)));
    of_pod.into_iter().map(|container| container.id.as_str()).collect()
}

fn is_dead(container: &Container) -> bool {
    container.state() == ContainerState::ContainerExited
}

fn label<'a>(container: &'a Container, key: &str) -> &'a str {
    container.labels.get(key).map_or("", String::as_str)
}
