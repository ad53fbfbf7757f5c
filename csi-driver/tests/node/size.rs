//! A volume's size: kept by its daemon, and grown under those who use it.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use proto::csi::volume_usage::Unit;
use proto::csi::{
    CapacityRange, ControllerExpandVolumeRequest, CreateVolumeRequest, NodeExpandVolumeRequest,
};
use tests::csi::scene::{Caller, Flags, Scene, create_request, text};
use tonic::{Code, Status};

pub(crate) const MI: i64 = 1 << 20;

fn range(required_bytes: i64, limit_bytes: i64) -> Option<CapacityRange> {
    Some(CapacityRange { required_bytes, limit_bytes })
}

pub(crate) fn create(caller: &Caller, name: &str, bytes: i64) -> String {
    let request = CreateVolumeRequest { capacity_range: range(bytes, 0), ..create_request(name) };
    caller.create(request).unwrap().volume_id
}

pub(crate) fn expand(caller: &Caller, volume_id: &str, bytes: i64) -> Result<i64, Status> {
    let request = ControllerExpandVolumeRequest {
        volume_id: volume_id.into(),
        capacity_range: range(bytes, 0),
        ..Default::default()
    };
    caller.controller(async |mut c| c.controller_expand_volume(request).await).map(|reply| {
        let reply = reply.into_inner();
        assert!(!reply.node_expansion_required, "the driver reaches its daemon itself");
        reply.capacity_bytes
    })
}

fn node_expand(
    caller: &Caller,
    volume_id: &str,
    path: &Path,
    wanted: Option<CapacityRange>,
) -> Result<i64, Status> {
    let request = NodeExpandVolumeRequest {
        volume_id: volume_id.into(),
        volume_path: text(path),
        capacity_range: wanted,
        ..Default::default()
    };
    caller.node(async |mut n| n.node_expand_volume(request).await).map(|r| r.into_inner().capacity_bytes)
}

/// What statfs of the volume says of bytes, as kubelet is told it: size and use.
pub(crate) fn bytes_of(caller: &Caller, volume_id: &str, path: &Path) -> (i64, i64) {
    let usage = caller.stats(volume_id, path).unwrap().usage;
    let bytes = usage.iter().find(|u| u.unit == Unit::Bytes as i32).unwrap();
    (bytes.total, bytes.used)
}

/// Writes zeroes until the volume is full; how many MiB went in whole.
fn fill(file: &mut fs::File) -> i64 {
    let block = vec![0; usize::try_from(MI).unwrap()];
    for written in 0.. {
        match file.write_all(&block) {
            Ok(()) => assert!(written < 1024, "no end in sight"),
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(Errno::ENOSPC as i32), "{e}");
                return written;
            }
        }
    }
    unreachable!("the loop ends by returning")
}

