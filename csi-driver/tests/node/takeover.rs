//! A volume's daemon is killed while applications use the volume: another one continues, and they see
//! a pause and no error.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tests::csi::programs::install;
use tests::csi::scene::{Flags, Scene, TIMEOUT, retried, volume_binary};
use tests::{Sandbox, eventually};

use crate::keepers::{keepers, kill_daemon, with_keeper};

/// Longer than what the driver takes for a daemon that died at once.
const LIVES: Duration = Duration::from_millis(60);

/// Threads that change names and content of the volume, and check every answer.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    pub(crate) fn start(volume: &Path) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let threads = (0..2).map(|number| {
            let (stop, rounds) = (Arc::clone(&stop), Arc::clone(&rounds));
            let dir = volume.join(format!("load-{number}"));
            std::thread::spawn(move || {
                fs::create_dir(&dir).expect("mkdir");
                let mut log = File::create(dir.join("log")).expect("create");
                let mut length = 0;
                while !stop.load(Ordering::Relaxed) {
                    let round = rounds.fetch_add(1, Ordering::Relaxed);
                    let (from, to) = (dir.join("from"), dir.join("to"));
                    fs::write(&from, round.to_le_bytes()).expect("write");
                    fs::rename(&from, &to).expect("rename");
                    assert_eq!(fs::read(&to).expect("read"), round.to_le_bytes());
                    fs::remove_file(&to).expect("unlink");
                    log.write_all(&round.to_le_bytes()).expect("append");
                    length += 8;
                    assert_eq!(log.metadata().expect("stat").len(), length);
                }
            })
        });
        let threads = threads.collect();
        Self { stop, rounds, threads }
    }

    /// Waits for progress, and until the daemon has not died at once. Fails as soon as a thread does.
    pub(crate) fn progress(&self) {
        let (before, begun) = (self.rounds.load(Ordering::Relaxed), Instant::now());
        while self.rounds.load(Ordering::Relaxed) < before + 20 || begun.elapsed() < LIVES {
            assert!(!self.threads.iter().any(std::thread::JoinHandle::is_finished), "an application failed");
            assert!(begun.elapsed() < TIMEOUT, "no progress");
            std::thread::yield_now();
        }
    }

    pub(crate) fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
    }
}

#[test]
fn applications_see_a_pause_and_no_error_when_a_daemon_is_killed() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    let load = Load::start(&target);
    let open = File::create_new(target.join("open")).unwrap();
    for round in 0..20_u64 {
        load.progress();
        open.write_all_at(&round.to_le_bytes(), round * 8).unwrap();
        kill_daemon(&scene);
    }
    load.progress();
    load.end();
    let written: Vec<u8> = (0..20_u64).flat_map(u64::to_le_bytes).collect();
    assert_eq!(fs::read(target.join("open")).unwrap(), written);
    drop(open);
    assert!(!caller.stats(&id, &target).unwrap().volume_condition.unwrap().abnormal);
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

/// Writes numbers to a file and reads them back, in a process of its own: a process that has a file
/// of the volume open cannot start a driver, because its child waits to close it.
pub(crate) fn writer(scene: &Scene, file: &Path) -> Child {
    let script = r#"n=0; while [ -e "$1.go" ]; do n=$((n+1)); echo $n > "$1" || exit 1; \
        [ "$(cat "$1")" = $n ] || exit 2; mv "$1" "$1.moved" || exit 3; mv "$1.moved" "$1" || exit 4; done"#;
    fs::write(go(file), "").unwrap();
    let mut command: Command = scene.sandbox.command(Path::new("/bin/sh"));
    command.args(["-c", script, "writer"]).arg(file).stdin(Stdio::null()).spawn().unwrap()
}

/// Waits until [`writer`] has written and read twice.
pub(crate) fn wait_for_writer(scene: &Scene, file: &Path, writer: &mut Child) {
    let number = |path: &Path| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let mut first = None;
    eventually("the application goes on", TIMEOUT, || {
        anyhow::ensure!(writer.try_wait()?.is_none(), "it failed\n{}", scene.log());
        let now = number(file).ok_or_else(|| anyhow::anyhow!("it moves the file"))?;
        let first = *first.get_or_insert(now);
        anyhow::ensure!(now >= first + 2, "{first}, then {now}");
        Ok(())
    })
    .unwrap();
}

