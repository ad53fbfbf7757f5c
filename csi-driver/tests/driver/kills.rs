//! kill -9 of the driver at every step that can be seen from outside, and at
//! random moments between them: a retry completes, and delete leaves nothing.

use std::fs;
use std::time::{Duration, Instant};

use tests::as_soon_as;
use tests::csi::scene::{Caller, Flags, Scene, TIMEOUT, mounted, retried};
use tonic::Status;

use crate::boot;

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

/// Brings the volume to just before `operation`, begins it, kills the driver as
/// soon as `is_moment`, or when the operation is over; starts another driver, and
/// takes the volume through the rest of its life and away. Whether the moment was met.
fn kill_during(
    scene: &mut Scene,
    operation: Operation,
    mut is_moment: impl FnMut(&Scene, &str, &Caller) -> bool,
) -> bool {
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
    let mut is_met = false;
    as_soon_as("the moment or the end", TIMEOUT, || {
        is_met = is_moment(scene, &id, &caller);
        is_met || running.is_finished()
    })
    .unwrap();
    scene.kill_driver();
    // Answered before the kill, or interrupted by it.
    drop(running.join().unwrap());
    scene.start_driver();
    for step in Operation::ALL.into_iter().filter(|o| *o >= operation) {
        retried(scene, &format!("{step:?}, killed in {operation:?}"), || step.call(&caller, &id));
        if step == Operation::Publish {
            let file = caller.target_path(POD).join("file");
            fs::write(&file, "after").unwrap();
            assert_eq!(fs::read(&file).unwrap(), b"after");
            assert_eq!(scene.daemons().len(), 1);
        }
    }
    let data = scene.sandbox.path("pool/volumes").join(&id).join("data/file");
    assert!(data.exists(), "the volume's data are kept through it all");
    retried(scene, "delete", || caller.delete(&id));
    scene.assert_nothing_left();
    is_met
}

/// Until the moment was met: some are shorter than a time slice.
#[track_caller]
fn killed_when(operation: Operation, mut is_moment: impl FnMut(&Scene, &str, &Caller) -> bool) {
    const ATTEMPTS: usize = 200;
    let mut scene = Scene::start(Flags::process());
    let is_met = (0..ATTEMPTS).any(|_| kill_during(&mut scene, operation, &mut is_moment));
    assert!(is_met, "the moment was not seen in {ATTEMPTS} attempts");
}

fn journal_says(scene: &Scene, id: &str, words: &str) -> bool {
    boot::journal(scene, id).contains(words)
}

#[test]
fn killed_when_the_journal_names_the_stage() {
    killed_when(Operation::Stage, |scene, id, _| journal_says(scene, id, "staging_path"));
}

#[test]
fn killed_when_the_staging_path_is_mounted() {
    killed_when(Operation::Stage, |_, id, caller| mounted(&caller.staging_path(id)).is_some());
}

#[test]
fn killed_when_the_dial_socket_is_there() {
    killed_when(Operation::Stage, |scene, id, _| scene.dial_dir(id).join("dial.sock").exists());
}

#[test]
fn killed_when_the_daemons_log_is_opened() {
    killed_when(Operation::Stage, |scene, id, _| scene.dial_dir(id).join("daemon.log").exists());
}

#[test]
fn killed_when_the_daemon_is_started() {
    killed_when(Operation::Stage, |scene, _, _| !scene.daemons().is_empty());
}

#[test]
fn killed_when_the_journal_names_the_launch() {
    killed_when(Operation::Stage, |scene, id, _| journal_says(scene, id, "start_time"));
}

#[test]
fn killed_when_the_journal_says_that_it_is_served() {
    killed_when(Operation::Stage, |scene, id, _| journal_says(scene, id, "connection_minor"));
}

#[test]
fn killed_when_the_journal_names_the_target() {
    killed_when(Operation::Publish, |scene, id, _| journal_says(scene, id, "\"published\":false"));
}

#[test]
fn killed_when_the_target_directory_is_made() {
    killed_when(Operation::Publish, |_, _, caller| caller.target_path(POD).symlink_metadata().is_ok());
}

#[test]
fn killed_when_the_target_is_mounted() {
    killed_when(Operation::Publish, |_, _, caller| mounted(&caller.target_path(POD)).is_some());
}

#[test]
fn killed_when_the_target_is_unmounted() {
    killed_when(Operation::Unpublish, |_, _, caller| mounted(&caller.target_path(POD)).is_none());
}

#[test]
fn killed_when_the_target_directory_is_gone() {
    killed_when(Operation::Unpublish, |_, _, caller| {
        let target = caller.target_path(POD);
        mounted(&target).is_none() && !target.exists()
    });
}

#[test]
fn killed_when_the_staging_path_is_unmounted() {
    killed_when(Operation::Unstage, |_, id, caller| mounted(&caller.staging_path(id)).is_none());
}

#[test]
fn killed_when_the_daemon_has_ended() {
    killed_when(Operation::Unstage, |scene, _, _| scene.daemons().is_empty());
}

#[test]
fn killed_when_the_dial_directory_is_gone() {
    killed_when(Operation::Unstage, |scene, id, _| !scene.dial_dir(id).exists());
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
            let mut begun = None;
            kill_during(&mut scene, operation, |_, _, _| {
                begun.get_or_insert_with(Instant::now).elapsed() >= after
            });
        }
    }
}

fn wait(span: Duration) {
    let begun = Instant::now();
    as_soon_as("the moment", TIMEOUT, || begun.elapsed() >= span).unwrap();
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
        wait(after);
        scene.restart_driver();
        drop(creation.join().unwrap());
        let id = retried(&scene, "create", || caller.create_named("pvc-kill"));
        let data = scene.sandbox.path("pool/volumes").join(&id).join("data");
        for n in 0..200 {
            fs::create_dir_all(data.join(format!("{n}/a/b"))).unwrap();
        }
        let deletion = std::thread::spawn({
            let (caller, id) = (caller.clone(), id.clone());
            move || caller.delete(&id)
        });
        wait(after);
        scene.restart_driver();
        drop(deletion.join().unwrap());
        retried(&scene, "delete", || caller.delete(&id));
        scene.assert_nothing_left();
    }
}
