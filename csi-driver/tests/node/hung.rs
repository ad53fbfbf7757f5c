//! A daemon that is stopped, a pool that does not answer: every call ends, and
//! what is taken down is gone.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use linux::mount::{FuseConnections, FuseMountOptions, FuseName, MountFlags};
use nix::sys::signal::Signal;
use proto::csi::VolumeUsage;
use proto::csi::volume_usage::Unit;
use tests::csi::scene::{Flags, GI, Scene, TIMEOUT, mounted};
use tests::{Daemon, eventually};
use tonic::Code;

use crate::astray::condition;

/// How long a call on a volume whose daemon is stopped may take: the driver's own
/// limits for a busy mount, a silent daemon and its end, and a slow machine.
pub(crate) const BOUND: Duration = Duration::from_secs(40);

pub(crate) fn within<T>(limit: Duration, call: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let result = call();
    assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
    result
}

pub(crate) fn connection_of(path: &Path) -> u32 {
    mounted(path).unwrap().minor
}

fn assert_no_connection(minor: u32) {
    eventually("the connection is gone", TIMEOUT, || {
        let waiting = FuseConnections::open()?.waiting(minor)?;
        anyhow::ensure!(waiting.is_none(), "{waiting:?} requests wait");
        Ok(())
    })
    .unwrap();
}

/// kubelet reads the condition only beside a usage.
pub(crate) fn assert_unmeasured(usage: &[VolumeUsage], capacity: i64) {
    let size = VolumeUsage { total: capacity, unit: Unit::Bytes.into(), ..VolumeUsage::default() };
    assert_eq!(usage, [size]);
}

#[test]
fn statistics_of_a_stopped_daemon_are_abnormal_within_seconds() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    scene.stop_daemon();
    for _ in 0..3 {
        let stats = within(Duration::from_secs(12), || caller.stats(&id, &target)).unwrap();
        let condition = stats.volume_condition.unwrap();
        assert!(condition.abnormal && condition.message.contains("does not answer"), "{condition:?}");
        assert_unmeasured(&stats.usage, GI);
    }
    within(BOUND, || caller.publish(&id, "two")).expect("a bind mount asks no daemon");
    scene.signal_daemon(Signal::SIGCONT);
    eventually("it answers again", TIMEOUT, || {
        let stats = caller.stats(&id, &target)?;
        anyhow::ensure!(!stats.volume_condition.unwrap().abnormal && stats.usage.len() == 2);
        Ok(())
    })
    .unwrap();
    caller.take_down(&id, &["one", "two"]).unwrap();
    scene.assert_nothing_left();
}

/// Whoever asks of the volume alone is told what who asks of a path is.
#[test]
fn get_volume_tells_daemons_that_do_not_answer_and_none_waits_for_another() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ids: Vec<_> = (0..8).map(|n| caller.create_named(&format!("pvc-{n}")).unwrap()).collect();
    ids.iter().for_each(|id| caller.stage(id).unwrap());
    assert!(ids.iter().all(|id| !condition(&caller, id).abnormal));
    scene.sandbox.switch_fuse_guard_off();
    scene.signal_daemons(Signal::SIGSTOP);
    // Less than one after the other would take.
    within(Duration::from_secs(12), || {
        std::thread::scope(|scope| {
            for id in &ids {
                scope.spawn(|| {
                    let told = condition(&caller, id);
                    assert!(told.abnormal && told.message.contains("does not answer"), "{told:?}");
                });
            }
        });
    });
    scene.signal_daemons(Signal::SIGCONT);
    for id in &ids {
        eventually("it answers again", TIMEOUT, || {
            let told = condition(&caller, id);
            anyhow::ensure!(!told.abnormal, "{told:?}");
            Ok(())
        })
        .unwrap();
        caller.take_down(id, &[]).unwrap();
    }
    scene.assert_nothing_left();
}

/// kubelet, a monitor and an operator may ask at once: none is told to come again.
#[test]
fn statistics_asked_for_at_once_are_all_answered() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let paths = [caller.target_path("one"), caller.staging_path(&id)];
    let asked = |abnormal: bool| {
        std::thread::scope(|scope| {
            for n in 0..8 {
                let (caller, id, path) = (&caller, &id, &paths[n % 2]);
                scope.spawn(move || {
                    let stats = caller.stats(id, path).unwrap();
                    let condition = stats.volume_condition.unwrap();
                    assert_eq!(
                        (condition.abnormal, stats.usage.len()),
                        (abnormal, if abnormal { 1 } else { 2 }),
                        "{condition:?}"
                    );
                });
            }
        });
    };
    for _ in 0..20 {
        asked(false);
    }
    scene.stop_daemon();
    within(Duration::from_secs(12), || asked(true));
    scene.signal_daemon(Signal::SIGCONT);
    eventually("it answers again", TIMEOUT, || {
        let stats = caller.stats(&id, &paths[0])?;
        anyhow::ensure!(!stats.volume_condition.unwrap().abnormal);
        Ok(())
    })
    .unwrap();
    asked(false);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// What is measured at a target whose mount is gone would be the node's own disk.
