//! Removed files of a volume, which its daemons put and list.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use keeper::Error;
use keeper::client::Client;
use keeper::daemon::Removed;
use keeper::wire::daemon::DaemonRequest;
use keeper::wire::{Call, Refusal, Request, Role, VolumeKey};
use tests::eventually;

use crate::fixture::{Keeper, LIMIT, file_of, good, key, send_with};

fn file(text: &str) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn text(fd: OwnedFd) -> String {
    let (mut file, mut text) = (File::from(fd), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

fn listed(keeper: &Keeper, volume: VolumeKey) -> Vec<(u64, String)> {
    let files = keeper.removed(volume).list_removed().unwrap();
    files.into_iter().map(|(node, fd)| (node, text(fd))).collect()
}

/// Sends packets as they are.
fn send(socket: impl AsFd, packet: &[u8]) -> rustix::io::Result<usize> {
    rustix::net::send(socket, packet, rustix::net::SendFlags::NOSIGNAL)
}

#[track_caller]
fn wait_for_removed(client: &mut Client, count: u32) {
    eventually("the removed files are held", LIMIT, || {
        let removed = client.ping()?.removed;
        anyhow::ensure!(removed == count, "{removed}");
        Ok(())
    })
    .unwrap();
}

fn refusals(removed: &Removed, count: usize) -> Vec<(u64, Refusal)> {
    let mut refused = Vec::new();
    eventually("refusals", LIMIT, || {
        refused.extend(removed.refused()?);
        anyhow::ensure!(refused.len() >= count, "{refused:?}");
        Ok(())
    })
    .unwrap();
    refused
}

#[test]
fn removed_files_outlive_their_daemon() {
    let keeper = Keeper::start();
    let first = keeper.removed(key(1));
    for (node, content) in [(9, "nine"), (u64::MAX, "last"), (4, "four"), (9, "nine again")] {
        first.put_removed(node, file(content).as_fd()).unwrap();
    }
    first.drop_removed(4).unwrap();
    first.drop_removed(5).unwrap();
    drop(first);
    let wanted = [(9, "nine again".to_owned()), (u64::MAX, "last".to_owned())];
    assert_eq!(listed(&keeper, key(1)), wanted);
    // A listing changes nothing.
    assert_eq!(listed(&keeper, key(1)), wanted);
    assert_eq!(keeper.client().list().unwrap()[0].removed, 2);
}

/// The next daemon's socket may be requested before the keeper has read what the last one sent.
#[test]
fn what_a_daemon_sent_before_its_death_is_not_lost() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let null = File::open("/dev/null").unwrap();
    let one = file("x");
    for round in 0..100 {
        let removed = Removed::new(client.daemon_socket(key(1)).unwrap(), LIMIT).unwrap();
        // Refused, which it never reads.
        removed.put_removed(0, null.as_fd()).unwrap();
        for node in 1..=20 {
            removed.put_removed(round * 100 + node, one.as_fd()).unwrap();
        }
        drop(removed);
    }
    let next = Removed::new(client.daemon_socket(key(1)).unwrap(), LIMIT).unwrap();
    assert_eq!(next.list_removed().unwrap().len(), 2000);
}

#[test]
fn a_daemon_can_do_nothing_after_its_successors_socket_was_made() {
    let keeper = Keeper::start();
    let old = keeper.removed(key(1));
    old.put_removed(1, file("of the old").as_fd()).unwrap();
    let new = keeper.removed(key(1));
    assert!(matches!(old.put_removed(2, file("x").as_fd()), Err(Error::Closed { op: "PUT_REMOVED" })));
    assert!(matches!(old.drop_removed(1), Err(Error::Closed { op: "DROP_REMOVED" })));
    assert!(matches!(old.list_removed(), Err(Error::Closed { op: "LIST_REMOVED" })));
    drop(old);
    assert_eq!(new.list_removed().unwrap().len(), 1);
    new.put_removed(3, file("of the new").as_fd()).unwrap();
    drop(new);
    let nodes: Vec<u64> = listed(&keeper, key(1)).into_iter().map(|(node, _)| node).collect();
    assert_eq!(nodes, [1, 3]);
}

#[test]
fn a_daemons_socket_reaches_its_own_volume_only() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    for role in Role::ALL {
        client.put(key(2), role, good(role, &keeper.sandbox).as_fd()).unwrap();
    }
    let (one, two) = (keeper.removed(key(1)), keeper.removed(key(2)));
    two.put_removed(7, good(Role::Directory, &keeper.sandbox).as_fd()).unwrap();
    two.put_removed(8, file_of(&mut client, key(2)).as_fd()).unwrap();
    wait_for_removed(&mut client, 1);
    let held = client.list().unwrap();
    one.drop_removed(8).unwrap();
    assert_eq!(one.list_removed().unwrap().len(), 0);
    // The driver's requests are none here.
    for call in [
        Call::ForgetVolume { volume: key(2) },
        Call::Get { volume: key(2), role: Role::Connection },
        Call::DaemonSocket { volume: key(2) },
        Call::List,
    ] {
        send(&one, &Request { number: 5, call }.encode()).unwrap();
        assert_eq!(refusals(&one, 1), [(5, Refusal::Size)]);
        assert_eq!(client.list().unwrap(), held);
    }
    assert_eq!(refusals(&two, 1), [(7, Refusal::OtherMount)]);
}

