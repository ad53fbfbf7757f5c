//! Plays the driver: mounts the connection, starts the daemon, hands over.
//!
//! Invariant: nothing hangs. A watchdog aborts the FUSE connection when a test
//! takes too long, so that every blocked file operation comes back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use keeper::wire::Refusal;
use keeper::wire::daemon::{DaemonPacket, DaemonRequest, Kind, MOST_NODES, VERSION};
use linux::fd_passing::{PacketListener, PacketSocket};
use linux::mount::{self, FuseMountOptions, FuseName, MountFlags, UnmountMode};
use linux::shared_memory::SharedWords;
use nix::mount::MsFlags;
use prost::Message;
use proto::control::{Done, GetUsage, ReplaceKeeper, Reply, Request, Usage, reply, request};
use proto::handover::{
    Answer, Assignment, Capacity, DataPath, Hello, HelloReply, Local, Proceed, Ready, Role, answer,
    assignment, hello_reply, state_table_bytes,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tempfile::TempDir;

pub(crate) const NONCE: &str = "0123456789abcdef-single-use";

/// No test needs a tenth of it, but where others write, one fsync may take seconds.
const TEST_DEADLINE: Duration = Duration::from_secs(300);
const DAEMON_DEADLINE: Duration = Duration::from_secs(30);
/// Of what [`Stage::descriptors`] gives.
const ROLES: [Role; 5] =
    [Role::FuseDevice, Role::Directory, Role::ControlListener, Role::MetricsListener, Role::UsageFile];

/// Logged by a daemon that no longer waits for the keeper: for a second, the files that are opened first do not pass
/// through.
const KEEPER_IS_LATE: &str = "REGISTER_BACKING: the keeper did not answer within";

/// `limit` on this machine: the laboratory's guests are emulated, and say how many times slower they are.
pub(crate) fn here(limit: Duration) -> Duration {
    let said = std::env::var("HAWSER_TEST_SLOWNESS").ok();
    limit * said.and_then(|factor| factor.parse().ok()).unwrap_or(1)
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) capacity_bytes: u64,
    pub(crate) inode_limit: u64,
    pub(crate) read_only: bool,
    pub(crate) confine: bool,
    /// The daemon is started with group 0 among its supplementary groups, as by a container runtime.
    pub(crate) in_a_group: bool,
    /// `ulimit -n` of the daemon; 0: what the tests have.
    pub(crate) descriptors: u32,
    /// 0: the daemon's default.
    pub(crate) known_inodes: u32,
    /// The kernel reads and writes the files, and the daemon counts nothing. Only with `successors`.
    pub(crate) passthrough: bool,
    /// A quota of the file system limits the volume.
    pub(crate) limited_by_kernel: bool,
    /// How many daemons can follow the first one. They are started with it, since a process that has
    /// a file of the volume open cannot start one: the new process closes its copy, and the FLUSH
    /// waits for a daemon.
    pub(crate) successors: usize,
    pub(crate) changed_from_outside: bool,
    /// The kernel keeps what is written and sends it later.
    pub(crate) writeback_cache: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self::PLAIN
    }
}

impl Setup {
    pub(crate) const PLAIN: Self = Self {
        capacity_bytes: 0,
        inode_limit: 0,
        read_only: false,
        confine: false,
        in_a_group: false,
        descriptors: 0,
        known_inodes: 0,
        passthrough: false,
        limited_by_kernel: false,
        successors: 0,
        changed_from_outside: false,
        writeback_cache: false,
    };

    fn data_path(self) -> DataPath {
        if self.passthrough { DataPath::Passthrough } else { DataPath::Daemon }
    }

    fn capacity(self) -> Capacity {
        match (self.limited_by_kernel, self.passthrough) {
            (true, _) => Capacity::Kernel,
            (false, true) => Capacity::None,
            (false, false) => Capacity::Daemon,
        }
    }
}

/// A daemon that has not dialled, or waits for its volume.
#[derive(Debug)]
struct Started {
    daemon: Child,
    listener: PacketListener,
}

/// What outlives a daemon, if another one is to follow it.
#[derive(Debug)]
struct Kept {
    device: OwnedFd,
    tree: OwnedFd,
    state: OwnedFd,
    keeper: Keeper,
}

/// A scratch directory, seen in a mount namespace of this thread alone.
#[derive(Debug)]
pub(crate) struct Stage {
    pub(crate) backing: PathBuf,
    pub(crate) mountpoint: PathBuf,
    pub(crate) socket: PathBuf,
    pub(crate) control: PathBuf,
    pub(crate) metrics: PathBuf,
    pub(crate) usage: PathBuf,
    fusectl: PathBuf,
    scratch: Option<TempDir>,
}

impl Stage {
    pub(crate) fn new() -> Self {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("these tests need root");
        mount::make_private(Path::new("/")).unwrap();
        Self::in_this_namespace()
    }

