//! Finds and kills hung daemons: those that answer no FUSE request while users wait, even if they still
//! answer on their control socket. With a keeper, another daemon continues the connection. Without one, or
//! after [`MOST_HUNG`] hung daemons in a row, the driver aborts the connection, and users get ENOTCONN
//! instead of waiting forever (docs/decisions/0032-hung-daemons.md).
//!
//! Invariant: the driver's own requests to a volume use a mount of their own ([`own_mount`]) and
//! are counted ([`Hangs::asking`]). So a stuck thread of the driver does not count as a user of a
//! path or of a connection.

mod killed;
mod tally;

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use linux::mount::FuseConnections;
use nix::errno::Errno;
use proto::control::written;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};
use tokio::sync::Notify;
use tokio::time::Instant;

use self::killed::Task;
use self::tally::{Seen, Tally, Verdict};
use crate::daemon::notes::Finding;
use crate::engine::daemons::Daemons;
use crate::engine::deaths::MOST_HUNG;
use crate::engine::locks::{Lock, Locks};
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::mounts::{self, ConnectionMount};
use crate::model::counts::Counts;
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::model::records::{Serving, StageRecord, VolumeRecord};

/// The daemon's threads are checked this often in each deadline: a daemon on a slow disk is not
/// always in a disk wait when it is checked.
const LOOKS: u32 = 10;
/// Probes of one daemon at the same time. The second one shows whether the daemon only lost the
/// first request.
const MOST_PROBES: u64 = 2;
/// Without a deadline, killed daemons that cannot end are looked for this often.
const KILLED_LOOK: Duration = Duration::from_secs(10);
/// Retry interval while another operation holds a hung volume's lock.
const LOCK_RETRY: Duration = Duration::from_millis(200);

/// A private mount of the volume: a request that is stuck in it keeps no path busy. Making it sends
/// no request to the daemon.
pub(crate) fn own_mount(path: &Path, connection_minor: u32) -> linux::Result<OwnedFd> {
    let tree = linux::mount::open_tree_clone(path)?;
    if linux::mount::minor_of(&tree)? == connection_minor {
        return Ok(tree);
    }
    Err(linux::Error::at("find the volume at", path, Errno::ENODEV))
}

/// [`own_mount`], and its root directory.
fn own_root(path: &Path, connection_minor: u32) -> linux::Result<(OwnedFd, OwnedFd)> {
    let mount = own_mount(path, connection_minor)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(&mount, ".", flags, Mode::empty())
        .map_err(|e| linux::Error::at("open the volume at", path, e))?;
    Ok((mount, root))
}

/// Flushes all writes to the volume at `path`, also those through mappings. Returns the private
/// mount that it used.
pub(crate) fn flush(path: &Path, connection_minor: u32) -> linux::Result<OwnedFd> {
    let (mount, root) = own_root(path, connection_minor)?;
    rustix::fs::syncfs(root).map_err(|e| linux::Error::at("syncfs", path, e))?;
    Ok(mount)
}

/// Waits until the kernel has sent what it keeps of these files of the volume at `path` to the daemon, and
/// the daemon has answered. syncfs(2) may return before that; close(2) of any descriptor of the file does
/// not (fuse_flush). Returns the nodes that could not be opened since the kernel does not know them so.
pub(crate) fn write_back(
    path: &Path,
    connection_minor: u32,
    files: &[written::File],
) -> linux::Result<Vec<u64>> {
    let (_mount, root) = own_root(path, connection_minor)?;
    let mut unknown = Vec::new();
    for written::File { node, generation } in files {
        let what = || format!("node {node} of the volume at {}", path.display());
        // The daemon may name any file of its volume, also a FIFO.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        match linux::fs_at::open_fuse_node(root.as_fd(), *node, *generation, flags) {
            Ok(file) => nix::unistd::close(file).map_err(|e| linux::Error::new("write back", what(), e))?,
            Err(rustix::io::Errno::STALE | rustix::io::Errno::NOENT) => unknown.push(*node),
            Err(errno) => return Err(linux::Error::new("open", what(), errno)),
        }
    }
    Ok(unknown)
}

#[derive(Debug)]
pub(crate) struct HangWatch {
    pub(crate) journal: Arc<Journal>,
    pub(crate) daemons: Arc<Daemons>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) locks: Locks,
    pub(crate) counts: Arc<Counts>,
    /// `None`: no daemon is killed (`--daemon-deadline 0`).
    pub(crate) deadline: Option<Duration>,
}

impl HangWatch {
    /// Checks all volumes in a loop without end.
    pub(crate) async fn run(self: Arc<Self>) {
        let Some(deadline) = self.deadline else { return self.follow_killed().await };
        loop {
            tokio::time::sleep(deadline / 2).await;
            for (volume_id, serving) in self.look(Self::awaited).await.unwrap_or_default() {
                if let Some(noted) = self.daemons.hangs.examining(&volume_id) {
                    let watch = self.clone();
                    tokio::spawn(async move {
                        let _until_examined = noted;
                        Examination { watch, volume_id, serving, deadline }.run().await;
                    });
                }
            }
        }
    }

