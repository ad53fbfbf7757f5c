//! ioctl(2) requests whose argument is one structure, read and written as a whole.

#![expect(unsafe_code, reason = "no crate wraps the requests of Btrfs, XFS and FUSE")]

use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

/// A request's number and the type of its argument.
#[derive(Debug)]
pub(crate) struct Request<T> {
    number: libc::c_ulong,
    argument: PhantomData<T>,
}

impl<T> Request<T> {
    /// Does not compile where `number`, built by `_IOC` of linux/ioctl.h, names another size
    /// than that of `T`.
    ///
    /// # Safety
    ///
    /// `T` has the layout that the kernel knows for `number`, and no pointer; all bytes that the
    /// kernel writes are a `T`.
    pub(crate) const unsafe fn new(number: libc::c_ulong) -> Self {
        assert!((number >> 16) & 0x3fff == size_of::<T>() as libc::c_ulong, "the size of the argument");
        Self { number, argument: PhantomData }
    }

    pub(crate) fn send(&self, file: impl AsFd, argument: &mut T) -> rustix::io::Result<()> {
        self.send_for_number(file, argument).map(drop)
    }

    /// [`Self::send`] of a request that returns a number.
    pub(crate) fn send_for_number(&self, file: impl AsFd, argument: &mut T) -> rustix::io::Result<u32> {
        // SAFETY: `argument` is what the request reads and writes, as `new` was promised, and is
        // ours alone during the call.
        let done = unsafe {
            libc::ioctl(file.as_fd().as_raw_fd(), self.number as libc::Ioctl, std::ptr::from_mut(argument))
        };
        u32::try_from(done).map_err(|_| {
            let error = std::io::Error::last_os_error();
            Errno::from_io_error(&error).unwrap_or(Errno::IO)
        })
    }
}
