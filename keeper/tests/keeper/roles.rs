//! What the driver puts is held, whichever process dies, until it is forgotten.

use std::fs::{File, Permissions};
use std::io::{Read, Seek, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::time::Duration;

use keeper::Error;
use keeper::client::{Client, Put};
use keeper::wire::{Entry, Refusal, Role, Roles};
use linux::fd_passing::PacketSocket;
use nix::sys::signal::Signal;
use rustix::fs::{Mode, OFlags, SealFlags};

use crate::fixture::{
    Keeper, LIMIT, SEALS, assert_refused, assignment, file_of, good, is_locked, key, lock, sealed, table,
    usage_file, wait_until_unlocked,
};

#[test]
fn what_is_got_is_the_open_file_that_was_put() {
    let keeper = Keeper::start();
    let mut table = table();
    assert_eq!(keeper.client().put(key(1), Role::StateTable, table.as_fd()).unwrap(), Put::New);
    table.write_all(b"from the first").unwrap();
    drop(table);
    for text in [", second", ", third"] {
        let got = keeper.client().get(key(1), Role::StateTable).unwrap().unwrap();
        // The position is part of the open file.
        File::from(got).write_all(text.as_bytes()).unwrap();
    }
    let mut got = File::from(keeper.client().get(key(1), Role::StateTable).unwrap().unwrap());
    let mut text = [0; 29];
    got.rewind().unwrap();
    got.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"from the first, second, third");
}

#[test]
fn a_descriptor_is_held_until_it_is_forgotten_or_replaced() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let (first, second) = (usage_file(&keeper.sandbox), usage_file(&keeper.sandbox));
    lock(&first);
    client.put(key(1), Role::UsageFile, first.as_fd()).unwrap();
    drop(first);
    assert!(is_locked(&second));
    assert_eq!(client.put(key(1), Role::UsageFile, second.as_fd()).unwrap(), Put::Replaced);
    // Which locks it again.
    wait_until_unlocked(&second);
    drop(second);
    drop(client);
    assert!(is_locked(usage_file(&keeper.sandbox)));
    let mut client = keeper.client();
    assert!(client.forget(key(1), Role::UsageFile).unwrap());
    wait_until_unlocked(usage_file(&keeper.sandbox));
    assert!(!client.forget(key(1), Role::UsageFile).unwrap());
    assert!(client.get(key(1), Role::UsageFile).unwrap().is_none());
}

#[test]
fn forgetting_a_volume_closes_all_of_it_and_nothing_of_others() {
    let keeper = Keeper::start();
    let before = keeper.open_files();
    let mut client = keeper.client();
    for volume in [key(1), key(2)] {
        for role in Role::ALL {
            client.put(volume, role, good(role, &keeper.sandbox).as_fd()).unwrap();
        }
    }
    let removed = keeper.removed(key(1));
    removed.put_removed(7, file_of(&mut client, key(1)).as_fd()).unwrap();
    tests::eventually("the removed file is held", LIMIT, || {
        anyhow::ensure!(client.ping()?.removed == 1);
        Ok(())
    })
    .unwrap();
    // Without the pidfd of its daemon: the socket is for another one.
    assert_eq!(client.forget_volume(key(1)).unwrap(), 9);
    assert_eq!(client.forget_volume(key(1)).unwrap(), 0);
    assert!(matches!(removed.drop_removed(7), Err(Error::Closed { .. })));
    let of_other: Roles = Role::ALL[..5].iter().copied().collect();
    let entry = Entry { volume: key(2), roles: of_other, has_daemon: false, removed: 0 };
    assert_eq!(client.list().unwrap(), [entry]);
    assert_eq!(client.forget_volume(key(2)).unwrap(), 9);
    drop(client);
    keeper.wait_for_open_files(before);
}

#[test]
fn volumes_are_listed_in_as_many_packets_as_needed() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    assert_eq!(client.list().unwrap(), []);
    for count in [64, 65, 200] {
        for number in 0..count {
            let role = Role::ALL[number as usize % 5];
            client.put(key(number), role, good(role, &keeper.sandbox).as_fd()).unwrap();
        }
        let listed = client.list().unwrap();
        assert_eq!(listed.len(), count as usize);
        for (number, entry) in (0..count).zip(listed) {
            assert_eq!(entry.volume, key(number));
            assert_eq!(entry.roles.iter().collect::<Vec<_>>(), [Role::ALL[number as usize % 5]]);
        }
    }
    assert_eq!(client.ping().unwrap().volumes, 200);
}

/// As a database leaves it.
#[test]
fn a_directory_that_only_its_owner_may_enter_is_held() {
    const OWNER: u32 = 12_345;
    let keeper = Keeper::start();
    let path = keeper.sandbox.make_dir("database").unwrap();
    chown(&path, Some(OWNER), Some(OWNER)).unwrap();
    std::fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    let directory = linux::mount::open_tree_clone(&path).unwrap();
    keeper.client().put(key(1), Role::Directory, directory.as_fd()).unwrap();
}