    /// `None` after an error, which is in the log.
    async fn look<T: Send + 'static>(self: &Arc<Self>, how: fn(&Self) -> Result<T>) -> Option<T> {
        let looking = self.clone();
        // A panic is in the log already.
        let found = tokio::task::spawn_blocking(move || how(&looking)).await.ok()?;
        found.inspect_err(|error| tracing::warn!(error = chain(error), "look for hung daemons")).ok()
    }

    /// Without a deadline: starts other daemons for those that were killed and cannot end, in a loop without
    /// end. The kernel reports no end of them.
    async fn follow_killed(self: Arc<Self>) {
        if !self.daemons.keeper.keeps_connections() {
            return;
        }
        loop {
            tokio::time::sleep(KILLED_LOOK).await;
            self.look(Self::report_killed).await;
        }
    }

    fn report_killed(&self) -> Result<()> {
        for (volume_id, serving) in self.awaited()? {
            if self.awaits_successor(&volume_id, serving)? {
                self.daemons.watch.report_killed(&volume_id, serving.daemon);
            }
        }
        Ok(())
    }

    /// Whether the daemon cannot end, and another one can follow.
    fn awaits_successor(&self, volume_id: &VolumeId, serving: Serving) -> Result<bool> {
        let cannot_end = serving.daemon.cannot_end().step("look at daemon")?;
        Ok(cannot_end && self.stages.has_successor(volume_id)?)
    }

    /// The volumes whose users wait for their daemons now.
    fn awaited(&self) -> Result<Vec<(VolumeId, Serving)>> {
        let connections = FuseConnections::open().step("look at connections")?;
        let served = |stage: StageRecord| stage.serving.filter(|_| !stage.aborted);
        let mut awaited = Vec::new();
        for (volume_id, record) in self.journal.list() {
            if let Some(serving) = record.stage.and_then(served)
                && self.users_wait(&connections, &volume_id, serving)?
            {
                awaited.push((volume_id, serving));
            }
        }
        Ok(awaited)
    }

    /// Whether requests other than the driver's own wait on the connection.
    fn users_wait(
        &self,
        connections: &FuseConnections,
        volume_id: &VolumeId,
        serving: Serving,
    ) -> Result<bool> {
        // In this order: a request of the driver that begins in between is not taken for a user's.
        let waiting = connections.waiting(serving.connection_minor).step("look at connection")?;
        Ok(waiting.unwrap_or_default() > self.daemons.hangs.own_requests(volume_id))
    }

    /// Killed processes that wait for the volume's daemon, if every pod with the volume on this
    /// node is being taken down. A pod that stays may be served well: then the daemon stays, and
    /// the killed processes wait until that pod leaves too.
    fn killed_users(&self, volume_id: &VolumeId, serving: Serving) -> Result<BTreeSet<Task>> {
        let leaving = self.daemons.hangs.leaving_targets(volume_id);
        let Some(record) = self.journal.find(volume_id)? else { return Ok(BTreeSet::new()) };
        if record.targets.is_empty() || !record.targets.keys().all(|target| leaving.contains(target)) {
            return Ok(BTreeSet::new());
        }
        let connections = FuseConnections::open().step("look at connections")?;
        killed::waiting_for(serving.connection_minor, &connections).step("look for killed processes")
    }

    /// Ends the daemon and the connection of a volume whose lock is held, unless another daemon
    /// serves it now.
    fn end_hung(&self, volume_id: &VolumeId, serving: Serving, seen: Seen) -> Result<()> {
        // Checked under the lock: a pod that was published meanwhile keeps the daemon.
        if seen == Seen::KilledUsers && self.killed_users(volume_id, serving)?.is_empty() {
            return Ok(());
        }
        let Some(mut record) = self.journal.find(volume_id)? else { return Ok(()) };
        let is_it = |stage: &StageRecord| stage.serving == Some(serving) && !stage.aborted;
        if !record.stage.as_ref().is_some_and(is_it) {
            return Ok(());
        }
        self.locks.check_not_copied(volume_id)?;
        if seen != Seen::KilledUsers {
            let is_alive = serving.daemon.is_alive().step("look at daemon")?;
            if !is_alive && self.stages.has_successor(volume_id)? {
                // It does not hang: a takeover is under way, and may have to wait for the keeper. If none is, one begins.
                self.daemons.watch.report(volume_id, serving.daemon);
                return Ok(());
            }
            if self.replace_hung(volume_id, &mut record, serving)? {
                return Ok(());
            }
        }
        let Some(stage) = record.stage.as_mut().filter(|stage| is_it(stage)) else { return Ok(()) };
        stage.aborted = true;
        if let Err(error) = self.journal.put(volume_id, &record) {
            // For example, a full disk. Once the daemon has ended, the journal entry is not needed.
            tracing::warn!(%volume_id, error = chain(&error), "journal the end of a hung daemon");
        }
        self.daemons.watch.stop(volume_id);
        self.daemons.release_connection(volume_id);
        self.daemons.hangs.found(volume_id, Some(Finding::Ended));
        self.counts.hung_daemons.inc();
        let (pid, deadline) = (serving.daemon.pid, self.deadline.unwrap_or_default());
        let deadline_seconds = deadline.as_secs();
        if seen == Seen::KilledUsers {
            tracing::error!(
                %volume_id,
                pid,
                deadline_seconds,
                "killed processes of the volume's pods waited for its daemon for three deadlines, and no pod \
                 is to keep the volume: the daemon is killed"
            );
        } else {
            tracing::error!(
                %volume_id,
                pid,
                deadline_seconds,
                "the volume's daemon answered no request for three deadlines and is killed: its pods get \
                 ENOTCONN; the next stage or publish starts another"
            );
        }
        serving.daemon.kill().step("end daemon")?;
        let minor = serving.connection_minor;
        mounts::abort_connection(minor, || mounts::is_connection_of(volume_id, minor))?;
        if !serving.daemon.is_gone_within(limits::CLOSING).step("end daemon")? {
            // For example, a frozen cgroup. The connection has ended all the same.
            tracing::warn!(%volume_id, pid = serving.daemon.pid, "the hung daemon still runs after SIGKILL");
        }
        Ok(())
    }
}

