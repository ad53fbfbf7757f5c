//! The keeper's life: its death is noticed at once, another one gets everything, and a daemon's
//! descriptors are trusted only as far as they can be verified.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use keeper::client::Client;
use keeper::wire::Entry;
use linux::fd_passing::{PacketListener, PacketSocket};
use nix::sys::signal::Signal;
use prost::Message;
use proto::control::{Descriptors, GetDescriptors, Pong, Reply, Request, reply, request};
use proto::handover::Role;
use rustix::fs::{Mode, OFlags};
use tests::csi::programs::install;
use tests::csi::scene::{Flags, Scene, TIMEOUT, retried, volume_binary};
use tests::{Sandbox, eventually};

pub(crate) fn keeper_binary() -> PathBuf {
    let keeper = volume_binary().with_file_name("hawser-keeper");
    assert!(keeper.is_file(), "{} is missing: run `cargo build -p keeper` first", keeper.display());
    keeper
}

pub(crate) fn with_keeper() -> Flags {
    let Flags(mut flags) = Flags::process_with_keeper();
    flags.extend(["--keeper-binary".to_owned(), keeper_binary().display().to_string()]);
    Flags(flags)
}

pub(crate) fn keepers(scene: &Scene) -> Vec<i32> {
    let processes = scene.sandbox.tag().processes().unwrap();
    processes
        .into_iter()
        .filter(|process| process.name == "hawser-keeper")
        .map(|process| process.pid)
        .collect()
}

/// Returns once it is dead.
pub(crate) fn kill_keeper(scene: &Scene) {
    let [keeper] = keepers(scene)[..] else { panic!("{:?}", keepers(scene)) };
    let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, 9).unwrap();
    assert!(linux::process::wait_for_end(&pidfd, TIMEOUT).unwrap());
}

