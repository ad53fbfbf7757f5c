//! Kills at moments of their own: without traffic, while another daemon starts, of a stopped daemon, in
//! a full volume, and during the driver's operations.

use std::time::{Duration, Instant};

use proto::csi::{CapacityRange, ControllerExpandVolumeRequest};
use tests::as_soon_as;
use tests::csi::scene::Caller;
use tests::csi::snapshots::{BLOCKING_COPY, delete_snapshot, get_snapshot, snapshot_with};
use tonic::{Code, Status};

use crate::report::Target;
use crate::suite::{Suite, Volume};
use crate::{TIMEOUT, kills, process};

const MI: i64 = 1 << 20;

#[test]
fn a_volume_without_traffic_is_as_it_was() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    let file = volume.path.join("kept");
    let written = suite.on_volume("write", {
        let file = file.clone();
        move || std::fs::write(file, "kept")
    });
    written.unwrap();
    for round in 0..kills(4) {
        suite.kill_or_daemon(Target::ALL[round % Target::ALL.len()]);
    }
    let read = suite.on_volume("read", move || std::fs::read(file));
    assert_eq!(read.unwrap(), b"kept");
    suite.finish();
}

#[test]
fn a_successor_that_is_killed_as_it_starts_is_followed_by_another_one() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["names", "file"]);
    suite.progress();
    for _ in 0..kills(2) {
        let first = suite.daemon(&volume);
        process::kill_now(first.pid);
        let (mut last, mut killed) = (first.pid, 0);
        // The driver ends the connection after eight that died at once.
        while killed < 3 {
            let mut next = None;
            let found = as_soon_as("the next daemon is started", TIMEOUT, || {
                next = process::launched(&suite.scene, &volume.id).filter(|pid| *pid != last);
                next.is_some()
            });
            found.unwrap_or_else(|error| suite.fail(&format!("{error:#}")));
            last = next.unwrap();
            process::kill_now(last);
            killed += 1;
        }
        suite.wait_for_successor(&volume, first);
        suite.progress();
    }
    suite.finish();
}

#[test]
fn a_stopped_daemon_is_killed_and_followed_by_another_one() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["file", "sqlite-wal"]);
    suite.progress();
    for round in 0..kills(2) {
        let daemon = suite.daemon(&volume);
        process::stop(daemon.pid);
        let waits = as_soon_as("a user waits", TIMEOUT, || process::waiting(&suite.scene, daemon.minor) > 0);
        waits.unwrap_or_else(|error| suite.fail(&format!("{error:#}")));
        // The driver alone holds the connection of the stopped daemon then.
        if round % 2 == 1 && suite.holders().keeper {
            process::kill_now(process::keeper(&suite.scene).unwrap());
        }
        process::kill_now(daemon.pid);
        suite.wait_for_successor(&volume, daemon);
        suite.progress();
    }
    suite.finish();
}

#[test]
fn programs_that_are_started_with_open_files_hold_no_driver_up() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["programs"]);
    suite.progress();
    for round in 0..kills(8) {
        suite.kill_or_daemon([Target::DriverAndDaemon, Target::Daemon][round % 2]);
    }
    suite.finish();
}

#[test]
fn a_full_volume_answers_enospc_and_nothing_else() {
    let mut suite = Suite::start();
    let volume = suite.volume_of(2 * MI);
    suite.applications(&volume, &["full"]);
    suite.progress();
    for _ in 0..kills(4) {
        suite.kill();
    }
    suite.finish();
}

/// Calls the driver again and again with the round's number, and kills something at a random moment of
/// each call.
fn during(
    suite: &mut Suite,
    what: &str,
    short: usize,
    call: impl Fn(&Caller, usize) -> Result<(), Status> + Clone + Send + 'static,
) {
    let undisturbed = Instant::now();
    suite.call(what, {
        let call = call.clone();
        move |caller| call(caller, 0)
    });
    let took = undisturbed.elapsed();
    for round in 1..=kills(short) {
        let call = call.clone();
        let calling = suite.begin(what, move |caller| call(caller, round));
        let moment = took.mul_f64(f64::from(u32::try_from(suite.random.below(1000)).unwrap_or(0)) / 1000.0);
        std::thread::park_timeout(moment.min(Duration::from_secs(5)));
        suite.kill();
        calling.join(suite);
    }
}