pub(crate) fn go(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(".go");
    name.into()
}

#[test]
fn a_driver_and_a_daemon_that_are_killed_together_cost_a_pause() {
    let mut scene = Scene::start(with_keeper());
    // The writer waits until another driver has started.
    scene.sandbox.switch_fuse_guard_off();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let file = caller.target_path("one").join("f");
    let mut writer = writer(&scene, &file);
    for _ in 0..3 {
        eventually("the writer writes", TIMEOUT, || {
            anyhow::ensure!(writer.try_wait()?.is_none(), "it failed");
            anyhow::ensure!(fs::metadata(&file).is_ok_and(|seen| seen.len() > 0), "not yet");
            Ok(())
        })
        .unwrap();
        scene.kill_driver();
        scene.kill_daemon();
        scene.start_driver();
        eventually("another daemon serves", TIMEOUT, || {
            anyhow::ensure!(scene.daemons().len() == 1, "{:?}", scene.daemons());
            Ok(())
        })
        .unwrap();
    }
    fs::remove_file(go(&file)).unwrap();
    assert!(writer.wait().unwrap().success(), "{}", scene.log());
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_keeper_that_is_killed_is_replaced_and_daemons_can_be_killed_again() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    let load = Load::start(&target);
    for _ in 0..3 {
        load.progress();
        let [keeper] = keepers(&scene)[..] else { panic!("{:?}", keepers(&scene)) };
        let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
        linux::process::signal_pidfd(&pidfd, 9).unwrap();
        assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap());
        load.progress();
        kill_daemon(&scene);
    }
    load.progress();
    load.end();
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

/// A sandbox with a program for daemons of its own, which a test may replace.
pub(crate) fn with_own_program(Flags(mut flags): Flags) -> (Scene, PathBuf) {
    let sandbox = Sandbox::new();
    let program = sandbox.path("hawser-volume");
    install(&program, &fs::read(volume_binary()).unwrap());
    let at = flags.iter().position(|flag| flag == "--volume-binary").unwrap();
    flags[at + 1] = program.display().to_string();
    (Scene::start_in(sandbox, Flags(flags)), program)
}

