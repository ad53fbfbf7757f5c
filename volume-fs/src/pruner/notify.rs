//! Notifications to the kernel, written to the FUSE connection (linux/fuse.h):
//! a header whose `unique` is zero and whose `error` is the notification's code.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::io::Errno;

/// FUSE_NOTIFY_INVAL_ENTRY.
const INVAL_ENTRY: i32 = 3;
/// FUSE_NOTIFY_PRUNE, Linux 6.18 (7.45). Older kernels answer EINVAL.
const PRUNE: i32 = 9;

/// Node ids in one notification: as many as the kernel takes at a time.
pub(super) const MOST_PRUNED: usize = 512;

const HEADER_BYTES: usize = 16;

#[derive(Debug)]
pub(super) struct Connection {
    device: OwnedFd,
}

impl Connection {
    pub(super) fn new(device: OwnedFd) -> Self {
        Self { device }
    }

    /// The kernel drops its unused entries of these inodes, and then the inodes.
    pub(super) fn prune(&self, ids: &[u64]) -> Result<(), Errno> {
        self.send(&prune_message(ids))
    }

    /// The kernel drops this entry of the directory.
    pub(super) fn invalidate_entry(&self, directory: u64, name: &CStr) -> Result<(), Errno> {
        self.send(&invalidate_message(directory, name))
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
