//! How a volume's life begins and ends.

use std::fs;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prost::Message;
use proto::handover::{Assignment, HelloReply, Role, UnknownVersion, answer, hello_reply};

use crate::fixture::{self, Setup, Stage, Volume, errno};

/// How the daemon ends, and its one line.
fn refusal(mut command: Command) -> String {
    ended(command.spawn().unwrap())
}

fn ended(mut daemon: Child) -> String {
    fixture::wait_for(&daemon).expect("the daemon gives up");
    let mut said = String::new();
    daemon.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(daemon.wait().unwrap().code(), Some(1), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    said.trim_end().to_owned()
}

/// The daemon's refusal of descriptors of which one is exchanged.
fn assign_with(stage: &Stage, number: usize, other: OwnedFd) -> String {
    let mut descriptors = stage.descriptors();
    descriptors[number] = other;
    assign(stage, fixture::local_assignment(), &descriptors.each_ref().map(AsFd::as_fd)).0
}

fn assign(stage: &Stage, assignment: Assignment, descriptors: &[BorrowedFd<'_>]) -> (String, String) {
    let listener = stage.listen();
    let daemon = stage.daemon(Setup::default()).spawn().unwrap();
    let socket = fixture::accept(&listener);
    fixture::hello(&socket);
    fixture::send_assignment(&socket, assignment, descriptors);
    let reason = match fixture::answer(&socket) {
        answer::Result::Failed(failed) => failed.reason,
        served @ (answer::Result::Ready(_) | answer::Result::Prepared(_)) => panic!("{served:?}"),
    };
    (reason, ended(daemon))
}

#[test]
fn the_unmount_ends_the_daemon_with_success_and_without_a_word() {
    for confine in [false, true] {
        let mut volume = Volume::with(Setup { confine, ..Setup::default() });
        fs::write(volume.path("f"), "kept").unwrap();
        let (status, said) = volume.unmount();
        assert_eq!((status.code(), said.as_str()), (Some(0), ""));
        assert_eq!(fs::read_to_string(volume.backing.join("f")).unwrap(), "kept");
    }
}

#[test]
fn a_killed_daemon_is_enotconn_at_once_for_open_and_for_new_files() {
    let mut volume = Volume::with(Setup { confine: true, ..Setup::default() });
    fs::write(volume.path("f"), "x").unwrap();
    let mut open = fs::File::open(volume.path("f")).unwrap();
    volume.kill();
    assert_eq!(errno(fs::metadata(volume.path("g"))), libc::ENOTCONN);
    assert_eq!(errno(open.read(&mut [0; 1])), libc::ENOTCONN);
    assert_eq!(errno(fs::write(volume.path("f"), "y")), libc::ENOTCONN);
}

#[test]
fn sigterm_and_sigint_do_not_take_the_volume_from_its_users() {
    let volume = Volume::new();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        kill(Pid::from_raw(volume.pid().cast_signed()), signal).unwrap();
    }
    fs::write(volume.path("f"), "served").unwrap();
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "served");
}

#[test]
fn sigterm_before_the_hand_over_ends_the_daemon() {
    let stage = Stage::new();
    let listener = stage.listen();
    let mut daemon = stage.daemon(Setup::default()).spawn().unwrap();
    let _silent = fixture::accept(&listener);
    kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM).unwrap();
    fixture::wait_for(&daemon).expect("SIGTERM ends it");
    assert!(!daemon.wait().unwrap().success());
}