#[test]
fn a_volume_whose_daemons_die_at_once_is_given_up_and_staged_anew() {
    let (scene, program) = with_own_program(with_keeper());
    // Longer than it waits for an answer.
    scene.sandbox.switch_fuse_guard_off();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    fs::write(target.join("f"), "kept").unwrap();
    install(&program, b"#!/bin/sh\nexit 1\n");
    scene.kill_daemon();
    let ended = fs::metadata(target.join("absent")).unwrap_err().raw_os_error();
    let errors =
        [nix::errno::Errno::ENOTCONN, nix::errno::Errno::ECONNABORTED].map(|errno| Some(errno as i32));
    assert!(errors.contains(&ended), "{ended:?}: {}", scene.log());
    assert!(scene.log().contains("die at once, again and again"), "{}", scene.log());
    install(&program, &fs::read(volume_binary()).unwrap());
    // The driver may still be about to record it.
    eventually("the volume is unpublished", TIMEOUT, || Ok(caller.unpublish(&id, "one")?)).unwrap();
    caller.stage(&id).unwrap();
    caller.publish(&id, "one").unwrap();
    assert_eq!(fs::read(target.join("f")).unwrap(), b"kept");
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

/// The daemon was not to be followed once the unstage had begun.
#[test]
fn a_daemon_is_followed_after_an_unstage_that_failed() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    caller.unpublish(&id, "one").unwrap();
    let staged = caller.staging_path(&id);
    let other = scene.sandbox.make_dir("other").unwrap();
    linux::mount::bind(&other, &staged).unwrap();
    caller.unstage(&id).unwrap_err();
    linux::mount::unmount(&staged, linux::mount::UnmountMode::Detach).unwrap();
    caller.publish(&id, "two").unwrap();
    let file = caller.target_path("two").join("f");
    fs::write(&file, "kept").unwrap();
    kill_daemon(&scene);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    retried(&scene, "unpublish", || caller.unpublish(&id, "two"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    fs::remove_dir(&other).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn without_a_keeper_a_killed_daemon_is_an_error_at_once() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    scene.kill_daemon();
    let dead = fs::metadata(caller.target_path("one").join("f")).unwrap_err();
    assert_eq!(dead.raw_os_error(), Some(nix::errno::Errno::ENOTCONN as i32));
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_hung_daemon_is_replaced_and_its_users_get_their_answer() {
    let Flags(mut flags) = with_keeper();
    flags.extend(["--daemon-deadline", "1"].map(str::to_owned));
    let scene = Scene::start(Flags(flags));
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    fs::write(target.join("f"), "kept").unwrap();
    scene.stop_daemon();
    // The request waits in the stopped daemon's connection until another one answers.
    assert_eq!(fs::read(target.join("f")).unwrap(), b"kept");
    assert!(scene.log().contains("another one continues"), "{}", scene.log());
    // The driver may still record the takeover.
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_volume_whose_daemons_hang_in_a_row_is_given_up() {
    let Flags(mut flags) = with_keeper();
    flags.extend(["--daemon-deadline", "1"].map(str::to_owned));
    let scene = Scene::start(Flags(flags));
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let target = caller.target_path("one");
    scene.stop_daemon();
    let (waited, ended) = std::sync::mpsc::channel();
    let user = {
        let target = target.clone();
        let ask =
            move |number: u32| fs::metadata(target.join(number.to_string())).unwrap_err().raw_os_error();
        std::thread::spawn(move || {
            (0..).map(ask).any(|answer| {
                let is_over = answer != Some(nix::errno::Errno::ENOENT as i32);
                waited.send(answer).is_err() || is_over
            })
        })
    };
    // Every daemon is stopped as soon as it serves.
    let (begun, mut stopped) = (Instant::now(), 1);
    let answer = loop {
        assert!(begun.elapsed() < 2 * TIMEOUT, "{}", scene.log());
        if scene.log().matches("another daemon has taken the volume over").count() == stopped {
            scene.stop_daemon();
            stopped += 1;
        }
        match ended.recv_timeout(Duration::from_millis(1)) {
            // A successor may answer before it is stopped; the next one is asked then.
            Ok(answer) if answer == Some(nix::errno::Errno::ENOENT as i32) => {}
            Ok(answer) => break answer,
            Err(_) => {}
        }
    };
    drop(ended);
    assert!(user.join().unwrap());
    let is_given_up = answer == Some(nix::errno::Errno::ENOTCONN as i32)
        || answer == Some(nix::errno::Errno::ECONNABORTED as i32);
    assert!(is_given_up, "{answer:?}\n{}", scene.log());
    // The driver may still be about to record it.
    eventually("the volume is unpublished", TIMEOUT, || Ok(caller.unpublish(&id, "one")?)).unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn after_a_restart_of_the_driver_the_keeper_and_then_the_daemon_may_be_killed() {
    let mut scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let file = caller.target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    scene.restart_driver();
    let [keeper] = keepers(&scene)[..] else { panic!("{:?}", keepers(&scene)) };
    let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, 9).unwrap();
    assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap());
    kill_daemon(&scene);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_driver_that_stops_while_no_daemon_starts_gives_no_volume_up() {
    let (mut scene, program) = with_own_program(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let file = caller.target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    // The file is read as soon as another daemon has begun.
    scene.sandbox.switch_fuse_guard_off();
    // A daemon that never dials in.
    install(&program, b"#!/bin/sh\nexec sleep 1000\n");
    scene.kill_daemon();
    eventually("a successor was started", TIMEOUT, || {
        let processes = scene.sandbox.tag().processes()?;
        anyhow::ensure!(processes.iter().any(|process| process.name == "sleep"), "{processes:?}");
        Ok(())
    })
    .unwrap();
    scene.driver.take().unwrap().stop(TIMEOUT).unwrap();
    install(&program, &fs::read(volume_binary()).unwrap());
    scene.start_driver();
    eventually("another daemon serves", TIMEOUT, || {
        anyhow::ensure!(scene.daemons().len() == 1, "{:?}\n{}", scene.daemons(), scene.log());
        Ok(())
    })
    .unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

/// kubelet repeats a refused NodeUnpublishVolume minutes later.
#[test]
fn a_pod_ends_while_daemons_are_started_that_never_serve() {
    let Flags(mut flags) = with_keeper();
    flags.extend(["--start-timeout", "4"].map(str::to_owned));
    let (scene, program) = with_own_program(Flags(flags));
    // Longer than it waits for an answer.
    scene.sandbox.switch_fuse_guard_off();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();
    let target = caller.target_path("two");
    fs::write(target.join("f"), "kept").unwrap();
    install(&program, b"#!/bin/sh\nexec sleep 1000\n");
    scene.kill_daemon();
    eventually("another daemon is started", TIMEOUT, || {
        anyhow::ensure!(scene.dial_dir(&id).join("dial.sock").exists(), "no socket");
        Ok(())
    })
    .unwrap();
    caller.unpublish(&id, "one").unwrap();
    let starts = scene.log().matches("could not take the volume over yet").count();
    assert!(starts <= 2, "{starts} starts\n{}", scene.log());
    install(&program, &fs::read(volume_binary()).unwrap());
    assert_eq!(fs::read(target.join("f")).unwrap(), b"kept", "{}", scene.log());
    retried(&scene, "unpublish", || caller.unpublish(&id, "two"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

/// kubelet repeats a refused NodeUnstageVolume later and later.
#[test]
fn a_volume_is_unstaged_in_a_pause_between_daemons_that_die_at_once() {
    let (scene, program) = with_own_program(with_keeper());
    scene.sandbox.switch_fuse_guard_off();
    // On a busy machine the pause may be over before: then another volume.
    let is_met = (0..10).any(|round| {
        install(&program, &fs::read(volume_binary()).unwrap());
        is_unstaged_in_a_pause(&scene, &program, &format!("pvc-{round}"))
    });
    assert!(is_met, "{}", scene.log());
    scene.assert_nothing_left();
    scene.end_keeper();
}

fn is_unstaged_in_a_pause(scene: &Scene, program: &Path, name: &str) -> bool {
    let caller = scene.caller();
    let id = caller.bring_up(name, &["one"]).unwrap();
    caller.unpublish(&id, "one").unwrap();
    let failures = || scene.log().matches("could not take the volume over yet").count();
    let before = failures();
    install(program, b"#!/bin/sh\nexit 1\n");
    scene.kill_daemon();
    let failed = eventually("daemons die at once", TIMEOUT, || {
        let failed = failures();
        anyhow::ensure!(failed >= before + 5, "{before} failed before, {failed} now");
        Ok(failed)
    })
    .unwrap();
    // Two seconds pass before the next one, from a tenth of a second after this one on.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(300) {
        std::thread::yield_now();
    }
    retried(scene, "unstage", || caller.unstage(&id));
    let is_met = failures() == failed;
    caller.delete(&id).unwrap();
    is_met
}

/// Nothing is lost of what it has written, and the other pod keeps its connection.
#[test]
fn a_target_in_use_waits_for_a_daemon() {
    let (scene, program) = with_own_program(with_keeper());
    // Longer than it waits for an answer.
    scene.sandbox.switch_fuse_guard_off();
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one", "two"]).unwrap();
    let serves = scene.sandbox.path("serves");
    install(&serves, &fs::read(volume_binary()).unwrap());
    install(&program, b"#!/bin/sh\nexit 1\n");
    let open = File::create_new(caller.target_path("one").join("open")).unwrap();
    scene.kill_daemon();
    let refused = caller.unpublish(&id, "one").unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Aborted, "{refused:?}");
    // It was never published: nothing of it waits for a daemon.
    retried(&scene, "unpublish", || caller.unpublish(&id, "never"));
    // Not written only now: a child that another test starts meanwhile waits to close the volume's file.
    fs::rename(&serves, &program).unwrap();
    open.write_all_at(b"kept", 0).unwrap();
    drop(open);
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    assert_eq!(fs::read(caller.target_path("two").join("open")).unwrap(), b"kept");
    retried(&scene, "unpublish", || caller.unpublish(&id, "two"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}
