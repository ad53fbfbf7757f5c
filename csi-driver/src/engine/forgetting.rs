//! Finds the mount points inside volumes, for daemons on kernels without FUSE_NOTIFY_PRUNE.
//!
//! Such a daemon can make the kernel forget an inode only by FUSE_NOTIFY_INVAL_ENTRY, which
//! detaches every mount on the entry in all mount namespaces. So the daemon asks for this list
//! first, and spares the entries in it.
//!
//! Invariant: a list is read after the daemon asked for it, and it is complete or not sent. A mount
//! namespace without a process, kept only by a descriptor or a bind mount, is not seen.
//!
//! A pod decides how long a list takes, by its number of mounts, threads and roots. So at most one
//! is made at a time, and one that takes too long ends.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::mountinfo;
use nix::errno::Errno;
use proto::control::{GetStats, MountPoints, Stats, reply, request};
use tokio::sync::watch;

use crate::daemon::control::Control;
use crate::engine::daemons::Daemons;
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::bounded::OneEach;
use crate::kernel::release;
use crate::model::ids::VolumeId;

/// The first kernel with FUSE_NOTIFY_PRUNE.
const PRUNES: (u32, u32) = (6, 18);
/// How often daemons are asked whether they want a list.
const EVERY: Duration = Duration::from_secs(2);
/// A slower daemon is asked again in the next round.
const CONTROL_TIMEOUT: Duration = Duration::from_millis(500);
/// A list that takes longer is not sent.
const LIST: Duration = Duration::from_secs(5);
const LISTING: &str = "list mount points";

/// Answers daemons until the driver stops. On a kernel with FUSE_NOTIFY_PRUNE no daemon asks.
pub(crate) async fn serve(lists: Arc<MountPointLists>, mut stopped: watch::Receiver<bool>) {
    if release::is_at_least(PRUNES) {
        return;
    }
    loop {
        tokio::select! {
            _ = stopped.wait_for(|stop| *stop) => return,
            () = tokio::time::sleep(EVERY) => {}
        }
        let lists = lists.clone();
        let round = tokio::task::spawn_blocking(move || lists.send());
        tokio::select! {
            // Daemons may not answer.
            _ = stopped.wait_for(|stop| *stop) => return,
            // A panic there is in the log; the next round starts anew.
            _ = round => {}
        }
    }
}

impl Control {
    fn stats(&self) -> Result<Stats> {
        match self.ask("GetStats", request::Kind::GetStats(GetStats {}))? {
            reply::Kind::Stats(stats) => Ok(stats),
            other => Err(self.unexpected("GetStats", &other)),
        }
    }

    fn mount_points(&self, round: u32, paths: Vec<Vec<u8>>) -> Result<()> {
        match self.ask("MountPoints", request::Kind::MountPoints(MountPoints { round, paths }))? {
            reply::Kind::Done(_) => Ok(()),
            other => Err(self.unexpected("MountPoints", &other)),
        }
    }
}

/// By FUSE connection (minor device number).
type MountPointsInside = BTreeMap<u32, BTreeSet<Vec<u8>>>;

#[derive(Debug)]
pub(crate) struct MountPointLists {
    journal: Arc<Journal>,
    daemons: Arc<Daemons>,
    walks: Walks,
}

impl MountPointLists {
    pub(crate) fn new(journal: Arc<Journal>, daemons: Arc<Daemons>) -> Self {
        Self { journal, daemons, walks: Walks::default() }
    }

    /// Sends the list of mount points inside its volume to every daemon that waits for one.
    fn send(&self) {
        let served = self.journal.list().into_iter().filter_map(|(id, record)| {
            let serving = record.stage?.serving?;
            Some((id, serving.connection_minor))
        });
        let wanting: BTreeMap<u32, (VolumeId, Control, u32)> = served
            .filter_map(|(id, minor)| {
                let control = self.daemons.control(&id, CONTROL_TIMEOUT).ok()?;
                // A daemon of an earlier version has no such counter.
                let round = control.stats().ok()?.mount_points_wanted;
                (round > 0).then_some((minor, (id, control, round)))
            })
            .collect();
        if wanting.is_empty() {
            return;
        }
        let minors = wanting.keys().copied().collect();
        match self.walks.find(LIST, move |deadline| mounted_inside(&minors, deadline)) {
            Ok(mut found) => {
                for (minor, (volume_id, control, round)) in wanting {
                    let paths = found.remove(&minor).unwrap_or_default();
                    if let Err(error) = control.mount_points(round, paths.into_iter().collect()) {
                        tracing::warn!(%volume_id, error = chain(&error), "mount points were not sent");
                    }
                }
            }
            Err(error) => tracing::warn!(error = chain(&error), "mount points were not found"),
        }
    }
}

/// Walks over the mount tables of all threads, one at a time.
#[derive(Debug, Default)]
struct Walks(OneEach<()>);

impl Walks {
    /// `walk` gets the time at which it must end. Reading the files of a stuck process may block it
    /// for longer; until it ends, further walks are refused.
    fn find(
        &self,
        limit: Duration,
        walk: impl FnOnce(Deadline) -> Result<MountPointsInside> + Send + 'static,
    ) -> Result<MountPointsInside> {
        let deadline = Deadline { at: Instant::now() + limit, limit };
        self.0.within(&(), LISTING, limit, move || walk(deadline))?
    }
}

#[derive(Debug, Clone, Copy)]
struct Deadline {
    at: Instant,
    limit: Duration,
}

