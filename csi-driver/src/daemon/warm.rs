//! Daemons that are started before they get a volume, so that neither a stage nor a takeover waits for
//! a start.
//!
//! A waiting daemon has dialled in and shown its nonce. It knows no volume, and has the settings that a
//! volume has by default; a volume with others gets a daemon of its own. The keeper has duplicates of
//! the waiting daemons' sockets, so that a volume gets one of them also while no driver runs. The next
//! driver ends those that still wait, and starts its own.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::Notify;

use super::launcher::{LaunchSpec, Launcher, memory};
use crate::daemon::dial::DialDir;
use crate::daemon::handover::{Dialled, Expected, NoDaemon, wait_for_daemon};
use crate::daemon::keeper::Keeper;
use crate::daemon::watch;
use crate::error::chain;
use crate::model::ids::VolumeId;
use crate::model::launch::{LaunchId, LaunchKey};
use crate::model::settings::LaunchSettings;

/// After a start that failed; doubled with each one in a row.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const LAST_RETRY: Duration = Duration::from_secs(60);
/// After a daemon was taken. Longer than a hand-over.
const BEFORE_NEXT: Duration = Duration::from_millis(25);
/// A waiting daemon has nothing to finish.
const NO_GRACE: Duration = Duration::ZERO;
/// A volume may have any number of inodes.
const ANY_NUMBER: u64 = 0;

#[derive(Debug)]
pub(crate) struct WarmDaemons {
    launcher: Arc<dyn Launcher>,
    keeper: Arc<dyn Keeper>,
    run_dir: PathBuf,
    /// Limit from a daemon's launch until it dials in.
    start_timeout: Duration,
    /// How many daemons are to wait.
    wanted: usize,
    /// A daemon of the configured program has dialled in to this driver.
    is_tried: AtomicBool,
    state: Mutex<State>,
    /// Fewer daemons may wait than are wanted.
    changed: Notify,
    /// Readable once no more daemon is to start.
    closed: EventFd,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<WarmDaemon>,
    is_closed: bool,
}

/// A daemon that has dialled in.
#[derive(Debug)]
pub(crate) struct WarmDaemon {
    pub(crate) key: LaunchKey,
    pub(crate) launch: LaunchId,
    /// The launch, as the launcher describes it in messages.
    pub(crate) described: String,
    pub(crate) dialled: Dialled,
}

/// Why no daemon was started ahead of its volume.
#[derive(Debug)]
pub(crate) struct NotStarted {
    pub(crate) reason: NoDaemon,
    /// The launch, as the launcher describes it in messages, if it came so far.
    pub(crate) launch: Option<String>,
    /// The last log line of a daemon that ended, if the driver has its log.
    pub(crate) log: Option<String>,
}

