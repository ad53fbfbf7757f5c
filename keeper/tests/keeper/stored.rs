//! The keeper as a service: it leaves copies with the service manager, which this test plays over a
//! real NOTIFY_SOCKET, and gets them back after it was killed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use keeper::client::Client;
use keeper::daemon::Removed;
use keeper::wire::Role;
use rustix::fs::{Mode, OFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use tests::{Network, Sandbox, eventually};

use crate::fixture::{LIMIT, binary, good, key};

struct Manager {
    socket: UnixDatagram,
    stored: BTreeMap<String, OwnedFd>,
    removed: Vec<String>,
    /// Of all times.
    added: usize,
    is_ready: bool,
    keeper: Option<Child>,
    sandbox: Sandbox,
}

impl Manager {
    fn new() -> Self {
        let sandbox = Sandbox::enter(Network::Callers).unwrap();
        let socket = UnixDatagram::bind(sandbox.path("notify")).unwrap();
        let (stored, removed) = (BTreeMap::new(), Vec::new());
        Self { socket, stored, removed, added: 0, is_ready: false, keeper: None, sandbox }
    }

    fn path(&self) -> PathBuf {
        self.sandbox.path("k.sock")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.sandbox.path("k.log")).unwrap_or_default()
    }

    /// With at most three descriptors, which a shell moves to the numbers that sd_listen_fds(3) names.
    fn start(&mut self, passed: Vec<(String, OwnedFd)>) {
        let (names, mut fds): (Vec<String>, Vec<OwnedFd>) = passed.into_iter().unzip();
        let count = fds.len();
        fds.resize_with(3, || File::open("/dev/null").unwrap().into());
        let close = (3 + count..6).map(|number| format!(" {number}<&-")).collect::<String>();
        let script = format!(
            "exec 3<&0 4<&1 5<&2 0</dev/null 1>/dev/null 2>>\"$2\"; exec{close}; \
             LISTEN_PID=$$ LISTEN_FDS={count} LISTEN_FDNAMES='{}' exec \"$0\" --log-level debug --socket \"$1\"",
            names.join(":")
        );
        let mut fds = fds.into_iter().map(Stdio::from);
        let mut next = || fds.next().unwrap();
        let mut shell = self.sandbox.command(Path::new("/bin/sh"));
        shell.args(["-c", &script]).arg(binary()).arg(self.path()).arg(self.sandbox.path("k.log"));
        shell.env("NOTIFY_SOCKET", self.sandbox.path("notify"));
        shell.stdin(next()).stdout(next()).stderr(next());
        self.is_ready = false;
        self.keeper = Some(shell.spawn().unwrap());
        self.wait("it is ready", |manager| manager.is_ready);
    }

    fn kill(&mut self) {
        let mut keeper = self.keeper.take().unwrap();
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        self.receive();
    }

    fn client(&self) -> Client {
        Client::connect(&self.path(), LIMIT).unwrap()
    }

    #[track_caller]
    fn wait(&mut self, what: &str, is_done: impl Fn(&Self) -> bool) {
        eventually(what, LIMIT, || {
            self.receive();
            anyhow::ensure!(is_done(self), "{:?}, {:?}: {}", self.stored, self.removed, self.log());
            Ok(())
        })
        .unwrap();
    }

    fn receive(&mut self) {
        let mut buffer = [0; 4096];
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(&mut buffer)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let Ok(received) = rustix::net::recvmsg(&self.socket, &mut parts, &mut control, flags) else {
                return;
            };
            let mut fds: Vec<OwnedFd> = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            let text = std::str::from_utf8(&buffer[..received.bytes]).unwrap().to_owned();
            self.take(&text, fds);
        }
    }

    fn take(&mut self, text: &str, mut fds: Vec<OwnedFd>) {
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let name = value("FDNAME=");
        if value("FDSTORE=").is_some() {
            assert_eq!((fds.len(), value("FDPOLL=").as_deref()), (1, Some("0")), "{text}");
            self.stored.insert(name.unwrap(), fds.pop().unwrap());
            self.added += 1;
        } else if value("FDSTOREREMOVE=").is_some() {
            let name = name.unwrap();
            self.stored.remove(&name);
            self.removed.push(name);
        } else {
            assert_eq!(text, "READY=1\n");
            self.is_ready = true;
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if self.keeper.is_some() {
            self.kill();
        }
    }
}

fn name(role: Role) -> String {
    format!("{}.{}", key(1), role.name())
}