    fn in_this_namespace() -> Self {
        // Of the disk, not a tmpfs: the disk's file systems have all features.
        let scratch = tempfile::tempdir_in("/var/tmp").unwrap();
        let at = |name: &str| {
            let path = scratch.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        };
        let stage = Self {
            backing: at("backing"),
            mountpoint: at("volume"),
            fusectl: at("fusectl"),
            socket: scratch.path().join("dial.sock"),
            control: scratch.path().join("ctl.sock"),
            metrics: scratch.path().join("prom.sock"),
            usage: scratch.path().join("usage"),
            scratch: Some(scratch),
        };
        open_to_all(stage.scratch());
        open_to_all(&stage.backing);
        mount::mount_fs("fusectl", "fusectl", &stage.fusectl, MountFlags::default(), "").unwrap();
        stage
    }

    fn scratch(&self) -> &Path {
        self.scratch.as_ref().expect("it is there until the drop").path()
    }

    /// The backing directory is the root of a new file system of this kind.
    pub(crate) fn on_file_system(kind: &str) -> Self {
        let stage = Self::new();
        let image = stage.scratch().join("image");
        File::create(&image).unwrap().set_len(512 << 20).unwrap();
        let run = |command: &mut Command| {
            let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        };
        run(Command::new(format!("mkfs.{kind}")).arg("-q").arg(&image));
        // The loop device goes with the mount, which goes with this thread's namespace.
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&stage.backing));
        open_to_all(&stage.backing);
        stage
    }

    /// The backing directory is the root of a new Btrfs, which a quota group limits to `bytes`.
    pub(crate) fn with_quota_group(bytes: u64) -> Self {
        let stage = Self::on_file_system("btrfs");
        tests::subvolume::enable_quotas(&stage.backing).unwrap();
        linux::btrfs::quota::limit(File::open(&stage.backing).unwrap(), bytes).unwrap();
        stage
    }

    pub(crate) fn listen(&self) -> PacketListener {
        PacketListener::bind(&self.socket).unwrap()
    }

    pub(crate) fn daemon(&self, setup: Setup) -> Command {
        self.daemon_at(&self.socket, setup)
    }

    fn daemon_at(&self, socket: &Path, setup: Setup) -> Command {
        let binary = env!("CARGO_BIN_EXE_hawser-volume");
        let mut command = match setup.descriptors {
            0 if setup.in_a_group => {
                let mut member = Command::new("setpriv");
                member.args(["--groups", "0", binary]);
                member
            }
            0 => Command::new(binary),
            limit => {
                let mut shell = Command::new("sh");
                shell.args(["-c", &format!("ulimit -n {limit}; exec \"$0\" \"$@\""), binary]);
                shell
            }
        };
        command.args(["serve", "--log-level", "warn", "--socket"]).arg(socket);
        if setup.confine {
            command.arg("--confine");
        }
        command.env("HAWSER_NONCE", NONCE).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Opens the device and mounts it on the mountpoint.
    pub(crate) fn mount_fuse(&self) -> OwnedFd {
        let device = mount::open_fuse_device().unwrap();
        let options = FuseMountOptions {
            flags: MountFlags { nosuid: true, nodev: true, ..MountFlags::default() },
            allow_other: true,
            default_permissions: true,
        };
        mount::mount_fuse(
            &device,
            FuseName { source: "hawser-test", subtype: "hawser" },
            &self.mountpoint,
            options,
        )
        .unwrap();
        device
    }

    pub(crate) fn tree(&self) -> OwnedFd {
        mount::open_tree_clone(&self.backing).unwrap()
    }

    /// What the daemon gets, in the order of [`ROLES`].
    pub(crate) fn descriptors(&self) -> [OwnedFd; 5] {
        let [control, metrics, usage] = self.sockets_and_usage();
        [self.mount_fuse(), self.tree(), control, metrics, usage]
    }

    fn sockets_and_usage(&self) -> [OwnedFd; 3] {
        for socket in [&self.control, &self.metrics] {
            drop(std::fs::remove_file(socket));
        }
        let control = PacketListener::bind(&self.control).unwrap();
        let metrics = UnixListener::bind(&self.metrics).unwrap();
        let usage = File::options().read(true).write(true).create(true).truncate(false).open(&self.usage);
        let control = control.as_fd().try_clone_to_owned().unwrap();
        [control, metrics.into(), usage.unwrap().into()]
    }

    fn connection(&self) -> u32 {
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        linux::mountinfo::read_of(tid)
            .unwrap()
            .into_iter()
            .find(|entry| entry.mount_point == self.mountpoint)
            .expect("the FUSE mount is in mountinfo")
            .minor
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // Already unmounted where the test says so; the backing directory is a mount in some tests.
        drop(mount::unmount(&self.mountpoint, UnmountMode::Detach));
        drop(mount::unmount(&self.backing, UnmountMode::Detach));
        mount::unmount(&self.fusectl, UnmountMode::Detach).unwrap();
        let removed = self.scratch.take().map_or(Ok(()), TempDir::close);
        assert!(removed.is_ok() || std::thread::panicking(), "{removed:?}");
    }
}

