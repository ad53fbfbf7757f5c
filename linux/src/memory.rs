//! Limits the growth of this process's memory.

#![cfg_attr(
    target_env = "gnu",
    expect(unsafe_code, reason = "mallopt(3) and malloc_trim(3) are functions of C")
)]

#[cfg(any(target_env = "gnu", test))]
use nix::errno::Errno;

use crate::{Error, Result};

/// Allocations of this size or more are mapped separately: untouched pages take no memory, and
/// freeing returns all of them. The C library starts with 128 KiB, but raises that to the largest
/// allocation ever freed, and then takes such allocations from its heap and clears them.
///
/// Must be called before there are threads. Does nothing with musl's C library.
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

/// Limits the heaps of all threads to `count`. Each heap keeps the most memory that it ever used;
/// the C library makes up to eight for each processor. With few heaps, threads wait for each other.
///
/// Must be called before there are threads. Does nothing with musl's C library.
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

/// Returns freed memory to the kernel, also from the middle of the heap. It takes time, and
/// allocations wait meanwhile. Does nothing with musl's C library.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number, and returns pages that nothing is allocated in.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Disables huge pages on machines that use them by default (transparent_hugepage=always): there,
/// the first byte of a large buffer takes 2 MiB.
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