impl WarmDaemons {
    /// Starts nothing yet: that is [`Self::run`].
    pub(crate) fn new(
        launcher: Arc<dyn Launcher>,
        keeper: Arc<dyn Keeper>,
        run_dir: PathBuf,
        start_timeout: Duration,
        wanted: usize,
    ) -> linux::Result<Self> {
        let closed = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| linux::Error::new("eventfd", "the waiting daemons", e))?;
        let (is_tried, state, changed) = (AtomicBool::new(false), Mutex::default(), Notify::new());
        Ok(Self { launcher, keeper, run_dir, start_timeout, wanted, is_tried, state, changed, closed })
    }

    /// Whether a waiting daemon does for a volume with these settings and so many inodes.
    pub(crate) fn suits(settings: &LaunchSettings, inode_limit: u64) -> bool {
        let default = LaunchSettings::default();
        let LaunchSettings {
            name_prefix,
            labels,
            resources,
            log_level,
            grace_seconds,
            delete_delay_seconds: _,
            threads: _,
            known_inode_limit: _,
            data_path: _,
            capacity: _,
            changed_from_outside: _,
            writeback_cache: _,
        } = settings;
        let has_default_pod = *name_prefix == default.name_prefix
            && *labels == default.labels
            && *resources == default.resources
            && *log_level == default.log_level
            && *grace_seconds == default.grace_seconds;
        let memory = |inodes, known| memory::default_limit_bytes(inodes, known);
        has_default_pod
            && memory(inode_limit, settings.known_inodes()) <= memory(ANY_NUMBER, default.known_inodes())
    }

    /// Whether any are to wait.
    pub(crate) fn are_wanted(&self) -> bool {
        self.wanted > 0
    }

    /// A daemon of the configured program has dialled in.
    pub(crate) fn note_tried(&self) {
        self.is_tried.store(true, Ordering::Relaxed);
    }

    /// Whether a daemon of the configured program has dialled in to this driver. Where none are to wait, it
    /// starts one for that alone. Must be called in a tokio context.
    pub(crate) fn try_program(&self) -> Result<bool, NoDaemon> {
        if !self.is_tried.load(Ordering::Relaxed) && !self.are_wanted() {
            let settings = LaunchSettings::default();
            let started = self.start_ahead(None, &settings, ANY_NUMBER, self.closed.as_fd());
            let WarmDaemon { key, launch, dialled, .. } = started.map_err(|not| not.reason)?;
            self.end(&key, &launch, Some(&dialled));
        }
        Ok(self.is_tried.load(Ordering::Relaxed))
    }

    /// A waiting daemon, if there is one. Another is started in its place.
    pub(crate) fn take(&self) -> Option<WarmDaemon> {
        loop {
            let waiting = self.locked().waiting.pop_front();
            self.changed.notify_one();
            let WarmDaemon { key, launch, dialled, .. } = waiting.as_ref()?;
            match self.keeper.reclaim(key) {
                Ok(()) => return waiting,
                // It could get another volume from the keeper.
                Err(error) => {
                    tracing::warn!(%key, error = chain(&error), "a waiting daemon is ended");
                    self.end(key, launch, Some(dialled));
                }
            }
        }
    }

    /// Gives a new keeper what the earlier one had.
    pub(crate) fn lend_all(&self) {
        self.locked().waiting.iter().for_each(|waiting| self.lend(waiting));
    }

    fn lend(&self, WarmDaemon { key, dialled, .. }: &WarmDaemon) {
        if let Some(socket) = dialled.for_keeper()
            && let Err(error) = self.keeper.lend(key, socket)
        {
            tracing::warn!(%key, error = chain(&error), "the keeper does not hold a waiting daemon's socket");
        }
    }

    /// Ends a daemon that got no volume, and removes what its launch made.
    pub(crate) fn end(&self, key: &LaunchKey, launch: &LaunchId, daemon: Option<&Dialled>) {
        let ended = || -> linux::Result<()> {
            self.launcher.remove(launch)?;
            for process in [daemon.map(|dialled| dialled.daemon), launch.process()].into_iter().flatten() {
                process.end(NO_GRACE)?;
            }
            self.launcher.clear(key)?;
            DialDir::of(&self.run_dir, key).remove()
        };
        if let Err(error) = ended() {
            tracing::warn!(%key, error = chain(&error), "a daemon without a volume left something behind");
        }
    }

    /// Starts daemons until [`Self::close`]. A start that fails is tried again later; volumes then
    /// start daemons of their own.
    pub(crate) async fn run(self: Arc<Self>) {
        let mut retry = FIRST_RETRY;
        loop {
            while self.lacks() {
                let daemons = self.clone();
                let started = tokio::task::spawn_blocking(move || daemons.start()).await;
                match started {
                    Ok(Ok(())) => retry = FIRST_RETRY,
                    Ok(Err(NoDaemon::Abandoned)) => return,
                    Ok(Err(error)) => {
                        tracing::warn!(error = chain(&error), again_in = ?retry, "no daemon waits for the next volume");
                        tokio::time::sleep(retry).await;
                        retry = (retry * 2).min(LAST_RETRY);
                    }
                    // It is in the log.
                    Err(_panic) => return,
                }
            }
            self.changed.notified().await;
            // The volume that has just got one is served first: a start takes all of two processors.
            tokio::time::sleep(BEFORE_NEXT).await;
        }
    }

    /// Ends the waiting daemons, unless the keeper may need them, and starts none from here on.
    pub(crate) fn close(&self) {
        // Fails only if the counter is full: then the descriptor is readable already.
        let _readable_either_way = self.closed.write(1);
        let waiting = {
            let mut state = self.locked();
            state.is_closed = true;
            std::mem::take(&mut state.waiting)
        };
        if self.keeper.stands_by() {
            return;
        }
        for WarmDaemon { key, launch, dialled, .. } in waiting {
            self.end(&key, &launch, Some(&dialled));
        }
    }

    fn lacks(&self) -> bool {
        let state = self.locked();
        !state.is_closed && state.waiting.len() < self.wanted
    }

    /// Starts one daemon and waits until it has dialled in.
    fn start(self: &Arc<Self>) -> Result<(), NoDaemon> {
        let settings = LaunchSettings::default();
        let started = self.start_ahead(None, &settings, ANY_NUMBER, self.closed.as_fd());
        let started = started.map_err(|not| not.reason)?;
        let pidfd = match started.dialled.pidfd.try_clone() {
            Ok(pidfd) => pidfd,
            Err(error) => {
                self.end(&started.key, &started.launch, Some(&started.dialled));
                return Err(not_duplicated(error).into());
            }
        };
        let (key, pid) = (started.key.clone(), started.dialled.daemon.pid);
        self.add(started);
        tracing::info!(%key, pid, "a daemon waits for the next volume");
        tokio::spawn(replace_ended(self.clone(), key, pidfd));
        Ok(())
    }

    /// Starts a daemon with these settings that gets its volume later, or this volume soon, and waits
    /// until it has dialled in, or `abandoned` is readable. Must be called in a tokio context.
    pub(crate) fn start_ahead(
        &self,
        volume_id: Option<&VolumeId>,
        settings: &LaunchSettings,
        inode_limit: u64,
        abandoned: BorrowedFd<'_>,
    ) -> Result<WarmDaemon, NotStarted> {
        let not = |reason: linux::Error| NotStarted { reason: reason.into(), launch: None, log: None };
        let key = LaunchKey::of_number(u128::from_ne_bytes(linux::random::bytes().map_err(not)?));
        let dial = DialDir::of(&self.run_dir, &key);
        let listener = dial.listen().map_err(not)?;
        let nonce = linux::random::hexadecimal().map_err(not)?;
        let program = None;
        let spec = LaunchSpec { key: &key, volume_id, nonce: &nonce, settings, inode_limit, program };
        let described = self.launcher.describe(spec);
        let launch = match self.launcher.ensure(spec) {
            Ok(launch) => launch,
            Err(error) => {
                drop(listener);
                dial.remove().map_err(not)?;
                return Err(NotStarted { reason: error.into(), launch: Some(described), log: None });
            }
        };
        let expected = Expected { nonce: &nonce, process: launch.process(), time_limit: self.start_timeout };
        let dialled = wait_for_daemon(&listener, expected, abandoned);
        drop(listener);
        dialled
            .inspect(|_| self.note_tried())
            .map(|dialled| WarmDaemon {
                key: key.clone(),
                launch: launch.clone(),
                described: described.clone(),
                dialled,
            })
            .map_err(|reason| {
                let has_ended = matches!(reason, NoDaemon::Ended);
                let log = has_ended.then(|| self.launcher.last_log_line(&key)).flatten();
                self.end(&key, &launch, None);
                NotStarted { reason, launch: Some(described), log }
            })
    }

    fn add(&self, daemon: WarmDaemon) {
        let mut state = self.locked();
        if state.is_closed {
            drop(state);
            self.end(&daemon.key, &daemon.launch, Some(&daemon.dialled));
        } else {
            // Under the lock, so that none is taken before.
            self.lend(&daemon);
            state.waiting.push_back(daemon);
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_duplicated(error: std::io::Error) -> linux::Error {
    linux::Error::new("duplicate", "a daemon's pidfd", error)
}

/// Removes a daemon that ends while it waits, and has another one started.
async fn replace_ended(daemons: Arc<WarmDaemons>, key: LaunchKey, pidfd: std::os::fd::OwnedFd) {
    if let Err(error) = watch::ended(pidfd).await {
        tracing::warn!(%key, %error, "cannot watch a daemon that waits for a volume");
        return;
    }
    let position = |state: &State| state.waiting.iter().position(|waiting| waiting.key == key);
    let ended = {
        let mut state = daemons.locked();
        position(&state).and_then(|at| state.waiting.remove(at))
    };
    let Some(WarmDaemon { launch, dialled, .. }) = ended else { return };
    tracing::warn!(%key, pid = dialled.daemon.pid, "a daemon ended while it waited for a volume");
    let ending = daemons.clone();
    let ending = tokio::task::spawn_blocking(move || ending.end(&key, &launch, Some(&dialled)));
    // A panic there is in the log.
    let _ended_or_not = ending.await;
    daemons.changed.notify_one();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::parameters::{LogLevel, Resources};

    #[test]
    fn a_waiting_daemon_does_for_default_settings_only() {
        let default = LaunchSettings::default;
        assert!(WarmDaemons::suits(&default(), ANY_NUMBER));
        assert!(WarmDaemons::suits(
            &LaunchSettings { threads: 8, delete_delay_seconds: 9, ..default() },
            1 << 40
        ));
        let labels = [("tier".to_owned(), "1".to_owned())].into();
        let resources = Resources { cpu_limit: Some("1".to_owned()), ..Resources::default() };
        for other in [
            LaunchSettings { labels, ..default() },
            LaunchSettings { resources, ..default() },
            LaunchSettings { name_prefix: "fast".to_owned(), ..default() },
            LaunchSettings { log_level: LogLevel::Debug, ..default() },
            LaunchSettings { grace_seconds: 60, ..default() },
            // Its daemon needs more memory.
            LaunchSettings { known_inode_limit: 2_000_000, ..default() },
        ] {
            assert!(!WarmDaemons::suits(&other, ANY_NUMBER), "{other:?}");
        }
    }
}