/// A volume that is served.
#[derive(Debug)]
pub(crate) struct Volume {
    pub(crate) path: PathBuf,
    pub(crate) backing: PathBuf,
    pub(crate) max_write_bytes: u32,
    daemon: Option<Child>,
    connection: u32,
    watchdog: Option<Watchdog>,
    kept: Option<Kept>,
    successors: VecDeque<Started>,
    /// How many successors were added.
    added: usize,
    /// A daemon that has ended had logged [`KEEPER_IS_LATE`].
    keeper_was_late: bool,
    stage: Stage,
}

impl Volume {
    pub(crate) fn new() -> Self {
        Self::with(Setup::default())
    }

    pub(crate) fn with(setup: Setup) -> Self {
        Self::on(Stage::new(), setup)
    }

    pub(crate) fn on(stage: Stage, setup: Setup) -> Self {
        let mut volume = Self {
            path: stage.mountpoint.clone(),
            backing: stage.backing.clone(),
            max_write_bytes: 0,
            daemon: None,
            connection: 0,
            watchdog: None,
            kept: None,
            successors: VecDeque::new(),
            added: 0,
            keeper_was_late: false,
            stage,
        };
        volume.serve(setup);
        volume
    }

    /// The next daemon, after [`Self::unmount`] or [`Self::kill`].
    pub(crate) fn serve_again(&mut self, setup: Setup) {
        drop(self.watchdog.take());
        // Gone already after an unmount.
        drop(mount::unmount(&self.path, UnmountMode::Detach));
        self.serve(setup);
    }

    /// Starts another daemon that can follow: one that waits for its volume for half a minute ends. Only
    /// while a daemon serves: the new process has closed its copies of this process's files once it dials.
    pub(crate) fn add_successor(&mut self, setup: Setup) {
        self.added += 1;
        let started = self.start(setup, setup.successors + self.added);
        assert!(readable(started.listener.as_fd(), here(DAEMON_DEADLINE)), "the daemon dials");
        self.successors.push_back(started);
    }

    fn start(&self, setup: Setup, number: usize) -> Started {
        let socket = self.stage.socket.with_extension(number.to_string());
        drop(std::fs::remove_file(&socket));
        let listener = PacketListener::bind(&socket).unwrap();
        Started { daemon: self.stage.daemon_at(&socket, setup).spawn().unwrap(), listener }
    }

    fn serve(&mut self, setup: Setup) {
        self.successors = (0..=setup.successors).map(|number| self.start(setup, number)).collect();
        let descriptors = self.stage.descriptors();
        self.kept = (setup.successors > 0).then(|| Kept {
            device: descriptors[0].try_clone().unwrap(),
            tree: descriptors[1].try_clone().unwrap(),
            state: linux::shared_memory::create("state", state_table_bytes(500_000)).unwrap(),
            keeper: Keeper::of(&descriptors[0], &descriptors[1]),
        });
        self.connection = self.stage.connection();
        self.watchdog = Some(Watchdog::start(self.stage.fusectl.clone(), self.connection));
        let ready = self.hand_over(setup, &descriptors, false).unwrap_or_else(|reason| panic!("{reason}"));
        self.max_write_bytes = ready.max_write_bytes;
        assert_eq!(ready.can_be_continued, setup.successors > 0, "this kernel can send requests again");
    }

    /// Another daemon continues the connection of one that was killed.
    pub(crate) fn take_over(&mut self, setup: Setup) {
        self.try_to_take_over(setup).unwrap_or_else(|reason| panic!("{reason}"));
    }

    pub(crate) fn try_to_take_over(&mut self, setup: Setup) -> Result<Ready, String> {
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        let [control, metrics, usage] = self.stage.sockets_and_usage();
        let (device, tree) = (kept.device.try_clone().unwrap(), kept.tree.try_clone().unwrap());
        self.hand_over(setup, &[device, tree, control, metrics, usage], true)
    }

    /// Another daemon prepares to follow the one that serves. If it refuses, the reason.
    pub(crate) fn prepare(&mut self, setup: Setup) -> Result<Prepared, String> {
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        let Started { mut daemon, listener } = self.successors.pop_front().expect("`successors` are enough");
        let socket = accept(&listener);
        hello(&socket);
        let mut assignment = Assignment {
            volume_name: "test".to_owned(),
            capacity_bytes: setup.capacity_bytes,
            data_path: setup.data_path().into(),
            capacity: setup.capacity().into(),
            writeback_cache: setup.writeback_cache,
            continues: true,
            waits_for_proceed: true,
            ..local_assignment()
        };
        assignment.descriptors.push(Role::StateTable.into());
        let sockets = self.stage.sockets_and_usage();
        let [control, metrics, usage] = sockets.each_ref().map(AsFd::as_fd);
        let given = [kept.device.as_fd(), kept.tree.as_fd(), control, metrics, usage, kept.state.as_fd()];
        send_assignment(&socket, assignment, &given);
        match answer(&socket) {
            answer::Result::Prepared(_) => Ok(Prepared { socket, daemon }),
            answer::Result::Failed(failed) => {
                daemon.wait().unwrap();
                Err(failed.reason)
            }
            answer::Result::Ready(ready) => panic!("before Proceed: {ready:?}"),
        }
    }