#[test]
fn a_keeper_that_is_killed_gets_back_what_the_service_manager_has_stored() {
    let mut manager = Manager::new();
    manager.start(Vec::new());
    let directory = good(Role::Directory, &manager.sandbox);
    let connection = good(Role::Connection, &manager.sandbox);
    let mut client = manager.client();
    client.put(key(1), Role::Connection, connection.as_fd()).unwrap();
    client.put(key(1), Role::Directory, directory.as_fd()).unwrap();
    let removed = Removed::new(client.daemon_socket(key(1)).unwrap(), LIMIT).unwrap();
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&directory, "f", flags, Mode::RUSR).unwrap();
    rustix::fs::unlinkat(&directory, "f", rustix::fs::AtFlags::empty()).unwrap();
    let mut file = File::from(file);
    file.write_all(b"kept").unwrap();
    removed.put_removed(77, file.as_fd()).unwrap();
    let of_file = format!("{}.77", key(1));
    let names = [name(Role::Connection), name(Role::Directory), of_file.clone()];
    manager.wait("three are stored", |manager| manager.stored.len() == 3);
    for round in 0..2 {
        manager.kill();
        let passed = names.clone().map(|name| (name.clone(), manager.stored[&name].try_clone().unwrap()));
        manager.start(passed.into());
        let mut client = manager.client();
        let entries = client.list().unwrap();
        assert_eq!((entries.len(), entries[0].removed), (1, 1), "round {round}: {}", manager.log());
        let got = client.get(key(1), Role::Directory).unwrap().unwrap();
        assert_eq!(rustix::fs::fstat(&got).unwrap().st_ino, rustix::fs::fstat(&directory).unwrap().st_ino);
        assert!(client.get(key(1), Role::Connection).unwrap().is_some());
        let next = Removed::new(client.daemon_socket(key(1)).unwrap(), LIMIT).unwrap();
        let (node, found) = next.list_removed().unwrap().pop().unwrap();
        let (mut found, mut text) = (File::from(found), String::new());
        found.rewind().unwrap();
        found.read_to_string(&mut text).unwrap();
        assert_eq!((node, text.as_str()), (77, "kept"));
        // It is in the store already.
        assert_eq!(manager.stored.len(), 3);
    }
    manager.client().forget_volume(key(1)).unwrap();
    manager.wait("nothing is stored", |manager| manager.stored.is_empty());
}

#[test]
fn a_replaced_descriptor_is_stored_once() {
    let mut manager = Manager::new();
    manager.start(Vec::new());
    let mut client = manager.client();
    for _ in 0..2 {
        let usage = good(Role::UsageFile, &manager.sandbox);
        client.put(key(1), Role::UsageFile, usage.as_fd()).unwrap();
    }
    manager.wait("the first one is removed", |manager| manager.removed == [name(Role::UsageFile)]);
    client.forget(key(1), Role::UsageFile).unwrap();
    manager.wait("both are removed", |manager| manager.removed.len() == 2 && manager.stored.is_empty());
}

/// What it was told to remove it would otherwise hold for ever, such as a connection.
#[test]
fn a_service_manager_that_did_not_read_for_a_while_holds_nothing_that_was_released() {
    const VOLUMES: u32 = 600;
    let mut manager = Manager::new();
    manager.start(Vec::new());
    let mut client = manager.client();
    let connection = good(Role::Connection, &manager.sandbox);
    client.put(key(1), Role::Connection, connection.as_fd()).unwrap();
    manager.wait("it is stored", |manager| manager.stored.len() == 1);
    // A hostile daemon can do this too, with its removed files.
    for volume in 2..VOLUMES {
        client.put(key(volume), Role::Connection, connection.as_fd()).unwrap();
    }
    for volume in 1..VOLUMES {
        client.forget_volume(key(volume)).unwrap();
    }
    manager.wait("all are removed", |manager| manager.stored.is_empty());
    // The keeper remembers none of those that it could not send.
    assert_eq!(manager.removed.len(), manager.added);
    // The names are of use again.
    client.put(key(1), Role::Connection, connection.as_fd()).unwrap();
    manager.wait("it is stored", |manager| manager.stored.contains_key(&name(Role::Connection)));
    client.forget_volume(key(1)).unwrap();
    manager.wait("nothing is stored", |manager| manager.stored.is_empty());
}

/// A datagram socket holds eleven packets by default (`net.unix.max_dgram_qlen`), and the keeper does not wait for room.
const UNREAD: u64 = 8;

