//! How this process's memory grows.

#![cfg_attr(
    target_env = "gnu",
    expect(unsafe_code, reason = "mallopt(3) and malloc_trim(3) are functions of C")
)]

#[cfg(any(target_env = "gnu", test))]
use nix::errno::Errno;

use crate::{Error, Result};

/// What is allocated in one piece of this size or more is mapped by itself: what is
/// never touched of it takes no memory, and it is given back when it is freed.
/// The C library begins with 128 KiB, but raises that to the largest piece that
/// was ever freed, and then takes even those from its heap and clears them.
///
/// To be called before there are threads. Does nothing with musl's C library.
pub fn map_allocations_from(bytes: u32) -> Result<()> {
    #[cfg(target_env = "gnu")]
    {
        let value = libc::c_int::try_from(bytes)
            .map_err(|_| Error::new("mallopt", format!("M_MMAP_THRESHOLD {bytes}"), Errno::EINVAL))?;
        for parameter in [libc::M_MMAP_THRESHOLD, libc::M_TRIM_THRESHOLD] {
            // SAFETY: two numbers; it changes how later calls of malloc(3) find memory.
            if unsafe { libc::mallopt(parameter, value) } == 0 {
                let subject = format!("{parameter} to {bytes}");
                return Err(Error::new("mallopt", subject, Errno::EINVAL));
            }
        }
    }
    #[cfg(not(target_env = "gnu"))]
    let _unused = bytes;
    Ok(())
}

/// Gives freed memory back to the kernel, from the middle of the heap too. It
/// takes time, and who allocates meanwhile waits. Does nothing with musl's C library.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, and returns pages that nothing is allocated in.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// No huge pages where the machine gives them unasked (transparent_hugepage=always):
/// there the first byte of a large buffer takes 2 MiB.
pub fn refuse_huge_pages() -> Result<()> {
    nix::sys::prctl::set_thp_disable(true).map_err(|e| Error::new("prctl", "PR_SET_THP_DISABLE", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_c_library_cannot_take_is_refused() {
        map_allocations_from(4 << 20).unwrap();
        refuse_huge_pages().unwrap();
        assert!(nix::sys::prctl::get_thp_disable().unwrap());
        if cfg!(target_env = "gnu") {
            assert_eq!(map_allocations_from(u32::MAX).unwrap_err().errno(), Errno::EINVAL);
        }
    }
}