    /// The earlier daemon has ended: the prepared one follows.
    pub(crate) fn proceed(&mut self, prepared: Prepared) {
        let Prepared { socket, daemon } = prepared;
        let kept = self.kept.as_ref().expect("it was prepared");
        let keeper = kept.keeper.socket();
        socket.send(&Proceed {}.encode_to_vec(), &[keeper.as_fd()]).unwrap();
        let answer = answer(&socket);
        assert!(matches!(answer, answer::Result::Ready(_)), "{answer:?}");
        self.daemon = Some(daemon);
    }

    /// The daemon that [`Self::take_over`] starts next.
    pub(crate) fn next_pid(&self) -> u32 {
        self.successors.front().expect("a successor was added").daemon.id()
    }

    fn hand_over(
        &mut self,
        setup: Setup,
        descriptors: &[OwnedFd; 5],
        continues: bool,
    ) -> Result<Ready, String> {
        let Started { mut daemon, listener } = self.successors.pop_front().expect("`successors` are enough");
        let socket = accept(&listener);
        let said = Hello {
            newest_version: proto::handover::VERSIONS.newest,
            nonce: NONCE.to_owned(),
            oldest_version: 3,
            release: RELEASE.to_owned(),
        };
        // It was killed before, and its tracer has waited for it.
        let Some(heard) = try_hello(&socket) else { return Err(String::new()) };
        assert_eq!(heard, said);
        let mut assignment = Assignment {
            volume_name: "test".to_owned(),
            capacity_bytes: setup.capacity_bytes,
            read_only: setup.read_only,
            threads: 0,
            inode_limit: setup.inode_limit,
            known_inode_limit: setup.known_inodes,
            data_path: setup.data_path().into(),
            capacity: setup.capacity().into(),
            changed_from_outside: setup.changed_from_outside,
            writeback_cache: setup.writeback_cache,
            continues,
            ..local_assignment()
        };
        let mut given: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let for_keeper = self.kept.as_ref().map(|kept| kept.keeper.socket());
        if let (Some(kept), Some(keeper)) = (&self.kept, &for_keeper) {
            assignment.descriptors.extend([Role::StateTable, Role::Keeper].map(i32::from));
            given.extend([kept.state.as_fd(), keeper.as_fd()]);
        }
        send_assignment(&socket, assignment, &given);
        match try_answer(&socket) {
            Some(answer::Result::Ready(ready)) => {
                assert!(
                    matches!(socket.receive(), Ok(None) | Err(_)),
                    "the daemon closes the connection after its answer"
                );
                self.daemon = Some(daemon);
                Ok(ready)
            }
            Some(answer::Result::Failed(failed)) => {
                daemon.wait().unwrap();
                Err(failed.reason)
            }
            // It was killed, and its tracer has waited for it.
            None => Err(String::new()),
            Some(answer::Result::Prepared(prepared)) => panic!("not asked for: {prepared:?}"),
        }
    }

    /// Another scratch directory, in the mount namespace of this thread.
    pub(crate) fn another_stage(&self) -> Stage {
        Stage::in_this_namespace()
    }

    /// `st_dev` of the volume's files, as major and minor.
    pub(crate) fn device(&self) -> (u32, u32) {
        (0, self.connection)
    }

    /// A shell run by `user` in the volume with `$0`, and the first line it writes.
    pub(crate) fn spawn_shell(&self, user: User, script: &str, name: &str) -> (Child, String) {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={}", user.uid), format!("--regid={}", user.gid)]);
        command.args(["--clear-groups", "sh", "-c", script, name]).current_dir(&self.path);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let output = child.stdout.take().expect("it is piped");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
        (child, line.trim_end().to_owned())
    }

    /// A connection of its own to the control socket.
    pub(crate) fn control(&self) -> Control {
        let socket = PacketSocket::connect(&self.stage.control).unwrap();
        socket.set_timeout(here(DAEMON_DEADLINE)).unwrap();
        Control { socket }
    }

