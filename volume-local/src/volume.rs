//! The file system over the volume's directory: the effect of each request on the backing files. It
//! does not know FUSE. The modules `names`, `data`, `attributes` and `listing` handle names,
//! content, attributes and directories. `charges` counts the space that they take, if the daemon
//! counts it. `holes` tells data from holes. `running` and `recovery` continue what an earlier daemon has begun.
//!
//! The kernel checks permissions before it sends a request (FUSE_POSIX_ACL implies
//! default_permissions). So this module accesses every file with CAP_DAC_OVERRIDE, and acts as the
//! caller only to create files.

mod attributes;
mod charges;
mod data;
mod holes;
mod listing;
mod names;
mod recovery;
mod running;

use std::collections::HashSet;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;

use linux::credentials::{self, CapabilitySet};
use linux::fs_at::{self, DescriptorDir};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use volume_fs::file::{Attributes, FileKind, Handle, Known, NodeId, Validity};
use volume_fs::service::DataPath;

use crate::attributes::Origin;
use crate::backings::{self, Backings};
use crate::count;
use crate::directory::Directory;
use crate::errno::{self, Result};
use crate::handles::{Handles, OfNode};
use crate::nodes::{NodeLimits, Nodes, stat};
use crate::place::{MOST_NAME_BYTES, Place};
use crate::quota::{Quota, Use};
use crate::state_table::{Opened, StateTable};
use crate::trust::{Access, Trust};
use crate::xattrs::AttributeBlocks;

pub(crate) use self::attributes::NewXattr;
pub(crate) use self::recovery::Shared;
pub(crate) use self::running::Running;

const WANTED: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME);

/// Descriptors reserved from open files and directories, to answer the driver and scrapers.
const MOST_KEPT_FREE: usize = 1024;

/// Open directories, which take no descriptors from files: each costs as much memory as a file.
const MOST_DIRECTORIES: usize = 65_536;

#[derive(Debug)]
pub(crate) struct Volume {
    origin: Origin,
    nodes: Nodes,
    root: Arc<OwnedFd>,
    descriptors: DescriptorDir,
    attribute_blocks: AttributeBlocks,
    files: Handles<OpenFile>,
    directories: Handles<Directory>,
    /// `None`: not this daemon counts what the volume holds.
    quota: Option<Arc<Quota>>,
    /// On Btrfs, whose block counts omit names: each further name of a file counts as an inode.
    names_take_inodes: bool,
    /// xfs, which allocates blocks beyond the end of a file that grows.
    allocates_ahead: bool,
    read_only: bool,
    /// The kernel keeps what is written and sends it later.
    writeback_cache: bool,
    /// A hole of a backing file always has whole pages of the kernel.
    holes_are_pages: bool,
    /// Files that the kernel reads and writes itself; `None`: the daemon does.
    passing: Option<Backings>,
    trust: Arc<Trust>,
    /// What a successor needs; `None` if none can follow.
    table: Option<Arc<StateTable>>,
}

#[derive(Debug)]
struct OpenFile {
    id: u64,
    /// The flags of its open.
    flags: OFlags,
    fd: OwnedFd,
}

impl OfNode for OpenFile {
    fn node(&self) -> u64 {
        self.id
    }

    fn flags_or_user(&self) -> u32 {
        self.flags.bits()
    }
}

/// Which way data takes, and what counts it.
#[derive(Debug)]
pub(crate) struct Policies {
    pub(crate) data_path: DataPath,
    /// `None`: not this daemon.
    pub(crate) quota: Option<Arc<Quota>>,
    /// The kernel keeps what is written and sends it later.
    pub(crate) writeback_cache: bool,
}

