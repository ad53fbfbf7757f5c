//! What `hawser-csi volumes`, `mounts` and `doctor` say of daemons that live and do not
//! answer: all of them are asked at once.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT};

use crate::doctor::found;

const COUNT: usize = 8;
/// A good deal less than one look after the other would take.
const BOUND: Duration = Duration::from_secs(10);
pub(crate) const SIGSTOP: i32 = 19;
const SIGCONT: i32 = 18;

fn rows(scene: &Scene, view: &str) -> Vec<Value> {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args([view, "-o", "json", "--state-dir"]).arg(scene.sandbox.path("state"));
    let done = command.arg("--run-dir").arg(scene.sandbox.path("run")).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    serde_json::from_slice(&done.stdout).unwrap()
}

pub(crate) fn signal_daemons(scene: &Scene, signal: i32) {
    for daemon in scene.daemons() {
        let pidfd = linux::process::open_pidfd(daemon).unwrap().unwrap();
        assert!(linux::process::signal_pidfd(&pidfd, signal).unwrap());
        if signal == SIGSTOP {
            tests::wait_until_stopped(daemon, TIMEOUT).unwrap();
        }
    }
}

fn states(rows: &[Value], key: &str) -> Vec<String> {
    rows.iter().map(|row| row[key].as_str().unwrap().to_owned()).collect()
}

fn made(caller: &Caller) -> Vec<String> {
    let mut ids: Vec<String> =
        (0..COUNT).map(|n| caller.create_named(&format!("pvc-{n}")).unwrap()).collect();
    ids.sort();
    ids.iter().for_each(|id| caller.stage(id).unwrap());
    ids
}

#[test]
fn views_and_doctor_name_daemons_that_do_not_answer() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ids = made(&caller);
    assert_eq!(states(&rows(&scene, "volumes"), "state"), ["staged"; COUNT]);
    let mounts = states(&rows(&scene, "mounts"), "daemon");
    assert!(mounts.len() >= COUNT && mounts.iter().all(|daemon| daemon == "serves"), "{mounts:?}");

    scene.sandbox.switch_fuse_guard_off();
    signal_daemons(&scene, SIGSTOP);
    let begun = Instant::now();
    assert_eq!(states(&rows(&scene, "volumes"), "state"), ["hung"; COUNT]);
    assert!(begun.elapsed() < BOUND, "{:?}", begun.elapsed());
    let mounts = states(&rows(&scene, "mounts"), "daemon");
    assert!(mounts.iter().all(|daemon| daemon == "hung"), "{mounts:?}");
    let (code, findings) = found(&scene, &[]);
    let wanted: Vec<[String; 2]> =
        ids.iter().map(|id| ["daemon does not answer".to_owned(), id.clone()]).collect();
    assert_eq!((code, findings), (1, wanted));

    signal_daemons(&scene, SIGCONT);
    assert_eq!(states(&rows(&scene, "volumes"), "state"), ["staged"; COUNT]);
    assert_eq!(found(&scene, &[]), (0, vec![]));
    ids.iter().for_each(|id| caller.take_down(id, &[]).unwrap());
    scene.assert_nothing_left();
}

#[test]
fn the_doctor_names_a_daemon_of_another_directory() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    caller.stage(&id).unwrap();
    let data = scene.sandbox.path("pool/volumes").join(&id).join("data");
    let aside = data.with_file_name("aside");
    std::fs::rename(&data, &aside).unwrap();
    std::fs::create_dir(&data).unwrap();
    assert_eq!(found(&scene, &[]), (1, vec![["daemon of another directory".to_owned(), id.clone()]]));
    std::fs::remove_dir(&aside).unwrap();
    caller.take_down(&id, &[]).unwrap();
    scene.assert_nothing_left();
}