/// It passes them in one string, and the kernel executes no program with a longer one than 128 KiB.
#[test]
fn the_service_manager_can_pass_on_the_names_of_all_that_it_has_stored() {
    const VOLUMES: u32 = 800;
    let mut manager = Manager::new();
    manager.start(Vec::new());
    let mut client = manager.client();
    let file = good(Role::UsageFile, &manager.sandbox);
    let length = |manager: &Manager| manager.stored.keys().map(|name| name.len() + 1).sum::<usize>();
    // More removed files than it stores, of a hostile daemon and of others.
    for volume in 1..=40 {
        let removed = Removed::new(client.daemon_socket(key(volume)).unwrap(), LIMIT).unwrap();
        for node in 0..100 {
            removed.put_removed(u64::MAX - node, file.as_fd()).unwrap();
            if node % UNREAD == UNREAD - 1 {
                // It answers once it has sent what came before.
                removed.list_removed().unwrap();
                manager.receive();
            }
        }
        assert_eq!(removed.list_removed().unwrap().len(), 100, "held all the same");
        manager.receive();
    }
    let of_removed = length(&manager);
    assert!((24 << 10..=32 << 10).contains(&of_removed), "{of_removed} bytes");
    let of_seventh = format!("{}.{}", key(7), u64::MAX);
    assert!(manager.stored.contains_key(&of_seventh), "each volume leaves half of the rest to the others");
    let connection = good(Role::Connection, &manager.sandbox);
    for volume in 1..=VOLUMES {
        for role in [Role::Connection, Role::ParkedMount, Role::UsageFile] {
            let mount = matches!(role, Role::ParkedMount).then(|| good(role, &manager.sandbox));
            let fd = match role {
                Role::Connection => connection.as_fd(),
                Role::UsageFile => file.as_fd(),
                _ => mount.as_ref().unwrap().as_fd(),
            };
            client.put(key(volume), role, fd).unwrap();
            manager.receive();
        }
    }
    let all = length(&manager);
    let whole = of_removed + VOLUMES as usize * 3 * 44;
    assert!(all < whole && all <= 127 << 10, "{all} bytes");
    assert!(manager.log().contains("cannot pass on more names"), "{}", manager.log());
    let names: Vec<String> = manager.stored.keys().cloned().collect();
    let mut next = manager.sandbox.command(Path::new("/bin/true"));
    next.env("LISTEN_FDNAMES", names.join(":"));
    assert!(next.status().unwrap().success());
    // What is released makes room.
    for volume in 1..=250 {
        client.forget_volume(key(volume)).unwrap();
        manager.receive();
    }
    client.put(key(VOLUMES + 1), Role::Connection, connection.as_fd()).unwrap();
    let name = format!("{}.{}", key(VOLUMES + 1), Role::Connection.name());
    manager.wait("it is stored", |manager| manager.stored.contains_key(&name));
}

#[test]
fn a_daemon_that_puts_and_drops_for_ever_does_not_keep_the_service_manager_busy() {
    const PUTS: u64 = 20_000;
    const MOST_A_SECOND: u64 = 256;
    let mut manager = Manager::new();
    manager.start(Vec::new());
    let mut client = manager.client();
    let file = good(Role::UsageFile, &manager.sandbox);
    let hostile = Removed::new(client.daemon_socket(key(1)).unwrap(), LIMIT).unwrap();
    let begun = Instant::now();
    for node in 0..PUTS {
        hostile.put_removed(node, file.as_fd()).unwrap();
        hostile.drop_removed(node).unwrap();
        manager.receive();
    }
    assert_eq!(hostile.list_removed().unwrap().len(), 0);
    manager.receive();
    let added = manager.added as u64;
    let seconds = begun.elapsed().as_secs() + 2;
    assert!(0 < added && added <= seconds * MOST_A_SECOND, "{added} in {seconds} s");
    // Others are stored meanwhile.
    let other = Removed::new(client.daemon_socket(key(2)).unwrap(), LIMIT).unwrap();
    other.put_removed(7, file.as_fd()).unwrap();
    let name = format!("{}.7", key(2));
    manager.wait("it is stored", |manager| manager.stored.contains_key(&name));
}

#[test]
fn stored_descriptors_are_checked_as_if_a_peer_had_sent_them() {
    let mut manager = Manager::new();
    let null = || OwnedFd::from(File::options().read(true).write(true).open("/dev/null").unwrap());
    let of_file = format!("{}.7", key(1));
    let wrong = [
        (name(Role::Connection), null()),
        (name(Role::StateTable), tempfile::tempfile().unwrap().into()),
        (of_file.clone(), tempfile::tempfile().unwrap().into()),
    ];
    manager.start(wrong.into());
    let names = [name(Role::Connection), name(Role::StateTable), of_file];
    manager.wait("all are refused", |manager| manager.removed == names);
    assert!(manager.client().list().unwrap().is_empty());
    assert!(manager.log().contains("not a character device 10:229"), "{}", manager.log());
    manager.kill();
    manager.removed.clear();
    manager.start([("another-program".to_owned(), null())].into());
    manager.wait("it is refused", |manager| manager.removed == ["another-program"]);
    assert!(manager.client().list().unwrap().is_empty());
}