    /// A connection to the metrics socket.
    pub(crate) fn scraper(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.stage.metrics).unwrap();
        stream.set_read_timeout(Some(here(DAEMON_DEADLINE))).unwrap();
        stream
    }

    pub(crate) fn control_socket(&self) -> &Path {
        &self.stage.control
    }

    pub(crate) fn usage_file(&self) -> &Path {
        &self.stage.usage
    }

    /// What the daemon says the volume uses, once it knows.
    pub(crate) fn usage(&self) -> Usage {
        loop {
            let usage = self.usage_now();
            if !usage.counting {
                return usage;
            }
            std::thread::yield_now();
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.daemon.as_ref().expect("the daemon was started").id()
    }

    /// Requests that the kernel has and that are not answered.
    pub(crate) fn waiting(&self) -> u64 {
        let path = self.stage.fusectl.join(self.connection.to_string()).join("waiting");
        std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
    }

    /// The removed files that the keeper holds.
    pub(crate) fn kept_nodes(&self) -> Vec<u64> {
        self.kept.as_ref().expect("the volume was served with `successors`").keeper.nodes()
    }

    /// The numbers of the backing files that are registered.
    pub(crate) fn registered(&self) -> BTreeSet<u32> {
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        kept.keeper.backings.lock().unwrap().registered.clone()
    }

    /// Registers a file as for a daemon that is killed before it reads the answer.
    pub(crate) fn register_unseen(&self, name: &str) {
        use rustix::fs::{Mode, OFlags};
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        let mut backings = kept.keeper.backings.lock().unwrap();
        let file = rustix::fs::openat(&backings.tree, name, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        backings.register(&file.unwrap()).unwrap();
    }

    /// Waits until as many backing files are registered: the daemon ends registrations without waiting.
    pub(crate) fn wait_for_registered(&self, count: usize) {
        let begun = Instant::now();
        while self.registered().len() != count {
            assert!(begun.elapsed() < here(DAEMON_DEADLINE), "{:?}", self.registered());
            std::thread::yield_now();
        }
    }

    /// The keeper ends; nothing that is sent to it arrives.
    pub(crate) fn end_keeper(&self) {
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        let (socket, serving) = kept.keeper.serving.lock().unwrap().take().expect("a daemon is connected");
        rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).unwrap();
        serving.join().unwrap();
    }

    /// From now on the keeper registers no file, or does again.
    pub(crate) fn let_keeper_refuse(&self, refuses: bool) {
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        kept.keeper.backings.lock().unwrap().refuses = refuses;
    }

    /// Another keeper takes the place of the one that the daemon knows.
    pub(crate) fn replace_keeper(&mut self) {
        self.replace_keeper_by_heir(&[]);
    }

    /// The new one holds something for `inherited`, which the daemon has not given it.
    pub(crate) fn replace_keeper_by_heir(&mut self, inherited: &[u64]) {
        let kept = self.kept.as_ref().expect("the volume was served with `successors`");
        let keeper = Keeper::of(&kept.device, &kept.tree);
        let held = |node: &u64| (*node, File::open("/dev/null").unwrap().into());
        keeper.held.lock().unwrap().extend(inherited.iter().map(held));
        // The numbers belong to the connection.
        keeper.backings.lock().unwrap().registered = self.registered();
        let socket = keeper.socket();
        let control = self.control();
        let asked = Request { kind: Some(request::Kind::ReplaceKeeper(ReplaceKeeper {})) };
        control.socket.send(&asked.encode_to_vec(), &[socket.as_fd()]).unwrap();
        assert_eq!(control.hear(), reply::Kind::Done(Done {}));
        let begun = Instant::now();
        let kept = self.kept.as_mut().expect("the volume was served with `successors`");
        while keeper.nodes().len() < kept.keeper.nodes().len() {
            assert!(begun.elapsed() < here(DAEMON_DEADLINE), "{:?}", keeper.nodes());
            std::thread::yield_now();
        }
        kept.keeper = keeper;
    }

    /// The words of the state table.
    pub(crate) fn state(&self) -> SharedWords {
        SharedWords::map(&self.kept.as_ref().expect("the volume was served with `successors`").state).unwrap()
    }

    /// What the daemon says the volume uses now, and whether it still counts.
    pub(crate) fn usage_now(&self) -> Usage {
        match self.control().ask(request::Kind::GetUsage(GetUsage {})) {
            reply::Kind::Usage(usage) => usage,
            other => panic!("{other:?}"),
        }
    }

    /// As if no daemon had written anything down.
    pub(crate) fn forget_state(&mut self) {
        let kept = self.kept.as_mut().expect("the volume was served with `successors`");
        kept.state = linux::shared_memory::create("state", state_table_bytes(500_000)).unwrap();
    }

    /// Ends the connection, whose daemon has ended.
    pub(crate) fn abort(&mut self) {
        mount::abort_fuse(&self.stage.fusectl, self.connection).unwrap();
    }

    /// kill -9; returns when it is dead.
    pub(crate) fn kill(&mut self) {
        let mut daemon = self.daemon.take().expect("the daemon was started");
        daemon.kill().unwrap();
        daemon.wait().unwrap();
        self.keeper_was_late |= log_so_far(&mut daemon).contains(KEEPER_IS_LATE);
    }

    /// The daemon has ended, and the caller knows that.
    pub(crate) fn forget_daemon(&mut self) {
        drop(self.daemon.take());
    }

    /// Unmounts and waits for the daemon. Returns how it ended and what it said.
    pub(crate) fn unmount(&mut self) -> (ExitStatus, String) {
        unmount(&self.path);
        let output = self.ended().expect("the daemon ends when its volume is unmounted");
        let log = String::from_utf8(output.stderr).unwrap();
        self.keeper_was_late |= log.contains(KEEPER_IS_LATE);
        (output.status, log)
    }

    /// Whether one of the daemons has logged [`KEEPER_IS_LATE`].
    fn keeper_was_late(&mut self) -> bool {
        let now = self.daemon.as_mut().is_some_and(|daemon| log_so_far(daemon).contains(KEEPER_IS_LATE));
        now || self.keeper_was_late
    }

    /// What a shell run by `user` in the volume says; panics if it fails.
    pub(crate) fn shell(&self, user: User, script: &str) -> String {
        let output = self.try_shell(user, script);
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
    }

    /// Remounts the file system: the kernel forgets every entry that is not in use.
    /// A system call: mount(8) would run mount.fuse, which asks for a program of the
    /// subtype's name.
    pub(crate) fn remount(&self, more: MsFlags) -> nix::Result<()> {
        let flags = MsFlags::MS_REMOUNT | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | more;
        nix::mount::mount(None::<&str>, &self.path, None::<&str>, flags, None::<&str>)
    }

    pub(crate) fn try_shell(&self, user: User, script: &str) -> Output {
        let mut command = Command::new("setpriv");
        command.args([format!("--reuid={}", user.uid), format!("--regid={}", user.gid)]);
        match user.group {
            Some(group) => command.arg(format!("--groups={group}")),
            None => command.arg("--clear-groups"),
        };
        command.args(["sh", "-c", script]).current_dir(&self.path).env("LC_ALL", "C").output().unwrap()
    }

    fn ended(&mut self) -> Option<Output> {
        let daemon = self.daemon.as_ref()?;
        wait_for(daemon)?;
        self.daemon.take().map(|daemon| daemon.wait_with_output().unwrap())
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        for Started { mut daemon, .. } in self.successors.drain(..) {
            daemon.kill().unwrap();
            daemon.wait().unwrap();
        }
        // The number of a volume that was unmounted may be another test's by now.
        let is_mounted = || {
            let mounted = linux::mountinfo::at(&self.path);
            mounted.is_ok_and(|found| found.is_some_and(|mount| mount.minor == self.connection))
        };
        if self.daemon.is_none() && self.kept.is_some() && is_mounted() {
            // Nothing else ends a connection that the test still holds.
            mount::abort_fuse(&self.stage.fusectl, self.connection).unwrap();
        }
        if self.daemon.is_some() {
            drop(mount::unmount(&self.path, UnmountMode::Detach));
            match self.ended() {
                Some(output) if std::thread::panicking() || output.status.success() => {}
                Some(output) => panic!("daemon: {}", String::from_utf8_lossy(&output.stderr)),
                None => {
                    mount::abort_fuse(&self.stage.fusectl, self.connection).unwrap();
                    let mut daemon = self.daemon.take().expect("it has not ended");
                    daemon.kill().unwrap();
                    daemon.wait().unwrap();
                    assert!(std::thread::panicking(), "the daemon outlived its volume");
                }
            }
        }
        drop(self.watchdog.take());
    }
}

