//! Lists directories.

use std::ffi::{CStr, OsStr};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, OFlags};
use rustix::io::Errno;
use volume_fs::backend::Taken;
use volume_fs::file::{Attributes, FileKind, Handle, Known, Listed, NodeId, OpenedDirectory};

use super::{Running, Volume, WANTED, synchronise};
use crate::attributes::file_kind;
use crate::directory::{Directory, Entry};
use crate::errno::Result;
use crate::nodes::stat;
use crate::place::{MOST_NAME_BYTES, Place};

/// The kernel keeps the listings of directories up to this size. It asks for names one by one if it has a
/// listing and has forgotten the inodes: with a larger directory, that would take long.
const MOST_KEPT_BYTES: u64 = 64 << 10;

/// With more open directories, what was read ahead of each would take too much memory.
const MOST_READ_AHEAD: usize = 1024;

impl Volume {
    pub(crate) fn open_directory(
        &self,
        running: &Running,
        NodeId(id): NodeId,
        uid: u32,
    ) -> Result<OpenedDirectory> {
        self.directories.admit_directory(uid)?;
        let node = self.nodes.descriptor(id)?;
        let fd = self.reopen(&node, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let is_small = self.trust.knows_all_changes() && stat(&fd)?.stx_size <= MOST_KEPT_BYTES;
        let (handle, is_sole) = self.directories.insert(Directory::new(id, fd, uid), running.number());
        self.keep_if_removed(id, &node);
        Ok(OpenedDirectory { handle, keeps_listing: is_small && is_sole })
    }

    pub(crate) fn release_directory(&self, handle: Handle) {
        drop(self.directories.remove(handle));
    }

    pub(crate) fn synchronise_directory(&self, handle: Handle, data_only: bool) -> Result<()> {
        synchronise(self.directory(handle)?.as_fd(), data_only)
    }

    /// Names and types from the cookie `offset` on. Too long names are left out: no request has one.
    pub(crate) fn list(
        &self,
        handle: Handle,
        offset: u64,
        mut take: impl FnMut(Listed<'_>) -> Taken,
    ) -> Result<()> {
        let keeps_ahead = self.keeps_ahead();
        let mut is_answer = false;
        let read = self.directory(handle)?.read(offset, keeps_ahead, |entry| {
            if is_too_long(&entry.name) {
                return Taken::Yes;
            }
            let taken = take(self.listed(entry));
            is_answer |= taken == Taken::Yes;
            taken
        });
        if is_answer { Ok(()) } else { read }
    }

    /// [`Self::list`] with attributes; each accepted entry counts as a lookup, except `.` and `..`.
    pub(crate) fn list_known(
        &self,
        node: NodeId,
        handle: Handle,
        offset: u64,
        mut take: impl FnMut(Listed<'_>, &Known) -> Taken,
    ) -> Result<()> {
        let directory = self.directory(handle)?;
        let own = self.attributes_now(&stat(&*directory)?)?;
        let (mut taken_before, mut is_answer, mut refused) = (false, false, None);
        let mut take = |listed: Listed<'_>, known: &Known| {
            let taken = take(listed, known);
            is_answer |= taken == Taken::Yes;
            taken
        };
        let read = directory.read(offset, self.keeps_ahead(), |entry| {
            if is_too_long(&entry.name) {
                return Taken::Yes;
            }
            let listed = self.listed(entry);
            if matches!(entry.name.as_bytes(), b"." | b"..") {
                // Only their number and type are used; the root's parent is the root.
                let is_own = entry.name.as_bytes() == b"." || node == NodeId::ROOT;
                let id = if is_own { node } else { listed.id };
                return take(
                    listed,
                    &Known { attributes: Attributes { id, ..own }, generation: 0, name_valid: own.valid },
                );
            }
            let seen = rustix::fs::statx(&*directory, &entry.name, AtFlags::SYMLINK_NOFOLLOW, WANTED);
            let known = seen.and_then(|seen| self.known(&seen, directory.as_fd(), &entry.name));
            let known = match known {
                Ok(known) => known,
                // Removed since it was read, or not part of this volume.
                Err(Errno::NOENT | Errno::STALE | Errno::XDEV) => return Taken::Yes,
                // The kernel would keep a listing without this name.
                Err(errno) => {
                    refused = Some(errno);
                    return Taken::No;
                }
            };
            // Remembered first: the kernel may use the answer at once.
            let place = Place { directory: node.0, name: entry.name.clone() };
            // One entry is enough for an answer.
            let may_wait = !taken_before;
            if let Err(errno) = self.nodes.remember_if_room(known.attributes.id.0, place, may_wait) {
                refused = Some(errno);
                return Taken::No;
            }
            let taken = take(listed, &known);
            if taken == Taken::No {
                self.forget_unanswered(known.attributes.id.0);
            }
            taken_before = true;
            taken
        });
        // The kernel sends no FORGET for entries of an answer that is an error. So entries that were taken are answered,
        // and the next request gets the error. If none was taken, the error is the answer: an empty one would mean the end
        // of the directory.
        if is_answer { Ok(()) } else { read.and(refused.map_or(Ok(()), Err)) }
    }

    /// Whether directories keep what was read ahead from one request to the next.
    fn keeps_ahead(&self) -> bool {
        self.directories.count() <= MOST_READ_AHEAD
    }

    fn listed<'a>(&self, entry: &'a Entry) -> Listed<'a> {
        Listed {
            id: NodeId(self.origin.node_id_of_inode(entry.inode)),
            kind: file_kind(entry.kind).unwrap_or(FileKind::Regular),
            name: OsStr::from_bytes(entry.name.as_bytes()),
            next: entry.next,
        }
    }
}