impl HangWatch {
    /// Kills a hung daemon, so that another one continues its connection. False if none can, or if
    /// too many in a row were hung: then the connection is to be aborted.
    fn replace_hung(
        &self,
        volume_id: &VolumeId,
        record: &mut VolumeRecord,
        serving: Serving,
    ) -> Result<bool> {
        if !self.stages.has_successor(volume_id)? || self.stages.deaths.hung(volume_id) > MOST_HUNG {
            return Ok(false);
        }
        let (pid, deadline_seconds) = (serving.daemon.pid, self.deadline.unwrap_or_default().as_secs());
        tracing::error!(
            %volume_id,
            pid,
            deadline_seconds,
            "the volume's daemon answered no request for three deadlines and is killed: another one continues"
        );
        self.counts.hung_daemons.inc();
        self.daemons.watch.stop(volume_id);
        if !serving.daemon.end(Duration::ZERO).step("end daemon")? {
            // For example, a frozen cgroup: while it lives, it may still answer.
            return Ok(false);
        }
        self.stages.take_over(volume_id, record)
    }
}

/// Examines one daemon that users wait for, until it answers or is ended.
#[derive(Clone)]
struct Examination {
    watch: Arc<HangWatch>,
    volume_id: VolumeId,
    serving: Serving,
    deadline: Duration,
}