impl Volume {
    /// `directory`: O_PATH descriptor of a detached mount's root.
    pub(crate) fn open(
        directory: OwnedFd,
        access: Access,
        descriptors: DescriptorDir,
        limits: NodeLimits,
        policies: Policies,
        shared: Option<Shared>,
    ) -> volume_fs::Result<Self> {
        let Policies { data_path, quota, writeback_cache } = policies;
        let read_only = access.read_only;
        let root = Arc::new(directory);
        let (table, keeper, earlier) = match shared {
            Some(Shared { table, keeper, earlier, .. }) => (Some(table), Some(keeper), earlier),
            None => (None, None, None),
        };
        if !read_only && earlier.is_none() {
            copy_single_blocks(&descriptors, &root);
        }
        let seen = stat(&root).map_err(|e| volume_fs::Error::Kernel {
            step: "open volume",
            source: linux::Error::new("statx", "the volume's directory", e),
        })?;
        let origin = Origin::of_root(&seen);
        let names_take_inodes = linux::btrfs::is_btrfs(&root).map_err(|e| volume_fs::Error::Kernel {
            step: "open volume",
            source: linux::Error::new("statfs", "the volume's directory", e),
        })?;
        let allocates_ahead = linux::xfs::is_xfs(&root).map_err(|e| volume_fs::Error::Kernel {
            step: "open volume",
            source: linux::Error::new("statfs", "the volume's directory", e),
        })?;
        let attribute_blocks = AttributeBlocks::of_file_system(&root);
        let holes_are_pages = rustix::fs::fstatvfs(&root).is_ok_and(|found| holes::are_pages(found.f_frsize));
        let shared = table.clone().zip(keeper.clone());
        let nodes = Nodes::new(Arc::clone(&root), origin, limits, quota.clone(), shared);
        let limit = usize::try_from(limits.descriptors).unwrap_or(usize::MAX);
        let kept_free = (limit / 8).min(MOST_KEPT_FREE);
        let (most_directories, of_user) = most_directories(limit);
        let others = nodes.most_descriptors() + nodes.most_nameless() + most_directories + kept_free;
        let most_files = limit.saturating_sub(others);
        let passing = match (data_path, table.clone(), keeper.clone()) {
            (DataPath::Daemon, ..) => None,
            (DataPath::Passthrough, Some(table), Some(keeper)) => Some(Backings::new(keeper, table)),
            (DataPath::Passthrough, ..) => return Err(volume_fs::Error::PassthroughWithoutKeeper),
        };
        let trust = Arc::new(Trust::new(access, &root));
        let volume = Self {
            origin,
            files: Handles::new(most_files, Opened::File, table.clone()),
            directories: Handles::new(most_directories, Opened::Directory, table.clone())
                .with_most_of_user(of_user),
            nodes,
            trust,
            root,
            descriptors,
            attribute_blocks,
            quota,
            names_take_inodes,
            allocates_ahead,
            read_only,
            writeback_cache,
            holes_are_pages,
            passing,
            table,
        };
        if let (Some(earlier), Some(keeper)) = (earlier, keeper) {
            volume.recover(earlier, &keeper)?;
        }
        Ok(volume)
    }

    /// Counts the whole tree, which must not change meanwhile.
    pub(crate) fn count(&self) -> Result<Use> {
        let attribute_blocks =
            |file: BorrowedFd<'_>| self.attribute_blocks_of(&self.descriptors.xattrs(file));
        let report = |so_far| {
            if let Some(quota) = &self.quota {
                quota.has_found(so_far);
            }
        };
        count::count(&*self.root, self.origin, self.names_take_inodes, attribute_blocks, report)
    }

    pub(crate) fn open_files(&self) -> usize {
        self.files.count()
    }

    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// The files that are open for writing, with their generations, above `after`: the first `most`.
    pub(crate) fn written(
        &self,
        NodeId(after): NodeId,
        most: usize,
    ) -> std::result::Result<Vec<(NodeId, u64)>, String> {
        let writes = |flags| backings::writes(OFlags::from_bits_retain(flags));
        let mut found = Vec::new();
        for id in self.files.nodes_after(after, most, writes) {
            match self.generation_of(id) {
                Ok(generation) => found.push((NodeId(id), generation)),
                // Closed meanwhile.
                Err(_) if self.files.nodes_after(id - 1, 1, writes) != [id] => {}
                Err(errno) => return Err(format!("the generation of node {id}: {errno}")),
            }
        }
        Ok(found)
    }

    fn generation_of(&self, id: u64) -> Result<u64> {
        let file = self.nodes.descriptor(id)?;
        generation(file.as_fd(), c"", &stat(&*file)?)
    }

    /// The nodes with an open file.
    pub(crate) fn open_nodes(&self) -> HashSet<u64> {
        self.files.nodes().into_iter().collect()
    }

    /// Whether the kernel reads and writes files itself.
    pub(crate) fn passes(&self) -> bool {
        self.passing.is_some()
    }

    /// The kernel has forgotten a node, perhaps not for the last time.
    pub(crate) fn is_unknown(&self, id: u64) {
        if self.files.has_earlier() || self.directories.has_earlier() {
            self.close_unopened(id);
        }
        if let Some(passing) = &self.passing {
            passing.is_forgotten(id, || !self.nodes.contains(id));
        }
    }

    /// Called by the ender. Returns only if no file can pass through.
    pub(crate) fn end_backings(&self) {
        self.passing.iter().for_each(Backings::send_what_waits);
    }

    pub(crate) fn keeper_was_replaced(&self) {
        self.passing.iter().for_each(Backings::keeper_was_replaced);
    }

    /// Whether files may be written without this daemon.
    pub(crate) fn may_be_written(&self) -> bool {
        self.passing.as_ref().is_some_and(Backings::may_be_written)
    }

    /// Returns memory after many nodes were dropped.
    pub(crate) fn give_back(&self) {
        if let Some(quota) = &self.quota {
            quota.shrink();
        }
        linux::memory::give_back();
        if let Some(table) = &self.table {
            table.give_back();
        }
    }

