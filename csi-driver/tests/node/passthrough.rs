//! Volumes whose files the kernel reads and writes, with the driver and the keeper.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::time::SystemTime;

use proto::csi::volume_usage::Unit;
use tests::csi::data_path;
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{data, of_size, with};
use tests::eventually;
use tests::operations::{operations, since};
use tonic::Code;

use crate::access::{flags, publish, stage};
use crate::keepers::{kill_daemon, kill_keeper, wait_until_held, with_keeper};
use crate::metrics::metrics;
use crate::takeover::Load;

const PASSING: [(&str, &str); 2] = [("dataPath", "passthrough"), ("capacity", "none")];

/// Bytes that the volume's daemon has read and written, for itself and for others (proc_pid_io(5)).
fn moved_by_daemon(scene: &Scene) -> u64 {
    let [daemon] = scene.serving_daemons()[..] else { panic!("one daemon serves") };
    let io = fs::read_to_string(format!("/proc/{daemon}/io")).unwrap();
    let fields = io.lines().filter_map(|line| line.split_once(": "));
    fields
        .filter(|(name, _)| matches!(*name, "rchar" | "wchar"))
        .map(|(_, n)| n.parse::<u64>().unwrap())
        .sum()
}

/// Of requests that the daemon has answered: the number of each operation.
fn answered(scene: &Scene, volume_id: &str) -> BTreeMap<String, u64> {
    operations(&data_path::metrics(&scene.daemon_metrics(volume_id)).unwrap())
}

/// The requests that `act` makes, with its RELEASE, which close(2) does not wait for.
fn requests_of(scene: &Scene, volume_id: &str, act: impl FnOnce()) -> BTreeMap<String, u64> {
    let before = answered(scene, volume_id);
    act();
    eventually("what was opened is released", TIMEOUT, || {
        let now = answered(scene, volume_id);
        let of = |operation: &str| now.get(operation).copied().unwrap_or_default();
        anyhow::ensure!(of("open") + of("create") == of("release"), "{now:?}");
        Ok(since(&before, now))
    })
    .unwrap()
}

