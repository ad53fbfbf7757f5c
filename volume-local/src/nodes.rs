//! Finds the backing file of a node id.
//!
//! A node keeps an O_PATH descriptor only while it is among the recently used ones: the kernel may
//! know a million inodes, but RLIMIT_NOFILE allows a few thousand descriptors. Other nodes are
//! found again by their place (directory and name), and accepted only if the inode number matches;
//! open by handle would need CAP_DAC_READ_SEARCH. A node without a place, such as an unlinked file
//! that is still open, keeps its descriptor until it is forgotten; the number of these is limited
//! for each user. So does a file with other names than the one where it was last seen, if that is
//! removed (`unplaced`). `table` has the nodes, and `bound` limits their number.
//!
//! Invariant: a node leaves the table and the quota's records in one step, so a request that finds it
//! in neither may create both anew.
//!
//! A successor restores the nodes from the state table ([`Nodes::restore`]). For a removed file that is
//! open, or that is a directory, the keeper holds a descriptor (`kept`).
//!
//! Lock order: `names_move`, the table, then the quota's.

mod bound;
mod keeping;
mod restored;
mod table;
mod unplaced;
mod zeros;

use std::collections::HashMap;
use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use rustix::fs::{AtFlags, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

pub(crate) use self::bound::{Admission, Pressure};
use self::restored::Count;
use self::table::{Left, Node, Table};
use crate::attributes::{Origin, ROOT};
use crate::errno::Result;
use crate::keeper_socket::KeeperSocket;
use crate::loops_at_rest::LoopsAtRest;
use crate::place::Place;
use crate::quota::Quota;
use crate::state_table::StateTable;

/// Descriptors cost kernel memory too: each holds an inode and its dentry.
const MOST_DESCRIPTORS: usize = 4096;

/// Most removed files that may be held: their descriptors cannot be closed.
const MOST_NAMELESS: u64 = 65_536;

/// Directories with the same remainder share their [`NamesAsOf`].
const NAME_COUNTERS: usize = 64;

#[derive(Debug)]
pub(crate) struct Nodes {
    origin: Origin,
    limit: usize,
    table: Mutex<Table>,
    /// Shared by requests that move or remove a name, until the table has followed.
    names_move: RwLock<()>,
    quota: Option<Arc<Quota>>,
    /// Number of names that directories have lost; changed under the table's lock.
    names_lost: [AtomicU64; NAME_COUNTERS],
    /// The number of nodes above which the kernel is asked to forget some.
    bound: usize,
    /// Those of the quota too, if there is one.
    at_rest: Arc<LoopsAtRest>,
    most_nameless: usize,
    /// Most nodes without a place, of files with names, before the kernel is asked about them.
    most_unplaced: usize,
    /// Wakes the pruner.
    pressure: Condvar,
    /// Wakes requests that wait for space.
    relief: Condvar,
    asked_to_forget: AtomicU64,
    refused: AtomicU64,
    /// Holds descriptors of removed files for a successor.
    keeper: Option<Arc<KeeperSocket>>,
    /// Wakes the sweeper.
    doubted: Condvar,
}

/// The limits of nodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeLimits {
    /// RLIMIT_NOFILE.
    pub(crate) descriptors: u64,
    /// The number of known inodes above which the kernel is asked to forget some.
    pub(crate) known: usize,
    pub(crate) event_loops: usize,
}

/// How a file that the kernel knows lost a name.
#[derive(Debug)]
pub(crate) struct Removal {
    /// The user who removed the name.
    pub(crate) uid: u32,
    /// Keeps the file reachable. Without `names_left` it is always kept: while the kernel knows the
    /// node, its inode number must not be reused.
    pub(crate) held: Arc<OwnedFd>,
    pub(crate) names_left: bool,
}

/// What is used no more after a change of the table: to be given to [`Nodes::close`].
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Unused {
    descriptors: Vec<Arc<OwnedFd>>,
    /// Nodes whose descriptors the keeper need not hold any more.
    unkept: Vec<u64>,
}

