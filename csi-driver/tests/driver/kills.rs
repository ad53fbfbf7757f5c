//! kill -9 of the driver at every step that can be seen from outside, and at
//! random moments between them: a retry completes, and delete leaves nothing.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use tests::as_soon_as;
use tonic::Status;

use crate::scene::{Caller, Flags, PATIENCE, Scene, mounted, retried};

const POD: &str = "one";

/// The four operations, in the order of a volume's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Stage,
    Publish,
    Unpublish,
    Unstage,
}

impl Operation {
    const ALL: [Self; 4] = [Self::Stage, Self::Publish, Self::Unpublish, Self::Unstage];

    fn call(self, caller: &Caller, id: &str) -> Result<(), Status> {
        match self {
            Self::Stage => caller.stage(id),
            Self::Publish => caller.publish(id, POD),
            Self::Unpublish => caller.unpublish(id, POD),
            Self::Unstage => caller.unstage(id),
        }
    }
}

/// Brings the volume to just before `operation`, begins it, lets `blow` wait for
/// the moment, kills the driver, starts another, and takes the volume through
/// the rest of its life and away.
fn killed_during(scene: &mut Scene, operation: Operation, blow: impl FnOnce(&Scene, &str, &Caller)) {
    let caller = scene.caller();
    let id = caller.create_named("pvc-kill").unwrap();
    for before in Operation::ALL.into_iter().filter(|o| *o < operation) {
        before.call(&caller, &id).unwrap_or_else(|status| panic!("{before:?}: {status:?}"));
        if before == Operation::Publish {
            fs::write(caller.target_path(POD).join("file"), "kept").unwrap();
        }
    }
    let running = std::thread::spawn({
        let (caller, id) = (caller.clone(), id.clone());
        move || operation.call(&caller, &id)
    });
    blow(scene, &id, &caller);
    scene.kill_driver();
    // Answered before the blow, or broken off by it.
    drop(running.join().unwrap());
    scene.start_driver();
    for step in Operation::ALL.into_iter().filter(|o| *o >= operation) {
        retried(&format!("{step:?}, killed in {operation:?}"), || step.call(&caller, &id));
        if step == Operation::Publish {
            let file = caller.target_path(POD).join("file");
            fs::write(&file, "after").unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"after");
            assert_eq!(scene.daemons().len(), 1);
        }
    }
    let data = scene.sandbox.path("pool/volumes").join(&id).join("data/file");
    assert!(data.exists(), "the volume's data are kept through it all");
    retried("delete", || caller.delete(&id));
    scene.assert_nothing_left();
}

fn wait_until(what: &str, is_so: impl FnMut() -> bool) {
    as_soon_as(what, PATIENCE, is_so).unwrap();
}

fn journal_says(scene: &Scene, id: &str, words: &str) {
    let path = scene.journal_path(id);
    wait_until(words, || fs::read_to_string(&path).is_ok_and(|text| text.contains(words)));
}

fn gone(path: &Path) {
    wait_until(&format!("{} is unmounted", path.display()), || mounted(path).is_none());
}

#[test]
fn killed_when_the_journal_names_the_stage() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Stage, |scene, id, _| journal_says(scene, id, "staging_path"));
}

#[test]
fn killed_when_the_staging_path_is_mounted() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Stage, |_, id, caller| {
        wait_until("mounted", || mounted(&caller.staging_path(id)).is_some());
    });
}

#[test]
fn killed_when_the_dial_socket_is_there() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Stage, |scene, id, _| {
        let socket = scene.dial_dir(id).join("dial.sock");
        wait_until("dial socket", || socket.exists());
    });
}

#[test]
fn killed_when_the_daemon_is_started() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Stage, |scene, id, _| {
        let log = scene.dial_dir(id).join("daemon.log");
        wait_until("the daemon's log", || log.exists());
    });
    killed_during(&mut scene, Operation::Stage, |scene, _, _| {
        wait_until("daemon", || !scene.daemons().is_empty());
    });
}

