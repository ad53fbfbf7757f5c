use std::fs::File;
use std::os::fd::OwnedFd;

use keeper::wire::Refusal;
use keeper::wire::daemon::{DaemonPacket, DaemonRequest, Kind, VERSION};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use volume_fs::state::Region;

use super::*;

const LIMIT: Duration = Duration::from_secs(30);
const FLAGS: OFlags = OFlags::WRONLY;

/// The keeper's end of a volume's socket, which the test reads and answers.
struct Keeper(OwnedFd);

impl Keeper {
    /// The next request; `None` if none waits.
    fn request(&self) -> Option<DaemonRequest> {
        let mut packet = [0; DaemonRequest::SIZE];
        match rustix::net::recv(&self.0, &mut packet, RecvFlags::DONTWAIT) {
            Ok(_) => Some(DaemonRequest::decode(&packet).unwrap()),
            Err(Errno::AGAIN) => None,
            Err(e) => panic!("{e}"),
        }
    }

    fn waits_for_request(&self) -> DaemonRequest {
        let mut next = None;
        ::tests::as_soon_as("a request is sent", LIMIT, || {
            next = self.request();
            next.is_some()
        })
        .unwrap();
        next.unwrap()
    }

    /// Registrations 1 to `count` are to end, in this order.
    fn waits_for_ends(&self, count: u32) {
        for number in 1..=count {
            match self.waits_for_request() {
                DaemonRequest::UnregisterBacking { backing } => assert_eq!(backing, number),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Answers a registration with this number.
    fn registers(&self, backing: u32) {
        let DaemonRequest::RegisterBacking { number } = self.waits_for_request() else { panic!("another") };
        let header = DaemonPacket { version: VERSION, kind: Kind::Registered, count: 1, number };
        let answer = [&header.encode()[..], &u64::from(backing).to_le_bytes()].concat();
        rustix::net::send(&self.0, &answer, SendFlags::empty()).unwrap();
    }

    /// Refuses the registration that was requested with this number.
    fn refuses(&self, number: u64) {
        let kind = Kind::NotRegistered(Refusal::Full);
        let answer = DaemonPacket { version: VERSION, kind, count: 0, number }.encode();
        rustix::net::send(&self.0, &answer, SendFlags::empty()).unwrap();
    }
}

fn socket() -> (Removed, Keeper) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (daemon, keeper) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    // Room for few packets.
    sockopt::set_socket_send_buffer_size(&daemon, 4096).unwrap();
    (Removed::new(daemon, LIMIT).unwrap(), Keeper(keeper))
}

/// Files 1 to `count` passed through and are closed; their numbers are the same. The keeper may answer late: it is
/// a thread of the test, and the machine may be busy.
fn with_closed_files(count: u32) -> (Arc<Backings>, Keeper) {
    let (daemon, keeper) = socket();
    let memory = linux::shared_memory::create("test", 1 << 20).unwrap();
    let table = Arc::new(StateTable::new(Region::of_backend(&memory).unwrap()));
    let backings = Backings::new(Arc::new(KeeperSocket::new(Arc::new(daemon))), table);
    let backings = Arc::new(Backings { keeper_answers: LIMIT, ..backings });
    let file = File::open("/dev/null").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| (1..=count).for_each(|number| keeper.registers(number)));
        for node in 1..=count {
            let entered = backings.enter(node.into(), FLAGS, Wanted::Passing(file.as_fd()));
            assert_eq!(entered.backing.map(|BackingId(number)| number), Some(node));
            backings.leave(node.into(), FLAGS);
        }
    });
    (backings, keeper)
}

/// Its thread stays until the test process ends.
fn start_ender(backings: &Arc<Backings>) {
    let backings = Arc::clone(backings);
    std::thread::spawn(move || backings.send_what_waits());
}

#[test]
fn what_the_kernel_forgets_ends_together() {
    let (backings, keeper) = with_closed_files(20);
    for node in 1..=20 {
        backings.is_forgotten(node, || true);
        // A node that was never registered sends nothing of the others.
        backings.is_forgotten(node + 1000, || true);
    }
    assert_eq!(keeper.request(), None);
    start_ender(&backings);
    keeper.waits_for_ends(20);
}

#[test]
fn what_finds_no_room_is_sent_later() {
    let (backings, keeper) = with_closed_files(600);
    start_ender(&backings);
    (1..=600).for_each(|node| backings.is_gone(node, 0));
    keeper.waits_for_ends(600);
}

#[test]
fn what_ends_without_a_keeper_is_sent_to_the_next_one() {
    let (backings, keeper) = with_closed_files(600);
    drop(keeper);
    start_ender(&backings);
    (1..=600).for_each(|node| backings.is_gone(node, 0));
    let (daemon, keeper) = socket();
    backings.keeper.replace(Arc::new(daemon));
    backings.keeper_was_replaced();
    keeper.waits_for_ends(600);
}

/// It ends them later, and may have died before.
#[test]
fn what_a_keeper_has_read_is_sent_to_the_next_one_too() {
    let (backings, keeper) = with_closed_files(3);
    start_ender(&backings);
    (1..=3).for_each(|node| backings.is_gone(node, 0));
    keeper.waits_for_ends(3);
    // Its answer comes after all that it has read before.
    let file = File::open("/dev/null").unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| keeper.registers(4));
        let entered = backings.enter(4, FLAGS, Wanted::Passing(file.as_fd()));
        assert_eq!(entered.backing.map(|BackingId(number)| number), Some(4));
    });
    let (daemon, next) = socket();
    backings.keeper.replace(Arc::new(daemon));
    backings.keeper_was_replaced();
    next.waits_for_ends(3);
}

#[test]
fn whether_a_file_is_written_is_known_while_the_keeper_stands_still() {
    let (backings, keeper) = with_closed_files(1);
    let file = File::open("/dev/null").unwrap();
    std::thread::scope(|scope| {
        let registers = scope.spawn(|| backings.enter(2, FLAGS, Wanted::Passing(file.as_fd())));
        let DaemonRequest::RegisterBacking { number } = keeper.waits_for_request() else { panic!("another") };
        // It may be written, as far as that can be known now.
        assert!(backings.is_written(1));
        assert!(!registers.is_finished(), "the answer has waited for the keeper");
        keeper.refuses(number);
        assert!(registers.join().unwrap().backing.is_none());
    });
    assert!(!backings.is_written(1));
}