impl Unused {
    pub(crate) fn extend(&mut self, more: Self) {
        self.descriptors.extend(more.descriptors);
        self.unkept.extend(more.unkept);
    }
}

/// A version of a directory's names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NamesAsOf(u64);

impl Nodes {
    /// Nodes may use a quarter of the descriptors, and a sixteenth for removed files. `quota` is
    /// notified of forgotten nodes.
    pub(crate) fn new(
        root: Arc<OwnedFd>,
        origin: Origin,
        limits: NodeLimits,
        quota: Option<Arc<Quota>>,
        succession: Option<(Arc<StateTable>, Arc<KeeperSocket>)>,
    ) -> Self {
        let (state, keeper) = succession.unzip();
        let part = |most: u64| usize::try_from(most).unwrap_or(usize::MAX);
        let root = Node { lookups: 1, fd: Some(root), ..Node::default() };
        let table = Table { state, nodes: HashMap::from([(ROOT, root)]), round: 1, ..Table::default() };
        let own = || Arc::new(LoopsAtRest::new(limits.event_loops));
        let at_rest = quota.as_ref().map_or_else(own, |quota| quota.loops_at_rest());
        let limit = part(limits.descriptors / 4).min(MOST_DESCRIPTORS);
        Self {
            origin,
            limit,
            table: Mutex::new(table),
            names_move: RwLock::new(()),
            quota,
            names_lost: std::array::from_fn(|_| AtomicU64::new(0)),
            bound: limits.known.max(1),
            at_rest,
            most_nameless: part((limits.descriptors / 16).min(MOST_NAMELESS)),
            most_unplaced: (limit / 16).max(1),
            pressure: Condvar::new(),
            relief: Condvar::new(),
            asked_to_forget: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            keeper,
            doubted: Condvar::new(),
        }
    }

    /// The O_PATH descriptor of a node, reopened if it was closed. `ESTALE` if the file is no
    /// longer at its place: it was changed behind the mount.
    pub(crate) fn descriptor(&self, id: u64) -> Result<Arc<OwnedFd>> {
        match self.open_by_names(id) {
            Err(Errno::NOENT | Errno::STALE | Errno::NOTDIR) => {}
            other => return other,
        }
        // A name on the way may just have moved, and the table not have followed yet.
        let none_moves = self.names_move.write().unwrap_or_else(PoisonError::into_inner);
        let opened = self.open_by_names(id);
        drop(none_moves);
        match opened {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(Errno::STALE),
            other => other,
        }
    }

    fn open_by_names(&self, id: u64) -> Result<Arc<OwnedFd>> {
        let (mut fd, way_down) = self.table().way_to(id)?;
        for (child, name) in way_down.into_iter().rev() {
            fd = self.open_known(&fd, &name, child)?;
        }
        Ok(fd)
    }

