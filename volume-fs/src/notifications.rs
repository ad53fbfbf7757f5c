//! Makes the kernel forget inodes: writes notifications to the FUSE connection (linux/fuse.h), with
//! a header whose `unique` is zero and whose `error` is the notification's code. One of them first
//! needs a list from the driver.

use std::collections::HashSet;
use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;

/// FUSE_NOTIFY_INVAL_INODE.
const INVAL_INODE: i32 = 2;
/// FUSE_NOTIFY_INVAL_ENTRY.
const INVAL_ENTRY: i32 = 3;
/// FUSE_NOTIFY_RESEND, Linux 6.9.
const RESEND: i32 = 7;
/// FUSE_NOTIFY_PRUNE, Linux 6.18 (7.45). Older kernels answer EINVAL.
const PRUNE: i32 = 9;

/// Node ids in one notification: the kernel's maximum.
pub const MOST_PRUNED: usize = 512;

const HEADER_BYTES: usize = 16;

/// A backend's requests to the kernel that has mounted its volume.
///
/// The calling thread must not serve requests. A notification may wait for pages under writeback
/// and for locked directories, and both may wait for an answer to a request.
#[derive(Debug)]
pub struct Kernel {
    device: Arc<OwnedFd>,
    mount_points: Arc<MountPoints>,
}

/// The list that the driver must send if the kernel lacks FUSE_NOTIFY_PRUNE: the mount points below
/// the volume's root, in all mount namespaces.
#[derive(Debug, Default)]
pub(crate) struct MountPoints {
    state: Mutex<Asked>,
    answered: Condvar,
}

#[derive(Debug, Default)]
struct Asked {
    /// The round that waits for a list.
    round: Option<u32>,
    list: Option<HashSet<Vec<u8>>>,
}

impl MountPoints {
    /// The round for which a list is requested.
    pub(crate) fn wanted_for(&self) -> Option<u32> {
        self.state().round
    }

    /// `false` if no list was requested, or if it belongs to another round.
    pub(crate) fn answer(&self, round: u32, paths: impl IntoIterator<Item = Vec<u8>>) -> bool {
        let mut state = self.state();
        let is_wanted = state.round == Some(round) && state.list.is_none();
        if is_wanted {
            state.list = Some(paths.into_iter().collect());
            self.answered.notify_one();
        }
        is_wanted
    }

    fn ask(&self, round: u32) -> (HashSet<Vec<u8>>, Instant) {
        let mut state = self.state();
        *state = Asked { round: Some(round), list: None };
        loop {
            if let Some(list) = state.list.take() {
                state.round = None;
                return (list, Instant::now());
            }
            state = self.answered.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, Asked> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kernel {
    /// `device`: the FUSE connection.
    pub(crate) fn new(device: Arc<OwnedFd>, mount_points: Arc<MountPoints>) -> Self {
        Self { device, mount_points }
    }

    /// Requests the mount points below the volume's root, in all mount namespaces, from the driver
    /// and waits for them. Also returns the time of the answer. Round numbers are above zero and
    /// never repeat.
    pub fn mount_points(&self, round: u32) -> (HashSet<Vec<u8>>, Instant) {
        self.mount_points.ask(round)
    }

    /// Whether the kernel has FUSE_NOTIFY_PRUNE. If it does not answer, it has not.
    pub fn has_prune(&self) -> bool {
        self.prune(&[]).is_ok()
    }

    /// Makes the kernel drop its unused entries of these inodes, at most [`MOST_PRUNED`], and then
    /// the inodes. `EINVAL`: it lacks FUSE_NOTIFY_PRUNE.
    pub fn prune(&self, ids: &[u64]) -> Result<(), Errno> {
        self.send(&prune_message(ids))
    }

    /// Makes the kernel drop this entry of the directory, even if it is in use, and every mount on
    /// or below it in all mount namespaces (FUSE_NOTIFY_INVAL_ENTRY).
    pub fn invalidate_entry(&self, directory: u64, name: &CStr) -> Result<(), Errno> {
        self.send(&invalidate_message(directory, name))
    }

    /// Whether the kernel knows this inode. If so, it drops the inode's cached attributes, and never
    /// its pages (FUSE_NOTIFY_INVAL_INODE).
    pub fn knows(&self, id: u64) -> Result<bool, Errno> {
        match self.send(&invalidate_attributes_message(id)) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    fn send(&self, message: &[u8]) -> Result<(), Errno> {
        loop {
            match rustix::io::write(&self.device, message) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }
}

/// struct fuse_notify_prune_out { u32 count; u32 padding; u64 spare; }, then the node ids.
fn prune_message(ids: &[u64]) -> Vec<u8> {
    let count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
    let mut body = Vec::with_capacity(16 + 8 * ids.len());
    body.extend(count.to_ne_bytes());
    body.extend([0; 12]);
    ids.iter().for_each(|id| body.extend(id.to_ne_bytes()));
    with_header(PRUNE, &body)
}

/// A header alone.
pub(crate) fn resend_message() -> Vec<u8> {
    with_header(RESEND, &[])
}

/// struct fuse_notify_inval_inode_out { u64 ino; i64 off; i64 len; }; below zero, `off` names no page.
fn invalidate_attributes_message(id: u64) -> Vec<u8> {
    let mut body = Vec::with_capacity(24);
    body.extend(id.to_ne_bytes());
    body.extend((-1_i64).to_ne_bytes());
    body.extend(0_i64.to_ne_bytes());
    with_header(INVAL_INODE, &body)
}

/// struct fuse_notify_inval_entry_out { u64 parent; u32 namelen; u32 flags; }, then the name and a zero.
fn invalidate_message(directory: u64, name: &CStr) -> Vec<u8> {
    let length = u32::try_from(name.to_bytes().len()).unwrap_or(u32::MAX);
    let mut body = Vec::new();
    body.extend(directory.to_ne_bytes());
    body.extend(length.to_ne_bytes());
    body.extend([0; 4]);
    body.extend(name.to_bytes_with_nul());
    with_header(INVAL_ENTRY, &body)
}

/// struct fuse_out_header { u32 len; i32 error; u64 unique; }
fn with_header(code: i32, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER_BYTES + body.len()).unwrap_or(u32::MAX);
    let mut message = Vec::with_capacity(HEADER_BYTES + body.len());
    message.extend(length.to_ne_bytes());
    message.extend(code.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(body);
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(message: &[u8]) -> Vec<u32> {
        message.chunks(4).map(|word| u32::from_ne_bytes(word.try_into().unwrap())).collect()
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn messages_have_the_layout_of_the_kernels_header_file() {
        let prune = prune_message(&[7, 1 << 32]);
        assert_eq!(words(&prune), [48, 9, 0, 0, 2, 0, 0, 0, 7, 0, 0, 1]);
        let entry = invalidate_message(5, c"abc");
        assert_eq!(words(&entry[..32]), [36, 3, 0, 0, 5, 0, 3, 0]);
        assert_eq!(&entry[32..], b"abc\0");
    }
}