/// In a pod it is the first process of a pid namespace, which gets only the signals that it waits for.
#[test]
fn sigterm_ends_a_daemon_that_waits_for_a_volume() {
    let stage = Stage::new();
    let listener = stage.listen();
    let start = || stage.daemon(Setup::default()).arg("--wait").spawn();
    let mut daemon = linux::pid_namespace::start_first(None, start).unwrap().unwrap();
    let socket = fixture::accept(&listener);
    fixture::hello(&socket);
    kill(Pid::from_raw(daemon.id().cast_signed()), Signal::SIGTERM).unwrap();
    fixture::wait_for(&daemon).expect("SIGTERM ends it");
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn a_refused_nonce_is_said_clearly() {
    let stage = Stage::new();
    let listener = stage.listen();
    let daemon = stage.daemon(Setup::default()).env("HAWSER_NONCE", "guessed").spawn().unwrap();
    let socket = fixture::accept(&listener);
    assert_eq!(fixture::hello(&socket).nonce, "guessed");
    drop(socket);
    let said = ended(daemon);
    assert!(said.contains("closed the connection after Hello (protocol version 3 to 6)"), "{said}");
    assert!(said.contains("does not know this nonce"), "{said}");
    assert!(!said.contains("guessed"), "a nonce is a secret: {said}");
}

#[test]
fn a_missing_nonce_and_a_missing_driver_are_said_clearly() {
    let stage = Stage::new();
    let mut without = stage.daemon(Setup::default());
    without.env_remove("HAWSER_NONCE");
    let said = refusal(without);
    assert!(
        said.starts_with("hawser-volume: environment variable HAWSER_NONCE is empty or not set"),
        "{said}"
    );
    let said = refusal(stage.daemon(Setup::default()));
    assert!(said.ends_with("dial.sock: No such file or directory (os error 2)"), "{said}");
}

#[test]
fn an_assignment_without_all_descriptors_is_refused() {
    let stage = Stage::new();
    let device = stage.mount_fuse();
    let (reason, said) = assign(&stage, fixture::local_assignment(), &[device.as_fd()]);
    assert!(reason.ends_with("descriptors: 5 roles for 1 descriptors"), "{reason}");
    assert_eq!(said, format!("hawser-volume: {reason}"));
    for (role, words) in [
        (Role::FuseDevice.into(), "descriptors: two have ROLE_FUSE_DEVICE"),
        (77, "descriptors: 77 is not a known role"),
        (0, "descriptors: 0 is not a known role"),
    ] {
        let stage = Stage::new();
        let descriptors = stage.descriptors();
        let mut assignment = fixture::local_assignment();
        assignment.descriptors[1] = role;
        let (reason, _) = assign(&stage, assignment, &descriptors.each_ref().map(AsFd::as_fd));
        assert!(reason.ends_with(words), "{reason}");
    }
    let stage = Stage::new();
    let descriptors = stage.descriptors();
    let mut assignment = fixture::local_assignment();
    assignment.descriptors.pop();
    let (reason, _) =
        assign(&stage, assignment, &descriptors[..4].iter().map(AsFd::as_fd).collect::<Vec<_>>());
    assert!(reason.ends_with("ROLE_USAGE_FILE: no descriptor has this role"), "{reason}");
}

#[test]
fn an_assignment_of_another_backend_is_refused() {
    let stage = Stage::new();
    let descriptors = stage.descriptors();
    let assignment = Assignment { backend: None, ..fixture::local_assignment() };
    let (reason, _) = assign(&stage, assignment, &descriptors.each_ref().map(AsFd::as_fd));
    assert!(reason.ends_with("backend: not local, the only one that this daemon serves"), "{reason}");
}

#[test]
fn a_driver_that_speaks_another_version_is_named_with_it() {
    let stage = Stage::new();
    let listener = stage.listen();
    let daemon = stage.daemon(Setup::default()).spawn().unwrap();
    let socket = fixture::accept(&listener);
    fixture::hello(&socket);
    let unknown = UnknownVersion { oldest_version: 7, newest_version: 8 };
    let reply = HelloReply { kind: Some(hello_reply::Kind::UnknownVersion(unknown)) };
    socket.send(&reply.encode_to_vec(), &[]).unwrap();
    let said = ended(daemon);
    assert!(
        said.ends_with(
            "speaks version 7 to 8 of the hand-over protocol, this daemon version 3 to 6: use both of one release"
        ),
        "{said}"
    );
}

#[test]
fn something_else_than_a_fuse_device_is_refused() {
    let stage = Stage::new();
    let null = OwnedFd::from(fs::File::open("/dev/null").unwrap());
    let reason = assign_with(&stage, 0, null);
    assert!(reason.ends_with("ROLE_FUSE_DEVICE: not /dev/fuse but CharacterDevice, device 1:3"), "{reason}");
}

#[test]
fn a_directory_that_leads_out_of_the_volume_is_refused() {
    let stage = Stage::new();
    let plain = OwnedFd::from(fs::File::open(&stage.backing).unwrap());
    let reason = assign_with(&stage, 1, plain);
    assert!(reason.ends_with("not the root of a detached mount: .. leads out of the volume"), "{reason}");
}

#[test]
fn sockets_and_files_that_are_not_what_they_should_be_are_refused() {
    let stage = Stage::new();
    let (one, _other) = linux::fd_passing::PacketSocket::pair().unwrap();
    let connected = one.as_fd().try_clone_to_owned().unwrap();
    let reason = assign_with(&stage, 2, connected);
    assert!(reason.ends_with("ROLE_CONTROL_LISTENER: a socket that does not listen"), "{reason}");
    for (number, place) in [(2, "ROLE_CONTROL_LISTENER"), (3, "ROLE_METRICS_LISTENER")] {
        let stage = Stage::new();
        let reason = assign_with(&stage, number, stage.tree());
        assert!(reason.contains(&format!("{place}: not a socket: ")), "{reason}");
    }
    let stage = Stage::new();
    let stream = std::os::unix::net::UnixListener::bind(stage.backing.join("s")).unwrap();
    let reason = assign_with(&stage, 2, stream.into());
    assert!(reason.contains("ROLE_CONTROL_LISTENER: not a unix socket of "), "{reason}");
    let stage = Stage::new();
    let read_only = fs::File::open("/etc/passwd").unwrap();
    let reason = assign_with(&stage, 4, read_only.into());
    assert!(reason.contains("ROLE_USAGE_FILE: not a regular file open for reading and writing"), "{reason}");
}

#[test]
fn too_many_threads_are_refused_by_number() {
    let stage = Stage::new();
    let assignment = Assignment { threads: 1000, ..fixture::local_assignment() };
    let descriptors = stage.descriptors();
    let (reason, _) = assign(&stage, assignment, &descriptors.each_ref().map(AsFd::as_fd));
    assert!(reason.ends_with("threads: 1000 is more than 64"), "{reason}");
}

#[test]
fn a_connection_that_is_gone_already_is_answered_with_failed() {
    let stage = Stage::new();
    let descriptors = stage.descriptors();
    linux::mount::unmount(&stage.mountpoint, linux::mount::UnmountMode::Plain).unwrap();
    let (reason, _) = assign(&stage, fixture::local_assignment(), &descriptors.each_ref().map(AsFd::as_fd));
    assert!(reason.starts_with("answer FUSE_INIT: "), "{reason}");
}