#[test]
fn malformed_packets_of_a_daemon_change_nothing_and_leave_no_descriptor_open() {
    let keeper = Keeper::start();
    let removed = keeper.removed(key(1));
    let one = file("x");
    removed.put_removed(7, one.as_fd()).unwrap();
    let mut client = keeper.client();
    wait_for_removed(&mut client, 1);
    let before = keeper.open_files();
    let put = DaemonRequest::PutRemoved { node: 7 }.encode();
    let with = |at: usize, byte: u8| {
        let mut packet = put.to_vec();
        packet[at] = byte;
        packet
    };
    let list = DaemonRequest::ListRemoved { number: 3 }.encode().to_vec();
    let dropped = DaemonRequest::DropRemoved { node: 7 }.encode().to_vec();
    for (packet, descriptors, wanted) in [
        (vec![], 0, (0, Refusal::Size)),
        (vec![0; 15], 3, (0, Refusal::Version)),
        (put[..15].to_vec(), 1, (0, Refusal::Size)),
        ([&put[..], &[0; 60_000]].concat(), 1, (7, Refusal::Size)),
        (with(1, 1), 1, (7, Refusal::Version)),
        (with(2, 9), 1, (7, Refusal::Operation)),
        (with(4, 9), 1, (7, Refusal::Unused)),
        (put.to_vec(), 0, (7, Refusal::NoDescriptor)),
        (put.to_vec(), 2, (7, Refusal::Descriptors)),
        (put.to_vec(), 250, (7, Refusal::Descriptors)),
        (dropped, 1, (7, Refusal::Descriptors)),
        (list, 1, (3, Refusal::Descriptors)),
    ] {
        send_with(&removed, &packet, &vec![one.as_fd(); descriptors]).unwrap();
        assert_eq!(refusals(&removed, 1), [wanted], "{descriptors} with {packet:?}");
    }
    for (fd, wanted) in [
        (File::open("/dev/null").unwrap().into(), Refusal::Device),
        (good(Role::Connection, &keeper.sandbox), Refusal::Device),
        (removed.as_fd().try_clone_to_owned().unwrap(), Refusal::NotPathOnly),
        (OwnedFd::from(std::io::pipe().unwrap().1), Refusal::NotPathOnly),
    ] {
        removed.put_removed(8, fd.as_fd()).unwrap();
        assert_eq!(refusals(&removed, 1), [(8, wanted)]);
    }
    assert_eq!(client.ping().unwrap().removed, 1);
    keeper.wait_for_open_files(before);
}

