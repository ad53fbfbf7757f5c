//! Registered CSI drivers: the watch on `plugins_registry` and the registration of each socket in
//! it.
//!
//! - A new or replaced socket starts a registration.
//! - A removed socket deregisters its driver.
//! - A socket that stays but does not answer stays registered, and calls to its driver fail.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use inotify::{EventMask, Inotify, WatchMask};
use proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, registration_client::RegistrationClient,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_stream::StreamExt;
use tonic::transport::Channel;
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::clients::csi::Driver;
use crate::clients::unix_channel;

const DIAL_DEADLINE: Duration = Duration::from_secs(10);
const GET_INFO_DEADLINE: Duration = Duration::from_secs(1);
const NOTIFY_DEADLINE: Duration = Duration::from_secs(5);
/// The poll interval while the directory cannot be watched.
const POLL_PERIOD: Duration = Duration::from_secs(1);

/// Why a plugin was not registered.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("dial {}", socket.display())]
    Dial {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("GetInfo of {}: {message}", socket.display())]
    GetInfo { socket: PathBuf, message: String },
    #[error("plugin type {found:?} is not CSIPlugin")]
    WrongType { found: String },
    #[error("supported_versions {found:?}: none is 0.x or 1.x")]
    WrongVersion { found: Vec<String> },
    #[error("driver name {name:?} is empty or has a '/'")]
    BadName { name: String },
    #[error("another driver with the name {name} is registered at {}", socket.display())]
    NameTaken { name: String, socket: PathBuf },
    #[error(transparent)]
    NodeGetInfo(#[from] crate::clients::csi::Error),
}

/// The registered drivers; clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Plugins {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    drivers: Mutex<BTreeMap<String, Registered>>,
    /// Counts registrations and removals.
    changes: watch::Sender<u64>,
}

#[derive(Debug, Clone)]
struct Registered {
    driver: Driver,
    socket: PathBuf,
}

impl Plugins {
    pub(crate) fn new() -> Self {
        let shared = Shared { drivers: Mutex::default(), changes: watch::Sender::new(0) };
        Self { shared: Arc::new(shared) }
    }

    pub(crate) fn driver(&self, name: &str) -> Option<Driver> {
        self.drivers().get(name).map(|r| r.driver.clone())
    }

    /// Changes whenever a driver is registered or removed.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.changes.subscribe()
    }

    /// Waits until the driver is registered.
    pub(crate) async fn wait_for(&self, name: &str) -> Driver {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            if let Some(driver) = self.driver(name) {
                return driver;
            }
            changes.changed().await.expect("the sender lives in `self`");
        }
    }

    /// Watches `dir` forever and recreates it after a removal. Polls if inotify is unavailable: the
    /// kernel limits instances per user, and a pod's root may hold all of them.
    pub(crate) async fn watch(self, dir: PathBuf) {
        let mut backoff = Backoff::operation();
        let mut sockets = Sockets { plugins: self, registrations: HashMap::new() };
        loop {
            match sockets.watch_once(&dir, &mut backoff).await {
                Ok(()) => info!(dir = %dir.display(), "plugin directory was replaced, watching the new one"),
                Err(error) => warn!(dir = %dir.display(), %error, "lost the watch on the plugin directory"),
            }
            sockets.poll_for(&dir, backoff.step()).await;
        }
    }

    fn drivers(&self) -> MutexGuard<'_, BTreeMap<String, Registered>> {
        self.shared.drivers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, driver: Driver, socket: &Path) {
        self.drivers().insert(driver.name().to_owned(), Registered { driver, socket: socket.to_owned() });
        self.shared.changes.send_modify(|n| *n += 1);
    }

    fn remove(&self, socket: &Path) {
        let mut drivers = self.drivers();
        let before = drivers.len();
        drivers.retain(|_, r| r.socket != socket);
        let removed = drivers.len() < before;
        drop(drivers);
        if removed {
            info!(socket = %socket.display(), "driver deregistered");
            self.shared.changes.send_modify(|n| *n += 1);
        }
    }

    fn socket_of(&self, name: &str) -> Option<PathBuf> {
        self.drivers().get(name).map(|r| r.socket.clone())
    }
}

/// The sockets in the directory, each with its running or finished registration.
struct Sockets {
    plugins: Plugins,
    registrations: HashMap<PathBuf, Registration>,
}

struct Registration {
    task: JoinHandle<()>,
    socket: SocketId,
}

/// Identifies a socket: a new socket at the same path has another id, even if the file system
/// reuses the inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct SocketId {
    inode: u64,
    changed: (i64, i64),
}

