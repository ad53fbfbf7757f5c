//! Quiesce and Resume: what a snapshot relies on.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use linux::fd_passing::PacketSocket;
use prost::Message;
use proto::control::{Ping, Quiesce, Quiesced, Reply, Request, Resume, Resumed, reply, request};
use rustix::fs::{
    CWD, FallocateFlags, FileType, Mode, XattrFlags, copy_file_range, fallocate, getxattr, mknodat,
    removexattr, setxattr,
};

use rustix::process::{Pid, Signal};

use crate::fixture::{Control, Setup, Volume, here};

/// No test needs a tenth of it.
const LONG_LEASE: u32 = 30_000;
/// For something that must not happen.
const A_WHILE: Duration = Duration::from_millis(200);

fn quiesce(control: &Control, lease_ms: u32) -> Quiesced {
    match control.ask(request::Kind::Quiesce(Quiesce { lease_ms, passing_may_write: false })) {
        reply::Kind::Quiesced(quiesced) => quiesced,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn resume(control: &Control) -> Resumed {
    match control.ask(request::Kind::Resume(Resume {})) {
        reply::Kind::Resumed(resumed) => resumed,
        other => panic!("{other:?}"),
    }
}

type Change = fn(&Path) -> io::Result<()>;

/// Each way of changing something, in a directory that has `f`, `g` and a directory `e`.
const CHANGES: &[(&str, Change)] = &[
    ("append", |d| append(d)?.write_all(b"more")),
    ("unlink", |d| fs::remove_file(d.join("f"))),
    ("rmdir", |d| fs::remove_dir(d.join("e"))),
    ("mkdir", |d| fs::create_dir(d.join("d"))),
    ("symlink", |d| symlink("f", d.join("s"))),
    ("link", |d| fs::hard_link(d.join("f"), d.join("l"))),
    ("mknod", |d| Ok(mknodat(CWD, d.join("p"), FileType::Fifo, Mode::RUSR, 0)?)),
    ("create", |d| File::create(d.join("new")).map(drop)),
    ("chmod", |d| fs::set_permissions(d.join("f"), PermissionsExt::from_mode(0o600))),
    ("chown", |d| chown(d.join("f"), Some(1001), None)),
    ("utimes", |d| append(d)?.set_modified(SystemTime::UNIX_EPOCH)),
    ("rename", |d| fs::rename(d.join("f"), d.join("h"))),
    ("rename over", |d| fs::rename(d.join("f"), d.join("g"))),
    ("truncate", |d| append(d)?.set_len(100)),
    ("fallocate", |d| Ok(fallocate(append(d)?, FallocateFlags::empty(), 0, 100)?)),
    ("setxattr", |d| Ok(setxattr(d.join("f"), "user.new", b"y", XattrFlags::empty())?)),
    ("removexattr", |d| Ok(removexattr(d.join("f"), "user.there")?)),
    ("copy_file_range", |d| {
        let to = File::options().write(true).open(d.join("g"))?;
        copy_file_range(File::open(d.join("f"))?, None, to, None, 3)?;
        Ok(())
    }),
];

fn append(directory: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).open(directory.join("f"))
}

/// Everything that can be seen of a directory of the backing tree.
fn contents(directory: &Path) -> String {
    let script = "find . -printf '%p %y %m %U %s %n %T@\\n' | sort; find . -type f | sort | xargs cat";
    let output = Command::new("sh").args(["-c", script]).current_dir(directory).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let attributes =
        ["user.there", "user.new"].map(|name| getxattr(directory.join("f"), name, &mut [0_u8; 8]));
    format!("{attributes:?} {}", String::from_utf8(output.stdout).unwrap())
}

/// Killed in the request that waits, and not in one before it that is answered.
const ATTEMPTS: usize = 50;

/// A field of /proc/<pid>/status.
fn field(child: &Child, name: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
}

/// R, S, D, Z and so on, as proc(5) has them.
fn state_of(child: &Child) -> String {
    field(child, "State:")[..1].to_owned()
}

/// How often it has begun to wait.
fn waits_of(child: &Child) -> u64 {
    field(child, "voluntary_ctxt_switches:").parse().unwrap()
}

/// One that writes, killed while it waits for an answer: dead, or not interruptible.
fn killed_in_a_request(file: &File) -> Child {
    let mut command = Command::new("echo");
    let child = command.arg("written").stdout(file.try_clone().unwrap()).spawn().unwrap();
    let waits =
        || fs::read_to_string(format!("/proc/{}/wchan", child.id())).unwrap() == "request_wait_answer";
    let until = |is_so: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !is_so() {
            assert!(begun.elapsed() < Duration::from_secs(10), "{}", state_of(&child));
            std::thread::yield_now();
        }
    };
    // In one wait.
    let waits_for = |least: Duration, is_waiting: &dyn Fn() -> bool| {
        let (since, begun) = (waits_of(&child), Instant::now());
        std::iter::repeat_with(|| is_waiting() && waits_of(&child) == since).take_while(|waits| *waits).any(
            |_| {
                std::thread::yield_now();
                begun.elapsed() > least
            },
        )
    };
    // A kill before the daemon has read the request takes it back.
    until(&|| waits_for(Duration::from_millis(20), &waits) || state_of(&child) == "Z");
    let before = waits_of(&child);
    rustix::process::kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    // It waits for the answer with state D before SIGKILL, too, and once more after it. A
    // request that no pause holds back (it asks for an attribute first) is answered soon.
    let is_held = || {
        let is_waiting = || state_of(&child) == "D" && waits();
        waits_of(&child) > before && waits_for(Duration::from_millis(200), &is_waiting)
    };
    until(&|| state_of(&child) == "Z" || is_held());
    child
}