#[test]
fn ten_thousand_removed_files_are_held_and_listed() {
    const COUNT: u64 = 10_000;
    more_open_files();
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let removed = keeper.removed(key(1));
    let one = file("x");
    for node in 0..COUNT {
        removed.put_removed(node, one.as_fd()).unwrap();
    }
    drop(removed);
    let next = keeper.removed(key(1));
    let files = next.list_removed().unwrap();
    assert!(files.iter().map(|(node, _)| *node).eq(0..COUNT), "{}", files.len());
    drop(files);
    assert_eq!(next.refused().unwrap(), []);
    assert_eq!(client.ping().unwrap().removed, 10_000);
    for node in 0..COUNT {
        next.drop_removed(node).unwrap();
    }
    wait_for_removed(&mut client, 0);
}

/// For descriptors of a listing, and those that are on their way (unix(7), ETOOMANYREFS).
fn more_open_files() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    assert!(limit.current.is_none_or(|most| most >= 16_384), "this test needs more open files: {limit:?}");
}

#[test]
fn a_daemon_that_never_reads_stops_nobody_and_costs_bounded_memory() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    let deaf = keeper.removed(key(1));
    let (one, null) = (file("x"), File::open("/dev/null").unwrap());
    for node in 0..2000 {
        deaf.put_removed(node, one.as_fd()).unwrap();
    }
    let before = keeper.memory("VmRSS");
    for number in 0..20_000 {
        send(&deaf, &DaemonRequest::ListRemoved { number }.encode())
            .or_else(|e| if e == rustix::io::Errno::AGAIN { Ok(0) } else { Err(e) })
            .unwrap();
        deaf.put_removed(number, null.as_fd()).unwrap();
    }
    let asked = Instant::now();
    client.ping().unwrap();
    let other = keeper.removed(key(2));
    other.put_removed(5, one.as_fd()).unwrap();
    assert_eq!(other.list_removed().unwrap().len(), 1);
    assert!(asked.elapsed() < LIMIT / 2);
    let after = keeper.memory("VmRSS");
    assert!(after < before + 512, "{before} kB, then {after} kB");
    // What waits for it are a few packets.
    let waiting = std::iter::from_fn(|| {
        let mut buffer = [0; 1024];
        rustix::net::recv(&deaf, &mut buffer[..], rustix::net::RecvFlags::DONTWAIT).ok()
    });
    assert!(waiting.take(1000).count() < 1000);
    assert_eq!(client.list().unwrap()[0].removed, 2000);
}

#[test]
fn when_descriptors_run_short_daemons_are_refused_and_the_driver_is_not() {
    let keeper = Keeper::with_open_files(256);
    let mut client = keeper.client();
    let room = client.ping().unwrap().room;
    let removed = keeper.removed(key(1));
    let one = file("x");
    let mut refused = Vec::new();
    for node in 0..300 {
        removed.put_removed(node, one.as_fd()).unwrap();
        refused.extend(removed.refused().unwrap());
    }
    // It is listed once the keeper has read all. A refusal that arrives first ends the call.
    eventually("the keeper has read all", LIMIT, || {
        refused.extend(removed.refused()?);
        Ok(removed.list_removed().map(drop)?)
    })
    .unwrap();
    if refused.is_empty() {
        refused.extend(refusals(&removed, 1));
    }
    assert!(refused.iter().all(|(_, why)| *why == Refusal::Full), "{refused:?}");
    let held = client.ping().unwrap().removed;
    assert!(held.abs_diff(room * 2 / 3) <= 2, "{held} of {room}");
    // What it holds already can be replaced and dropped.
    removed.put_removed(0, one.as_fd()).unwrap();
    removed.drop_removed(1).unwrap();
    wait_for_removed(&mut client, held - 1);
    // Another volume's daemon finds room too.
    let other = keeper.removed(key(2));
    other.put_removed(1, one.as_fd()).unwrap();
    wait_for_removed(&mut client, held);
    for volume in 1..20 {
        let device = good(Role::Connection, &keeper.sandbox);
        client.put(key(volume), Role::Connection, device.as_fd()).unwrap();
        keeper.removed(key(volume));
    }
}