/// Kills the volume's daemon, and waits until another one serves.
pub(crate) fn kill_daemon(scene: &Scene) {
    // Its users wait meanwhile, on a busy machine for longer than the guard takes for a hang.
    scene.sandbox.switch_fuse_guard_off();
    let before = scene.daemons();
    scene.kill_daemon();
    eventually("another daemon serves", TIMEOUT, || {
        let now = scene.daemons();
        anyhow::ensure!(now.len() == 1 && now != before, "{before:?}, then {now:?}");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", scene.log()));
}

/// What the keeper holds of the one volume.
fn entry(scene: &Scene) -> anyhow::Result<Entry> {
    let mut client = Client::connect(&scene.sandbox.path("run/keeper/keeper.sock"), TIMEOUT)?;
    let entries = client.list()?;
    anyhow::ensure!(entries.len() == 1, "{entries:?}");
    Ok(entries[0])
}

/// The keeper holds the volume's descriptors and this many removed files, and has its daemon's socket.
pub(crate) fn wait_until_held(scene: &Scene, removed: u32) {
    eventually("the keeper holds the volume", TIMEOUT, || {
        let entry = entry(scene)?;
        let is_whole = entry.has_daemon && entry.roles.contains(keeper::wire::Role::Connection);
        anyhow::ensure!(is_whole && entry.removed == removed, "{entry:?}");
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", scene.log()));
}

fn read_all(file: &mut File) -> String {
    let mut text = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

fn end(scene: &Scene, id: &str) {
    let caller = scene.caller();
    // The driver may be about to journal a takeover.
    retried(scene, "unpublish", || caller.unpublish(id, "one"));
    caller.unstage(id).unwrap();
    caller.delete(id).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_removed_file_that_is_open_survives_its_keeper_and_then_its_daemon() {
    let scene = Scene::start(with_keeper());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let target = scene.caller().target_path("one");
    let mut file = File::create_new(target.join("f")).unwrap();
    file.write_all(b"0").unwrap();
    fs::remove_file(target.join("f")).unwrap();
    fs::create_dir(target.join("d")).unwrap();
    let directory = File::open(target.join("d")).unwrap();
    fs::remove_dir(target.join("d")).unwrap();
    wait_until_held(&scene, 2);
    for round in 1..=3 {
        // No call to the driver, and none by it: only the keeper's death wakes it.
        kill_keeper(&scene);
        wait_until_held(&scene, 2);
        kill_daemon(&scene);
        file.write_all(round.to_string().as_bytes()).unwrap();
        assert_eq!(read_all(&mut file), (0..=round).map(|n| n.to_string()).collect::<String>());
        assert_eq!(rustix::fs::fstat(&directory).unwrap().st_nlink, 0);
    }
    drop((file, directory));
    wait_until_held(&scene, 0);
    end(&scene, &id);
}

#[test]
fn a_driver_holds_connections_alone_while_no_keeper_can_be_started() {
    let sandbox = Sandbox::new();
    let program = sandbox.path("hawser-keeper");
    install(&program, &fs::read(keeper_binary()).unwrap());
    let Flags(mut flags) = with_keeper();
    *flags.last_mut().unwrap() = program.display().to_string();
    let scene = Scene::start_in(sandbox, Flags(flags));
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    fs::remove_file(&program).unwrap();
    kill_keeper(&scene);
    eventually("the driver reports it", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("no keeper: this driver alone"), "not yet");
        Ok(())
    })
    .unwrap();
    kill_daemon(&scene);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    install(&program, &fs::read(keeper_binary()).unwrap());
    wait_until_held(&scene, 0);
    end(&scene, &id);
}

#[test]
fn a_volume_that_is_unstaged_while_its_keeper_is_stopped_is_not_held_afterwards() {
    let scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    wait_until_held(&scene, 0);
    let [keeper] = keepers(&scene)[..] else { panic!("{:?}", keepers(&scene)) };
    let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGSTOP as i32).unwrap();
    tests::wait_until_stopped(keeper, TIMEOUT).unwrap();
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGCONT as i32).unwrap();
    // It ends only once it holds nothing.
    scene.end_keeper();
    eventually("another keeper runs", TIMEOUT, || {
        anyhow::ensure!(keepers(&scene).len() == 1, "{:?}", keepers(&scene));
        Ok(())
    })
    .unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_new_driver_has_the_keeper_release_what_an_earlier_one_could_not() {
    let mut scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let volumes = ["one", "two"].map(|pod| {
        let id = caller.bring_up(&format!("pvc-{pod}"), &[pod]).unwrap();
        (id, pod)
    });
    let [keeper] = keepers(&scene)[..] else { panic!("{:?}", keepers(&scene)) };
    let pidfd = linux::process::open_pidfd(keeper).unwrap().unwrap();
    linux::process::signal_pidfd(&pidfd, Signal::SIGSTOP as i32).unwrap();
    tests::wait_until_stopped(keeper, TIMEOUT).unwrap();
    for (id, pod) in &volumes {
        retried(&scene, "unpublish", || caller.unpublish(id, pod));
        caller.unstage(id).unwrap();
    }
    scene.kill_driver();
    linux::process::signal_pidfd(&pidfd, Signal::SIGCONT as i32).unwrap();
    scene.start_driver();
    let held = Client::connect(&scene.sandbox.path("run/keeper/keeper.sock"), TIMEOUT).unwrap().list();
    assert_eq!(held.unwrap(), []);
    volumes.iter().for_each(|(id, _)| caller.delete(id).unwrap());
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn a_new_driver_takes_everything_back_from_a_daemon_that_was_left_alone() {
    let mut scene = Scene::start(with_keeper());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let target = scene.caller().target_path("one");
    fs::write(target.join("f"), "kept").unwrap();
    let mut removed = File::create_new(target.join("removed")).unwrap();
    removed.write_all(b"removed").unwrap();
    fs::remove_file(target.join("removed")).unwrap();
    scene.kill_driver();
    kill_keeper(&scene);
    scene.start_driver();
    wait_until_held(&scene, 1);
    assert!(scene.log().contains("its daemon has returned it"), "{}", scene.log());
    kill_daemon(&scene);
    assert_eq!(fs::read(target.join("f")).unwrap(), b"kept");
    assert_eq!(read_all(&mut removed), "removed");
    // Also the driver has them all.
    kill_keeper(&scene);
    wait_until_held(&scene, 1);
    kill_daemon(&scene);
    assert_eq!(read_all(&mut removed), "removed");
    drop(removed);
    end(&scene, &id);
}

/// Answers in place of the volume's daemon, as an attacker does who controls it.
struct Impostor {
    socket: PathBuf,
    original: PathBuf,
    stops: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Impostor {
    fn start(scene: &Scene, id: &str, version: u32, returned: Vec<(Role, OwnedFd)>) -> Self {
        let socket = scene.dial_dir(id).join("ctl.sock");
        let original = socket.with_extension("original");
        fs::rename(&socket, &original).unwrap();
        let listener = PacketListener::bind(&socket).unwrap();
        let stops = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stops);
        let thread = thread::spawn(move || {
            while let Ok(connection) = listener.accept() {
                if seen.load(Ordering::Relaxed) {
                    return;
                }
                answer(&connection, version, &returned);
            }
        });
        Self { socket, original, stops, thread: Some(thread) }
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.stops.store(true, Ordering::Relaxed);
        drop(PacketSocket::connect(&self.socket));
        let joined = self.thread.take().unwrap().join();
        fs::rename(&self.original, &self.socket).unwrap();
        assert!(joined.is_ok() || thread::panicking());
    }
}

fn answer(connection: &PacketSocket, version: u32, returned: &[(Role, OwnedFd)]) {
    while let Ok(Some((packet, _))) = connection.receive_with_fds(1) {
        let asked = Request::decode(&*packet).unwrap().kind;
        let roles = || returned.iter().map(|(role, _)| i32::from(*role)).collect();
        let (kind, beside): (_, Vec<BorrowedFd<'_>>) = match asked {
            Some(request::Kind::GetDescriptors(_)) => (
                reply::Kind::Descriptors(Descriptors { roles: roles() }),
                returned.iter().map(|(_, fd)| fd.as_fd()).collect(),
            ),
            _ => (reply::Kind::Pong(Pong { version, ..Pong::default() }), Vec::new()),
        };
        let sent = connection.send(&Reply { kind: Some(kind) }.encode_to_vec(), &beside);
        if sent.is_err() {
            return;
        }
    }
}

/// What the real daemon returns.
fn descriptors_of(scene: &Scene, id: &str) -> Vec<(Role, OwnedFd)> {
    let socket = PacketSocket::connect(&scene.dial_dir(id).join("ctl.sock")).unwrap();
    socket.set_timeout(TIMEOUT).unwrap();
    let asked = Request { kind: Some(request::Kind::GetDescriptors(GetDescriptors {})) };
    socket.send(&asked.encode_to_vec(), &[]).unwrap();
    let (packet, fds) = socket.receive_with_fds(8).unwrap().unwrap();
    match Reply::decode(&*packet).unwrap().kind {
        Some(reply::Kind::Descriptors(found)) => {
            let roles = found.roles.into_iter().map(|role| Role::try_from(role).unwrap());
            roles.zip(fds).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn open(path: &Path, flags: OFlags) -> OwnedFd {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// Wrong descriptors, each with the words of its refusal.
fn wrong_descriptors(scene: &Scene, other: &str) -> Vec<(Role, OwnedFd, &'static str)> {
    let mut of_other = descriptors_of(scene, other);
    let mut take = |role: Role| {
        let at = of_other.iter().position(|(found, _)| *found == role).unwrap();
        of_other.swap_remove(at).1
    };
    let (connection, directory, usage_file) =
        (take(Role::FuseDevice), take(Role::Directory), take(Role::UsageFile));
    let data = scene.sandbox.path("pool/volumes").join(other).join("data");
    let fuse = Path::new("/dev/fuse");
    vec![
        (Role::FuseDevice, connection, "of FUSE connection "),
        (Role::FuseDevice, open(fuse, OFlags::PATH), "O_PATH"),
        (Role::FuseDevice, open(Path::new("/dev/null"), OFlags::RDWR), "(/dev/fuse)"),
        (Role::FuseDevice, open(fuse, OFlags::RDWR), "of no FUSE connection"),
        (Role::Directory, directory, "not the directory that the daemon was assigned"),
        (Role::Directory, open(&data, OFlags::PATH | OFlags::DIRECTORY), "not the root of a detached mount"),
        (Role::UsageFile, usage_file, "not the usage file of the volume in the pool"),
        (Role::StateTable, linux::shared_memory::create("state", 1 << 20).unwrap(), "1048576 bytes"),
        (Role::StateTable, tempfile::tempfile_in("/var/tmp").unwrap().into(), "not a memfd"),
    ]
}

#[test]
fn a_new_driver_refuses_each_wrong_descriptor_of_a_daemon() {
    let mut scene = Scene::start(with_keeper());
    let caller = scene.caller();
    let id = caller.bring_up("pvc-1", &["one"]).unwrap();
    let other = caller.bring_up("pvc-2", &["two"]).unwrap();
    let right = descriptors_of(&scene, &id);
    assert_eq!(right.len(), 4, "{right:?}");
    for (role, descriptor, words) in wrong_descriptors(&scene, &other) {
        let mut returned: Vec<_> = right.iter().map(|(role, fd)| (*role, fd.try_clone().unwrap())).collect();
        let at = returned.iter().position(|(found, _)| *found == role).unwrap();
        returned[at].1 = descriptor;
        scene.kill_driver();
        kill_keeper(&scene);
        let impostor = Impostor::start(&scene, &id, 2, returned);
        let said_before = scene.log().len();
        scene.start_driver();
        eventually("the driver refuses it", TIMEOUT, || {
            let log = scene.log();
            let log = &log[said_before..];
            let is_refused = log.contains("returned a wrong descriptor as ROLE_") && log.contains(words);
            anyhow::ensure!(is_refused, "{words}: {log}");
            Ok(())
        })
        .unwrap();
        drop(impostor);
        let held =
            Client::connect(&scene.sandbox.path("run/keeper/keeper.sock"), TIMEOUT).unwrap().list().unwrap();
        let key = id.trim_start_matches("vol-");
        assert!(!held.iter().any(|entry| entry.volume.to_string() == key), "{words}: {held:?}");
    }
    // The daemon itself returns the right ones.
    drop(right);
    scene.restart_driver();
    eventually("the keeper holds both volumes", TIMEOUT, || {
        let held = Client::connect(&scene.sandbox.path("run/keeper/keeper.sock"), TIMEOUT)?.list()?;
        anyhow::ensure!(held.iter().filter(|entry| entry.has_daemon).count() == 2, "{held:?}");
        Ok(())
    })
    .unwrap();
    retried(&scene, "unpublish", || caller.unpublish(&other, "two"));
    caller.unstage(&other).unwrap();
    caller.delete(&other).unwrap();
    end(&scene, &id);
}

#[test]
fn a_daemon_of_an_earlier_version_is_served_on_and_reported() {
    let scene = Scene::start(with_keeper());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    let impostor = Impostor::start(&scene, &id, 1, Vec::new());
    kill_keeper(&scene);
    eventually("the driver reports it", TIMEOUT, || {
        anyhow::ensure!(
            scene.log().contains("is of an earlier version, which takes no other keeper"),
            "not yet"
        );
        Ok(())
    })
    .unwrap_or_else(|error| panic!("{error:#}\n{}", scene.log()));
    drop(impostor);
    kill_daemon(&scene);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    end(&scene, &id);
}

/// The fields of the volume's mount in a pod, as `hawser-csi mounts` shows them.
fn shown(scene: &Scene, output: &str) -> String {
    view(scene, "mounts", output)
}

/// What a view of `hawser-csi` shows.
pub(crate) fn view(scene: &Scene, view: &str, output: &str) -> String {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args([view, "-o", output, "--state-dir"]).arg(scene.sandbox.path("state"));
    command.arg("--run-dir").arg(scene.sandbox.path("run"));
    let done = command.output().unwrap();
    assert!(done.status.success(), "{done:?}");
    String::from_utf8(done.stdout).unwrap()
}

pub(crate) fn mounts(scene: &Scene) -> Vec<serde_json::Value> {
    serde_json::from_str(&shown(scene, "json")).unwrap()
}

pub(crate) fn published(scene: &Scene) -> serde_json::Value {
    mounts(scene).into_iter().find(|mount| mount["state"] == "published").unwrap()
}

#[test]
fn mounts_shows_who_holds_a_volume_and_since_when_it_is_served() {
    let mut scene = Scene::start(with_keeper());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    wait_until_held(&scene, 0);
    let first = published(&scene);
    assert_eq!(first["holders"], serde_json::json!(["daemon", "driver", "keeper"]));
    assert_eq!((first["takeovers"].as_u64(), &first["sole_holder_reason"]), (Some(0), &().into()));
    kill_daemon(&scene);
    eventually("the successor is shown", TIMEOUT, || {
        let mount = published(&scene);
        let is_next = mount["takeovers"] == 1 && mount["daemon_pid"] != first["daemon_pid"];
        let is_later = mount["served_since"].as_i64() >= first["served_since"].as_i64();
        anyhow::ensure!(is_next && is_later, "{mount}");
        Ok(())
    })
    .unwrap();
    assert!(shown(&scene, "table").contains("daemon,driver,keeper"), "{}", shown(&scene, "table"));
    scene.kill_driver();
    assert_eq!(published(&scene)["holders"], serde_json::json!(["daemon", "keeper"]));
    // As on a kernel before 6.9.
    let boot = fs::read_dir(scene.sandbox.path("state/boots")).unwrap().next().unwrap().unwrap().path();
    let path = boot.join(format!("{id}.jsonl"));
    let journal = fs::read_to_string(&path).unwrap();
    let alone = journal.replace("\"is_sole_holder\":false", "\"is_sole_holder\":true");
    assert_ne!(alone, journal, "{journal}");
    fs::write(&path, alone).unwrap();
    assert_eq!(published(&scene)["sole_holder_reason"], "kernel before 6.9");
    // As after an upgrade to a program that would ask the kernel for more.
    let lacking = journal.replace("\"takeovers\":1", "\"takeovers\":1,\"needs_new_stage\":[\"FUSE_X\"]");
    assert_ne!(lacking, journal, "{journal}");
    fs::write(&path, lacking).unwrap();
    assert_eq!(published(&scene)["needs_new_stage"], serde_json::json!(["FUSE_X"]));
    assert!(shown(&scene, "table").contains("FUSE_X"), "{}", shown(&scene, "table"));
    fs::write(&path, journal).unwrap();
    kill_keeper(&scene);
    assert_eq!(published(&scene)["holders"], serde_json::json!(["daemon"]));
    scene.start_driver();
    wait_until_held(&scene, 0);
    assert_eq!(published(&scene)["holders"], serde_json::json!(["daemon", "driver", "keeper"]));
    end(&scene, &id);
}

/// Fields of /proc/PID/stat from the third one on.
fn stat(pid: i32) -> Vec<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, rest) = text.rsplit_once(") ").unwrap();
    rest.split(' ').map(str::to_owned).collect()
}

#[test]
fn a_keeper_runs_by_default_in_a_session_and_a_control_group_of_its_own() {
    let scene = Scene::start(Flags::process_with_keeper());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let file = scene.caller().target_path("one").join("f");
    fs::write(&file, "kept").unwrap();
    let [keeper] = keepers(&scene)[..] else { panic!("{:?}", keepers(&scene)) };
    let session = &stat(keeper)[3];
    assert_eq!(*session, keeper.to_string());
    let groups = fs::read_to_string(format!("/proc/{keeper}/cgroup")).unwrap();
    let own = scene.sandbox.volumes_cgroup_root().join("keeper");
    assert!(groups.lines().any(|line| line.ends_with(own.to_str().unwrap())), "{groups}\n{}", scene.log());
    kill_daemon(&scene);
    assert_eq!(fs::read(&file).unwrap(), b"kept");
    kill_keeper(&scene);
    wait_until_held(&scene, 0);
    let [another] = keepers(&scene)[..] else { panic!("{:?}", keepers(&scene)) };
    let groups = fs::read_to_string(format!("/proc/{another}/cgroup")).unwrap();
    assert!(groups.lines().any(|line| line.ends_with(own.to_str().unwrap())), "{groups}");
    end(&scene, &id);
}

#[test]
fn a_driver_without_a_keeper_beside_it_serves_and_says_what_is_lost() {
    let mut scene = Scene::start(Flags::process());
    scene.kill_driver();
    let alone = scene.sandbox.make_dir("alone").unwrap().join("hawser-csi");
    install(&alone, &fs::read(env!("CARGO_BIN_EXE_hawser-csi")).unwrap());
    let mut command = scene.sandbox.command(&alone);
    let is_default = |argument: &&std::ffi::OsStr| *argument != "--keeper-binary" && *argument != "none";
    command.args(scene.driver_command().get_args().filter(is_default));
    let log = scene.sandbox.path("alone.log");
    let mut driver = tests::Daemon::start("hawser-csi", command, &log).unwrap();
    eventually("the driver serves", TIMEOUT, || {
        anyhow::ensure!(driver.ended()?.is_none(), "it ended:\n{}", driver.output());
        anyhow::ensure!(driver.output().contains(" serving "), "not yet:\n{}", driver.output());
        Ok(())
    })
    .unwrap();
    let said = driver.output();
    let wanted = format!("put hawser-keeper at {}", alone.with_file_name("hawser-keeper").display());
    assert!(
        said.contains("if a volume's daemon ends, its pods get ENOTCONN") && said.contains(&wanted),
        "{said}"
    );
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    scene.kill_daemon();
    let dead = fs::metadata(scene.caller().target_path("one").join("f")).unwrap_err();
    assert_eq!(dead.raw_os_error(), Some(nix::errno::Errno::ENOTCONN as i32));
    retried(&scene, "unpublish", || scene.caller().unpublish(&id, "one"));
    scene.caller().unstage(&id).unwrap();
    scene.caller().delete(&id).unwrap();
    driver.stop(TIMEOUT).unwrap();
}

/// The driver waits for a keeper that [`start_service`] starts.
fn with_service() -> Flags {
    let Flags(mut flags) = Flags::process_with_keeper();
    flags.extend(["--keeper-binary", "service"].map(str::to_owned));
    Flags(flags)
}

pub(crate) fn start_service(scene: &Scene) -> tests::Daemon {
    let mut command = scene.sandbox.command(&keeper_binary());
    command.arg("--socket").arg(scene.sandbox.path("run/keeper/keeper.sock"));
    tests::Daemon::start("hawser-keeper", command, &scene.sandbox.path("keeper.log")).unwrap()
}

#[test]
fn a_keeper_that_another_program_starts_gets_everything_when_it_comes() {
    let scene = Scene::start(with_service());
    let id = scene.caller().bring_up("pvc-1", &["one"]).unwrap();
    let target = scene.caller().target_path("one");
    assert_eq!(published(&scene)["holders"], serde_json::json!(["daemon", "driver"]));
    let mut removed = File::create_new(target.join("f")).unwrap();
    removed.write_all(b"removed").unwrap();
    fs::remove_file(target.join("f")).unwrap();
    let mut keeper = start_service(&scene);
    wait_until_held(&scene, 1);
    kill_daemon(&scene);
    assert_eq!(read_all(&mut removed), "removed");
    keeper.kill().unwrap();
    kill_daemon(&scene);
    fs::write(target.join("g"), "served").unwrap_or_else(|error| panic!("{error}\n{}", scene.log()));
    assert!(keepers(&scene).is_empty(), "the driver has started one");
    drop(removed);
    let caller = scene.caller();
    retried(&scene, "unpublish", || caller.unpublish(&id, "one"));
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
}

/// The stage begins without a keeper, and the keeper comes before the daemon has answered.
#[test]
fn a_daemon_that_starts_while_a_keeper_comes_gets_a_socket_to_it() {
    let sandbox = Sandbox::new();
    let (gate, program) = (sandbox.path("gate"), sandbox.path("hawser-volume"));
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let waits =
        format!("#!/bin/sh\nread go < {}\nexec {} \"$@\"\n", gate.display(), volume_binary().display());
    install(&program, waits.as_bytes());
    let flags = with_service().with(&["--volume-binary".to_owned(), program.display().to_string()]);
    let scene = Scene::start_in(sandbox, flags);
    let caller = scene.caller();
    let id = caller.create_named("pvc-1").unwrap();
    let _keeper = thread::scope(|scope| {
        let stage = scope.spawn(|| caller.stage(&id));
        let mut go = eventually("the program waits", TIMEOUT, || {
            // Without O_NONBLOCK, an open would wait for a reader.
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(File::from(rustix::fs::open(&gate, flags, Mode::empty())?))
        })
        .unwrap();
        let keeper = start_service(&scene);
        eventually("the driver uses the keeper", TIMEOUT, || {
            anyhow::ensure!(scene.log().contains("connected to a keeper"), "not yet:\n{}", scene.log());
            Ok(())
        })
        .unwrap();
        go.write_all(b"go\n").unwrap();
        stage.join().unwrap().unwrap();
        keeper
    });
    wait_until_held(&scene, 0);
    eventually("the daemon has the socket", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("the volume's daemon uses another keeper"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    // The driver may still hold the volume.
    retried(&scene, "unstage", || caller.unstage(&id));
    caller.delete(&id).unwrap();
}