#[test]
fn a_write_past_the_claim_is_enospc_in_the_pod() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 16 * MI);
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let target = caller.target_path("one");
    let path = target.join("file");
    let mut file = fs::File::create(&path).unwrap();
    let written = fill(&mut file);
    assert!((14..=16).contains(&written), "{written} MiB went into 16");
    let (total, used) = bytes_of(&caller, &id, &target);
    assert_eq!(total, 16 * MI);
    assert!(used <= total && used >= written * MI, "{used}");
    // What is there can be changed, and what goes makes room.
    fs::File::options().write(true).open(&path).unwrap().write_all(b"over").unwrap();
    fs::write(target.join("more"), vec![0; 1 << 20]).expect_err("full");
    drop(file);
    fs::remove_file(&path).unwrap();
    fs::write(target.join("more"), vec![0; 1 << 20]).unwrap();
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_published_volume_grows_under_its_pods() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let target = caller.target_path("one");
    let mut file = fs::File::create(target.join("file")).unwrap();
    let before = fill(&mut file);
    assert_eq!(expand(&caller, &id, 24 * MI).unwrap(), 24 * MI);
    assert_eq!(bytes_of(&caller, &id, &target).0, 24 * MI, "no stage, no publish in between");
    assert!(fill(&mut file) + before >= 22, "the open file goes on");
    assert_eq!(expand(&caller, &id, 24 * MI).unwrap(), 24 * MI, "repeated");
    caller.unpublish(&id, "one").unwrap_err();
    drop(file);
    caller.unpublish(&id, "one").unwrap();
    caller.unstage(&id).unwrap();

    // A volume that nobody serves has the new size from its next stage on.
    assert_eq!(expand(&caller, &id, 32 * MI).unwrap(), 32 * MI);
    caller.stage(&id).unwrap();
    assert_eq!(bytes_of(&caller, &id, &caller.staging_path(&id)).0, 32 * MI);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn node_expand_follows_the_controller_and_never_leads() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    let staging = caller.staging_path(&id);
    let target = caller.target_path("one");
    let unstaged = node_expand(&caller, &id, &target, None).unwrap_err();
    assert_eq!(unstaged.code(), Code::NotFound, "{unstaged:?}");
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();

    for path in [&staging, &target] {
        assert_eq!(node_expand(&caller, &id, path, None).unwrap(), 8 * MI);
        assert_eq!(node_expand(&caller, &id, path, range(4 * MI, 8 * MI)).unwrap(), 8 * MI);
        let beyond = node_expand(&caller, &id, path, range(9 * MI, 0)).unwrap_err();
        assert_eq!(beyond.code(), Code::OutOfRange, "{beyond:?}");
        assert!(beyond.message().contains("8388608") && beyond.message().contains("9437184"), "{beyond:?}");
    }
    expand(&caller, &id, 16 * MI).unwrap();
    assert_eq!(node_expand(&caller, &id, &target, range(16 * MI, 0)).unwrap(), 16 * MI);
    assert_eq!(bytes_of(&caller, &id, &target).0, 16 * MI);

    // The request itself, then the volume, then the path.
    let call = |volume_id: &str, path: &str, wanted| node_expand(&caller, volume_id, Path::new(path), wanted);
    for (volume_id, path, wanted, code) in [
        ("", "/x", None, Code::InvalidArgument),
        (id.as_str(), "", None, Code::InvalidArgument),
        ("fake-vol-id", "some/path", range(-1, 0), Code::InvalidArgument),
        ("fake-vol-id", "some/path", None, Code::NotFound),
        (id.as_str(), "some/path", None, Code::NotFound),
        (id.as_str(), "/elsewhere", None, Code::NotFound),
    ] {
        let refused = call(volume_id, path, wanted).unwrap_err();
        assert_eq!(refused.code(), code, "{volume_id} {path}: {refused:?}");
    }
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
}

/// A controller that was killed after its journal entry: the daemon has the old size.
#[test]
fn node_expand_alone_tells_the_daemon_what_the_journal_says() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    scene.kill_driver();
    let mut journal: serde_json::Value = serde_json::from_str(&scene.journal(&id)).unwrap();
    journal["capacity_bytes"] = (16 * MI).into();
    fs::write(scene.journal_path(&id), journal.to_string()).unwrap();
    scene.start_driver();
    let staging = caller.staging_path(&id);
    assert_eq!(bytes_of(&caller, &id, &staging).0, 8 * MI);
    assert_eq!(node_expand(&caller, &id, &staging, range(16 * MI, 0)).unwrap(), 16 * MI);
    assert_eq!(bytes_of(&caller, &id, &staging).0, 16 * MI);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}

/// The journal has the new size before the daemon is told, so a retry completes it.
#[test]
fn an_expansion_that_a_stopped_daemon_does_not_answer_ends_in_time_and_is_completed() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = create(&caller, "pvc-1", 8 * MI);
    caller.stage(&id).unwrap();
    let staging = caller.staging_path(&id);
    scene.stop_daemon();
    let begun = Instant::now();
    for result in [expand(&caller, &id, 16 * MI), node_expand(&caller, &id, &staging, None)] {
        let refused = result.unwrap_err();
        assert_eq!(refused.code(), Code::DeadlineExceeded, "{refused:?}");
        assert!(refused.message().contains("SetCapacity"), "{refused:?}");
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    scene.signal_daemon(Signal::SIGCONT);
    assert_eq!(expand(&caller, &id, 16 * MI).unwrap(), 16 * MI);
    assert_eq!(bytes_of(&caller, &id, &staging).0, 16 * MI);
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}