impl SocketId {
    /// `None` if the path is not a socket.
    fn of(path: &Path) -> Option<Self> {
        let found = std::fs::metadata(path).ok().filter(|found| found.file_type().is_socket())?;
        Some(Self { inode: found.ino(), changed: (found.ctime(), found.ctime_nsec()) })
    }
}

impl Sockets {
    /// Returns when the directory is removed.
    async fn watch_once(&mut self, dir: &Path, backoff: &mut Backoff) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let inotify = Inotify::init()?;
        let mask = WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::DELETE
            | WatchMask::MOVED_FROM
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF
            | WatchMask::ONLYDIR;
        inotify.watches().add(dir, mask)?;
        let mut events = inotify.into_event_stream(vec![0; 4096])?;
        // Scan after the watch is in place, so that no socket is missed.
        self.rescan(dir)?;
        backoff.reset();
        while let Some(event) = events.next().await {
            let event = event?;
            if event.mask.intersects(EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::IGNORED) {
                self.rescan(dir)?;
                return Ok(());
            }
            if event.mask.contains(EventMask::Q_OVERFLOW) {
                self.rescan(dir)?;
            }
            if let Some(name) = event.name.filter(|n| is_visible(n)) {
                if event.mask.intersects(EventMask::DELETE | EventMask::MOVED_FROM) {
                    self.remove(&dir.join(name));
                } else {
                    self.add(dir.join(name));
                }
            }
        }
        Ok(())
    }

    /// Polls for `span`.
    async fn poll_for(&mut self, dir: &Path, span: Duration) {
        let end = Instant::now() + span;
        loop {
            if let Err(error) = self.rescan(dir) {
                warn!(dir = %dir.display(), %error, "cannot read the plugin directory");
            }
            let now = Instant::now();
            if now >= end {
                return;
            }
            tokio::time::sleep_until(end.min(now + POLL_PERIOD)).await;
        }
    }

    fn rescan(&mut self, dir: &Path) -> io::Result<()> {
        let mut present = Vec::new();
        match std::fs::read_dir(dir) {
            Ok(entries) => {
                for entry in entries {
                    present.push(entry?.path());
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
        let lost: Vec<PathBuf> =
            self.registrations.keys().filter(|s| !present.contains(s)).cloned().collect();
        for socket in lost {
            self.remove(&socket);
        }
        for socket in present {
            let visible = socket.file_name().is_some_and(is_visible);
            if visible && !self.is_known(&socket) {
                self.add(socket);
            }
        }
        Ok(())
    }

    fn is_known(&self, socket: &Path) -> bool {
        let known = self.registrations.get(socket).map(|registration| registration.socket);
        known.is_some() && known == SocketId::of(socket)
    }

    fn add(&mut self, socket: PathBuf) {
        let Some(id) = SocketId::of(&socket) else { return };
        self.remove(&socket);
        let task = tokio::spawn(register(self.plugins.clone(), socket.clone()));
        self.registrations.insert(socket, Registration { task, socket: id });
    }

    fn remove(&mut self, socket: &Path) {
        if let Some(registration) = self.registrations.remove(socket) {
            registration.task.abort();
        }
        self.plugins.remove(socket);
    }
}

fn is_visible(name: &OsStr) -> bool {
    !name.as_encoded_bytes().starts_with(b".")
}

/// Registers one socket: retries until it succeeds, or the driver's NodeGetInfo fails. After that
/// failure kubelet also waits for a new socket.
async fn register(plugins: Plugins, socket: PathBuf) {
    let mut backoff = Backoff::operation();
    let (mut client, info) = loop {
        match get_info(&socket).await {
            Ok(found) => break found,
            Err(error) => {
                warn!(socket = %socket.display(), error = linux::chain(&error), "plugin not registered yet");
            }
        }
        tokio::time::sleep(backoff.step()).await;
    };
    let outcome = accept(&plugins, &socket, &info).await;
    let status = RegistrationStatus {
        plugin_registered: outcome.is_ok(),
        error: outcome.as_ref().err().map(|e| linux::chain(e)).unwrap_or_default(),
    };
    match outcome {
        Ok(driver) => {
            info!(driver = driver.name(), socket = %socket.display(), "driver registered");
            plugins.add(driver, &socket);
        }
        Err(error) => {
            warn!(driver = info.name, socket = %socket.display(), error = linux::chain(&error), "driver refused");
        }
    }
    let notified = tokio::time::timeout(NOTIFY_DEADLINE, client.notify_registration_status(status)).await;
    if !matches!(notified, Ok(Ok(_))) {
        warn!(driver = info.name, "NotifyRegistrationStatus got no answer");
    }
}

async fn get_info(socket: &Path) -> Result<(RegistrationClient<Channel>, PluginInfo), Error> {
    let channel = dial(socket).await.map_err(|source| Error::Dial { socket: socket.to_owned(), source })?;
    let mut client = RegistrationClient::new(channel);
    let refused = |message| Error::GetInfo { socket: socket.to_owned(), message };
    match tokio::time::timeout(GET_INFO_DEADLINE, client.get_info(InfoRequest {})).await {
        Ok(Ok(reply)) => {
            let info = reply.into_inner();
            validate(&info)?;
            Ok((client, info))
        }
        Ok(Err(status)) => Err(refused(unix_channel::text(&status))),
        Err(_) => Err(refused("no answer within 1 s".to_owned())),
    }
}

/// A socket file exists from bind(2) on but refuses connections until listen(2).
async fn dial(socket: &Path) -> io::Result<Channel> {
    let mut pause = Backoff::new(Duration::from_millis(1), Duration::from_millis(500));
    let dialled = tokio::time::timeout(DIAL_DEADLINE, async {
        loop {
            match unix_channel::connect(socket).await {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                    tokio::time::sleep(pause.step()).await;
                }
                other => return other,
            }
        }
    });
    dialled.await.unwrap_or_else(|_| Err(io::ErrorKind::ConnectionRefused.into()))
}

fn validate(info: &PluginInfo) -> Result<(), Error> {
    if info.r#type != "CSIPlugin" {
        return Err(Error::WrongType { found: info.r#type.clone() });
    }
    if info.name.is_empty() || info.name.contains('/') {
        return Err(Error::BadName { name: info.name.clone() });
    }
    let known = |v: &String| {
        let major = v.trim_start_matches('v').split('.').next();
        matches!(major, Some("0" | "1"))
    };
    if !info.supported_versions.iter().any(known) {
        return Err(Error::WrongVersion { found: info.supported_versions.clone() });
    }
    Ok(())
}

async fn accept(plugins: &Plugins, socket: &Path, info: &PluginInfo) -> Result<Driver, Error> {
    if let Some(other) = plugins.socket_of(&info.name).filter(|other| other != socket) {
        return Err(Error::NameTaken { name: info.name.clone(), socket: other });
    }
    let endpoint = if info.endpoint.is_empty() { socket } else { Path::new(&info.endpoint) };
    let driver = Driver::new(&info.name, endpoint);
    let node = driver.node_get_info().await?;
    info!(driver = info.name, node_id = node.node_id, "NodeGetInfo");
    Ok(driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info() -> PluginInfo {
        PluginInfo {
            r#type: "CSIPlugin".to_owned(),
            name: "csi.example.com".to_owned(),
            endpoint: String::new(),
            supported_versions: vec!["1.0.0".to_owned()],
        }
    }

    #[test]
    fn a_csi_plugin_with_a_supported_version_is_accepted() {
        validate(&info()).unwrap();
        validate(&PluginInfo { supported_versions: vec!["2.0.0".into(), "v1.1.0".into()], ..info() })
            .unwrap();
    }

    #[test]
    fn other_types_versions_and_names_that_are_paths_are_refused() {
        let refused = |info: PluginInfo| validate(&info).unwrap_err().to_string();
        assert!(refused(PluginInfo { r#type: "DevicePlugin".into(), ..info() }).contains("DevicePlugin"));
        assert!(refused(PluginInfo { supported_versions: vec!["2.0.0".into()], ..info() }).contains("2.0.0"));
        assert!(refused(PluginInfo { name: "../x".into(), ..info() }).contains("../x"));
    }

    #[tokio::test]
    async fn without_a_watch_polling_finds_added_replaced_and_removed_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("driver-reg.sock");
        let mut sockets = Sockets { plugins: Plugins::new(), registrations: HashMap::new() };
        let bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        sockets.poll_for(dir.path(), Duration::ZERO).await;
        let first = sockets.registrations[&socket].socket;
        sockets.poll_for(dir.path(), Duration::ZERO).await;
        assert_eq!(sockets.registrations[&socket].socket, first);

        drop(bound);
        std::fs::remove_file(&socket).unwrap();
        let _bound = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        sockets.poll_for(dir.path(), Duration::ZERO).await;
        assert_ne!(sockets.registrations[&socket].socket, first);

        std::fs::remove_file(&socket).unwrap();
        sockets.poll_for(dir.path(), Duration::ZERO).await;
        assert!(sockets.registrations.is_empty());
    }
}
