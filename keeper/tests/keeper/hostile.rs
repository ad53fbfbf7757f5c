//! Peers that send what they should not, do not read, or are too many.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use keeper::Error;
use keeper::client::Client;
use keeper::wire::standby::LaunchKey;
use keeper::wire::{Call, Refusal, ReplyHeader, Request, Role, Status, VERSION};
use linux::fd_passing::PacketSocket;
use nix::errno::Errno;
use rustix::process::Uid;

use crate::fixture::{Keeper, LIMIT, good, key, table};

#[track_caller]
fn refusal(socket: &PacketSocket) -> (u64, Refusal) {
    let packet = socket.receive().unwrap().expect("a reply");
    let (header, body) = ReplyHeader::decode(&packet).unwrap();
    assert!((1..=VERSION).contains(&header.version), "{header:?}");
    assert_eq!((header.count, body), (0, &[][..]));
    let Status::Refused(refusal) = header.status else { panic!("{header:?}") };
    (header.number, refusal)
}

#[test]
fn malformed_packets_change_nothing_and_leave_no_descriptor_open() {
    let keeper = Keeper::start();
    let mut client = keeper.client();
    for role in Role::ALL {
        client.put(key(1), role, good(role, &keeper.sandbox).as_fd()).unwrap();
    }
    let held = client.list().unwrap();
    let request = |call| Request { number: 7, call }.encode().to_vec();
    let put = request(Call::Put { volume: key(1), role: Role::StateTable });
    let get = request(Call::Get { volume: key(1), role: Role::StateTable });
    let forget_volume = request(Call::ForgetVolume { volume: key(1) });
    let launch = LaunchKey::parse(&key(9).to_string()).unwrap();
    let with = |packet: &[u8], at: usize, byte: u8| {
        let mut packet = packet.to_vec();
        packet[at] = byte;
        packet
    };
    let table: [(Vec<u8>, usize, u64, Refusal); 27] = [
        (vec![], 0, 0, Refusal::Size),
        (vec![], 1, 0, Refusal::Size),
        (vec![0], 0, 0, Refusal::Size),
        (vec![VERSION.to_le_bytes()[0], 0], 250, 0, Refusal::Size),
        (put[..47].to_vec(), 1, 7, Refusal::Size),
        ([&put[..], b"x"].concat(), 1, 7, Refusal::Size),
        ([&put[..], &[0; 60_000]].concat(), 1, 7, Refusal::Size),
        (with(&put, 0, 3), 1, 7, Refusal::Version),
        (with(&put, 0, 2), 1, 7, Refusal::Version),
        (request(Call::Put { volume: key(2), role: Role::Daemon }), 1, 7, Refusal::NotAttending),
        (request(Call::PutSpare { launch }), 1, 7, Refusal::NotAttending),
        (request(Call::ForgetSpare { launch }), 1, 7, Refusal::Descriptors),
        (with(&put, 2, 99), 1, 7, Refusal::Operation),
        (with(&put, 4, 0), 1, 7, Refusal::Role),
        (with(&put, 4, 10), 1, 7, Refusal::Role),
        (with(&put, 7, 1), 1, 7, Refusal::Unused),
        (with(&put, 16, b'G'), 1, 7, Refusal::Volume),
        (with(&put, 47, b'/'), 1, 7, Refusal::Volume),
        (put.clone(), 0, 7, Refusal::NoDescriptor),
        (put.clone(), 2, 7, Refusal::Descriptors),
        (put.clone(), 3, 7, Refusal::Descriptors),
        (put.clone(), 250, 7, Refusal::Descriptors),
        (get.clone(), 1, 7, Refusal::Descriptors),
        (get, 250, 7, Refusal::Descriptors),
        (with(&forget_volume, 4, 1), 0, 7, Refusal::Unused),
        (forget_volume, 1, 7, Refusal::Descriptors),
        (with(&request(Call::List), 40, 1), 0, 7, Refusal::Unused),
    ];
    let raw = keeper.raw();
    let before = keeper.open_files();
    let good = crate::fixture::table();
    for (packet, descriptors, number, wanted) in table {
        raw.send(&packet, &vec![good.as_fd(); descriptors]).unwrap();
        assert_eq!(refusal(&raw), (number, wanted), "{descriptors} with {packet:?}");
        assert_eq!(client.list().unwrap(), held);
    }
    keeper.wait_for_open_files(before);
    // The connection is still good.
    raw.send(&request(Call::Ping), &[]).unwrap();
    assert!(raw.receive().unwrap().is_some());
}

#[test]
fn a_client_that_does_not_read_stops_only_itself() {
    let keeper = Keeper::start();
    keeper.client().put(key(1), Role::StateTable, table().as_fd()).unwrap();
    for call in [Call::Get { volume: key(1), role: Role::StateTable }, Call::List, Call::Ping] {
        let deaf = PacketSocket::connect_within(&keeper.socket, LIMIT).unwrap();
        deaf.set_timeout(Duration::from_millis(50)).unwrap();
        let send = |number| deaf.send(&Request { number, call }.encode(), &[]);
        let stopped = (1..100_000).find_map(|number| send(number).err().map(|e| (number, e)));
        let (first_unsent, error) = stopped.expect("the socket becomes full");
        assert_eq!(error.errno(), Errno::EAGAIN);
        let asked = Instant::now();
        keeper.client().ping().unwrap();
        assert!(asked.elapsed() < LIMIT / 2);
        deaf.set_timeout(LIMIT).unwrap();
        // When it reads, it gets every answer, in order.
        for number in 1..first_unsent {
            let (packet, fds) = deaf.receive_with_fds(1).unwrap().unwrap();
            let (header, _) = ReplyHeader::decode(&packet).unwrap();
            assert_eq!((header.number, header.status), (number, Status::Done));
            assert_eq!(fds.len(), usize::from(matches!(call, Call::Get { .. })));
        }
    }
}