#[test]
fn a_blocking_socket_is_refused() {
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(matches!(Removed::new(socket.into(), LIMIT), Err(Error::Blocking)));
}

#[test]
fn a_daemon_does_not_wait_for_a_keeper_that_does_not_read() {
    let keeper = Keeper::start();
    let limit = std::time::Duration::from_millis(50);
    let removed = Removed::new(keeper.client().daemon_socket(key(1)).unwrap(), limit).unwrap();
    keeper.process.signal(nix::sys::signal::Signal::SIGSTOP).unwrap();
    tests::wait_until_stopped(keeper.process.pid().as_raw(), LIMIT).unwrap();
    let one = file("x");
    let error = (0..10_000).find_map(|node| removed.put_removed(node, one.as_fd()).err());
    assert!(matches!(error, Some(Error::TimedOut { op: "PUT_REMOVED", .. })), "{error:?}");
    assert!(matches!(removed.list_removed(), Err(Error::TimedOut { op: "LIST_REMOVED", .. })));
    keeper.process.signal(nix::sys::signal::Signal::SIGCONT).unwrap();
    eventually("it reads again", LIMIT, || Ok(removed.drop_removed(0)?)).unwrap();
}

/// With the system calls that `volume-fs` leaves a daemon (its `seccomp.rs`), as far as they matter
/// here: no recvmsg, and none to make or change a socket.
#[test]
fn a_confined_daemon_puts_drops_and_reads_refusals() {
    use linux::process::{BpfInstruction, install_seccomp};
    use nix::libc;
    const ALLOWED: [libc::c_long; 20] = [
        libc::SYS_sendmsg,
        libc::SYS_recvfrom,
        libc::SYS_ppoll,
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_close,
        libc::SYS_fcntl,
        libc::SYS_brk,
        libc::SYS_mmap,
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_mprotect,
        libc::SYS_madvise,
        libc::SYS_futex,
        libc::SYS_rt_sigprocmask,
        libc::SYS_sigaltstack,
        libc::SYS_sched_yield,
        libc::SYS_clock_gettime,
        libc::SYS_exit,
        libc::SYS_exit_group,
    ];
    // linux/bpf_common.h, linux/seccomp.h
    let instruction = |code, jt, k| BpfInstruction { code, jt, jf: 0, k };
    let mut filter = vec![instruction(0x20, 0, 0)];
    for (at, call) in ALLOWED.iter().enumerate() {
        let to_last = u8::try_from(ALLOWED.len() - at).unwrap();
        filter.push(instruction(0x15, to_last, u32::try_from(*call).unwrap()));
    }
    filter.push(instruction(0x06, 0, 0x0005_0000 | 1));
    filter.push(instruction(0x06, 0, 0x7fff_0000));

    let keeper = Keeper::start();
    let socket = keeper.client().daemon_socket(key(1)).unwrap();
    let (one, null) = (file("x"), File::open("/dev/null").unwrap());
    let confined = std::thread::spawn(move || {
        install_seccomp(&filter).unwrap();
        let removed = Removed::new(socket, LIMIT).unwrap();
        // Enough to wait for the keeper now and then.
        for node in 0..3000 {
            removed.put_removed(node, one.as_fd()).unwrap();
        }
        for node in 0..2999 {
            removed.drop_removed(node).unwrap();
        }
        removed.put_removed(5, null.as_fd()).unwrap();
        let mut polled = [rustix::event::PollFd::new(&removed, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut polled, None).unwrap();
        let refused = removed.refused().unwrap();
        let listed = removed.list_removed().unwrap_err();
        (refused, listed.to_string())
    });
    let (refused, listed) = confined.join().unwrap();
    assert_eq!(refused, [(5, Refusal::Device)]);
    assert_eq!(listed, "LIST_REMOVED: send to the keeper, or receive");
    assert_eq!(keeper.removed(key(1)).list_removed().unwrap().len(), 1);
}
