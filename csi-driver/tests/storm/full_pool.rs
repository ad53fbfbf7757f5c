//! A pool whose disk is full, although no volume has reached its own size.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use proto::csi::{CapacityRange, CreateVolumeRequest};
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request};
use tests::loop_device::{FileSystem, LoopMount};
use tests::{Sandbox, eventually};
use tonic::Code;

use crate::all;

/// Each may have 1 Gi; the disk has 64 Mi for all four.
const VOLUMES: usize = 4;
const DISK_BYTES: u64 = 64 << 20;
static CHUNK: [u8; 64 << 10] = [7; 64 << 10];

/// Writes until something is refused; how much was taken, and the refusal.
fn fill(file: &Path) -> (usize, io::Error) {
    let mut out = File::create(file).unwrap();
    let mut taken = 0;
    loop {
        match out.write(&CHUNK).and_then(|count| out.sync_data().map(|()| count)) {
            Ok(count) => taken += count,
            Err(error) => return (taken, error),
        }
    }
}

#[test]
fn a_full_pool_is_enospc_and_recovers() {
    let sandbox = Sandbox::new();
    let _pool = LoopMount::new(&sandbox, "pool", FileSystem::Ext4, DISK_BYTES).unwrap();
    let scene = Scene::start_in(sandbox, Flags::process());
    let caller = scene.caller();
    let pods: Vec<String> = (0..VOLUMES).map(|number| format!("pod-{number}")).collect();
    let ids = all(VOLUMES, &pods, |pod| {
        let id = caller.create_named(pod).unwrap();
        caller.stage(&id).unwrap();
        caller.publish(&id, pod).unwrap();
        fs::write(caller.target_path(pod).join("kept"), pod).unwrap();
        id
    });

    let outcomes = all(VOLUMES, &pods, |pod| fill(&caller.target_path(pod).join("big")));
    for (taken, error) in &outcomes {
        assert_eq!(error.raw_os_error(), Some(nix::libc::ENOSPC), "{error} after {taken} bytes");
    }
    let taken: usize = outcomes.iter().map(|(taken, _)| taken).sum();
    assert!(taken > CHUNK.len() && taken < usize::try_from(DISK_BYTES).unwrap(), "{taken}");
    // What was there is there, and nobody's daemon has ended.
    for pod in &pods {
        assert_eq!(&fs::read_to_string(caller.target_path(pod).join("kept")).unwrap(), pod);
    }
    assert_eq!(scene.daemons().len(), VOLUMES);
    // Neither success nor a trace of it, whatever step it fails at.
    if let Ok(id) = caller.create_named("on a full disk") {
        caller.delete(&id).unwrap();
    }

    // One volume's end is the others' room.
    caller.unpublish(&ids[0], &pods[0]).unwrap();
    caller.unstage(&ids[0]).unwrap();
    caller.delete(&ids[0]).unwrap();
    let freed = outcomes[0].0 / 2;
    eventually("there is room again", TIMEOUT, || {
        let (again, _) = fill(&caller.target_path(&pods[1]).join("more"));
        anyhow::ensure!(again >= freed, "{again} bytes instead of {freed}");
        Ok(())
    })
    .unwrap();
    fs::remove_file(caller.target_path(&pods[1]).join("more")).unwrap();
    let id = caller.create_named("after").unwrap();
    caller.stage(&id).unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();

    for (pod, id) in pods.iter().zip(&ids).skip(1) {
        caller.unpublish(id, pod).unwrap();
        caller.unstage(id).unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}

/// One volume of many files, as the genuine daemon allows them, beside another one.
#[test]
fn a_volume_full_of_files_leaves_another_its_inodes() {
    let sandbox = Sandbox::new();
    let few_inodes = ["-N", "4000"];
    let _pool = LoopMount::with_options(&sandbox, "pool", FileSystem::Ext4, 256 << 20, &few_inodes).unwrap();
    let flags = Flags::process().with(&["--pool-capacity", "230Mi"].map(str::to_owned));
    let scene = Scene::start_in(sandbox, flags);
    let caller = scene.caller();
    let create = |name: &str, bytes| {
        let range = CapacityRange { required_bytes: bytes, limit_bytes: 0 };
        caller.create(CreateVolumeRequest { capacity_range: Some(range), ..create_request(name) })
    };
    let pods = ["greedy", "modest"];
    let ids = pods.map(|pod| create(pod, 100 << 20).unwrap().volume_id);
    for (id, pod) in ids.iter().zip(pods) {
        caller.stage(id).unwrap();
        caller.publish(id, pod).unwrap();
    }
    let [greedy, modest] = pods.map(|pod| {
        let dir = caller.target_path(pod);
        let made = (0..10_000_u32).map(|n| File::create(dir.join(n.to_string())));
        let refused = made.map_while(|file| Some(file.err())).find_map(|error| error).unwrap();
        assert_eq!(refused.raw_os_error(), Some(nix::libc::ENOSPC), "{refused}");
        fs::read_dir(&dir).unwrap().count()
    });
    assert_eq!(greedy, modest);
    assert!(greedy > 1000, "{greedy}");
    // There are 30 MiB, but no 1024 inodes.
    let refused = create("third", 30 << 20).unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused}");
    assert!(refused.message().contains("inodes"), "{refused}");
    for (id, pod) in ids.iter().zip(pods) {
        caller.unpublish(id, pod).unwrap();
        caller.unstage(id).unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}