#[test]
fn killed_when_the_journal_names_the_launch() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Stage, |scene, id, _| journal_says(scene, id, "start_time"));
}

#[test]
fn killed_when_the_journal_says_that_it_is_served() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Stage, |scene, id, _| journal_says(scene, id, "connection_minor"));
}

#[test]
fn killed_when_the_journal_names_the_target() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Publish, |scene, id, _| {
        journal_says(scene, id, "\"published\": false");
    });
}

#[test]
fn killed_when_the_target_directory_is_made() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Publish, |_, _, caller| {
        let target = caller.target_path(POD);
        wait_until("target", || target.symlink_metadata().is_ok());
    });
}

#[test]
fn killed_when_the_target_is_mounted() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Publish, |_, _, caller| {
        wait_until("mounted", || mounted(&caller.target_path(POD)).is_some());
    });
}

#[test]
fn killed_when_the_target_is_unmounted() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Unpublish, |_, _, caller| gone(&caller.target_path(POD)));
}

#[test]
fn killed_when_the_target_directory_is_gone() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Unpublish, |_, _, caller| {
        let target = caller.target_path(POD);
        wait_until("target", || mounted(&target).is_none() && !target.exists());
    });
}

#[test]
fn killed_when_the_staging_path_is_unmounted() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Unstage, |_, id, caller| gone(&caller.staging_path(id)));
}

#[test]
fn killed_when_the_daemon_has_ended() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Unstage, |scene, _, _| {
        wait_until("the daemon's end", || scene.daemons().is_empty());
    });
}

#[test]
fn killed_when_the_dial_directory_is_gone() {
    let mut scene = Scene::start(Flags::process());
    killed_during(&mut scene, Operation::Unstage, |scene, id, _| {
        let dir = scene.dial_dir(id);
        wait_until("dial directory", || !dir.exists());
    });
}

/// Moments spread evenly over what each operation takes: between the steps that
/// the tests above wait for there are others that show nothing outside.
#[test]
fn killed_at_any_moment() {
    const MOMENTS: u32 = 12;
    let mut scene = Scene::start(Flags::process());
    let spans = measured(&scene);
    for (operation, span) in Operation::ALL.into_iter().zip(spans) {
        for moment in 0..MOMENTS {
            let after = span * moment / MOMENTS;
            killed_during(&mut scene, operation, |_, _, _| {
                let begun = Instant::now();
                wait_until("the moment", || begun.elapsed() >= after);
            });
        }
    }
}

/// How long each operation takes when nothing disturbs it.
fn measured(scene: &Scene) -> [Duration; 4] {
    let caller = scene.caller();
    let id = caller.create_named("measure").unwrap();
    let spans = Operation::ALL.map(|operation| {
        let begun = Instant::now();
        operation.call(&caller, &id).unwrap();
        begun.elapsed()
    });
    caller.delete(&id).unwrap();
    spans
}

#[test]
fn killed_during_creation_and_deletion() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    for moment in 0..10 {
        let after = Duration::from_micros(300 * moment);
        let creation = std::thread::spawn({
            let caller = caller.clone();
            move || caller.create_named("pvc-kill")
        });
        let begun = Instant::now();
        wait_until("the moment", || begun.elapsed() >= after);
        scene.restart_driver();
        drop(creation.join().unwrap());
        let id = retried("create", || caller.create_named("pvc-kill"));
        let data = scene.sandbox.path("pool/volumes").join(&id).join("data");
        for n in 0..200 {
            fs::create_dir_all(data.join(format!("{n}/a/b"))).unwrap();
        }
        let deletion = std::thread::spawn({
            let (caller, id) = (caller.clone(), id.clone());
            move || caller.delete(&id)
        });
        let begun = Instant::now();
        wait_until("the moment", || begun.elapsed() >= after);
        scene.restart_driver();
        drop(deletion.join().unwrap());
        retried("delete", || caller.delete(&id));
        scene.assert_nothing_left();
    }
}