impl Examination {
    async fn run(self) {
        let (volume_id, pid) = (&self.volume_id, self.serving.daemon.pid);
        let hangs = &self.watch.daemons.hangs;
        let (mut tally, answered) = (Tally::default(), Arc::new(Notify::new()));
        let ended = loop {
            let seen = match self.one_deadline(&answered).await {
                Ok(Some(seen)) => seen,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            match tally.missed(seen) {
                Verdict::Wait => {}
                Verdict::DiskStalls => {
                    tracing::error!(%volume_id, pid, "the pool's disk stalls: the volume's daemon waits for it, and its users wait");
                    hangs.found(volume_id, Some(Finding::DiskStalls));
                    self.watch.counts.disk_stalls.inc();
                }
                Verdict::Hung => break self.end(&answered, seen).await,
            }
        };
        if let Err(error) = ended {
            tracing::warn!(%volume_id, error = chain(&error), "examine a daemon that does not answer");
        }
        if tally.is_stall_reported() && hangs.finding(volume_id) == Some(Finding::DiskStalls) {
            tracing::info!(%volume_id, pid, "the volume's daemon answers again");
            hangs.found(volume_id, None);
        }
    }

    /// The result of one deadline without an answer, or with an answer but with killed users still
    /// waiting. `None` if the daemon answered, no user waits any more, or the daemon cannot be
    /// asked.
    async fn one_deadline(&self, answered: &Arc<Notify>) -> Result<Option<Seen>> {
        if self.watch.daemons.hangs.own_requests(&self.volume_id) < MOST_PROBES {
            let Some(path) = self.blocking(Self::path).await? else { return Ok(None) };
            self.probe(&path, answered.clone())?;
        }
        let (mut in_disk_wait, mut held_back) = (false, false);
        let mut killed = self.blocking(Self::killed_users).await?;
        let begun = Instant::now();
        for look in 1..=LOOKS {
            if self.blocking(Self::awaits_successor).await? {
                // It does not hang: it was killed, and ends once another one answers its users.
                self.watch.daemons.watch.report_killed(&self.volume_id, self.serving.daemon);
                return Ok(None);
            }
            let until = begun + self.deadline * look / LOOKS;
            tokio::select! {
                () = answered.notified(), if killed.is_empty() => return Ok(None),
                () = tokio::time::sleep_until(until) => {}
            }
            if !killed.is_empty() {
                let now = self.blocking(Self::killed_users).await?;
                killed.retain(|task| now.contains(task));
            }
            held_back |= self.watch.daemons.hangs.is_held_back(&self.volume_id);
            in_disk_wait |= self.blocking(Self::waits_for_disk).await?;
        }
        if !self.blocking(Self::users_wait).await? {
            return Ok(None);
        }
        Ok(Some(match (held_back, in_disk_wait) {
            (true, _) => Seen::HeldBack,
            (false, true) => Seen::DiskWait,
            (false, false) if self.blocking(|this| Ok(this.is_counting())).await? => Seen::Counting,
            (false, false) if !killed.is_empty() => Seen::KilledUsers,
            (false, false) => Seen::Silence,
        }))
    }

    /// Requests statfs and the attributes of the volume's root, on a thread that is abandoned if
    /// one request gets no answer.
    fn probe(&self, path: &Path, answered: Arc<Notify>) -> Result<()> {
        let mount = own_mount(path, self.serving.connection_minor).step("look at volume")?;
        let asking = self.watch.daemons.hangs.asking(&self.volume_id);
        let ask = move || {
            // An error is an answer too: from the daemon, or from the kernel after the daemon's
            // end.
            let _answer = nix::sys::statvfs::fstatvfs(&mount);
            let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
            let _answer = rustix::fs::statx(&mount, "", flags, StatxFlags::BASIC_STATS);
            drop((mount, asking));
            answered.notify_one();
        };
        let started = std::thread::Builder::new().name("probe".to_owned()).spawn(ask);
        started
            .map(drop)
            .map_err(|e| linux::Error::new("start thread for", &self.volume_id, e))
            .step("start thread")
    }

    /// Waits for the volume's lock, because a call under way may end the hang, then ends the
    /// daemon.
    async fn end(&self, answered: &Arc<Notify>, seen: Seen) -> Result<()> {
        loop {
            match self.watch.locks.hold(Lock::Volume(self.volume_id.as_str())) {
                Ok(guard) => {
                    let serving = self.serving;
                    let ended = self.blocking(move |this| {
                        let _guard = guard;
                        this.watch.end_hung(&this.volume_id, serving, seen)
                    });
                    return ended.await;
                }
                // A snapshot is being cut: after it, the daemon again gets three deadlines.
                Err(_) if self.watch.daemons.hangs.is_held_back(&self.volume_id) => return Ok(()),
                Err(Error::Pending { .. }) => {}
                Err(error) => return Err(error),
            }
            tokio::select! {
                () = answered.notified(), if seen != Seen::KilledUsers => return Ok(()),
                () = tokio::time::sleep(LOCK_RETRY) => {}
            }
        }
    }

    fn path(&self) -> Result<Option<std::path::PathBuf>> {
        Ok(match mounts::connection_mount(&self.volume_id, self.serving.connection_minor)? {
            ConnectionMount::At(mount) => Some(mount.mount_point),
            ConnectionMount::Hidden | ConnectionMount::Nowhere => None,
        })
    }

    /// Whether the daemon cannot end, and another one can follow. Otherwise the connection is aborted after three
    /// deadlines.
    fn awaits_successor(&self) -> Result<bool> {
        self.watch.awaits_successor(&self.volume_id, self.serving)
    }

    fn users_wait(&self) -> Result<bool> {
        let connections = FuseConnections::open().step("look at connections")?;
        self.watch.users_wait(&connections, &self.volume_id, self.serving)
    }

    fn killed_users(&self) -> Result<BTreeSet<Task>> {
        self.watch.killed_users(&self.volume_id, self.serving)
    }

    fn waits_for_disk(&self) -> Result<bool> {
        linux::disk_wait::waits_for_disk(self.serving.daemon.pid).step("look at daemon")
    }

    fn is_counting(&self) -> bool {
        let control = self.watch.daemons.control(&self.volume_id, limits::STATISTICS);
        let usage = control.and_then(|control| control.usage());
        usage.is_ok_and(|usage| usage.counting)
    }

    async fn blocking<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let this = self.clone();
        let looked = tokio::task::spawn_blocking(move || look(&this));
        looked.await.unwrap_or(Err(Error::Panicked { operation: "look for a hung daemon" }))
    }
}