fn is_too_long(name: &CStr) -> bool {
    name.to_bytes().len() > MOST_NAME_BYTES
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use volume_fs::file::Name;

    use super::*;
    use crate::trust::Access;
    use crate::volume::testing::{begin, volume};

    /// An error after some entries: the directory is removed while it is listed.
    #[test]
    fn an_error_behind_the_first_entries_of_an_answer_is_the_next_answer() {
        let root = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = root.path().join("d");
        let volume = volume(root.path(), Access::default(), None);
        for with_attributes in [false, true] {
            std::fs::create_dir(&path).unwrap();
            // More than is read at once.
            for number in 0..3000 {
                std::fs::write(path.join(format!("file-{number}")), "").unwrap();
            }
            let name = Name { directory: NodeId::ROOT, name: OsStr::new("d") };
            let node = volume.find_known(&mut begin(&volume), name).unwrap().attributes.id;
            let handle = volume.open_directory(&begin(&volume), node, 0).unwrap().handle;
            let mut taken: Vec<(OsString, u64, NodeId)> = Vec::new();
            let mut take = |listed: Listed<'_>| {
                if !matches!(listed.name.as_bytes(), b"." | b"..") {
                    taken.push((listed.name.to_owned(), listed.next, listed.id));
                    if path.exists() {
                        std::fs::remove_dir_all(&path).unwrap();
                    }
                }
                Taken::Yes
            };
            let list = |offset, take: &mut dyn FnMut(Listed<'_>) -> Taken| match with_attributes {
                true => volume.list_known(node, handle, offset, |listed, _known| take(listed)),
                false => volume.list(handle, offset, take),
            };
            list(0, &mut take).unwrap();
            let (_, next, _) = taken.last().unwrap();
            let error = list(*next, &mut |listed| panic!("{listed:?}")).unwrap_err();
            assert_eq!(error, Errno::NOENT);
            if with_attributes {
                // The others were gone when their attributes were read.
                let [(_, _, id)] = &taken[..] else { panic!("{} entries", taken.len()) };
                volume.forget(*id, 1);
                assert!(!volume.nodes.contains(id.0));
            }
            volume.release_directory(handle);
        }
    }
}