    /// To be held from before a name moves or is removed until [`Self::moved`] or [`Self::removed`] has
    /// returned. [`Self::descriptor`] waits for its end, so the holder must not call that, and must not wait
    /// for the keeper.
    pub(crate) fn moves_names(&self) -> RwLockReadGuard<'_, ()> {
        self.names_move.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens `name` in `directory` with O_PATH. The result is always inside the volume: one
    /// component, no link followed.
    pub(crate) fn open_path(&self, directory: &OwnedFd, name: &CStr) -> Result<OwnedFd> {
        self.with_descriptors(|| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(directory, name, flags, Mode::empty())
        })
    }

    /// Runs `open`. If the process has no free descriptor, closes some that can be reopened, and
    /// tries again.
    pub(crate) fn with_descriptors<T>(&self, open: impl Fn() -> Result<T>) -> Result<T> {
        match open() {
            Err(Errno::MFILE) => {
                let mut table = self.table();
                let closed = table.close_until(self.limit / 4);
                self.release(table, closed);
                open()
            }
            other => other,
        }
    }

    /// Records a file that is about to be reported to the kernel again.
    pub(crate) fn remember(&self, id: u64, place: Place, fd: Option<OwnedFd>) {
        self.remember_in(self.table(), id, place, fd);
    }

    fn remember_in(&self, mut table: MutexGuard<'_, Table>, id: u64, place: Place, fd: Option<OwnedFd>) {
        let (before, round) = (table.nodes.len(), table.round);
        let node = table.nodes.entry(id).or_default();
        // An earlier daemon may have recorded any number.
        node.lookups = node.lookups.saturating_add(1);
        (node.used, node.touched) = (true, round);
        node.count.another_lookup();
        // A lookup that overlaps the removal of the last name must not give the node a place again:
        // it could not be opened there.
        let nameless = node.place.is_none()
            && node.fd.as_ref().is_some_and(|fd| stat(fd).is_ok_and(|seen| seen.stx_nlink == 0));
        if table.nodes.len() > before {
            table.ring_add(id);
            self.came(&mut table);
        }
        let mut left = if id == ROOT || nameless { Left::default() } else { table.put(id, place) };
        table.write_lookups(id);
        if let Some(fd) = fd {
            left.extend(table.keep_open(id, Arc::new(fd), self.limit));
        }
        self.release(table, left);
    }

    /// Must be called before the lookup of a name in a directory that the kernel has not locked.
    pub(crate) fn names_now(&self, directory: u64) -> NamesAsOf {
        NamesAsOf(self.names_lost(directory).load(Ordering::Acquire))
    }

    /// [`Self::remember`], unless the directory has lost a name since `seen`: the name may belong
    /// to another file now, so it must be looked up again. `ENFILE` if there is no space for
    /// another node.
    pub(crate) fn remember_if_still_there(
        &self,
        id: u64,
        place: &Place,
        fd: OwnedFd,
        seen: NamesAsOf,
        admission: Admission,
    ) -> Result<Option<OwnedFd>> {
        let mut table = self.table();
        if admission == Admission::IfRoom && !table.nodes.contains_key(&id) {
            table = self.room_for_one(table, place.directory)?;
        }
        if self.names_now(place.directory) != seen {
            return Ok(Some(fd));
        }
        self.remember_in(table, id, place.clone(), Some(fd));
        Ok(None)
    }

    /// [`Self::remember`] for a file that was not looked up by this name. `ENFILE` if there is no
    /// space, at once unless it `may_wait`.
    pub(crate) fn remember_if_room(&self, id: u64, place: Place, may_wait: bool) -> Result<()> {
        let mut table = self.table();
        if !table.nodes.contains_key(&id) {
            if !may_wait && table.nodes.len() >= self.bound.saturating_mul(2) {
                return Err(Errno::NFILE);
            }
            table = self.room_for_one(table, place.directory)?;
        }
        self.remember_in(table, id, place, None);
        Ok(())
    }

    /// Called before a node loses a name: whether `uid` may have another removed file. `ENOSPC` if
    /// not; a FORGET may be on its way.
    pub(crate) fn admit_nameless(&self, uid: u32) -> Result<()> {
        self.table().nameless.admit(uid, self.most_nameless)
    }

    fn names_lost(&self, directory: u64) -> &AtomicU64 {
        &self.names_lost[usize::try_from(directory % NAME_COUNTERS as u64).unwrap_or_default()]
    }

    /// Most descriptors of nodes that may be open at the same time.
    pub(crate) fn most_descriptors(&self) -> usize {
        self.limit
    }

    /// Most descriptors that removed files may use.
    pub(crate) fn most_nameless(&self) -> usize {
        self.most_nameless
    }

    /// Whether the directory is known to have no default ACL.
    pub(crate) fn lacks_default_acl(&self, id: u64) -> bool {
        self.table().nodes.get(&id).is_some_and(|node| node.lacks_default_acl)
    }

    /// The kernel has locked the directory, so no request changes its attributes meanwhile.
    pub(crate) fn set_lacks_default_acl(&self, id: u64, lacks: bool) {
        if let Some(node) = self.table().nodes.get_mut(&id) {
            node.lacks_default_acl = lacks;
        }
    }

    /// Whether the file is known to have no security.capability.
    pub(crate) fn lacks_capability(&self, id: u64) -> bool {
        self.table().nodes.get(&id).is_some_and(|node| node.lacks_capability)
    }

    /// Only where files change by requests alone: none of them can set security.capability.
    pub(crate) fn set_lacks_capability(&self, id: u64) {
        if let Some(node) = self.table().nodes.get_mut(&id) {
            node.lacks_capability = true;
        }
    }

    /// Whether the kernel knows this node.
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.table().nodes.contains_key(&id)
    }

    /// Whether the kernel has looked this node up and not forgotten it.
    pub(crate) fn is_looked_up(&self, id: u64) -> bool {
        self.table().nodes.get(&id).is_some_and(|node| node.lookups > 0)
    }

    /// The kernel has forgotten `count` lookups.
    pub(crate) fn forget(&self, id: u64, count: u64) {
        let mut table = self.table();
        let Some(node) = table.nodes.get_mut(&id) else { return };
        node.lookups = node.lookups.saturating_sub(count);
        let is_doubtful = node.lookups > 0 && node.count != Count::Exact;
        table.write_lookups(id);
        if is_doubtful {
            // The kernel has sent its whole count: what is left may be an earlier daemon's mistake.
            table.doubtful.push(id);
            self.doubted.notify_one();
        }
        let left = table.drop_unused(id);
        self.went(&mut table);
        self.release(table, left);
    }

    /// The file at `place` lost that name.
    pub(crate) fn removed(&self, id: u64, place: &Place, removal: Removal) -> Unused {
        let Removal { uid, held, names_left } = removal;
        let mut table = self.table();
        self.names_lost(place.directory).fetch_add(1, Ordering::Release);
        let Some(node) = table.nodes.get(&id) else { return Unused::default() };
        let loses_place = !names_left || node.place.as_ref() == Some(place);
        let mut left = Left::default();
        if !names_left {
            table.nameless.add(id, uid);
        }
        if loses_place {
            // In this order: a node without a place is not closed again.
            left.extend(table.take_place(id));
            left.extend(table.keep_open(id, held, self.limit));
            self.lost_place_of(&mut table);
        }
        self.forget_charges(&table, left)
    }

    /// The file moved from `from` to `to`. A node that is known by another name keeps that one.
    pub(crate) fn moved(&self, id: u64, from: &Place, to: Place) -> Unused {
        let mut table = self.table();
        self.names_lost(from.directory).fetch_add(1, Ordering::Release);
        let known_by_it = table.nodes.get(&id).is_some_and(|node| node.place.as_ref() == Some(from));
        let left = if known_by_it { table.put(id, to) } else { Left::default() };
        self.forget_charges(&table, left)
    }

    /// Opens the file that should be node `id`, and keeps its descriptor.
    fn open_known(&self, directory: &OwnedFd, name: &CStr, id: u64) -> Result<Arc<OwnedFd>> {
        let fd = self.open_path(directory, name)?;
        if self.origin.node_id(&stat(&fd)?)? != id {
            return Err(Errno::STALE);
        }
        let fd = Arc::new(fd);
        let mut table = self.table();
        let left = table.keep_open(id, Arc::clone(&fd), self.limit);
        self.release(table, left);
        Ok(fd)
    }

    /// Frees the space before it closes the files: a request that waits for space must not wait
    /// until the backing file system has freed a large file.
    fn release(&self, table: MutexGuard<'_, Table>, left: Left) {
        let unused = self.forget_charges(&table, left);
        drop(table);
        self.close(unused);
    }

    /// Called with the table locked, see the invariant.
    fn forget_charges(&self, _table: &MutexGuard<'_, Table>, left: Left) -> Unused {
        let Left { descriptors, forgotten, unkept } = left;
        if let Some(quota) = &self.quota {
            forgotten.into_iter().for_each(|id| quota.forget(id));
        }
        Unused { descriptors, unkept }
    }

    /// May wait for the keeper and for the backing file system.
    pub(crate) fn close(&self, unused: Unused) {
        drop(unused.descriptors);
        for id in unused.unkept {
            self.let_keeper_drop(id);
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // Code under the lock never panics in the middle of a change.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// All attributes for an answer, of the file itself (a link is not followed).
pub(crate) fn stat(file: impl AsFd) -> Result<Statx> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS | StatxFlags::BTIME)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use super::*;
    use crate::state_table::{NodeRecord, NodeView};

    struct Fixture {
        directory: tempfile::TempDir,
        root: Arc<OwnedFd>,
        nodes: Nodes,
    }

    impl Fixture {
        fn with_limit(limit: u64) -> Self {
            Self::with(limit, 1_000_000)
        }

        fn with(limit: u64, known: usize) -> Self {
            let directory = tempfile::tempdir().unwrap();
            let flags = OFlags::PATH | OFlags::DIRECTORY;
            let root = Arc::new(rustix::fs::open(directory.path(), flags, Mode::empty()).unwrap());
            let origin = Origin::of_root(&stat(&root).unwrap());
            let quota = Arc::new(Quota::new(volume_fs::figures::Limits::default(), 4, None));
            let limits = NodeLimits { descriptors: limit, known, event_loops: 4 };
            Self { directory, nodes: Nodes::new(Arc::clone(&root), origin, limits, Some(quota), None), root }
        }

        fn look_up(&self, directory: u64, path: &str) -> u64 {
            let parent = self.nodes.descriptor(directory).unwrap();
            let name = CString::new(path).unwrap();
            let fd = self.nodes.open_path(&parent, &name).unwrap();
            let id = self.nodes.origin.node_id(&stat(&fd).unwrap()).unwrap();
            self.nodes.remember(id, Place { directory, name }, Some(fd));
            id
        }

        fn create(&self, path: &str) {
            std::fs::write(self.directory.path().join(path), "").unwrap();
        }

        fn inode(&self, id: u64) -> u64 {
            stat(self.nodes.descriptor(id).unwrap()).unwrap().stx_ino
        }
    }

    #[test]
    fn far_more_nodes_than_descriptors_are_all_found_again() {
        let fixture = Fixture::with_limit(16);
        let ids: Vec<u64> = (0..200)
            .map(|n| {
                fixture.create(&format!("f{n}"));
                fixture.look_up(1, &format!("f{n}"))
            })
            .collect();
        assert!(fixture.nodes.table().open <= 8, "{}", fixture.nodes.table().open);
        for id in ids {
            assert_eq!(fixture.inode(id), id);
        }
    }

    #[test]
    fn a_deep_directory_is_found_again_through_closed_ones() {
        let fixture = Fixture::with_limit(0);
        std::fs::create_dir_all(fixture.directory.path().join("a/b/c/d")).unwrap();
        let mut id = 1;
        for name in ["a", "b", "c", "d"] {
            id = fixture.look_up(id, name);
        }
        assert_eq!(fixture.nodes.table().open, 0);
        assert_eq!(fixture.inode(id), id);
    }

    #[test]
    fn the_pruners_rest_ends_when_what_was_in_use_is_forgotten() {
        let fixture = Fixture::with(16, 2);
        let ids: Vec<u64> = (0..4)
            .map(|n| {
                fixture.create(&format!("f{n}"));
                fixture.look_up(1, &format!("f{n}"))
            })
            .collect();
        std::thread::scope(|scope| {
            // Longer than any test may take: without the end of the rest, this never ends.
            let resting = scope.spawn(|| fixture.nodes.rest(std::time::Duration::from_secs(86_400)));
            while !fixture.nodes.table().stuck {
                std::thread::yield_now();
            }
            for id in ids {
                fixture.nodes.forget(id, 1);
            }
            resting.join().unwrap();
        });
        assert!(!fixture.nodes.table().stuck);
    }

    #[test]
    fn as_many_forgets_as_lookups_leave_only_the_root() {
        let fixture = Fixture::with_limit(1000);
        std::fs::create_dir_all(fixture.directory.path().join("a/b")).unwrap();
        let a = fixture.look_up(1, "a");
        let b = fixture.look_up(a, "b");
        assert_eq!(fixture.look_up(a, "b"), b);
        // The directory first: it stays until its child is gone.
        fixture.nodes.forget(a, 1);
        assert_eq!(fixture.inode(b), b);
        fixture.nodes.forget(b, 1);
        assert_eq!(fixture.inode(b), b);
        fixture.nodes.forget(b, 1);
        let table = fixture.nodes.table();
        assert_eq!((table.nodes.len(), table.open), (1, 0));
        assert_eq!(table.nodes[&1].children, 0);
    }

    #[test]
    fn a_removed_file_keeps_its_descriptor_until_it_is_forgotten() {
        let fixture = Fixture::with_limit(2);
        fixture.create("gone");
        let id = fixture.look_up(1, "gone");
        let held = fixture.nodes.descriptor(id).unwrap();
        std::fs::remove_file(fixture.directory.path().join("gone")).unwrap();
        let place = Place { directory: 1, name: c"gone".into() };
        fixture.nodes.close(fixture.nodes.removed(id, &place, Removal { uid: 0, held, names_left: false }));
        for n in 0..10 {
            fixture.create(&format!("f{n}"));
            fixture.look_up(1, &format!("f{n}"));
        }
        assert_eq!(fixture.inode(id), id);
        // A look-up that had opened it just before.
        fixture.nodes.remember(id, Place { directory: 1, name: c"gone".into() }, None);
        drop(fixture.nodes.table().close_until(0));
        assert_eq!(fixture.inode(id), id);
        fixture.nodes.forget(id, 2);
        assert!(!fixture.nodes.contains(id));
    }

    #[test]
    fn a_file_without_a_name_is_held_wherever_it_was_last_seen() {
        let fixture = Fixture::with_limit(0);
        fixture.create("a");
        let id = fixture.look_up(1, "a");
        let path = |name: &str| fixture.directory.path().join(name);
        std::fs::rename(path("a"), path("b")).unwrap();
        let at_b = Place { directory: 1, name: c"b".into() };
        let held = Arc::new(fixture.nodes.open_path(&fixture.root, c"b").unwrap());
        std::fs::remove_file(path("b")).unwrap();
        fixture.nodes.close(fixture.nodes.removed(id, &at_b, Removal { uid: 0, held, names_left: false }));
        assert_eq!(fixture.inode(id), id);
    }

    #[test]
    fn a_look_up_that_a_rename_overtakes_is_made_again() {
        let fixture = Fixture::with_limit(0);
        fixture.create("a");
        let id = fixture.look_up(1, "a");
        let place = |name: &CStr| Place { directory: 1, name: name.into() };
        let seen = fixture.nodes.names_now(1);
        let fd = fixture.nodes.open_path(&fixture.root, c"a").unwrap();
        let path = |name: &str| fixture.directory.path().join(name);
        std::fs::rename(path("a"), path("b")).unwrap();
        fixture.nodes.close(fixture.nodes.moved(id, &place(c"a"), place(c"b")));
        let fd =
            fixture.nodes.remember_if_still_there(id, &place(c"a"), fd, seen, Admission::IfRoom).unwrap();
        let fd = fd.expect("given back");
        assert_eq!(fixture.inode(id), id, "found at b");
        let seen = fixture.nodes.names_now(1);
        let kept = fixture.nodes.remember_if_still_there(id, &place(c"b"), fd, seen, Admission::IfRoom);
        assert!(kept.unwrap().is_none());
    }

    /// An attacker may have controlled the daemon that gave it to the keeper, or written the table.
    #[test]
    fn a_descriptor_of_another_file_is_not_taken_over_and_no_count_of_lookups_overflows() {
        let fixture = Fixture::with_limit(1000);
        ["right", "wrong"].into_iter().for_each(|name| fixture.create(name));
        let open = |name: &str| std::fs::File::open(fixture.directory.path().join(name)).unwrap();
        let id = stat(open("right")).unwrap().stx_ino;
        let record = NodeRecord { id, lookups: u64::MAX, place: None, removed_by: Some(0) };
        let memfd = linux::shared_memory::create("test", 1 << 20).unwrap();
        let table = StateTable::new(volume_fs::state::Region::of_backend(&memfd).unwrap());
        let view = NodeView { id, lookups: u64::MAX, place: None, removed_by: Some(0) };
        fixture.nodes.restore(vec![(table.put_node(None, &view).unwrap(), record)]);
        for wrong in [open("wrong"), std::fs::File::open("/proc/self/status").unwrap()] {
            assert_eq!(fixture.nodes.restore_kept(vec![(id, wrong.into())]).len(), 1);
            assert_eq!(fixture.nodes.descriptor(id).unwrap_err(), Errno::STALE);
        }
        assert!(fixture.nodes.restore_kept(vec![(id, open("right").into())]).is_empty());
        assert_eq!(fixture.inode(id), id);
        assert_eq!(fixture.look_up(1, "right"), id);
        fixture.nodes.forget(id, 1);
        assert_eq!(fixture.inode(id), id);
    }

    #[test]
    fn a_moved_file_is_found_at_its_new_place_and_an_exchanged_one_is_not_taken_for_it() {
        let fixture = Fixture::with_limit(0);
        fixture.create("a");
        fixture.create("b");
        let (a, b) = (fixture.look_up(1, "a"), fixture.look_up(1, "b"));
        let place = |name: &CStr| Place { directory: 1, name: name.into() };
        let exchange = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(&fixture.root, "a", &fixture.root, "b", exchange).unwrap();
        // The table does not know: no file is better than the wrong file.
        assert_eq!(fixture.nodes.descriptor(a).unwrap_err(), Errno::STALE);
        fixture.nodes.close(fixture.nodes.moved(a, &place(c"a"), place(c"b")));
        fixture.nodes.close(fixture.nodes.moved(b, &place(c"b"), place(c"a")));
        assert_eq!((fixture.inode(a), fixture.inode(b)), (a, b));
    }

    #[test]
    fn coming_and_going_does_not_grow_the_clock() {
        let fixture = Fixture::with_limit(1000);
        fixture.create("f");
        for _ in 0..10_000 {
            let id = fixture.look_up(1, "f");
            fixture.nodes.forget(id, 1);
        }
        assert!(fixture.nodes.table().clock.len() < 3000);
    }

    #[test]
    fn memory_is_returned_after_the_last_file_is_forgotten() {
        let fixture = Fixture::with_limit(1000);
        fixture.create("f");
        let id = fixture.look_up(1, "f");
        std::thread::scope(|scope| {
            let returning = scope.spawn(|| {
                let is_done = fixture.nodes.give_back(std::time::Duration::from_secs(5));
                (is_done, fixture.nodes.table().nodes.len())
            });
            std::thread::park_timeout(std::time::Duration::from_millis(50));
            fixture.nodes.forget(id, 1);
            assert_eq!(returning.join().unwrap(), (true, 1));
        });
    }

    #[test]
    fn memory_is_not_returned_while_too_many_files_are_known() {
        let fixture = Fixture::with(16, 2);
        for n in 0..4 {
            fixture.create(&format!("f{n}"));
            fixture.look_up(1, &format!("f{n}"));
        }
        assert!(!fixture.nodes.give_back(std::time::Duration::from_secs(86_400)));
    }

    #[test]
    fn what_many_files_took_is_returned_when_they_are_forgotten() {
        let fixture = Fixture::with_limit(0);
        let ids = 2..20_000;
        for id in ids.clone() {
            let name = CString::new(format!("f{id}")).unwrap();
            fixture.nodes.remember(id, Place { directory: 1, name }, None);
            fixture.nodes.zeros_were_read(id, &(0..4096));
        }
        let capacities = || {
            let table = fixture.nodes.table();
            [table.nodes.capacity(), table.zeros.0.capacity(), table.ring.capacity()]
        };
        let taken = capacities();
        assert!(taken.iter().all(|capacity| *capacity > 19_000), "{taken:?}");
        ids.for_each(|id| fixture.nodes.forget(id, 1));
        assert!(fixture.nodes.table().much_freed());
        assert!(fixture.nodes.give_back(std::time::Duration::ZERO));
        let left = capacities();
        assert!(left.iter().all(|capacity| *capacity <= 4096), "{left:?}");
        assert!(!fixture.nodes.table().much_freed(), "it is returned once");
    }
}