    /// An open file. One that an earlier daemon has opened is opened again at its first use.
    fn file(&self, handle: Handle) -> Result<Arc<OpenFile>> {
        self.files.get(handle, |earlier| {
            let flags = OFlags::from_bits_retain(earlier.flags);
            let fd = self.reopen(&*self.nodes.descriptor(earlier.node)?, flags)?;
            Ok(OpenFile { id: earlier.node, flags, fd })
        })
    }

    /// An open directory, as [`Self::file`].
    fn directory(&self, handle: Handle) -> Result<Arc<Directory>> {
        self.directories.get(handle, |earlier| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let fd = self.reopen(&*self.nodes.descriptor(earlier.node)?, flags)?;
            Ok(Directory::new(earlier.node, fd, earlier.flags))
        })
    }

    /// Whether there is a file at `place` that is not a directory.
    pub(crate) fn is_no_directory(&self, place: &Place) -> bool {
        let seen = self.nodes.descriptor(place.directory).and_then(|directory| {
            rustix::fs::statx(directory, &place.name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE)
        });
        seen.is_ok_and(|seen| FileType::from_raw_mode(seen.stx_mode.into()) != FileType::Directory)
    }

    fn reopen(&self, node: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
        // Only regular files and directories are opened through FUSE; a FIFO made behind the mount
        // must not block an event loop.
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
        self.nodes.with_descriptors(|| self.descriptors.reopen(node.as_fd(), flags))
    }

    fn known(&self, seen: &Statx, file: BorrowedFd<'_>, name: &CStr) -> Result<Known> {
        let attributes = self.attributes_now(seen)?;
        let generation = generation(file, name, seen)?;
        Ok(Known { attributes, generation, name_valid: self.trust.of_name() })
    }

    /// The answer's attributes.
    fn attributes_now(&self, seen: &Statx) -> Result<Attributes> {
        let attributes = self.origin.attributes(seen, self.trust.of_attributes())?;
        let is_written = |passing: &Backings| passing.is_written(attributes.id.0);
        let valid = match self.passing.as_ref().is_some_and(is_written) {
            // Stores by mappings change the file's times without a request.
            true => Validity::Second,
            false => attributes.valid,
        };
        // FUSE counts no blocks of what the kernel has not sent. tar(1) takes a file without any for a hole.
        let hides_data = attributes.kind == FileKind::Regular
            && attributes.blocks == 0
            && self.may_have_unsent_data(attributes.id.0, attributes.bytes);
        let blocks = attributes.blocks.max(u64::from(hides_data));
        Ok(Attributes { valid, blocks, ..attributes })
    }

    pub(crate) fn trust(&self) -> &Arc<Trust> {
        &self.trust
    }

    fn writable(&self) -> Result<()> {
        if self.read_only { Err(Errno::ROFS) } else { Ok(()) }
    }
}

/// The most open directories of all users together, and of one user: as many as are kept free or more, and
/// at most four fifths of all.
fn most_directories(limit: usize) -> (usize, usize) {
    let least = (limit / 8).min(MOST_KEPT_FREE);
    let all = (limit / 16).min(MOST_DIRECTORIES).max(least + least / 4);
    (all, (all / 4).max(least))
}

/// Overwriting blocks shared with a snapshot reserves no space, so it must not take more than is
/// written. New files and directories inherit this.
fn copy_single_blocks(descriptors: &DescriptorDir, root: &OwnedFd) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let chosen = descriptors.reopen(root.as_fd(), flags).and_then(linux::xfs::copy_single_blocks_below);
    if let Err(errno) = chosen {
        tracing::warn!(%errno, "xfs: overwriting what a snapshot shares will take more than is written");
    }
}

/// Changes a file as a process without CAP_FSETID would: suid and sgid are cleared.
fn clearing_setid<T>(change: impl FnOnce() -> Result<T>) -> Result<T> {
    credentials::without_capability(CapabilitySet::FSETID, change).map_err(errno::from_nix)?
}

/// Distinguishes successive files with the same inode number.
fn generation(file: BorrowedFd<'_>, name: &CStr, seen: &Statx) -> Result<u64> {
    match fs_at::generation(file, name) {
        // Without handles, or if a container's own filter refuses the call, the birth time
        // distinguishes successive files nearly as well.
        Err(Errno::OPNOTSUPP | Errno::PERM | Errno::NOSYS) => {
            Ok(seen.stx_btime.tv_sec.cast_unsigned().rotate_left(30) ^ u64::from(seen.stx_btime.tv_nsec))
        }
        other => other,
    }
}

fn synchronise(file: BorrowedFd<'_>, data_only: bool) -> Result<()> {
    if data_only { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) }
}

fn mode_bits(mode: u32) -> Mode {
    Mode::from_raw_mode(mode) & Mode::from_raw_mode(0o7777)
}