/// Calls `test` with a new volume on a new stage. The keeper is a thread of this process: on a busy machine it may answer later than
/// the daemon waits, in all attempts but one.
pub(crate) fn with_prompt_keeper(stage: impl Fn() -> Stage, setup: Setup, test: impl Fn(&mut Volume)) {
    const ATTEMPTS: usize = 5;
    for attempt in 1..=ATTEMPTS {
        let mut volume = Volume::on(stage(), setup);
        let Err(failure) = catch_unwind(AssertUnwindSafe(|| test(&mut volume))) else { return };
        if attempt == ATTEMPTS || !volume.keeper_was_late() {
            resume_unwind(failure);
        }
    }
}

/// What a daemon has logged since the last call. Does not wait.
fn log_so_far(daemon: &mut Child) -> String {
    let pipe = daemon.stderr.as_mut().expect("it is piped");
    let (mut log, mut part) = (Vec::new(), [0; 4096]);
    // At its end the pipe is readable too.
    while readable(pipe.as_fd(), Duration::ZERO) {
        match pipe.read(&mut part).unwrap() {
            0 => break,
            length => log.extend(&part[..length]),
        }
    }
    String::from_utf8_lossy(&log).into_owned()
}

/// Unmounts what this test has no open file in.
pub(crate) fn unmount(target: &Path) {
    let begun = Instant::now();
    // A child of another test holds copies of this process's files until its execve.
    while let Err(error) = mount::unmount(target, UnmountMode::Plain) {
        let is_busy = error.errno() == nix::errno::Errno::EBUSY;
        assert!(is_busy && begun.elapsed() < here(DAEMON_DEADLINE), "{error}");
        std::thread::yield_now();
    }
}