#[test]
fn a_snapshot_is_cut_although_something_is_killed() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    cut_snapshots(&mut suite, &volume, &[BLOCKING_COPY]);
    suite.finish();
}

/// Of a volume that applications change. `parameters`: of the snapshots' class.
pub(crate) fn cut_snapshots(
    suite: &mut Suite,
    volume: &Volume,
    parameters: &'static [(&'static str, &'static str)],
) {
    let kept = volume.path.join("kept");
    suite.on_volume("write", move || std::fs::write(kept, "kept")).unwrap();
    suite.applications(volume, &["names", "sqlite-journal"]);
    suite.progress();
    let scene_data = suite.scene.sandbox.path("pool/snapshots");
    let id = volume.id.clone();
    during(suite, "snapshot", 2, move |caller, round| {
        let made = snapshot_with(caller, &format!("snap-{round}"), &id, parameters);
        let snapshot = made.or_else(|status| made_again(caller, status))?;
        let found = get_snapshot(caller, &snapshot.snapshot_id);
        if !found.or_else(|status| made_again(caller, status))?.ready_to_use {
            return Err(Status::unavailable("the copy goes on"));
        }
        let kept = std::fs::read(scene_data.join(&snapshot.snapshot_id).join("data/kept"));
        assert_eq!(kept.unwrap(), b"kept");
        delete_snapshot(caller, &snapshot.snapshot_id)
    });
}

/// A cut whose daemon died in its pause has failed: as the driver asks, the snapshot is deleted and made
/// again.
fn made_again<T>(caller: &Caller, status: Status) -> Result<T, Status> {
    let message = status.message().to_owned();
    if status.code() == Code::Internal && message.contains("delete it and make it again") {
        let id = message.split(' ').find(|word| word.starts_with("snap-")).unwrap();
        delete_snapshot(caller, id)?;
        return Err(Status::unavailable(message));
    }
    Err(status)
}

#[test]
fn a_volume_grows_although_something_is_killed() {
    let mut suite = Suite::start();
    let volume = suite.volume_of(64 * MI);
    grow(&mut suite, &volume, 65 * MI);
    suite.finish();
}

/// `first`: the new size of the first round; each one adds 1 MiB.
pub(crate) fn grow(suite: &mut Suite, volume: &Volume, first: i64) {
    suite.applications(volume, &["file", "names"]);
    suite.progress();
    let (id, path) = (volume.id.clone(), volume.path.clone());
    during(suite, "expansion", 2, move |caller, round| {
        let bytes = first + i64::try_from(round).unwrap() * MI;
        let capacity_range = Some(CapacityRange { required_bytes: bytes, limit_bytes: 0 });
        let request =
            ControllerExpandVolumeRequest { volume_id: id.clone(), capacity_range, ..Default::default() };
        let grown = caller.controller(async |mut c| c.controller_expand_volume(request).await)?.into_inner();
        assert_eq!(grown.capacity_bytes, bytes);
        let stats = caller.stats(&id, &path)?;
        if stats.volume_condition.is_none_or(|condition| condition.abnormal) {
            return Err(Status::unavailable("the driver has not asked a daemon"));
        }
        let usage = stats.usage;
        assert!(usage.iter().any(|usage| usage.total == bytes), "{usage:?}, not {bytes}");
        Ok(())
    });
}

#[test]
fn another_volume_is_staged_and_unstaged_although_something_is_killed() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["names"]);
    suite.progress();
    let id = suite.call("create", |caller| caller.create_named("another"));
    let staged = id.clone();
    during(&mut suite, "stage", 2, move |caller, _| {
        caller.stage(&staged)?;
        caller.publish(&staged, "another")?;
        caller.unpublish(&staged, "another")?;
        caller.unstage(&staged)
    });
    suite.call("delete", move |caller| caller.delete(&id));
    suite.finish();
}

#[test]
fn another_pod_gets_the_volume_although_something_is_killed() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["file", "names"]);
    suite.progress();
    let id = volume.id.clone();
    during(&mut suite, "publish", 2, move |caller, _| {
        caller.publish(&id, "another")?;
        caller.unpublish(&id, "another")
    });
    suite.finish();
}