#[test]
fn a_process_that_waits_for_the_end_of_a_pause_is_killed_then() {
    use std::os::unix::process::ExitStatusExt;
    let volume = Volume::new();
    let file = File::create(volume.path("f")).unwrap();
    let control = volume.control();
    quiesce(&control, LONG_LEASE);
    let mut child = killed_in_a_request(&file);
    for _ in 0..ATTEMPTS {
        if state_of(&child) != "Z" {
            break;
        }
        child.wait().unwrap();
        child = killed_in_a_request(&file);
    }
    assert_eq!(state_of(&child), "D", "not interruptible: the change may be made yet");
    resume(&control);
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "written\n");
}

#[test]
fn a_quiesced_volume_changes_nothing_and_answers_reads() {
    let volume = Volume::new();
    for (name, _) in CHANGES {
        let directory = volume.path(name);
        fs::create_dir_all(directory.join("e")).unwrap();
        fs::write(directory.join("f"), "f-f").unwrap();
        fs::write(directory.join("g"), "g").unwrap();
        setxattr(directory.join("f"), "user.there", b"x", XattrFlags::empty()).unwrap();
    }
    let all = || CHANGES.iter().map(|(name, _)| contents(&volume.backing.join(name))).collect::<Vec<_>>();
    let control = volume.control();
    let used = volume.usage();
    let quiesced = quiesce(&control, LONG_LEASE);
    assert_eq!((quiesced.used_bytes, quiesced.used_inodes), (used.used_bytes, used.used_inodes));
    let before = all();
    let (done, reported) = channel();
    std::thread::scope(|scope| {
        // In directories of their own: the kernel itself lets two changes of one wait for each other.
        for (name, change) in CHANGES {
            let (done, directory) = (done.clone(), volume.path(name));
            scope.spawn(move || done.send((*name, change(&directory).map_err(|e| e.to_string()))).unwrap());
        }
        assert_eq!(reported.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
        assert_eq!(all(), before);
        rustix::fs::statvfs(&volume.path).unwrap();
        assert_eq!(control.ask(request::Kind::Ping(Ping {})), crate::fixture::pong());
        let resumed = resume(&control);
        assert!(resumed.held && resumed.paused_us >= 200_000, "{resumed:?}");
        for _ in CHANGES {
            let (name, done) = reported.recv_timeout(here(Duration::from_secs(60))).unwrap();
            assert_eq!(done, Ok(()), "{name}");
        }
    });
    for (((name, _), before), after) in CHANGES.iter().zip(before).zip(all()) {
        assert_ne!(before, after, "{name}");
    }
}

#[test]
fn reads_go_on_while_more_writers_wait_than_there_are_event_loops() {
    let volume = Volume::new();
    fs::write(volume.path("read"), vec![3; 100_000]).unwrap();
    const WRITERS: usize = 100;
    const LARGEST_WRITE: usize = 256 << 10;
    let files: Vec<File> =
        (0..WRITERS).map(|n| File::create(volume.path(&format!("f{n}"))).unwrap()).collect();
    let control = volume.control();
    quiesce(&control, LONG_LEASE);
    std::thread::scope(|scope| {
        let writers: Vec<_> =
            files.iter().map(|file| scope.spawn(|| file.write_all_at(&[9; LARGEST_WRITE], 0))).collect();
        let deadline = Instant::now() + A_WHILE;
        while Instant::now() < deadline {
            // Opened anew: from the daemon, not from the page cache.
            assert_eq!(fs::read(volume.path("read")).unwrap().len(), 100_000);
        }
        assert!(writers.iter().all(|writer| !writer.is_finished()));
        assert!(resume(&control).held);
        for writer in writers {
            writer.join().unwrap().unwrap();
        }
    });
    for n in 0..WRITERS {
        assert_eq!(fs::read(volume.backing.join(format!("f{n}"))).unwrap(), vec![9; LARGEST_WRITE]);
    }
}

#[test]
fn the_lease_ends_a_forgotten_pause() {
    let volume = Volume::new();
    let control = volume.control();
    let start = Instant::now();
    quiesce(&control, 400);
    fs::write(volume.path("f"), "waits").unwrap();
    let waited = start.elapsed();
    assert!(waited >= Duration::from_millis(400), "{waited:?}");
    let resumed = resume(&control);
    assert!(!resumed.held && resumed.paused_us >= 400_000, "{resumed:?}");
    // Renewed, it lasts longer.
    let start = Instant::now();
    quiesce(&control, 300);
    quiesce(&control, 700);
    fs::write(volume.path("f"), "waits").unwrap();
    assert!(start.elapsed() >= Duration::from_millis(700));
}

#[test]
fn a_lost_connection_ends_the_pause() {
    let volume = Volume::new();
    let control = volume.control();
    quiesce(&control, LONG_LEASE);
    let start = Instant::now();
    drop(control);
    fs::write(volume.path("f"), "at once").unwrap();
    assert!(start.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_pause_belongs_to_one_connection() {
    let volume = Volume::new();
    let (one, other) = (volume.control(), volume.control());
    quiesce(&one, LONG_LEASE);
    match other.ask(request::Kind::Quiesce(Quiesce { lease_ms: 1000, passing_may_write: false })) {
        reply::Kind::Refused(refused) => {
            assert_eq!(refused.reason, "another connection has paused the volume");
        }
        unexpected => panic!("{unexpected:?}"),
    }
    assert!(!resume(&other).held);
    assert!(resume(&one).held);
    quiesce(&other, LONG_LEASE);
    assert!(resume(&other).held);
}

#[test]
fn a_cut_between_two_files_is_one_moment() {
    let volume = Volume::new();
    let control = volume.control();
    let (mut first, mut second) =
        (File::create(volume.path("first")).unwrap(), File::create(volume.path("second")).unwrap());
    let (stop, stopped) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while stopped.try_recv().is_err() {
                first.write_all(b"x").unwrap();
                second.write_all(b"x").unwrap();
            }
        });
        for _ in 0..50 {
            quiesce(&control, LONG_LEASE);
            let length = |name: &str| fs::metadata(volume.backing.join(name)).unwrap().len();
            let (before, after) = (length("first"), length("second"));
            assert!(before == after || before == after + 1, "{before} and {after}");
            assert_eq!((length("first"), length("second")), (before, after));
            assert!(resume(&control).held);
        }
        stop.send(()).unwrap();
    });
}

