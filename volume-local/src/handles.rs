//! Open files and directories, by the handle numbers that the kernel uses.
//!
//! A handle of an earlier daemon is opened again at its first use.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::OFlags;
use rustix::io::Errno;
use volume_fs::file::Handle;

use crate::errno::Result;
use crate::state_table::{HandleRecord, Opened, RecordId, StateTable};

/// An open file or directory.
pub(crate) trait OfNode {
    fn node(&self) -> u64;
    /// open(2) flags of the backing file. Of a directory, the user that opened it.
    fn flags_or_user(&self) -> u32;
}

/// Numbers are never reused, so a late request cannot reach another file.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    most: usize,
    /// Directories of one user.
    most_of_user: usize,
    kind: Opened,
    /// Of the next handle, if there is no state table.
    next: AtomicU64,
    table: Option<Arc<StateTable>>,
    /// An earlier daemon has left handles.
    has_earlier: AtomicBool,
    open: RwLock<Open<T>>,
}

#[derive(Debug)]
struct Open<T> {
    all: HashMap<u64, Entry<T>>,
    /// How many handles each node has.
    of_node: HashMap<u64, Count>,
    /// How many directories each user has.
    of_user: HashMap<u32, usize>,
    /// Handles of an earlier daemon, by the request that opened each.
    by_request: HashMap<u64, u64>,
}

#[derive(Debug)]
struct Entry<T> {
    record: Option<RecordId>,
    item: Item<T>,
}

#[derive(Debug)]
enum Item<T> {
    Open(Arc<T>),
    /// Opened by an earlier daemon, and not used since.
    Earlier(HandleRecord),
}

impl<T: OfNode> Item<T> {
    fn node_and_flags(&self) -> (u64, u32) {
        match self {
            Self::Open(item) => (item.node(), item.flags_or_user()),
            Self::Earlier(record) => (record.node, record.flags),
        }
    }
}

#[derive(Debug, Default)]
struct Count {
    all: u32,
    /// Of these, open for reading and writing.
    both_ways: u32,
}

fn is_both_ways(kind: Opened, flags: u32) -> bool {
    kind == Opened::File && OFlags::from_bits_retain(flags).contains(OFlags::RDWR)
}

impl<T> Open<T> {
    /// Whether it is the node's only handle.
    fn counts(&mut self, kind: Opened, node: u64, flags_or_user: u32) -> bool {
        if kind == Opened::Directory {
            *self.of_user.entry(flags_or_user).or_default() += 1;
        }
        let count = self.of_node.entry(node).or_default();
        count.all += 1;
        count.both_ways += u32::from(is_both_ways(kind, flags_or_user));
        count.all == 1
    }

    fn counts_no_more(&mut self, kind: Opened, node: u64, flags_or_user: u32) {
        if kind == Opened::Directory
            && let Some(count) = self.of_user.get_mut(&flags_or_user)
        {
            *count -= 1;
            if *count == 0 {
                self.of_user.remove(&flags_or_user);
            }
        }
        let Some(count) = self.of_node.get_mut(&node) else { return };
        count.all -= 1;
        count.both_ways -= u32::from(is_both_ways(kind, flags_or_user));
        if count.all == 0 {
            self.of_node.remove(&node);
        }
    }
}

/// What a handle was.
#[derive(Debug)]
pub(crate) struct Closed<T> {
    pub(crate) node: u64,
    /// open(2) flags of the backing file. Of a directory, the user that opened it.
    pub(crate) flags: u32,
    /// `None`: opened by an earlier daemon and not used since.
    pub(crate) file: Option<Arc<T>>,
}

impl<T: OfNode> Handles<T> {
    /// `most`: the limit of open handles.
    pub(crate) fn new(most: usize, kind: Opened, table: Option<Arc<StateTable>>) -> Self {
        let (all, of_node, of_user, by_request) = Default::default();
        let open = RwLock::new(Open { all, of_node, of_user, by_request });
        let (next, has_earlier) = (AtomicU64::new(1), AtomicBool::new(false));
        Self { most, most_of_user: most, kind, next, table, has_earlier, open }
    }

    /// Of directories: one user may have at most so many.
    pub(crate) fn with_most_of_user(self, most_of_user: usize) -> Self {
        Self { most_of_user, ..self }
    }