/// The driver's end of a control connection.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) socket: PacketSocket,
}

impl Control {
    pub(crate) fn ask(&self, kind: request::Kind) -> reply::Kind {
        self.say(kind);
        self.hear()
    }

    pub(crate) fn say(&self, kind: request::Kind) {
        self.socket.send(&Request { kind: Some(kind) }.encode_to_vec(), &[]).unwrap();
    }

    pub(crate) fn hear(&self) -> reply::Kind {
        let packet = self.socket.receive().unwrap().expect("the daemon answers");
        Reply::decode(&*packet).unwrap().kind.expect("the answer says something")
    }
}

/// Who does something.
#[derive(Debug, Clone, Copy)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary group.
    pub(crate) group: Option<u32>,
}

pub(crate) const ROOT: User = User { uid: 0, gid: 0, group: None };
pub(crate) const ALICE: User = User { uid: 1001, gid: 2001, group: None };
pub(crate) const BOB: User = User { uid: 1002, gid: 2002, group: None };

#[derive(Debug)]
struct Watchdog {
    done: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    fn start(fusectl: PathBuf, connection: u32) -> Self {
        let (done, told) = channel::<()>();
        let thread = std::thread::spawn(move || {
            let deadline = here(TEST_DEADLINE);
            if told.recv_timeout(deadline) == Err(RecvTimeoutError::Timeout) {
                mount::abort_fuse(&fusectl, connection).unwrap();
                panic!("aborted FUSE connection {connection} after {deadline:?}");
            }
        });
        Self { done: Some(done), thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.done.take());
        if let Some(thread) = self.thread.take() {
            assert!(thread.join().is_ok() || std::thread::panicking(), "the test was aborted");
        }
    }
}

pub(crate) fn accept(listener: &PacketListener) -> PacketSocket {
    assert!(readable(listener.as_fd(), here(DAEMON_DEADLINE)), "the daemon dials");
    let socket = listener.accept().unwrap();
    socket.set_timeout(here(DAEMON_DEADLINE)).unwrap();
    socket
}

/// A daemon that waits for the end of the one that serves.
pub(crate) struct Prepared {
    socket: PacketSocket,
    daemon: Child,
}

impl Prepared {
    /// As a driver does that wants it no more, or that is killed.
    pub(crate) fn hang_up(mut self) -> ExitStatus {
        drop(self.socket);
        self.daemon.wait().unwrap()
    }
}

const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// The answer to a Ping.
pub(crate) fn pong() -> proto::control::reply::Kind {
    let (version, release) = (proto::control::VERSION, RELEASE.to_owned());
    proto::control::reply::Kind::Pong(proto::control::Pong { version, release })
}

pub(crate) fn hello(socket: &PacketSocket) -> Hello {
    try_hello(socket).expect("the daemon says Hello")
}

fn try_hello(socket: &PacketSocket) -> Option<Hello> {
    socket.receive().unwrap().map(|packet| Hello::decode(&*packet).unwrap())
}

/// Of the backend local, with the descriptors that [`Stage::descriptors`] gives.
pub(crate) fn local_assignment() -> Assignment {
    Assignment {
        descriptors: ROLES.map(i32::from).to_vec(),
        backend: Some(assignment::Backend::Local(Local {})),
        ..Assignment::default()
    }
}

pub(crate) fn send_assignment(socket: &PacketSocket, assignment: Assignment, descriptors: &[BorrowedFd<'_>]) {
    let reply = HelloReply { kind: Some(hello_reply::Kind::Assignment(assignment)) };
    socket.send(&reply.encode_to_vec(), descriptors).unwrap();
}

pub(crate) fn answer(socket: &PacketSocket) -> answer::Result {
    try_answer(socket).expect("the daemon answers")
}

/// `None` if the daemon ended first.
fn try_answer(socket: &PacketSocket) -> Option<answer::Result> {
    let packet = match socket.receive() {
        Ok(packet) => packet?,
        Err(error) if error.errno() == nix::errno::Errno::ECONNRESET => return None,
        Err(error) => panic!("{error}"),
    };
    Some(Answer::decode(&*packet).unwrap().result.expect("the answer says something"))
}

/// Waits for the end of a process, not for its exit status.
pub(crate) fn wait_for(child: &Child) -> Option<()> {
    let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    readable(pidfd.as_fd(), here(DAEMON_DEADLINE)).then_some(())
}

fn readable(fd: BorrowedFd<'_>, deadline: Duration) -> bool {
    let timeout = Timespec::try_from(deadline).unwrap();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).unwrap() == 1
}

pub(crate) fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
}

pub(crate) fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().expect("the kernel's own error")
}