/// A name in a directory, which cannot lead out of it.
fn component(name: &OsStr) -> Result<CString> {
    match name.as_bytes() {
        b"" => Err(Errno::NOENT),
        b"." | b".." => Err(Errno::INVAL),
        bytes if bytes.contains(&b'/') => Err(Errno::INVAL),
        bytes if bytes.len() > MOST_NAME_BYTES => Err(Errno::NAMETOOLONG),
        _ => c_string(name),
    }
}

fn c_string(text: &OsStr) -> Result<CString> {
    CString::new(OsString::from(text).into_vec()).map_err(|_| Errno::INVAL)
}

/// Volumes without a kernel above them.
#[cfg(test)]
pub(crate) mod testing {
    use std::path::Path;
    use std::time::Duration;

    use keeper::daemon::Removed;
    use linux::credentials::Caller;
    use volume_fs::file::Name;
    use volume_fs::request::{Permissions, RequestId};
    use volume_fs::service::Succession;
    use volume_fs::state::Region;

    use super::*;

    pub(crate) const CALLER: Caller = Caller { uid: 0, gid: 0 };

    pub(crate) fn volume(directory: &Path, access: Access, quota: Option<Arc<Quota>>) -> Volume {
        with_descriptors(1024, directory, access, quota)
    }

    /// With such a limit of open files.
    pub(super) fn with_descriptors(
        descriptors: u64,
        directory: &Path,
        access: Access,
        quota: Option<Arc<Quota>>,
    ) -> Volume {
        open(descriptors, directory, access, quota, None)
    }

    /// Whose keeper has the other end of `socket`; the daemon waits for it up to `limit`.
    pub(super) fn with_keeper(directory: &Path, socket: OwnedFd, limit: Duration) -> Volume {
        rustix::fs::fcntl_setfl(&socket, OFlags::NONBLOCK).unwrap();
        let removed = Removed::new(socket, limit).unwrap();
        let memory = linux::shared_memory::create("test", 8 << 20).unwrap();
        let state = Region::of_backend(&memory).unwrap();
        let shared = Shared::open(Succession { state, version: 2, removed, continues: false }).unwrap();
        open(1024, directory, Access::default(), None, Some(shared))
    }

    fn open(
        descriptors: u64,
        directory: &Path,
        access: Access,
        quota: Option<Arc<Quota>>,
        shared: Option<Shared>,
    ) -> Volume {
        let root = rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let limits = NodeLimits { descriptors, known: 1000, event_loops: 4 };
        let policies = Policies { data_path: DataPath::Daemon, quota, writeback_cache: false };
        Volume::open(root, access, DescriptorDir::open().unwrap(), limits, policies, shared).unwrap()
    }

    pub(super) fn begin(volume: &Volume) -> Running {
        volume.begin(RequestId { number: 1, resent: false })
    }

    pub(super) fn create(volume: &Volume, name: &str) -> Result<(NodeId, Handle)> {
        let name = Name { directory: NodeId::ROOT, name: OsStr::new(name) };
        let permissions = Permissions { mode: 0o644, umask: 0 };
        let (known, opened) = volume.create(&mut begin(volume), name, permissions, OFlags::RDWR, CALLER)?;
        Ok((known.attributes.id, opened.handle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component_or_refused() {
        for (name, refused) in
            [("", Errno::NOENT), (".", Errno::INVAL), ("..", Errno::INVAL), ("a/b", Errno::INVAL)]
        {
            assert_eq!(component(OsStr::new(name)), Err(refused), "{name:?}");
        }
        assert_eq!(component(OsStr::new("..a")).unwrap().as_c_str(), c"..a");
        let long = |bytes| OsString::from("n".repeat(bytes));
        assert_eq!(component(&long(255)).unwrap().as_bytes(), long(255).as_bytes());
        for bytes in [256, 257, 1024] {
            assert_eq!(component(&long(bytes)), Err(Errno::NAMETOOLONG), "{bytes}");
        }
    }

    #[test]
    fn one_user_has_an_eighth_of_the_descriptors_or_1024_and_leaves_a_fifth_of_the_directories() {
        for (limit, most) in [
            (1024, (160, 128)),
            (8192, (1280, 1024)),
            (20_480, (1280, 1024)),
            (65_536, (4096, 1024)),
            (1 << 20, (65_536, 16_384)),
            (usize::MAX, (65_536, 16_384)),
        ] {
            assert_eq!(most_directories(limit), most, "{limit}");
        }
        for limit in (32..1 << 20).step_by(7) {
            let (all, of_user) = most_directories(limit);
            assert!(of_user >= (limit / 8).min(1024), "{limit}");
            assert!(all - of_user >= all / 5 && all > of_user, "{limit}: {all}, {of_user}");
        }
    }
}
