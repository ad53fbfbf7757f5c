//! As after a node's restart, or when a set of two hundred pods is scaled up and down.

use std::fs;

use tests::csi::scene::{Caller, Flags, Scene, volume_binary};

use crate::all;

const VOLUMES: usize = 200;
const AT_ONCE: usize = 20;

struct Claim {
    pod: String,
    volume_id: String,
}

/// From nothing to a pod's file that is on the volume.
fn bring_up(caller: &Caller, name: &str) -> Claim {
    let volume_id = caller.create_named(name).unwrap();
    caller.stage(&volume_id).unwrap();
    let claim = Claim { pod: format!("pod-of-{name}"), volume_id };
    caller.publish(&claim.volume_id, &claim.pod).unwrap();
    let file = fs::File::create_new(caller.target_path(&claim.pod).join("whose")).unwrap();
    std::io::Write::write_all(&mut &file, claim.volume_id.as_bytes()).unwrap();
    file.sync_all().unwrap();
    claim
}

fn take_down(caller: &Caller, claim: &Claim) {
    let read = fs::read_to_string(caller.target_path(&claim.pod).join("whose")).unwrap();
    assert_eq!(read, claim.volume_id, "each pod has its own volume");
    caller.unpublish(&claim.volume_id, &claim.pod).unwrap();
    caller.unstage(&claim.volume_id).unwrap();
    caller.delete(&claim.volume_id).unwrap();
}

/// No call fails, not even for a moment: each is about a volume of its own.
#[test]
fn two_hundred_volumes_twenty_at_a_time_leave_nothing() {
    let volume_binary = volume_binary().display().to_string();
    let flags = [
        ["--launcher", "process"],
        ["--volume-binary", &volume_binary],
        ["--pool-capacity", "200Gi"],
        ["--keeper-binary", "none"],
        ["--warm-daemons", "0"],
    ];
    let scene = Scene::start(Flags(flags.concat().into_iter().map(str::to_owned).collect()));
    let caller = scene.caller();
    let names: Vec<String> = (0..VOLUMES).map(|number| format!("pvc-{number}")).collect();
    let claims = all(AT_ONCE, &names, |name| bring_up(&caller, name));
    assert_eq!(scene.daemons().len(), VOLUMES, "one daemon a volume");
    assert!(caller.create_named("one-too-many").is_err(), "everything is promised");
    all(AT_ONCE, &claims, |claim| take_down(&caller, claim));
    scene.assert_nothing_left();
}
