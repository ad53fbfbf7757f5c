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
        set(libc::M_MMAP_THRESHOLD, "M_MMAP_THRESHOLD", bytes)?;
        set(libc::M_TRIM_THRESHOLD, "M_TRIM_THRESHOLD", bytes)?;
    }
    #[cfg(not(target_env = "gnu"))]
    let _unused = bytes;
    Ok(())
}

/// Lets all threads allocate from `count` heaps at most. Each keeps what was ever in use at
/// once; the C library makes up to eight for each processor. More threads wait for each other.
///
/// To be called before there are threads. Does nothing with musl's C library.
pub fn limit_heaps(count: u32) -> Result<()> {
    #[cfg(target_env = "gnu")]
    set(libc::M_ARENA_MAX, "M_ARENA_MAX", count)?;
    #[cfg(not(target_env = "gnu"))]
    let _unused = count;
    Ok(())
}

#[cfg(target_env = "gnu")]
fn set(parameter: libc::c_int, name: &str, value: u32) -> Result<()> {
    let refused = || Error::new("mallopt", format!("{name} {value}"), Errno::EINVAL);
    let number = libc::c_int::try_from(value).map_err(|_| refused())?;
    // SAFETY: two numbers; it changes how later calls of malloc(3) find memory.
    if unsafe { libc::mallopt(parameter, number) } == 0 { Err(refused()) } else { Ok(()) }
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
        limit_heaps(2).unwrap();
        refuse_huge_pages().unwrap();
        assert!(nix::sys::prctl::get_thp_disable().unwrap());
        if cfg!(target_env = "gnu") {
            for refused in [map_allocations_from(u32::MAX), limit_heaps(u32::MAX)] {
                assert_eq!(refused.unwrap_err().errno(), Errno::EINVAL);
            }
        }
    }
}