impl Deadline {
    fn check(self) -> Result<()> {
        if Instant::now() < self.at {
            return Ok(());
        }
        Err(Error::Deadline { what: LISTING.to_owned(), limit: self.limit })
    }
}

/// For each of these FUSE connections (minor device numbers): the mount points inside it, in every
/// mount namespace that has a thread.
fn mounted_inside(minors: &BTreeSet<u32>, deadline: Deadline) -> Result<MountPointsInside> {
    let mut found = MountPointsInside::new();
    // Twice: a process that forks and ends during the listing of /proc is missed, and so is its
    // child.
    for _ in 0..2 {
        let mut seen = HashSet::new();
        for thread in threads(deadline)? {
            deadline.check()?;
            let view = ["ns/mnt", "root"].map(|name| std::fs::read_link(thread.join(name)));
            let [Ok(namespace), Ok(root)] = view else { continue };
            if !seen.insert((namespace, root)) {
                continue;
            }
            let table = match mountinfo::read_at(&thread.join("mountinfo")) {
                Ok(table) => table,
                // It has ended, or is about to.
                Err(e) if matches!(e.errno(), Errno::ENOENT | Errno::ESRCH | Errno::EINVAL) => continue,
                Err(e) => return Err(e).step("read mountinfo"),
            };
            for minor in minors {
                let inside = mountinfo::mounted_inside(&table, (0, *minor));
                found
                    .entry(*minor)
                    .or_default()
                    .extend(inside.into_iter().map(|path| path.into_os_string().into_vec()));
            }
        }
    }
    Ok(found)
}

/// `/proc/<pid>/task/<tid>` of every thread.
fn threads(deadline: Deadline) -> Result<Vec<PathBuf>> {
    let mut threads = Vec::new();
    for process in numbered(Path::new("/proc"))? {
        deadline.check()?;
        match numbered(&process.join("task")) {
            Ok(tasks) => threads.extend(tasks),
            Err(Error::Kernel { source, .. }) if source.errno() == Errno::ENOENT => {}
            Err(e) => return Err(e),
        }
    }
    Ok(threads)
}

fn numbered(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e: io::Error| linux::Error::at("list", dir, e);
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed).step("list threads")? {
        match entry {
            Ok(entry) => {
                let name = entry.file_name();
                if name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
                    found.push(entry.path());
                }
            }
            // The process ended while its threads were listed.
            Err(e) if e.raw_os_error() == Some(Errno::ESRCH as i32) => break,
            Err(e) => return Err(failed(e)).step("list threads"),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    use linux::mount::{self, MountFlags};

    const TIMEOUT: Duration = Duration::from_secs(10);

    fn deadline(limit: Duration) -> Deadline {
        Deadline { at: Instant::now() + limit, limit }
    }

    #[test]
    fn a_walk_that_is_stuck_is_the_only_one() {
        let walks = Walks::default();
        let (begun, begins) = channel();
        let (release, wait) = channel::<()>();
        let wait = Arc::new(std::sync::Mutex::new(wait));
        let walk = || {
            let (begun, wait) = (begun.clone(), wait.clone());
            move |_| {
                begun.send(()).unwrap();
                wait.lock().unwrap().recv().unwrap();
                Ok(MountPointsInside::new())
            }
        };
        for _ in 0..3 {
            let error = walks.find(Duration::from_millis(20), walk()).unwrap_err();
            assert!(matches!(error, Error::Deadline { .. }), "{error}");
        }
        begins.recv_timeout(TIMEOUT).unwrap();
        release.send(()).unwrap();
        ::tests::eventually("the next one begins", TIMEOUT, || {
            Ok(walks.find(TIMEOUT, |_| Ok(MountPointsInside::new())).map(drop)?)
        })
        .unwrap();
        assert_eq!(begins.try_iter().count(), 0, "one began, and two were refused");
    }

    #[test]
    fn a_walk_ends_at_its_deadline() {
        let minors = BTreeSet::from([0]);
        let error = mounted_inside(&minors, deadline(Duration::ZERO)).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        let error = threads(deadline(Duration::ZERO)).unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
    }

    #[test]
    fn mounts_are_found_in_the_namespace_of_any_thread() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_owned();
        let (ready, wait) = channel();
        let (end, ended) = channel::<()>();
        let other = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            mount::make_private(Path::new("/")).unwrap();
            mount::mount_fs("tmpfs", "volume", &place, MountFlags::default(), "").unwrap();
            std::fs::create_dir_all(place.join("d/mounted")).unwrap();
            std::fs::write(place.join("f"), "").unwrap();
            mount::mount_fs("tmpfs", "inside", &place.join("d/mounted"), MountFlags::default(), "").unwrap();
            mount::bind(Path::new("/proc/version"), &place.join("f")).unwrap();
            let table = mountinfo::read().unwrap();
            let volume = table.iter().find(|entry| entry.mount_point == place).unwrap();
            ready.send(volume.minor).unwrap();
            let _ended = ended.recv();
        });
        let minor = wait.recv().unwrap();
        let found = mounted_inside(&BTreeSet::from([minor]), deadline(TIMEOUT)).unwrap();
        drop(end);
        other.join().unwrap();
        let wanted: BTreeSet<Vec<u8>> = ["d/mounted", "f"].map(|path| path.as_bytes().to_vec()).into();
        assert_eq!(found[&minor], wanted);
    }
}