#[test]
fn what_a_client_sent_counts_after_its_death() {
    let keeper = Keeper::start();
    let raw = keeper.raw();
    for number in 1..20 {
        let call = Call::Put { volume: key(number), role: Role::StateTable };
        raw.send(&Request { number: number.into(), call }.encode(), &[table().as_fd()]).unwrap();
    }
    // The replies are never read.
    drop(raw);
    tests::eventually("all are held", LIMIT, || {
        anyhow::ensure!(keeper.client().ping()?.volumes == 19);
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_connection_that_was_used_the_longest_time_ago_gives_way() {
    let keeper = Keeper::start();
    let mut clients: Vec<Client> = (0..16).map(|_| keeper.bystander()).collect();
    for client in clients.iter_mut().rev() {
        client.ping().unwrap();
    }
    let mut one_more = keeper.bystander();
    one_more.ping().unwrap();
    let longest_ago = clients.pop().unwrap().ping();
    assert!(matches!(longest_ago, Err(Error::Closed { .. })), "{longest_ago:?}");
    for client in &mut clients {
        client.ping().unwrap();
    }
}

#[test]
fn only_root_is_served() {
    let keeper = Keeper::start();
    let connect_as = |uid: u32| {
        let socket = keeper.socket.clone();
        // Credentials belong to a thread.
        let other = std::thread::spawn(move || {
            let uid = Uid::from_raw(uid);
            rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
            Client::connect(&socket, LIMIT).and_then(|mut client| client.ping())
        });
        other.join().unwrap()
    };
    let mode = |path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&keeper.socket), 0o600);
    let others = connect_as(1234).unwrap_err();
    let Error::Connect { cause } = others else { panic!("{others:?}") };
    assert_eq!(cause.errno(), Errno::EACCES);
    // The mode is not all that protects it.
    let open_to_all = |path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    open_to_all(keeper.socket.as_path(), 0o666);
    open_to_all(keeper.sandbox.dir(), 0o755);
    let others = connect_as(1234).unwrap_err();
    assert!(matches!(others, Error::Closed { .. }), "{others:?}");
    connect_as(0).unwrap();
    assert!(keeper.process.output().contains("uid 1234"), "{}", keeper.process.output());
}

/// A mount whose daemon never answers must not stop the keeper that inspects its descriptors.
#[test]
fn descriptors_of_a_file_system_that_does_not_answer_are_inspected_at_once() {
    let keeper = Keeper::start();
    let device = linux::mount::open_fuse_device().unwrap();
    let mount = crate::fuse::detached(&device);
    let asked = Instant::now();
    keeper.client().put(key(1), Role::ParkedMount, mount.as_fd()).unwrap();
    let raw = keeper.raw();
    let put = |role, fd: BorrowedFd<'_>| {
        raw.send(&Request { number: 7, call: Call::Put { volume: key(2), role } }.encode(), &[fd]).unwrap();
        let packet = raw.receive().unwrap().expect("a reply");
        ReplyHeader::decode(&packet).unwrap().0.status
    };
    assert_eq!(put(Role::Directory, mount.as_fd()), Status::Refused(Refusal::WouldWait));
    assert_eq!(put(Role::UsageFile, mount.as_fd()), Status::Refused(Refusal::PathOnly));
    assert!(asked.elapsed() < LIMIT / 2);
    keeper.client().forget_volume(key(1)).unwrap();
}

/// Packets of daemons do not shorten the pause after it, and so do not fill the log.
#[test]
fn a_connection_that_cannot_be_accepted_is_not_tried_again_at_once() {
    let keeper = Keeper::with_open_files(64);
    let mut client = keeper.client();
    let daemon = keeper.removed(key(1));
    let table = table();
    let filled = (2..100).find_map(|volume| client.put(key(volume), Role::StateTable, table.as_fd()).err());
    crate::fixture::assert_refused(filled.map_or(Ok(()), Err), Refusal::Full);
    let begun = Instant::now();
    let _waiting = keeper.raw();
    let failures = || keeper.process.output().matches("not again for a second").count();
    tests::eventually("an accept has failed", LIMIT, || {
        anyhow::ensure!(failures() > 0);
        Ok(())
    })
    .unwrap();
    let counted = Instant::now();
    while counted.elapsed() < Duration::from_millis(500) {
        daemon.drop_removed(7).unwrap();
        client.ping().unwrap();
    }
    let (failed, seconds) = (failures() as u64, begun.elapsed().as_secs());
    assert!(failed <= seconds + 2, "{failed} failures in {seconds} s");
    // It is accepted in the end.
    for volume in 2..10 {
        client.forget_volume(key(volume)).unwrap();
    }
    keeper.bystander().ping().unwrap();
}