    /// Takes over the handles of an earlier daemon.
    pub(crate) fn restore(&self, handles: impl IntoIterator<Item = (RecordId, HandleRecord)>) {
        let mut open = self.write();
        for (record, handle) in handles {
            self.has_earlier.store(true, Ordering::Release);
            open.counts(self.kind, handle.node, handle.flags);
            open.by_request.insert(handle.request, handle.handle);
            open.all.insert(handle.handle, Entry { record: Some(record), item: Item::Earlier(handle) });
        }
    }

    /// The handle that an earlier daemon has opened for this request. Asked at most once.
    pub(crate) fn opened_by(&self, request: u64) -> Option<Handle> {
        let known = !self.read().by_request.is_empty();
        if known { self.write().by_request.remove(&request).map(Handle) } else { None }
    }

    /// Whether an earlier daemon has left handles; some may be closed.
    pub(crate) fn has_earlier(&self) -> bool {
        self.has_earlier.load(Ordering::Acquire)
    }

    /// The handles of a node that an earlier daemon has opened, and that were not used since.
    pub(crate) fn unused_of(&self, node: u64) -> Vec<Handle> {
        let open = self.read();
        if !open.of_node.contains_key(&node) {
            return Vec::new();
        }
        let is_its = |item: &Item<T>| matches!(item, Item::Earlier(record) if record.node == node);
        let unused = open.all.iter().filter(|(_, entry)| is_its(&entry.item));
        unused.map(|(handle, _)| Handle(*handle)).collect()
    }

    /// Called before an open. Concurrent calls may all succeed: an event loop opens one file at a
    /// time. A handle without a record would be lost with its daemon.
    pub(crate) fn admit(&self) -> Result<()> {
        let has_room = self.table.as_ref().is_none_or(|table| table.has_room());
        if has_room && self.count() < self.most { Ok(()) } else { Err(Errno::MFILE) }
    }

    /// As [`Self::admit`], of a directory that this user opens.
    pub(crate) fn admit_directory(&self, uid: u32) -> Result<()> {
        self.admit()?;
        let of_user = self.read().of_user.get(&uid).copied().unwrap_or_default();
        if of_user < self.most_of_user { Ok(()) } else { Err(Errno::MFILE) }
    }

    /// The handle, and whether it is the node's only one. `request`: the number of the request that opened it.
    pub(crate) fn insert(&self, item: T, request: u64) -> (Handle, bool) {
        let (node, flags) = (item.node(), item.flags_or_user());
        let (number, record) = match &self.table {
            Some(table) => {
                let handle = table.next_handle(self.kind);
                let record = HandleRecord { kind: self.kind, handle, node, flags, request };
                (handle, table.put_handle(&record))
            }
            None => (self.next.fetch_add(1, Ordering::Relaxed), None),
        };
        let mut open = self.write();
        let is_sole = open.counts(self.kind, node, flags);
        open.all.insert(number, Entry { record, item: Item::Open(Arc::new(item)) });
        (Handle(number), is_sole)
    }

    /// The open file; `open` opens one of an earlier daemon.
    pub(crate) fn get(
        &self,
        handle: Handle,
        open: impl FnOnce(&HandleRecord) -> Result<T>,
    ) -> Result<Arc<T>> {
        let earlier = match &self.read().all.get(&handle.0).ok_or(Errno::BADF)?.item {
            Item::Open(item) => return Ok(Arc::clone(item)),
            Item::Earlier(record) => *record,
        };
        let opened = Arc::new(open(&earlier)?);
        let mut all = self.write();
        let entry = all.all.get_mut(&handle.0).ok_or(Errno::BADF)?;
        // Another request may have opened it meanwhile.
        if let Item::Earlier(_) = entry.item {
            entry.item = Item::Open(opened);
        }
        match &entry.item {
            Item::Open(item) => Ok(Arc::clone(item)),
            Item::Earlier(_) => Err(Errno::BADF),
        }
    }

    /// Whether the node has an open handle.
    pub(crate) fn has(&self, node: u64) -> bool {
        self.read().of_node.contains_key(&node)
    }

