//! What a start refuses, and what it says of what it makes: mistyped flags are told
//! before anything depends on them.

use std::fs;
use std::path::Path;
use std::process::Command;

use tests::csi::scene::{Flags, NODE, Scene, TIMEOUT};
use tests::{Daemon, eventually};

const OTHER: &str = "node-2";

/// The driver, or with a first argument one of its commands, by this name of the node.
pub(crate) fn command(scene: &Scene, first: &[&str], node_id: &str, flags: &[&str]) -> Command {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    let path = |name: &str| scene.sandbox.path(name);
    command.args(first).args(["--node-id", node_id]);
    command.arg("--kubelet-dir").arg(path("k")).arg("--pool").arg(path("pool"));
    command.arg("--state-dir").arg(path("state")).arg("--run-dir").arg(path("run"));
    command.args(flags);
    command
}

/// The one line that a start which was refused ends with.
#[track_caller]
pub(crate) fn refusal(mut command: Command) -> String {
    let done = command.output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(1), "{said}");
    said.lines()
        .find_map(|line| line.strip_prefix("hawser-csi: "))
        .unwrap_or_else(|| panic!("{said}"))
        .to_owned()
}

#[test]
fn what_a_launcher_lacks_is_named_before_anything_is_made() {
    let mut scene = Scene::start(Flags::process());
    scene.kill_driver();
    fs::remove_dir_all(scene.sandbox.path("state")).unwrap();
    let [missing, plain] = ["missing", "plain"].map(|name| scene.sandbox.path(name));
    fs::write(&plain, "").unwrap();
    for (launcher, flag, path, reason) in [
        ("manifest", "--manifests", &missing, "no such file or directory"),
        ("manifest", "--manifests", &plain, "not a directory"),
        ("process", "--volume-binary", &missing, "no such file or directory"),
        ("process", "--volume-binary", &plain, "permission denied"),
    ] {
        let flags = ["--launcher", launcher, "--mount-image", "i", flag, path.to_str().unwrap()];
        let line = refusal(command(&scene, &[], NODE, &flags));
        assert!(line.starts_with(&format!("{flag} {path:?}: {reason}: ")), "{line}");
    }
    assert!(!scene.sandbox.path("state").exists());
    fs::remove_file(plain).unwrap();
}

#[test]
fn a_first_start_says_that_it_made_the_pool_and_where() {
    let mut scene = Scene::start(Flags::process());
    let pool = scene.sandbox.path("pool");
    assert!(scene.log().contains("made a new pool in this directory"), "{}", scene.log());
    scene.kill_driver();
    fs::remove_dir_all(scene.sandbox.path("state")).unwrap();
    fs::remove_dir_all(&pool).unwrap();
    let warnings = |scene: &Scene| -> Vec<String> {
        let words = "the pool's directory did not exist: made it, and a new pool in it";
        scene.log().lines().filter(|line| line.contains(words)).map(str::to_owned).collect()
    };
    assert_eq!(warnings(&scene), Vec::<String>::new());
    for _start in 0..2 {
        scene.start_driver();
        let [line] = &warnings(&scene)[..] else { panic!("once:\n{}", scene.log()) };
        assert!(line.contains(" WARN ") && line.contains(&format!("path={}", pool.display())), "{line}");
        scene.kill_driver();
    }
    scene.start_driver();
    scene.assert_nothing_left();
}

/// A keeper that comes later could hold something only of volumes that the node has.
#[test]
fn only_a_node_with_volumes_warns_that_no_keeper_answers() {
    let flags = Flags::process().with(&["--keeper-binary", "service"].map(str::to_owned));
    let mut scene = Scene::start(flags);
    let lines = |scene: &Scene| -> Vec<String> {
        let log = scene.log_of_this_driver();
        log.lines().filter(|line| line.contains("no keeper answers")).map(str::to_owned).collect()
    };
    let [first] = &lines(&scene)[..] else { panic!("once:\n{}", scene.log()) };
    assert!(first.contains(" INFO "), "{first}");
    let volume = scene.caller().create_named("pvc-1").unwrap();
    scene.restart_driver();
    let [second] = &lines(&scene)[..] else { panic!("once:\n{}", scene.log()) };
    assert!(second.contains(" WARN ") && second.contains("keeps the descriptors"), "{second}");
    scene.caller().delete(&volume).unwrap();
    scene.assert_nothing_left();
}

/// All nodes that start before they have a name would have one topology value. A node that has volumes under
/// this name keeps it.
#[test]
fn a_machine_without_a_name_is_refused_unless_it_had_this_name_before() {
    let mut scene = Scene::start(Flags::process());
    scene.kill_driver();
    let flags: Vec<String> = Flags::process().0;
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let recorded = scene.sandbox.path("state/node-id");
    for name in ["localhost", "localhost.localdomain"] {
        let line = refusal(command(&scene, &[], name, &flags));
        let words =
            format!("--node-id {name:?}: a machine without a name has this one: pass the node's own name");
        assert!(line.contains(&words), "{words} in {line}");
    }
    fs::write(&recorded, "localhost\n").unwrap();
    let log = scene.sandbox.path("other.log");
    let mut other = Daemon::start("hawser-csi", command(&scene, &[], "localhost", &flags), &log).unwrap();
    eventually("it serves", TIMEOUT, || {
        anyhow::ensure!(fs::read_to_string(&log)?.contains(" serving "));
        Ok(())
    })
    .unwrap();
    assert!(other.stop(TIMEOUT).unwrap().success());
    fs::remove_file(log).unwrap();
    scene.start_driver();
    scene.assert_nothing_left();
}

#[test]
fn another_node_id_is_refused_until_a_person_says_so() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    scene.kill_driver();
    let flags: Vec<String> = Flags::process().0;
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let recorded = scene.sandbox.path("state/node-id");
    assert_eq!(fs::read_to_string(&recorded).unwrap(), format!("{NODE}\n"));
    for _again in 0..2 {
        let line = refusal(command(&scene, &[], OTHER, &flags));
        for words in [
            "--node-id \"node-2\": ",
            " is of node \"node-1\"",
            "start with --node-id \"node-1\"",
            &format!("remove {}", recorded.display()),
            "kubectl label node NODE topology.csi.hawser.dev/node-",
        ] {
            assert!(line.contains(words), "{words} in {line}");
        }
    }
    let looked = command(&scene, &["doctor", "-o", "json"], OTHER, &flags).output().unwrap();
    let text = String::from_utf8(looked.stdout).unwrap();
    assert!(looked.status.code() == Some(1) && text.contains("state directory of another node"), "{text}");

    // A person has said that the volumes are this node's.
    fs::remove_file(&recorded).unwrap();
    let log = scene.sandbox.path("other.log");
    let mut other = Daemon::start("hawser-csi", command(&scene, &[], OTHER, &flags), &log).unwrap();
    eventually("it serves", TIMEOUT, || {
        anyhow::ensure!(fs::read_to_string(&log)?.contains(" serving "));
        Ok(())
    })
    .unwrap();
    assert_eq!(fs::read_to_string(&recorded).unwrap(), format!("{OTHER}\n"));
    caller.delete(&volume).unwrap();
    assert!(other.stop(TIMEOUT).unwrap().success());
    fs::remove_file(log).unwrap();
    // Nothing is in the journal any more that was the other node's.
    scene.start_driver();
    scene.assert_nothing_left();
}