#[test]
fn a_volume_that_nothing_limits_shows_the_figures_of_its_pool() {
    const CLAIM: i64 = 1 << 20;
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let request = of_size(with(create_request("pvc-1"), &PASSING), CLAIM, 0);
    let id = caller.create(request).unwrap().volume_id;
    caller.stage(&id).unwrap();
    let pool = nix::sys::statvfs::statvfs(&scene.sandbox.path("pool")).unwrap();
    let total = i64::try_from(pool.blocks() * pool.fragment_size()).unwrap();
    let shown = caller.stats(&id, &caller.staging_path(&id)).unwrap();
    let bytes = &shown.usage[0];
    assert_eq!((bytes.unit(), bytes.total), (Unit::Bytes, total));
    assert!(bytes.used > CLAIM && bytes.used + bytes.available <= total, "{shown:?}");
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn requests_are_few_for_files_that_pass_through() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.create(with(create_request("pvc-1"), &PASSING)).unwrap().volume_id;
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let target = caller.target_path("one");
    // Until a first FLUSH is answered, each close(2) is one.
    drop(File::create_new(target.join("first")).unwrap());
    // The small one is read from the kernel's cache of the volume, the large one from that of the pool.
    for bytes in [4096, 1 << 20] {
        let mut files = 0;
        // A file for which the keeper answers too late takes the daemon's way.
        let (path, written) = eventually("a file passes through", TIMEOUT, || {
            files += 1;
            let path = target.join(format!("{bytes}-{files}"));
            let written = requests_of(&scene, &id, || {
                let mut file = File::options().write(true).create_new(true).open(&path).unwrap();
                file.write_all(&vec![7; bytes]).unwrap();
            });
            anyhow::ensure!(!written.contains_key("write"), "{written:?}");
            Ok((path, written))
        })
        .unwrap();
        let most = ["create", "getattr", "getxattr", "lookup", "release"];
        assert!(written.contains_key("create"), "{written:?}");
        assert!(written.iter().all(|(name, count)| most.contains(&&**name) && *count == 1), "{written:?}");
        // Without fstat(2): a read that passes through changes the access time, which that would ask for. The
        // change of the directory costs one more request, some time after it.
        let fewest = BTreeMap::from(["open", "release"].map(|name| (name.to_owned(), 1)));
        eventually("a read takes no other request", TIMEOUT, || {
            let read = requests_of(&scene, &id, || {
                File::open(&path).unwrap().read_exact_at(&mut vec![0; bytes], 0).unwrap();
            });
            anyhow::ensure!(read == fewest, "{read:?}");
            Ok(())
        })
        .unwrap();
    }
    caller.take_down(&id, &["one"]).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn data_goes_past_the_daemon_while_daemon_and_keeper_are_killed() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.create(with(create_request("pvc-1"), &PASSING)).unwrap().volume_id;
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    let policies = format!(
        "hawser_csi_volume_policies{{volume_id=\"{id}\",data_path=\"passthrough\",capacity=\"none\"}} 1"
    );
    assert!(metrics(&scene).lines().any(|line| line == policies), "{policies}");
    let target = caller.target_path("one");
    let data = vec![7; 8 << 20];
    let mut files = 0;
    // A file for which the keeper answers too late takes the daemon's way.
    eventually("a file goes past the daemon", TIMEOUT, || {
        files += 1;
        let path = target.join(format!("large-{files}"));
        let before = moved_by_daemon(&scene);
        fs::write(&path, &data).unwrap();
        assert!(fs::read(&path).unwrap() == data);
        let moved = moved_by_daemon(&scene) - before;
        fs::remove_file(&path).unwrap();
        anyhow::ensure!(moved < 1 << 20, "the daemon moved {moved} bytes");
        Ok(())
    })
    .unwrap();

    let load = Load::start(&target);
    let open = File::create_new(target.join("open")).unwrap();
    for round in 0..10_u64 {
        load.progress();
        open.write_all_at(&round.to_le_bytes(), round * 8).unwrap();
        kill_daemon(&scene);
        if round % 3 == 2 {
            kill_keeper(&scene);
            wait_until_held(&scene, 0);
        }
    }
    load.progress();
    load.end();
    let written: Vec<u8> = (0..10_u64).flat_map(u64::to_le_bytes).collect();
    assert_eq!(fs::read(target.join("open")).unwrap(), written);
    drop(open);
    // The driver may still record the last takeover.
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn without_a_keeper_a_volume_that_passes_through_is_refused_by_name() {
    let mut scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.create(with(create_request("pvc-1"), &PASSING)).unwrap().volume_id;
    scene.end_keeper();
    scene.flags = Flags::process();
    scene.restart_driver();
    let caller = scene.caller();
    let refused = caller.create(with(create_request("pvc-2"), &PASSING)).unwrap_err();
    let message = "parameters.dataPath: passthrough needs a keeper, which registers the files, and this driver has none: \
                   name one with --keeper-binary, or choose daemon";
    assert_eq!(refused.message(), message);
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    // It was created when there was one.
    let refused = caller.stage(&id).unwrap_err();
    assert!(refused.message().contains("dataPath passthrough"), "{refused:?}");
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    caller.unstage(&id).unwrap();
    // With `sync` nothing is registered.
    stage(&caller, &id, flags(&["sync"])).unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.flags = with_keeper();
    scene.restart_driver();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn noatime_and_relatime_of_a_stage_apply_to_what_passes_through() {
    const BYTES: usize = 1 << 20;
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    for (name, option, changes) in [("pvc-1", "noatime", false), ("pvc-2", "relatime", true)] {
        let id = caller.create(with(create_request(name), &PASSING)).unwrap().volume_id;
        stage(&caller, &id, flags(&[option])).unwrap();
        publish(&caller, &id, "one", flags(&[option])).unwrap();
        let mut files = 0;
        // A file for which the keeper answers too late takes the daemon's way.
        let read_at = eventually("a file passes through", TIMEOUT, || {
            files += 1;
            let name = format!("f-{files}");
            let path = caller.target_path("one").join(&name);
            fs::write(&path, vec![7; BYTES]).unwrap();
            let file = File::open(&path).unwrap();
            file.set_times(FileTimes::new().set_accessed(SystemTime::UNIX_EPOCH)).unwrap();
            let before = moved_by_daemon(&scene);
            file.read_exact_at(&mut vec![0; BYTES], 0).unwrap();
            let moved = moved_by_daemon(&scene) - before;
            anyhow::ensure!(moved < BYTES as u64, "the daemon moved {moved} bytes");
            Ok(fs::metadata(data(&scene, &id).join(&name)).unwrap().accessed().unwrap())
        })
        .unwrap();
        assert_eq!(read_at > SystemTime::UNIX_EPOCH, changes, "{option}: {read_at:?}");
        caller.take_down(&id, &["one"]).unwrap();
    }
    scene.assert_nothing_left();
    scene.end_keeper();
}

fn fsyncs(scene: &Scene, volume_id: &str) -> u64 {
    answered(scene, volume_id).get("fsync").copied().unwrap_or_default()
}

#[test]
fn with_the_mount_option_sync_the_daemon_synchronises_every_write() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let daemon = [("dataPath", "daemon"), ("capacity", "none")];
    for (name, parameters) in [("pvc-1", PASSING), ("pvc-2", daemon)] {
        let id = caller.create(with(create_request(name), &parameters)).unwrap().volume_id;
        stage(&caller, &id, flags(&["sync"])).unwrap();
        publish(&caller, &id, "one", flags(&["sync"])).unwrap();
        let target = caller.target_path("one");
        data_path::ensure_daemon_answers(&scene.daemon_metrics(&id), &target).unwrap();
        assert_eq!(scene.policies(&id).unwrap().0, "daemon", "what `hawser-csi volumes` shows");
        let before = fsyncs(&scene, &id);
        let file = File::create_new(target.join("f")).unwrap();
        (0..3).for_each(|at| file.write_all_at(b"x", at).unwrap());
        assert_eq!(fsyncs(&scene, &id) - before, 3, "{parameters:?}");
        drop(file);
        caller.take_down(&id, &["one"]).unwrap();
    }
    scene.assert_nothing_left();
    scene.end_keeper();
}