#[test]
fn statistics_of_an_unmounted_target_are_not_those_of_the_disk_beneath() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    linux::mount::unmount(&target, linux::mount::UnmountMode::Plain).unwrap();
    let stats = caller.stats(&id, &target).unwrap();
    let condition = stats.volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("not mounted"), "{condition:?}");
    assert_unmeasured(&stats.usage, GI);
    assert!(!caller.stats(&id, &caller.staging_path(&id)).unwrap().volume_condition.unwrap().abnormal);
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// The pod's process was killed, and its last close waits for the daemon: neither
/// the process nor the mount goes away by itself.
#[test]
fn unpublish_and_unstage_of_a_stopped_daemon_end_in_time_and_leave_no_connection() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();
    let connection = connection_of(&caller.staging_path(&id));
    let file = caller.target_path("one").join("file");
    let mut command = scene.sandbox.command(Path::new("sh"));
    command.args(["-c", "exec >\"$0\"; echo begun; exec sleep 1000"]).arg(&file);
    let mut pod = Daemon::start("pod", command, &scene.sandbox.path("driver.log")).unwrap();
    eventually("the pod writes", TIMEOUT, || {
        anyhow::ensure!(fs::read(&file)? == b"begun\n");
        Ok(())
    })
    .unwrap();
    scene.stop_daemon();
    pod.signal(Signal::SIGKILL).unwrap();
    within(BOUND, || caller.unpublish(&id, "one")).unwrap();
    assert!(pod.wait(TIMEOUT).is_ok(), "nothing keeps it any more");
    within(BOUND, || caller.unpublish(&id, "two")).unwrap();
    within(BOUND, || caller.unstage(&id)).unwrap();
    assert_no_connection(connection);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// Somebody else sits in the staged mount: it is detached, and nothing can wait in it.
#[test]
fn unstage_under_a_stranger_ends_the_connection_and_not_the_stranger() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let staging = caller.staging_path(&id);
    fs::write(staging.join("file"), "x").unwrap();
    let connection = connection_of(&staging);
    let stranger = fs::File::open(&staging).unwrap();
    within(BOUND, || caller.unstage(&id)).unwrap();
    assert!(mounted(&staging).is_none());
    let refused = nix::sys::stat::fstatat(&stranger, "file", nix::fcntl::AtFlags::empty());
    assert_eq!(refused.unwrap_err(), nix::errno::Errno::ENOTCONN);
    drop(stranger);
    assert_no_connection(connection);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// A file system over the pool that answers nothing, until it is ended.
struct HungPool {
    _device: OwnedFd,
    minor: u32,
}

impl HungPool {
    fn over(pool: &Path) -> Self {
        let device = linux::mount::open_fuse_device().unwrap();
        let options =
            FuseMountOptions { flags: MountFlags::default(), allow_other: true, default_permissions: false };
        linux::mount::mount_fuse(device.as_fd(), FuseName { source: "hung", subtype: "hung" }, pool, options)
            .unwrap();
        Self { _device: device, minor: connection_of(pool) }
    }

    /// Ends it: the pool beneath is there again.
    fn end(self, pool: &Path) {
        let connection = FuseConnections::open().unwrap().connection(self.minor).unwrap();
        connection.unwrap().abort().unwrap();
        eventually("the hung pool is gone", TIMEOUT, || {
            Ok(linux::mount::unmount(pool, linux::mount::UnmountMode::Plain)?)
        })
        .unwrap();
    }
}

#[test]
fn a_hung_pool_fails_within_the_deadline_and_spares_others() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let [served, staged_later] = ["served", "later"].map(|name| caller.create_named(name).unwrap());
    caller.stage(&served).unwrap();
    caller.publish(&served, "one").unwrap();
    scene.sandbox.switch_fuse_guard_off();
    let pool = scene.sandbox.path("pool");
    let hung = HungPool::over(&pool);

    let refused = within(BOUND, || caller.stage(&staged_later)).unwrap_err();
    assert!(matches!(refused.code(), Code::DeadlineExceeded | Code::Unavailable), "{refused:?}");
    assert!(mounted(&caller.staging_path(&staged_later)).is_none(), "nothing is left of it");
    // What is served has its directory already, and to take it down needs no pool.
    fs::write(caller.target_path("one").join("file"), "x").unwrap();
    within(BOUND, || caller.unstage(&staged_later)).unwrap();
    within(BOUND, || caller.unpublish(&served, "one")).unwrap();
    within(BOUND, || caller.unstage(&served)).unwrap();

    hung.end(&pool);
    eventually("the pool is used again", TIMEOUT, || Ok(caller.stage(&staged_later)?)).unwrap();
    caller.unstage(&staged_later).unwrap();
    for id in [&served, &staged_later] {
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}
