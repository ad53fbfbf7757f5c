//! Finds the mount points inside volumes, for daemons on kernels without FUSE_NOTIFY_PRUNE.
//!
//! Such a daemon can make the kernel forget an inode only by FUSE_NOTIFY_INVAL_ENTRY, which
//! detaches every mount on the entry in all mount namespaces. So the daemon asks for this list
//! first, and spares the entries in it.
//!
//! Invariant: a list is read after the daemon asked for it, and it is complete or not sent. A mount
//! namespace without a process, kept only by a descriptor or a bind mount, is not seen.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use linux::mountinfo;
use nix::errno::Errno;
use proto::control::{GetStats, MountPoints, Stats, reply, request};
use tokio::sync::watch;

use crate::daemon::control::Control;
use crate::engine::daemons::Daemons;
use crate::error::{Error, Result, Step, chain};
use crate::journal::Journal;
use crate::kernel::{bounded, release};
use crate::model::ids::VolumeId;

/// The first kernel with FUSE_NOTIFY_PRUNE.
const PRUNES: (u32, u32) = (6, 18);
/// How often daemons are asked whether they want a list.
const EVERY: Duration = Duration::from_secs(2);
/// A slower daemon is asked again in the next round.
const CONTROL_TIMEOUT: Duration = Duration::from_millis(500);
/// A list that takes longer is not sent.
const LIST: Duration = Duration::from_secs(5);

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
        // A panic there is in the log; the next round starts anew.
        let _done = tokio::task::spawn_blocking(move || lists.send()).await;
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

#[derive(Debug)]
pub(crate) struct MountPointLists {
    pub(crate) journal: Arc<Journal>,
    pub(crate) daemons: Arc<Daemons>,
}

impl MountPointLists {
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
        // Reading the files of a stuck process may block.
        let found = bounded::within("list mount points", LIST, move || mounted_inside(&minors));
        match found.and_then(|found| found) {
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

/// For each of these FUSE connections (minor device numbers): the mount points inside it, in every
/// mount namespace that has a thread.
fn mounted_inside(minors: &BTreeSet<u32>) -> Result<BTreeMap<u32, BTreeSet<Vec<u8>>>> {
    let mut found: BTreeMap<u32, BTreeSet<Vec<u8>>> = BTreeMap::new();
    // Twice: a process that forks and ends during the listing of /proc is missed, and so is its
    // child.
    for _ in 0..2 {
        let mut seen = HashSet::new();
        for thread in threads()? {
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
fn threads() -> Result<Vec<PathBuf>> {
    let mut threads = Vec::new();
    for process in numbered(Path::new("/proc"))? {
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
        let found = mounted_inside(&BTreeSet::from([minor])).unwrap();
        drop(end);
        other.join().unwrap();
        let wanted: BTreeSet<Vec<u8>> = ["d/mounted", "f"].map(|path| path.as_bytes().to_vec()).into();
        assert_eq!(found[&minor], wanted);
    }
}
