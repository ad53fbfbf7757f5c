//! fsGroup: a volume's files belong to the pod's group, which can write them (kubernetes,
//! pkg/volume/volume_linux.go).
//!
//! Invariant: a volume's group is changed once per pod, before the pod's first container starts. A
//! marker on disk records it, since a restarted kubelet mounts the volumes of running pods again.
//! Other pods may use the volume meanwhile, so the walk is `linux::tree`'s, which is safe against
//! renames.
//!
//! A walk has no time limit, as with kubelet, but it ends with its pod ([`Stop`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use linux::tree::{self, GroupAccess};
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use tokio::sync::SetOnce;

use super::device::Turn;
use super::error::Error;
use super::files;
use super::host_paths::{HostPaths, Walk};
use crate::objects::FsGroupChangePolicy;

/// How long a pod's end waits for a walk whose file system does not answer. The walk's thread ends later.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
const INTERRUPTED: Error = Error::Interrupted { what: "the change of group" };

/// Ends the walks of one pod.
#[derive(Debug, Default)]
pub(super) struct Stop {
    is_set: AtomicBool,
    set: SetOnce<()>,
}

impl Stop {
    pub(super) fn set(&self) {
        self.is_set.store(true, Ordering::Relaxed);
        let _was_set = self.set.set(());
    }

    async fn wait(&self) {
        self.set.wait().await;
    }
}

/// A volume and its new group.
#[derive(Debug)]
pub(super) struct GroupChange {
    pub(super) root: PathBuf,
    /// A path that all pods of the volume have in common. It need not exist.
    pub(super) volume: PathBuf,
    pub(super) group: u32,
    pub(super) policy: FsGroupChangePolicy,
    /// A file that exists once the group was changed.
    pub(super) marker: PathBuf,
    pub(super) stop: Arc<Stop>,
}

/// [`change_group`] of a volume that other pods may have. Their walks hold `turn` too: the volume has the group
/// of the last one, and a root with the right group shows that a walk is complete.
pub(super) async fn change_group_in_turn(
    change: GroupChange,
    turn: &Turn,
    paths: &HostPaths,
) -> Result<(), Error> {
    // The containers of this pod may run: they must not wait for another pod's walk.
    if change.marker.exists() {
        return Ok(());
    }
    let stop = Arc::clone(&change.stop);
    let _turn = tokio::select! {
        turn = turn.lock() => turn,
        () = stop.wait() => return Err(INTERRUPTED),
    };
    change_group(change, paths).await
}

/// Walks the whole tree, in a thread of its own.
pub(super) async fn change_group(change: GroupChange, paths: &HostPaths) -> Result<(), Error> {
    let stop = Arc::clone(&change.stop);
    let stopped = async {
        stop.wait().await;
        tokio::time::sleep(STOP_TIMEOUT).await;
    };
    let (root, volume) = (change.root.clone(), change.volume.clone());
    let walk = Walk { root: &root, volume: &volume, what: "change of group" };
    paths.walk(walk, stopped, move || change_once(&change)).await?.ok_or(INTERRUPTED)
}

fn change_once(change: &GroupChange) -> Result<(), Error> {
    if change.marker.exists() {
        return Ok(());
    }
    change_if_needed(change).map_err(|source| Error::FsGroup {
        root: change.root.clone(),
        group: change.group,
        source,
    })?;
    // The pod's directory is being removed.
    if change.stop.is_set.load(Ordering::Relaxed) {
        return Err(INTERRUPTED);
    }
    files::make_dir(change.marker.parent().unwrap_or(Path::new("/")), 0o750)?;
    // A power cut may lose the marker, but then no container runs.
    std::fs::write(&change.marker, "").map_err(|e| Error::io("create", &change.marker, e))
}

fn change_if_needed(change: &GroupChange) -> linux::Result<()> {
    let GroupChange { root: path, group, policy, stop, .. } = change;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let root = open(path, flags, Mode::empty()).map_err(|e| linux::Error::at("open", path, e))?;
    let access = GroupAccess::ReadWrite;
    if *policy == FsGroupChangePolicy::OnRootMismatch && tree::has_group(&root, *group, access)? {
        return Ok(());
    }
    tree::give_group(&root, *group, access, &stop.is_set)
}

#[cfg(test)]
mod tests {
    use super::super::Volumes;
    use super::super::host_paths::MAX_LATE_OF_MOUNT;
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    fn group_of(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().gid()
    }

    fn change(dir: &Path, marker: &str, group: u32, policy: FsGroupChangePolicy) -> GroupChange {
        let (root, marker) = (dir.join("root"), dir.join("pods/u").join(marker));
        GroupChange { volume: dir.to_owned(), root, group, policy, marker, stop: Arc::default() }
    }

