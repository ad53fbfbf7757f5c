//! Whether the pool is present, is the one with this driver's volumes, and answers.
//!
//! A pool is identified by the id in its file `.hawser-pool`; the state directory records the same
//! id. If a file system that should be mounted is not, that file is missing, and the driver makes
//! nothing in the bare directory below. If the state directory records no pool, the driver refuses
//! a pool with volumes: they belong to another driver, or this driver's journal is lost. An empty
//! pool gets a new id, so that another driver sees that it is in use.
//!
//! One thread looks at the pool, and only on request. A caller waits a limited time, and not at all
//! while an earlier look is stuck.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Mode, fstat, fstatfs, mkdirat, statat};
use rustix::io::Errno;

use super::traits::{Traits, traits_of};
use super::{PARTS, open_root};
use crate::error::{Error, Result, Step, chain};
use crate::kernel::private_dir::private_dir_all;

const MARKER: &str = ".hawser-pool";
/// File name in the state directory.
const REMEMBERED: &str = "pool-id";
const ID_DIGITS: usize = 32;

#[derive(Debug)]
pub(super) struct Presence {
    dir: PathBuf,
    /// The file with the id of this driver's pool.
    remembered: PathBuf,
    limit: Duration,
    watch: Arc<Watch>,
}

#[derive(Debug)]
struct Watch {
    state: Mutex<State>,
    /// Signalled when a caller asks, when the thread has answered, and when the pool is dropped.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    /// Number of looks requested, and up to which of them the verdict is valid.
    asked: u64,
    answered: u64,
    looking_since: Option<Instant>,
    verdict: std::result::Result<Traits, String>,
    is_dropped: bool,
}

impl Presence {
    /// Starts the thread; it looks at nothing yet.
    pub(super) fn watch(dir: &Path, state_dir: &Path, limit: Duration) -> Result<Self> {
        let state = State {
            asked: 0,
            answered: 0,
            looking_since: None,
            verdict: Err("it has not been looked at".to_owned()),
            is_dropped: false,
        };
        let watch = Arc::new(Watch { state: Mutex::new(state), changed: Condvar::new() });
        let remembered = state_dir.join(REMEMBERED);
        let (looker, pool, its_id) = (watch.clone(), dir.to_owned(), remembered.clone());
        std::thread::Builder::new()
            .name("pool".to_owned())
            .spawn(move || {
                let mut traits = None;
                looker.run(|| look(&pool, &its_id, &mut traits).map_err(|e| reason(&e)));
            })
            .map_err(|e| linux::Error::at("start thread for", dir, e))
            .step("watch pool")?;
        Ok(Self { dir: dir.to_owned(), remembered, limit, watch })
    }

    /// The file system's traits, if the pool is present now.
    pub(super) fn check(&self) -> Result<Traits> {
        self.watch.ask(self.limit).map_err(|reason| Error::PoolAway { path: self.dir.clone(), reason })
    }

    /// For read-only commands: makes nothing, and a pool that was never used is not away.
    pub(super) fn why_away(&self) -> Option<String> {
        let (pool, wanted) = (&self.dir, read_id(&self.remembered));
        let ids = wanted.and_then(|wanted| Ok((wanted, read_id(&pool.join(MARKER))?)));
        let same = ids.and_then(|(wanted, found)| same(pool, wanted.as_deref(), found.as_deref()));
        same.err().map(|e| reason(&e))
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.watch.locked().is_dropped = true;
        self.watch.changed.notify_all();
    }
}