/// Each role, and what is wrong for it.
#[test]
fn descriptors_of_the_wrong_kind_are_refused_by_name_and_closed() {
    let keeper = Keeper::start();
    let dir = keeper.sandbox.make_dir("dir").unwrap();
    let open = |path: &Path, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let (fuse, null) = (Path::new("/dev/fuse"), Path::new("/dev/null"));
    let usage = keeper.sandbox.path("usage");
    drop(usage_file(&keeper.sandbox));
    let wrong: Vec<(Role, OwnedFd, Refusal)> = vec![
        (Role::Connection, open(null, OFlags::RDWR), Refusal::NotFuseDevice),
        (Role::Connection, open(fuse, OFlags::PATH), Refusal::PathOnly),
        (Role::Connection, open(fuse, OFlags::RDONLY), Refusal::NotReadWrite),
        (Role::Connection, keeper.raw().as_fd().try_clone_to_owned().unwrap(), Refusal::NotFuseDevice),
        (Role::Directory, open(&dir, OFlags::PATH), Refusal::NotDetached),
        (Role::Directory, open(&dir, OFlags::RDONLY), Refusal::NotPathOnly),
        (Role::Directory, open(Path::new("/proc"), OFlags::PATH), Refusal::NotDetached),
        (Role::StateTable, open(&usage, OFlags::RDWR), Refusal::NotMemfd),
        (Role::StateTable, good(Role::Connection, &keeper.sandbox), Refusal::NotRegular),
        (Role::UsageFile, open(&usage, OFlags::WRONLY), Refusal::NotReadWrite),
        (Role::UsageFile, good(Role::Directory, &keeper.sandbox), Refusal::PathOnly),
        (Role::ParkedMount, open(&dir, OFlags::RDONLY), Refusal::NotPathOnly),
        (Role::ParkedMount, open(&usage, OFlags::PATH), Refusal::NotDirectory),
        (Role::ControlListener, good(Role::MetricsListener, &keeper.sandbox), Refusal::NotListener),
        (Role::ControlListener, PacketSocket::pair().unwrap().0.into(), Refusal::NotListener),
        (Role::MetricsListener, good(Role::ControlListener, &keeper.sandbox), Refusal::NotListener),
        (Role::MetricsListener, TcpListener::bind("127.0.0.1:0").unwrap().into(), Refusal::NotListener),
        (Role::MetricsListener, open(&usage, OFlags::RDWR), Refusal::NotListener),
        (Role::Assignment, good(Role::UsageFile, &keeper.sandbox), Refusal::NotMemfd),
        (Role::Assignment, good(Role::StateTable, &keeper.sandbox), Refusal::NotAssignment),
        (Role::Assignment, assignment(b"p", SEALS.difference(SealFlags::WRITE)), Refusal::NotAssignment),
        (Role::Assignment, assignment(b"p", SEALS.difference(SealFlags::SEAL)), Refusal::NotAssignment),
        (Role::Assignment, sealed(&[1; 100], SEALS), Refusal::NotAssignment),
        (Role::Assignment, sealed(&[0; 1 << 20], SEALS), Refusal::NotAssignment),
        (Role::Daemon, open(Path::new("/proc/self"), OFlags::RDONLY), Refusal::NotPidfd),
        (Role::Daemon, open(null, OFlags::RDWR), Refusal::NotPidfd),
        (Role::Daemon, std::io::pipe().unwrap().0.into(), Refusal::NotPidfd),
    ];
    let before = keeper.open_files();
    let mut client = keeper.client();
    for role in Role::ALL {
        client.put(key(1), role, good(role, &keeper.sandbox).as_fd()).unwrap();
    }
    for (role, fd, refusal) in &wrong {
        assert_refused(client.put(key(1), *role, fd.as_fd()), *refusal);
        assert_refused(client.put(key(2), *role, fd.as_fd()), *refusal);
    }
    let listed = client.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].roles, Role::ALL[..5].iter().copied().collect());
    drop(client);
    keeper.wait_for_open_files(before + 9);
    let log = keeper.process.output();
    assert!(log.contains("refused PUT of the driver: not a character device 10:229 (/dev/fuse)"), "{log}");
}

#[test]
fn an_answer_that_comes_too_late_is_not_taken_for_another() {
    let keeper = Keeper::start();
    keeper.client().put(key(1), Role::StateTable, table().as_fd()).unwrap();
    let limit = Duration::from_millis(500);
    let mut client = Client::connect(&keeper.socket, limit).unwrap();
    client.ping().unwrap();
    keeper.process.signal(Signal::SIGSTOP).unwrap();
    tests::wait_until_stopped(keeper.process.pid().as_raw(), LIMIT).unwrap();
    for _ in 0..3 {
        let late = client.get(key(1), Role::StateTable);
        assert!(matches!(late, Err(Error::TimedOut { op: "GET", .. })), "{late:?}");
    }
    keeper.process.signal(Signal::SIGCONT).unwrap();
    tests::eventually("an answer in time", LIMIT, || {
        assert!(client.get(key(2), Role::StateTable)?.is_none());
        Ok(())
    })
    .unwrap();
    assert_eq!(client.ping().unwrap().volumes, 1);
}

#[test]
fn nothing_answers_where_no_keeper_is() {
    let mut keeper = Keeper::start();
    let mut client = keeper.client();
    keeper.process.kill().unwrap();
    assert!(matches!(client.ping(), Err(Error::Closed { op: "PING" })));
    assert!(matches!(Client::connect(&keeper.socket, LIMIT), Err(Error::Connect { .. })));
}

#[test]
fn a_link_in_the_place_of_the_socket_is_not_followed() {
    let keeper = Keeper::start();
    let link = keeper.socket.with_file_name("link");
    std::os::unix::fs::symlink(&keeper.socket, &link).unwrap();
    let Err(Error::Connect { cause }) = Client::connect(&link, LIMIT) else { panic!("connected") };
    assert_eq!(cause.errno(), nix::errno::Errno::ECONNREFUSED);
    keeper.client().ping().unwrap();
}