    #[tokio::test]
    async fn a_walk_ends_with_its_pod_also_where_the_file_system_does_not_answer() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("root")).unwrap();
        let walk = change(dir.path(), "a", 2000, FsGroupChangePolicy::Always);
        walk.stop.set();
        let paths = HostPaths::default();
        let (marker, error) = (walk.marker.clone(), change_group(walk, &paths).await.unwrap_err());
        assert!(error.text().contains("Operation canceled"), "{}", error.text());
        assert!(!marker.exists());

        let (silent, connection) = super::super::host_paths::mount_silent(dir.path());
        let walk = GroupChange {
            root: silent.clone(),
            ..change(dir.path(), "b", 2000, FsGroupChangePolicy::Always)
        };
        let (stop, marker) = (Arc::clone(&walk.stop), walk.marker.clone());
        let walking = tokio::spawn(async move { change_group(walk, &paths).await });
        tokio::task::yield_now().await;
        stop.set();
        let stopped = tokio::time::timeout(2 * STOP_TIMEOUT, walking).await;
        drop(connection);
        linux::mount::unmount(&silent, linux::mount::UnmountMode::Detach).unwrap();
        assert_eq!(stopped.unwrap().unwrap().unwrap_err().text(), INTERRUPTED.text());
        assert!(!marker.exists());
    }

    /// Pods are made again and again on a volume whose server is gone.
    #[tokio::test(start_paused = true)]
    async fn walks_over_a_volume_that_does_not_answer_take_few_threads() {
        const PODS: usize = 3 * MAX_LATE_OF_MOUNT;
        let dir = tempfile::tempdir().unwrap();
        let (silent, connection) = super::super::host_paths::mount_silent(dir.path());
        let (paths, mut errors) = (HostPaths::default(), Vec::new());
        for number in 0..PODS {
            let marker = format!("ready-{number}");
            let walk = GroupChange {
                // Each pod has another path to the volume.
                root: dir.path().join("./".repeat(number)).join("silent"),
                ..change(dir.path(), &marker, 2000, FsGroupChangePolicy::Always)
            };
            let stop = Arc::clone(&walk.stop);
            let walking = change_group(walk, &paths);
            let ending = async {
                tokio::task::yield_now().await;
                stop.set();
            };
            errors.push(tokio::join!(walking, ending).0.unwrap_err().text());
        }
        // Each has a thread.
        let late = paths.late();
        drop(connection);
        linux::mount::unmount(&silent, linux::mount::UnmountMode::Detach).unwrap();
        assert_eq!(late, MAX_LATE_OF_MOUNT);
        let (given_up, refused) = errors.split_at(MAX_LATE_OF_MOUNT);
        assert!(given_up.iter().all(|error| *error == INTERRUPTED.text()), "{given_up:?}");
        let says_why = |error: &String| error.contains("silent has not answered within 5 s");
        assert!(refused.iter().all(says_why), "{refused:?}");
    }

    #[tokio::test]
    async fn the_end_of_a_pod_stops_its_walks_and_not_those_of_the_next_pod() {
        let dir = tempfile::tempdir().unwrap();
        let store = crate::store::Store::open(dir.path(), "node").unwrap();
        let sinks = crate::sink::Sinks::new(store.clone(), Vec::new());
        let volumes = Volumes::new(dir.path(), store, sinks, crate::clients::plugins::Plugins::new());
        let is_set = |stop: &Stop| stop.is_set.load(Ordering::Relaxed);
        let (stop, other) = (volumes.shared.stop_of("u"), volumes.shared.stop_of("other"));
        let ended = crate::objects::ObjectRef { uid: "u".to_owned(), ..crate::objects::ObjectRef::default() };
        volumes.unmount_pod(&ended).await;
        assert!(is_set(&stop) && !is_set(&other) && !is_set(&volumes.shared.stop_of("u")));
    }

    #[test]
    fn the_group_is_changed_once_per_pod() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("root/file");
        std::fs::create_dir(dir.path().join("root")).unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::Always)).unwrap();
        std::fs::write(&file, "").unwrap();
        std::os::unix::fs::chown(&file, None, Some(0)).unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::Always)).unwrap();
        assert_eq!(group_of(&file), 0, "its containers may have started");
        change_once(&change(dir.path(), "b", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&file), 0, "the root is the group's");
        change_once(&change(dir.path(), "c", 2000, FsGroupChangePolicy::Always)).unwrap();
        assert_eq!(group_of(&file), 2000);
    }

    #[test]
    fn on_root_mismatch_walks_when_the_root_lacks_setgid() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(root.join("file"), "").unwrap();
        std::os::unix::fs::chown(&root, None, Some(2000)).unwrap();
        std::fs::set_permissions(&root, PermissionsExt::from_mode(0o770)).unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&root.join("file")), 2000);
        assert_eq!(std::fs::metadata(&root).unwrap().mode() & 0o7777, 0o2770);
    }

    #[test]
    fn the_group_of_a_single_file_is_changed() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("root"), "").unwrap();
        change_once(&change(dir.path(), "a", 2000, FsGroupChangePolicy::OnRootMismatch)).unwrap();
        assert_eq!(group_of(&dir.path().join("root")), 2000);
    }
}