/// Plays the keeper, for one daemon after the other.
#[derive(Debug)]
struct Keeper {
    held: Arc<Mutex<BTreeMap<u64, OwnedFd>>>,
    backings: Arc<Mutex<Backings>>,
    /// With its end of the socket.
    serving: Mutex<Option<(OwnedFd, JoinHandle<()>)>>,
}

impl Keeper {
    /// The socket of the next daemon. The one before must have ended.
    fn socket(&self) -> OwnedFd {
        let (ours, daemons) = PacketSocket::pair().unwrap();
        let held = Arc::clone(&self.held);
        let mut serving = self.serving.lock().unwrap();
        if let Some((socket, earlier)) = serving.take() {
            // What the daemon sent is still read. Its end alone does not end the thread: a child of
            // another test has a copy of the daemon's end until its execve, which may wait for a
            // daemon.
            rustix::net::shutdown(&socket, rustix::net::Shutdown::Read).unwrap();
            earlier.join().unwrap();
        }
        let socket = ours.as_fd().try_clone_to_owned().unwrap();
        let backings = Arc::clone(&self.backings);
        let serve = move || serve_daemon(&ours, &held, &backings);
        *serving = Some((socket, std::thread::spawn(serve)));
        let daemons = OwnedFd::from(daemons);
        rustix::fs::fcntl_setfl(&daemons, rustix::fs::OFlags::NONBLOCK).unwrap();
        daemons
    }

    fn of(connection: &OwnedFd, tree: &OwnedFd) -> Self {
        let backings = Backings {
            connection: connection.try_clone().unwrap(),
            tree: tree.try_clone().unwrap(),
            registered: BTreeSet::new(),
            refuses: false,
        };
        Self { held: Arc::default(), serving: Mutex::default(), backings: Arc::new(Mutex::new(backings)) }
    }

    fn nodes(&self) -> Vec<u64> {
        self.held.lock().unwrap().keys().copied().collect()
    }
}

/// The files that the kernel passes requests to, as the keeper registers them.
#[derive(Debug)]
struct Backings {
    connection: OwnedFd,
    tree: OwnedFd,
    registered: BTreeSet<u32>,
    /// As a keeper that has no room.
    refuses: bool,
}

impl Backings {
    fn register(&mut self, file: &OwnedFd) -> Result<u32, Refusal> {
        if self.refuses {
            return Err(Refusal::Full);
        }
        keeper::descriptors::check_backing(file.as_fd(), self.tree.as_fd())?;
        let registrar = linux::fuse_backing::Registrar::on_this_thread().unwrap();
        let number = registrar.register(self.connection.as_fd(), file.as_fd()).unwrap();
        self.registered.insert(number);
        Ok(number)
    }

    fn unregister(&mut self, number: u32) {
        if linux::fuse_backing::unregister(&self.connection, number).is_ok() {
            assert!(self.registered.remove(&number), "{number} was registered");
        }
    }
}

/// Until the daemon ends.
fn serve_daemon(socket: &PacketSocket, held: &Mutex<BTreeMap<u64, OwnedFd>>, backings: &Mutex<Backings>) {
    while let Ok(Some((packet, mut fds))) = socket.receive_with_fds(1) {
        let mut held = held.lock().unwrap();
        match DaemonRequest::decode(&packet).unwrap() {
            DaemonRequest::PutRemoved { node } => drop(held.insert(node, fds.pop().unwrap())),
            DaemonRequest::DropRemoved { node } => drop(held.remove(&node)),
            DaemonRequest::RegisterBacking { number } => {
                let registered = backings.lock().unwrap().register(&fds.pop().unwrap());
                let (kind, backing) = match registered {
                    Ok(backing) => (Kind::Registered, Some(backing)),
                    Err(refusal) => (Kind::NotRegistered(refusal), None),
                };
                let count = backing.iter().count().try_into().unwrap();
                let mut packet = DaemonPacket { version: VERSION, kind, count, number }.encode().to_vec();
                backing.iter().for_each(|backing| packet.extend(u64::from(*backing).to_le_bytes()));
                // Not to a daemon that was killed.
                drop(socket.send(&packet, &[]));
            }
            DaemonRequest::UnregisterBacking { backing } => backings.lock().unwrap().unregister(backing),
            DaemonRequest::ListRemoved { number } => {
                let all: Vec<(&u64, &OwnedFd)> = held.iter().collect();
                let header = |kind, count: usize| {
                    DaemonPacket { version: VERSION, kind, count: count.try_into().unwrap(), number }.encode()
                };
                for some in all.chunks(MOST_NODES) {
                    let mut packet = header(Kind::Removed, some.len()).to_vec();
                    some.iter().for_each(|(node, _)| packet.extend(node.to_le_bytes()));
                    let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, fd)| fd.as_fd()).collect();
                    if socket.send(&packet, &fds).is_err() {
                        // The daemon was killed.
                        return;
                    }
                }
                if socket.send(&header(Kind::End, 0), &[]).is_err() {
                    return;
                }
            }
        }
    }
}
