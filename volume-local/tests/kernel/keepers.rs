//! Another keeper takes the place of a daemon's own.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use linux::fd_passing::PacketSocket;
use prost::Message;
use proto::control::{GetDescriptors, Ping, ReplaceKeeper, Reply, Request, reply, request};
use proto::handover::Role;

use crate::fixture::{Setup, Volume};
use crate::known::until;

const SETUP: Setup = Setup { confine: true, successors: 1, ..Setup::PLAIN };

fn ask(volume: &Volume, kind: request::Kind, beside: &[BorrowedFd<'_>]) -> reply::Kind {
    let control = volume.control();
    control.socket.send(&Request { kind: Some(kind) }.encode_to_vec(), beside).unwrap();
    control.hear()
}

fn refusal(volume: &Volume, beside: &[BorrowedFd<'_>]) -> String {
    match ask(volume, request::Kind::ReplaceKeeper(ReplaceKeeper {}), beside) {
        reply::Kind::Refused(refused) => refused.reason,
        other => panic!("{other:?}"),
    }
}

/// What the daemon has open, and how often.
fn open_files(volume: &Volume) -> BTreeMap<PathBuf, usize> {
    let mut open = BTreeMap::new();
    for entry in fs::read_dir(format!("/proc/{}/fd", volume.pid())).unwrap() {
        // Closed meanwhile.
        let Ok(file) = fs::read_link(entry.unwrap().path()) else { continue };
        *open.entry(file).or_default() += 1;
    }
    open
}

/// The daemon closes a connection soon after its client has; some of `before` may be among these.
fn wait_until_no_more_is_open(volume: &Volume, before: &BTreeMap<PathBuf, usize>) {
    let begun = Instant::now();
    loop {
        let mut now = open_files(volume);
        now.retain(|file, count| before.get(file).is_none_or(|earlier| *count > *earlier));
        if now.is_empty() {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{now:?}");
        std::thread::yield_now();
    }
}

#[test]
fn a_new_keeper_gets_all_that_the_earlier_one_held() {
    let mut volume = Volume::with(SETUP);
    let open = |name: String| {
        OpenOptions::new().read(true).write(true).create_new(true).open(volume.path(&name)).unwrap()
    };
    let mut removed: Vec<File> = (0..300).map(|number| open(format!("f{number}"))).collect();
    for (number, file) in removed.iter_mut().enumerate() {
        file.write_all(number.to_string().as_bytes()).unwrap();
        fs::remove_file(volume.path(&format!("f{number}"))).unwrap();
    }
    let named = open("named".to_owned());
    until("all are held", || volume.kept_nodes().len() == 300);
    volume.replace_keeper();
    until("all are held again", || volume.kept_nodes().len() == 300);
    // What is removed from now on goes there too.
    fs::remove_file(volume.path("named")).unwrap();
    let begun = Instant::now();
    while volume.kept_nodes().len() < 301 {
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", volume.kept_nodes().len());
        std::thread::yield_now();
    }
    volume.kill();
    volume.take_over(SETUP);
    for (number, file) in removed.iter_mut().enumerate() {
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, number.to_string());
    }
    drop((removed, named));
}

#[test]
fn what_was_removed_while_there_was_no_keeper_is_given_to_the_next_one() {
    let mut volume = Volume::with(SETUP);
    let file = File::create_new(volume.path("f")).unwrap();
    volume.end_keeper();
    fs::remove_file(volume.path("f")).unwrap();
    let number = file.metadata().unwrap().ino();
    volume.replace_keeper();
    until("it is held", || volume.kept_nodes() == [number]);
}

/// Its predecessor had stored it, and died before it was told to drop it.
#[test]
fn a_new_keeper_drops_what_it_has_inherited_and_no_one_uses() {
    let mut volume = Volume::with(SETUP);
    let file = File::create_new(volume.path("f")).unwrap();
    fs::remove_file(volume.path("f")).unwrap();
    let used = file.metadata().unwrap().ino();
    until("it is held", || volume.kept_nodes() == [used]);
    volume.replace_keeper_by_heir(&[used, u64::MAX - 1]);
    until("the other one is dropped", || volume.kept_nodes() == [used]);
    drop(file);
    until("nothing is held", || volume.kept_nodes().is_empty());
}

#[test]
fn only_one_packet_socket_is_taken_for_a_keeper() {
    let volume = Volume::with(SETUP);
    let before = open_files(&volume);
    let (one, _other) = PacketSocket::pair().unwrap();
    let null = OwnedFd::from(File::open("/dev/null").unwrap());
    let stream = std::os::unix::net::UnixStream::pair().unwrap().0;
    let pair = [null.as_fd(), null.as_fd()];
    for (beside, words) in [
        (&[][..], "no descriptor beside the packet"),
        (&pair[..], "more than one descriptor beside the packet"),
        (&[null.as_fd(); 250], "more than one descriptor beside the packet"),
        (&pair[..1], "not a socket: "),
        (&[stream.as_fd()], "not a unix socket of SocketType"),
        (&[one.as_fd()], "not a non-blocking socket"),
    ] {
        let reason = refusal(&volume, beside);
        assert!(reason.starts_with(words), "{reason}");
    }
    wait_until_no_more_is_open(&volume, &before);
}

#[test]
fn a_daemon_without_successors_takes_no_keeper_and_returns_nothing() {
    let volume = Volume::with(Setup { successors: 0, ..SETUP });
    let (one, _other) = PacketSocket::pair().unwrap();
    let one = OwnedFd::from(one);
    rustix::fs::fcntl_setfl(&one, rustix::fs::OFlags::NONBLOCK).unwrap();
    let reason = refusal(&volume, &[one.as_fd()]);
    assert_eq!(reason, "no other daemon can continue this one's connection");
    match ask(&volume, request::Kind::GetDescriptors(GetDescriptors {}), &[]) {
        reply::Kind::Descriptors(found) => assert_eq!(found.roles, [0_i32; 0]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn descriptors_beside_other_requests_are_never_opened() {
    let volume = Volume::with(SETUP);
    let before = open_files(&volume);
    let (mut reader, writer) = std::io::pipe().unwrap();
    for _ in 0..20 {
        let pong = ask(&volume, request::Kind::Ping(Ping {}), &[writer.as_fd(); 16]);
        assert_eq!(pong, crate::fixture::pong());
    }
    drop(writer);
    assert_eq!(reader.read(&mut [0]).unwrap(), 0, "a copy is open");
    wait_until_no_more_is_open(&volume, &before);
}

#[test]
fn a_daemon_returns_what_it_was_given() {
    let volume = Volume::with(SETUP);
    let control = volume.control();
    let asked = Request { kind: Some(request::Kind::GetDescriptors(GetDescriptors {})) };
    control.socket.send(&asked.encode_to_vec(), &[]).unwrap();
    let (packet, found) = control.socket.receive_with_fds(8).unwrap().unwrap();
    let Some(reply::Kind::Descriptors(roles)) = Reply::decode(&*packet).unwrap().kind else { panic!() };
    let roles: Vec<Role> = roles.roles.into_iter().map(|role| Role::try_from(role).unwrap()).collect();
    assert_eq!(roles, [Role::FuseDevice, Role::Directory, Role::UsageFile, Role::StateTable]);
    assert_eq!(linux::mount::fuse_connection_of(&found[0]).unwrap(), Some(volume.device().1));
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    let inode_at = |path: &std::path::Path| rustix::fs::stat(path).unwrap().st_ino;
    assert_eq!(inode(&found[1]), inode_at(&volume.backing));
    assert_eq!(inode(&found[2]), inode_at(volume.usage_file()));
}