#[test]
#[expect(unsafe_code, reason = "there is no safe mmap")]
fn what_was_synchronised_of_a_mapping_is_in_the_cut() {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    let volume = Volume::new();
    let path = volume.path("mapped");
    fs::write(&path, [b'-'; 8192]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // SAFETY: the mapping is new, 8192 bytes long, used only between here and
    // munmap, and the file is not shortened meanwhile.
    unsafe {
        let at =
            mmap(std::ptr::null_mut(), 8192, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
                .unwrap();
        at.cast::<u8>().add(5000).write(b'M');
        msync(at, 8192, MsyncFlags::SYNC).unwrap();
        let control = volume.control();
        quiesce(&control, LONG_LEASE);
        // Written after the cut: no part of it.
        at.cast::<u8>().add(5001).write(b'N');
        assert_eq!(fs::read(volume.backing.join("mapped")).unwrap()[4999..5002], *b"-M-");
        assert!(resume(&control).held);
        munmap(at, 8192).unwrap();
    }
}

#[test]
fn a_stranger_on_the_control_socket_is_refused() {
    let volume = Volume::new();
    fs::set_permissions(volume.control_socket(), PermissionsExt::from_mode(0o777)).unwrap();
    let answer = |uid: u32| {
        let socket = volume.control_socket();
        std::thread::scope(|scope| scope.spawn(move || ping_as(uid, socket)).join().unwrap())
    };
    assert_eq!(answer(65_534), None);
    assert_eq!(answer(0), Some(crate::fixture::pong()));
}

/// Dials and asks with this effective uid, which the calling thread keeps.
#[expect(unsafe_code, reason = "the C library would change the uid of all threads")]
fn ping_as(uid: u32, socket: &Path) -> Option<reply::Kind> {
    // SAFETY: setresuid(2) reads no memory; -1 leaves the others as they are.
    assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, -1, uid, -1) }, 0);
    let socket = PacketSocket::connect(socket).unwrap();
    socket.set_timeout(Duration::from_secs(10)).unwrap();
    let ping = Request { kind: Some(request::Kind::Ping(Ping {})) };
    // Turned away before or after: both are no answer.
    socket.send(&ping.encode_to_vec(), &[]).ok()?;
    let packet = socket.receive().ok()??;
    Reply::decode(&*packet).unwrap().kind
}

#[test]
fn nonsense_on_the_control_socket_is_refused_and_the_next_one_served() {
    let volume = Volume::with(Setup { confine: true, ..Setup::default() });
    let refusal = |packet: &[u8]| {
        let control = volume.control();
        control.socket.send(packet, &[]).unwrap();
        match control.hear() {
            reply::Kind::Refused(refused) => refused.reason,
            other => panic!("{other:?}"),
        }
    };
    assert!(refusal(b"\xff\xff\xff").starts_with("no Request: "));
    assert_eq!(refusal(&[0x7a, 0]), "kind: not a request of this version");
    assert_eq!(refusal(&[0; 65_537]), "65537 bytes are more than 65536");
    // One that comes and says nothing costs the others nothing.
    let _silent: Vec<PacketSocket> =
        (0..3).map(|_| PacketSocket::connect(volume.control_socket()).unwrap()).collect();
    assert_eq!(volume.control().ask(request::Kind::Ping(Ping {})), crate::fixture::pong());
}
