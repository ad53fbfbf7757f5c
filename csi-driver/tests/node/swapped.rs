//! A directory on the way to a staging or target path that a pod swaps for a link, as it can in
//! its emptyDir: nothing happens where the link leads.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use linux::mountinfo::MountEntry;
use rustix::fs::{CWD, RenameFlags};
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, is_uncertain, retried};
use tonic::{Code, Status};

use crate::paths::{publish_at, stage_at, unpublish_at, unstage_at};

/// Names that the sentinel has, and one that it does not have.
const NAMES: [&str; 3] = ["stage", "target", "fresh"];
/// A driver that used its paths again failed within the first rounds.
const PUBLISHES: usize = 60;
const STAGES: usize = 16;
/// The shortest is long enough for a call to check its path, the longest for a whole call on a busy machine.
const BETWEEN_SWAPS: Duration = Duration::from_micros(500);
const LENGTHS: u32 = 7;
const LONGEST_ATTACK: Duration = Duration::from_secs(120);

/// A pod's emptyDir with the directory `dir`, and a link to the sentinel, outside of the
/// kubelet's directory.
struct Ground<'a> {
    scene: &'a Scene,
    empty_dir: PathBuf,
    sentinel: PathBuf,
    /// Inode and mode of each name in the sentinel.
    before: BTreeMap<String, (u64, u32)>,
}

impl<'a> Ground<'a> {
    fn new(scene: &'a Scene) -> Self {
        let sentinel = scene.sandbox.make_dir("sentinel").unwrap();
        for name in &NAMES[..2] {
            fs::create_dir(sentinel.join(name)).unwrap();
            fs::set_permissions(sentinel.join(name), fs::Permissions::from_mode(0o755)).unwrap();
        }
        let empty_dir = scene.kubelet_dir().join("pods/p/volumes/kubernetes.io~empty-dir/v");
        fs::create_dir_all(empty_dir.join("dir")).unwrap();
        symlink(&sentinel, empty_dir.join("aside")).unwrap();
        let before = names(&sentinel);
        Self { scene, empty_dir, sentinel, before }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.empty_dir.join("dir").join(name)
    }

    fn swap(&self) {
        swap(&self.empty_dir);
    }

    #[track_caller]
    fn assert_sentinel_untouched(&self, after: &dyn std::fmt::Debug) {
        assert_eq!(names(&self.sentinel), self.before, "after {after:?}\n{}", self.scene.log());
        let mounts = linux::mountinfo::read().unwrap();
        let there: Vec<_> = mounts.iter().filter(|m| m.mount_point.starts_with(&self.sentinel)).collect();
        assert!(there.is_empty(), "after {after:?}: {there:?}");
    }

    fn attack(&self) -> Attack {
        let ends = Arc::new(AtomicBool::new(false));
        let (empty_dir, stop) = (self.empty_dir.clone(), ends.clone());
        let swapping = std::thread::spawn(move || {
            let begun = Instant::now();
            for round in 0.. {
                if stop.load(Ordering::Relaxed) || begun.elapsed() >= LONGEST_ATTACK {
                    break;
                }
                swap(&empty_dir);
                std::thread::park_timeout(BETWEEN_SWAPS * (1 << (round % LENGTHS)));
            }
            if fs::symlink_metadata(empty_dir.join("dir")).unwrap().is_symlink() {
                swap(&empty_dir);
            }
        });
        Attack { ends, swapping: Some(swapping) }
    }

    fn remove(self) {
        for dir in [self.empty_dir.join("dir"), self.sentinel.clone()] {
            let there = if dir == self.sentinel { &self.before } else { &BTreeMap::new() };
            assert_eq!(&names(&dir), there, "{}", dir.display());
        }
        fs::remove_dir_all(&self.sentinel).unwrap();
        fs::remove_dir_all(self.scene.kubelet_dir().join("pods/p")).unwrap();
    }
}

/// Ends with the directory in its place.
struct Attack {
    ends: Arc<AtomicBool>,
    swapping: Option<JoinHandle<()>>,
}

impl Drop for Attack {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let ended = self.swapping.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn swap(empty_dir: &Path) {
    let (dir, aside) = (empty_dir.join("dir"), empty_dir.join("aside"));
    rustix::fs::renameat_with(CWD, &dir, CWD, &aside, RenameFlags::EXCHANGE).unwrap();
}

fn names(dir: &Path) -> BTreeMap<String, (u64, u32)> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    let shown = |entry: fs::DirEntry| {
        let found = fs::symlink_metadata(entry.path()).unwrap();
        (entry.file_name().into_string().unwrap(), (found.ino(), found.mode()))
    };
    entries.map(shown).collect()
}

fn volumes_mounted() -> Vec<MountEntry> {
    let all = linux::mountinfo::read().unwrap();
    all.into_iter().filter(|mount| mount.fs_type == "fuse.hawser").collect()
}

/// A link is refused where it is seen, and what became one since is uncertain.
#[track_caller]
fn assert_clear(answer: &Result<(), Status>, field: &str) {
    let Err(status) = answer else { return };
    assert!(is_uncertain(status) || status.code() == Code::InvalidArgument, "{status:?}");
    assert!(status.message().contains(field), "{status:?}");
}

fn staged(scene: &Scene, caller: &Caller) -> (String, usize) {
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let mounts = volumes_mounted().len();
    assert!(mounts > 0, "{}", scene.log());
    (id, mounts)
}