impl Watch {
    fn run(&self, mut look: impl FnMut() -> std::result::Result<Traits, String>) {
        let mut state = self.locked();
        loop {
            if state.is_dropped {
                return;
            }
            if state.asked == state.answered {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let until = state.asked;
            state.looking_since = Some(Instant::now());
            drop(state);
            let verdict = look();
            state = self.locked();
            state.looking_since = None;
            state.verdict = verdict;
            state.answered = until;
            self.changed.notify_all();
        }
    }

    /// The outcome of a look that begins after this call.
    fn ask(&self, limit: Duration) -> std::result::Result<Traits, String> {
        let silent = |waited: Duration| Err(format!("it has not answered for {} s", waited.as_secs()));
        let mut state = self.locked();
        if let Some(stuck) = state.looking_since.map(|since| since.elapsed()).filter(|t| *t >= limit) {
            return silent(stuck);
        }
        state.asked += 1;
        let wanted = state.asked;
        self.changed.notify_all();
        let (state, _) = self
            .changed
            .wait_timeout_while(state, limit, |state| state.answered < wanted)
            .unwrap_or_else(PoisonError::into_inner);
        if state.answered < wanted { silent(limit) } else { state.verdict.clone() }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the state consistent at each step.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reason(error: &Error) -> String {
    match error {
        Error::PoolAway { reason, .. } => reason.clone(),
        other => chain(other),
    }
}

fn same(pool: &Path, wanted: Option<&str>, found: Option<&str>) -> Result<()> {
    let away = |reason: String| Err(Error::PoolAway { path: pool.to_owned(), reason });
    match (wanted, found) {
        (Some(wanted), Some(found)) if wanted != found => away(format!("it is pool {found}, not {wanted}")),
        (Some(wanted), None) => away(format!("no {MARKER} identifies it as pool {wanted}")),
        (None, Some(_)) if super::listing::stored(pool) != Default::default() => away(format!(
            "it has volumes that the state directory knows nothing of: put that back, or remove {MARKER} \
             to forget them"
        )),
        (Some(_), Some(_)) | (None, _) => Ok(()),
    }
}

/// Identifies a file system, as far as two that are mounted one after the other differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FsId {
    device: u64,
    fs_type: i64,
}

/// Detects `traits` once for each file system.
fn look(pool: &Path, remembered: &Path, traits: &mut Option<(FsId, Traits)>) -> Result<Traits> {
    let marker = pool.join(MARKER);
    let (wanted, found) = (read_id(remembered)?, read_id(&marker)?);
    same(pool, wanted.as_deref(), found.as_deref())?;
    match (wanted, found) {
        (Some(_), _) => {}
        (None, _) => {
            // If a path is mistyped or a file system is not mounted, this warning is the only sign.
            let was_there = pool.exists();
            private_dir_all(pool).step("create pool")?;
            let id = linux::random::hexadecimal().step("draw an id")?[..ID_DIGITS].to_owned();
            // The pool's id is written first: after a kill in between, the next start repeats both.
            write_id(&marker, &id)?;
            write_id(remembered, &id)?;
            let path = pool.display();
            if was_there {
                tracing::info!(%path, id, "made a new pool in this directory");
            } else {
                tracing::warn!(%path, id, "the pool's directory did not exist: made it, and a new pool in it");
            }
        }
    }
    let fs = make_parts(pool)?;
    match traits {
        Some((known, found)) if *known == fs && found.can_reflink.is_ok() => Ok(found.clone()),
        _ => traits_of(pool).map(|found| traits.insert((fs, found)).1.clone()),
    }
}

/// Makes the pool's directories if they are missing: in a new pool, after a restored backup, or
/// after a manual cleanup.
fn make_parts(pool: &Path) -> Result<FsId> {
    let dir = open_root(pool).step("look at pool")?;
    let is_there = |name: &str| match statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(e) => Err(linux::Error::at("look at", &pool.join(name), e)).step("look at pool"),
    };
    // Reads the marker in this very directory: the bare directory below a mount that has just gone
    // has none.
    if !is_there(MARKER)? {
        return Err(Error::PoolAway { path: pool.to_owned(), reason: format!("{MARKER} has just gone") });
    }
    for part in PARTS {
        if !is_there(part)? {
            mkdirat(&dir, part, Mode::RWXU)
                .map_err(|e| linux::Error::at("create", &pool.join(part), e))
                .step("create pool")?;
        }
    }
    let failed = |e| linux::Error::at("look at", pool, e);
    let found = fstat(&dir).and_then(|at| Ok((at.st_dev, fstatfs(&dir)?.f_type)));
    found.map(|(device, fs_type)| FsId { device, fs_type }).map_err(failed).step("look at pool")
}

fn read_id(path: &Path) -> Result<Option<String>> {
    match linux::atomic_file::read_text(path) {
        Ok(text) => Ok(Some(text.trim().to_owned())),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(linux::Error::at("read", path, e)).step("look at pool"),
    }
}

fn write_id(path: &Path, id: &str) -> Result<()> {
    linux::atomic_file::remove_leftovers(path).step("name pool")?;
    linux::atomic_file::write(path, format!("{id}\n").as_bytes(), 0o600).step("name pool")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_look_that_is_stuck_fails_those_who_wait_and_later_ones_at_once() {
        let state = State {
            asked: 0,
            answered: 0,
            looking_since: None,
            verdict: Err("none yet".to_owned()),
            is_dropped: false,
        };
        let watch = Arc::new(Watch { state: Mutex::new(state), changed: Condvar::new() });
        let (release, wait) = mpsc::channel::<()>();
        let looker = watch.clone();
        let thread = std::thread::spawn(move || {
            looker.run(|| {
                wait.recv().map_err(|e| e.to_string())?;
                Err("answered".to_owned())
            });
        });
        let limit = Duration::from_millis(900);
        let reason = watch.ask(limit).unwrap_err();
        assert!(reason.starts_with("it has not answered for "), "{reason}");
        // The thread may have started late.
        ::tests::eventually("the look has taken too long", Duration::from_secs(10), || {
            let since = watch.locked().looking_since;
            anyhow::ensure!(since.is_some_and(|since| since.elapsed() >= limit), "{since:?}");
            Ok(())
        })
        .unwrap();
        let begun = Instant::now();
        let reason = watch.ask(limit).unwrap_err();
        assert!(reason.starts_with("it has not answered for "), "{reason}");
        assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
        release.send(()).unwrap();
        release.send(()).unwrap();
        // The stuck look has ended; the next request gets an answer.
        ::tests::eventually("it answers", Duration::from_secs(10), || {
            anyhow::ensure!(watch.locked().looking_since.is_none());
            Ok(())
        })
        .unwrap();
        release.send(()).unwrap();
        assert_eq!(watch.ask(Duration::from_secs(10)).unwrap_err(), "answered");
        watch.locked().is_dropped = true;
        watch.changed.notify_all();
        drop(release);
        thread.join().unwrap();
    }

    #[test]
    fn another_pool_or_none_is_away_and_nothing_is_made_in_it() {
        let dir = tempfile::tempdir().unwrap();
        let [state, pool, other] = ["state", "pool", "other"].map(|name| dir.path().join(name));
        std::fs::create_dir(&state).unwrap();
        let check =
            |pool: &Path| Presence::watch(pool, &state, Duration::from_secs(10)).unwrap().check().map(drop);
        check(&pool).unwrap();
        check(&pool).unwrap();
        let aside = dir.path().join("aside");
        std::fs::rename(&pool, &aside).unwrap();
        std::fs::create_dir(&pool).unwrap();
        let error = check(&pool).unwrap_err();
        assert!(matches!(&error, Error::PoolAway { path, .. } if *path == pool), "{error}");
        assert_eq!(std::fs::read_dir(&pool).unwrap().count(), 0);
        assert!(error.to_string().contains("no .hawser-pool identifies it as pool "), "{error}");

        let other_state = dir.path().join("other state");
        std::fs::create_dir(&other_state).unwrap();
        Presence::watch(&other, &other_state, Duration::from_secs(10)).unwrap().check().unwrap();
        assert!(check(&other).unwrap_err().to_string().contains(", not "));
        std::fs::remove_dir(&pool).unwrap();
        std::fs::rename(&aside, &pool).unwrap();
        check(&pool).unwrap();
    }

    #[test]
    fn a_pool_with_volumes_is_only_its_own_drivers_and_an_empty_one_the_last_comers() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second, pool] = ["first", "second", "pool"].map(|name| dir.path().join(name));
        let check = |state: &Path| {
            std::fs::create_dir_all(state).unwrap();
            Presence::watch(&pool, state, Duration::from_secs(10)).unwrap().check().map(drop)
        };
        check(&first).unwrap();
        check(&second).unwrap();
        let taken = check(&first).unwrap_err().to_string();
        assert!(taken.contains("it is pool ") && taken.contains(", not "), "{taken}");
        std::fs::create_dir(pool.join("volumes/vol-0123456789abcdef0123456789abcdef")).unwrap();
        check(&second).unwrap();
        let third = dir.path().join("third");
        let refused = check(&third).unwrap_err().to_string();
        assert!(refused.contains("it has volumes that the state directory knows nothing of"), "{refused}");
        assert!(!third.join(REMEMBERED).exists());
        check(&second).unwrap();
        // As an administrator would do after data loss.
        std::fs::remove_file(pool.join(MARKER)).unwrap();
        check(&third).unwrap();
    }

    #[test]
    fn parts_that_somebody_took_away_are_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let [state, pool] = ["state", "pool"].map(|name| dir.path().join(name));
        std::fs::create_dir(&state).unwrap();
        let presence = Presence::watch(&pool, &state, Duration::from_secs(10)).unwrap();
        presence.check().unwrap();
        for part in PARTS {
            std::fs::remove_dir(pool.join(part)).unwrap();
        }
        presence.check().unwrap();
        assert!(PARTS.iter().all(|part| pool.join(part).is_dir()));
    }
}