    /// Whether the node has a handle that is open for reading and writing.
    pub(crate) fn has_open_both_ways(&self, node: u64) -> bool {
        self.read().of_node.get(&node).is_some_and(|count| count.both_ways > 0)
    }

    /// The nodes with an open handle.
    pub(crate) fn nodes(&self) -> Vec<u64> {
        self.read().of_node.keys().copied().collect()
    }

    /// The nodes that have an open handle with such flags, above `after`: the first `most` of them.
    pub(crate) fn nodes_after(&self, after: u64, most: usize, with: impl Fn(u32) -> bool) -> Vec<u64> {
        let open = self.read();
        let all = open.all.values().map(|entry| entry.item.node_and_flags());
        let wanted: BTreeSet<u64> =
            all.filter(|(node, flags)| *node > after && with(*flags)).map(|(node, _)| node).collect();
        wanted.into_iter().take(most).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.read().all.len()
    }

    /// Removes the handle; its file closes when the last request that uses it ends.
    pub(crate) fn remove(&self, handle: Handle) -> Option<Closed<T>> {
        let mut open = self.write();
        let Entry { record, item } = open.all.remove(&handle.0)?;
        let (node, flags) = item.node_and_flags();
        if let Item::Earlier(record) = &item {
            open.by_request.remove(&record.request);
        }
        open.counts_no_more(self.kind, node, flags);
        drop(open);
        if let (Some(table), Some(record)) = (&self.table, record) {
            table.remove(record);
        }
        let file = match item {
            Item::Open(item) => Some(item),
            Item::Earlier(_) => None,
        };
        Some(Closed { node, flags, file })
    }

    fn read(&self) -> RwLockReadGuard<'_, Open<T>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Open<T>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use volume_fs::state::Region;

    use super::*;

    #[derive(Debug, PartialEq, Eq)]
    struct File(u64);

    impl OfNode for File {
        fn node(&self) -> u64 {
            self.0
        }

        fn flags_or_user(&self) -> u32 {
            0
        }
    }

    fn unopened(_: &HandleRecord) -> Result<File> {
        Err(Errno::IO)
    }

    #[test]
    fn a_released_handle_is_bad_and_its_number_is_not_used_again() {
        let handles = Handles::new(2, Opened::File, None);
        let (first, _) = handles.insert(File(7), 1);
        assert!(handles.has(7));
        assert_eq!(handles.remove(first).unwrap().file.as_deref(), Some(&File(7)));
        assert!(!handles.has(7));
        assert_eq!(handles.get(first, unopened), Err(Errno::BADF));
        assert_ne!(handles.insert(File(8), 2).0, first);
    }

    #[test]
    fn nodes_are_listed_once_each_and_in_order_from_any_of_them_on() {
        let handles = Handles::new(9, Opened::File, None);
        for node in [5, 3, 9, 3] {
            handles.insert(File(node), node);
        }
        assert_eq!(handles.nodes_after(0, 2, |_| true), [3, 5]);
        assert_eq!(handles.nodes_after(5, 2, |_| true), [9]);
        assert_eq!(handles.nodes_after(0, 2, |flags| flags != 0), [0_u64; 0]);
    }

    #[test]
    fn no_handle_is_opened_that_a_successor_would_not_find() {
        let memory = linux::shared_memory::create("test", 1 << 20).unwrap();
        let table = Arc::new(StateTable::new(Region::of_backend(&memory).unwrap()));
        let handles = Handles::new(usize::MAX, Opened::File, Some(table));
        let mut open = Vec::new();
        while handles.admit().is_ok() {
            open.push(handles.insert(File(7), 1).0);
            assert!(open.len() < 1 << 20, "the table is full");
        }
        let unrecorded = handles.read().all.values().filter(|entry| entry.record.is_none()).count();
        assert_eq!(unrecorded, 0);
        assert!(open.len() > 1000, "{}", open.len());
        handles.remove(open[0]).unwrap();
        handles.admit().unwrap();
    }

    #[test]
    fn as_many_as_the_limit_are_open() {
        let handles = Handles::new(1, Opened::File, None);
        handles.admit().unwrap();
        handles.insert(File(7), 1);
        assert_eq!(handles.admit(), Err(Errno::MFILE));
    }
}