#[test]
fn nothing_happens_where_a_link_leads_that_took_the_place_of_a_known_parent() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ground = Ground::new(&scene);
    let (id, _) = staged(&scene, &caller);
    let other = caller.create_named("pvc-2").unwrap();
    let (target, stage) = (ground.path("target"), ground.path("stage"));
    fs::create_dir(&stage).unwrap();
    stage_at(&caller, &other, &stage).unwrap();
    publish_at(&caller, &id, &target).unwrap();
    let mounted = volumes_mounted().len();

    ground.swap();
    for refused in [unpublish_at(&caller, &id, &target), unstage_at(&caller, &other, &stage)] {
        ground.assert_sentinel_untouched(&refused);
        let status = refused.unwrap_err();
        assert_eq!(status.code(), Code::Aborted, "{status:?}");
        assert!(status.message().contains("dir has become a link"), "{status:?}");
    }
    assert_eq!(volumes_mounted().len(), mounted, "both are there still");
    ground.swap();
    unpublish_at(&caller, &id, &target).unwrap();
    unstage_at(&caller, &other, &stage).unwrap();
    fs::remove_dir(&stage).unwrap();
    caller.delete(&other).unwrap();
    ground.remove();
    caller.take_down(&id, &[]).unwrap();
    fs::remove_dir_all(scene.kubelet_dir().join("pods/refused")).unwrap();
    scene.assert_nothing_left();
}

/// Runs `act` where nothing is mounted below `dir`, as in a pod's mount namespace.
fn without_mounts_below(dir: &Path, act: impl FnOnce() + Send) {
    let below = |mount: &MountEntry| mount.mount_point.starts_with(dir);
    let in_pod = || {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        linux::mount::make_private(Path::new("/")).unwrap();
        let mounts = || linux::mountinfo::read().unwrap().into_iter().filter(below).collect::<Vec<_>>();
        let unmount = |mount: &MountEntry| {
            linux::mount::unmount(&mount.mount_point, linux::mount::UnmountMode::Detach).is_ok()
        };
        // Some lie beneath others, and no path leads to them until those are gone.
        while mounts().iter().rev().any(unmount) {}
        assert_eq!(mounts(), []);
        act();
    };
    std::thread::scope(|scope| scope.spawn(in_pod).join()).unwrap();
}

#[test]
fn a_pod_that_removes_its_target_keeps_no_volume() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ground = Ground::new(&scene);
    let (id, _) = staged(&scene, &caller);
    let target = ground.path("target");
    publish_at(&caller, &id, &target).unwrap();
    // The kernel takes a mount off whose directory is removed where it is no mount point.
    without_mounts_below(&scene.kubelet_dir(), || fs::remove_dir(&target).unwrap());
    ground.swap();
    unpublish_at(&caller, &id, &target).unwrap();
    ground.assert_sentinel_untouched(&"a link without a mount behind it");
    ground.swap();

    publish_at(&caller, &id, &target).unwrap();
    let replaced = || {
        fs::remove_dir(&target).unwrap();
        fs::create_dir(&target).unwrap();
        fs::write(target.join("x"), "of the pod").unwrap();
    };
    without_mounts_below(&scene.kubelet_dir(), replaced);
    unpublish_at(&caller, &id, &target).unwrap();
    assert_eq!(fs::read_to_string(target.join("x")).unwrap(), "of the pod");
    fs::remove_dir_all(&target).unwrap();
    ground.remove();
    caller.take_down(&id, &[]).unwrap();
    fs::remove_dir_all(scene.kubelet_dir().join("pods/refused")).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_pod_that_swaps_a_directory_for_a_link_moves_no_publish() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ground = Ground::new(&scene);
    let (id, mounted) = staged(&scene, &caller);
    let mut published = 0;
    let attack = ground.attack();
    for round in 0..PUBLISHES {
        let target = ground.path(NAMES[1 + round % 2]);
        let answer = publish_at(&caller, &id, &target);
        ground.assert_sentinel_untouched(&answer);
        assert_clear(&answer, "target_path");
        published += usize::from(answer.is_ok());
        retried(&scene, "unpublish", || {
            let answer = unpublish_at(&caller, &id, &target);
            ground.assert_sentinel_untouched(&answer);
            answer
        });
        assert_eq!(volumes_mounted().len(), mounted, "{answer:?}\n{}", scene.log());
    }
    drop(attack);
    assert!(published > 0, "{}", scene.log());
    publish_at(&caller, &id, &ground.path("target")).unwrap();
    unpublish_at(&caller, &id, &ground.path("target")).unwrap();
    ground.remove();
    caller.take_down(&id, &[]).unwrap();
    fs::remove_dir_all(scene.kubelet_dir().join("pods/refused")).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_pod_that_swaps_a_directory_for_a_link_moves_no_stage() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ground = Ground::new(&scene);
    let id = caller.create_named("pvc-1").unwrap();
    let stage = ground.path("stage");
    fs::create_dir(&stage).unwrap();
    let mut staged = 0;
    let attack = ground.attack();
    for _ in 0..STAGES {
        let answer = stage_at(&caller, &id, &stage);
        ground.assert_sentinel_untouched(&answer);
        assert_clear(&answer, "staging_target_path");
        staged += usize::from(answer.is_ok());
        retried(&scene, "unstage", || {
            let answer = unstage_at(&caller, &id, &stage);
            ground.assert_sentinel_untouched(&answer);
            answer
        });
        assert!(volumes_mounted().is_empty(), "{answer:?}\n{}", scene.log());
    }
    drop(attack);
    assert!(staged > 0, "{}", scene.log());
    stage_at(&caller, &id, &stage).unwrap();
    unstage_at(&caller, &id, &stage).unwrap();
    fs::remove_dir(&stage).unwrap();
    ground.remove();
    caller.delete(&id).unwrap();
    tests::eventually("nothing runs", TIMEOUT, || {
        anyhow::ensure!(scene.daemons().is_empty());
        Ok(())
    })
    .unwrap();
    scene.assert_nothing_left();
}
