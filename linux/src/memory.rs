//! Limits the growth of this process's memory.

#![cfg_attr(
    target_env = "gnu",
    expect(
        unsafe_code,
        reason = "mallopt(3) and malloc_trim(3) are functions of C, an allocator returns pointers, and the \
                  linker names where the program's code is"
    )
)]

#[cfg(target_env = "gnu")]
use std::alloc::{GlobalAlloc, Layout, System};
#[cfg(target_env = "gnu")]
use std::sync::atomic::{AtomicUsize, Ordering};

#[cfg(any(target_env = "gnu", test))]
use nix::errno::Errno;

use crate::{Error, Result};

/// Bytes of a page (sysconf(3)). Makes no system call: the C library has the figure from the program's start.
/// That of `rustix` reads a file of /proc with kernels before Linux 6.4, which a daemon's seccomp filter refuses.
pub fn page_bytes() -> usize {
    let known = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
    known.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(4096)
}

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

/// Unmaps the pages of the program's code that were used so far. They count as memory of this process
/// (VmRSS), although all processes of the program share them. What is executed again comes back from
/// the page cache. For a program whose start takes much of its code. Does nothing with musl's C library.
pub fn forget_code() -> Result<()> {
    #[cfg(target_env = "gnu")]
    {
        let (start, end) = (&raw const __executable_start, &raw const etext);
        let start = start.map_addr(|at| at.next_multiple_of(PAGE_BYTES));
        let bytes = (end.addr() - start.addr()) / PAGE_BYTES * PAGE_BYTES;
        // SAFETY: these pages are the program's file, which this process does not write to. So the
        // kernel reads the same again.
        let advised =
            unsafe { rustix::mm::madvise(start.cast_mut().cast(), bytes, rustix::mm::Advice::LinuxDontNeed) };
        match advised {
            // ENOMEM: there is a gap between two of the program's segments, and the rest was unmapped
            // (madvise_walk_vmas of mm/madvise.c).
            Ok(()) | Err(rustix::io::Errno::NOMEM) => {}
            Err(e) => {
                let errno = Errno::from_raw(e.raw_os_error());
                return Err(Error::new("madvise", "the program's code", errno));
            }
        }
    }
    Ok(())
}

#[cfg(target_env = "gnu")]
// SAFETY: ld(1) and lld(1) define both; only their addresses are used.
unsafe extern "C" {
    safe static __executable_start: u8;
    safe static etext: u8;
}

/// The system's allocator. It also makes the begin of large zeroed allocations present in memory: the
/// kernel cannot do that any more while it copies to the buffer of a process that is being killed.
#[cfg(target_env = "gnu")]
#[derive(Debug)]
pub struct Populating {
    /// The smallest allocation that is large.
    from: usize,
    /// How much of it is made present.
    bytes: AtomicUsize,
}

#[cfg(target_env = "gnu")]
impl Populating {
    /// Allocations of `from` bytes and more are large. Nothing is made present yet.
    pub const fn new(from: usize) -> Self {
        Self { from, bytes: AtomicUsize::new(0) }
    }

    /// Makes so many bytes of each large allocation present from here on.
    pub fn populate(&self, bytes: usize) {
        self.bytes.store(bytes, Ordering::Relaxed);
    }
}

/// The smallest page of any processor.
#[cfg(target_env = "gnu")]
const PAGE_BYTES: usize = 4096;

// SAFETY: all memory is the system allocator's. Writing a zero to zeroed memory that has not been
// returned yet changes nothing.
#[cfg(target_env = "gnu")]
unsafe impl GlobalAlloc for Populating {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those of the system allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above; `at` is the system allocator's.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: as above; `at` is the system allocator's.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let at = unsafe { System.alloc_zeroed(layout) };
        if !at.is_null() && layout.size() >= self.from {
            let present = self.bytes.load(Ordering::Relaxed).min(layout.size());
            for offset in (0..present).step_by(PAGE_BYTES) {
                // SAFETY: inside the allocation, which has `layout.size()` bytes.
                unsafe { at.add(offset).write_volatile(0) }
            }
        }
        at
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

    #[cfg(target_env = "gnu")]
    #[test]
    fn only_the_begin_of_a_large_allocation_is_present() {
        const MIB: usize = 1 << 20;
        // Else the C library would reuse memory that was present before.
        map_allocations_from(4 << 20).unwrap();
        let allocator = Populating::new(16 * MIB);
        allocator.populate(2 * MIB);
        let present = |layout: Layout| {
            // SAFETY: the layout is not empty, and the memory is released once.
            let at = unsafe { allocator.alloc_zeroed(layout) };
            let page = at.map_addr(|at| at.next_multiple_of(PAGE_BYTES));
            let mut pages = vec![0; layout.size() / PAGE_BYTES - 1];
            // SAFETY: mincore(2) writes a byte for each whole page of the allocation.
            let asked = unsafe { libc::mincore(page.cast(), pages.len() * PAGE_BYTES, pages.as_mut_ptr()) };
            // SAFETY: from the same allocator, with the same layout.
            unsafe { allocator.dealloc(at, layout) };
            assert_eq!(asked, 0);
            pages.iter().filter(|page| **page & 1 == 1).count()
        };
        let large = present(Layout::from_size_align(16 * MIB, 1).unwrap());
        assert!((2 * MIB / PAGE_BYTES - 2..3 * MIB / PAGE_BYTES).contains(&large), "{large}");
        assert!(present(Layout::from_size_align(8 * MIB, 1).unwrap()) < 8);
    }

    #[test]
    fn a_page_has_a_power_of_two_of_bytes() {
        let bytes = page_bytes();
        assert!(bytes >= 4096 && bytes.is_power_of_two(), "{bytes}");
    }

    #[test]
    fn code_that_was_forgotten_runs_again() {
        forget_code().unwrap();
        assert_eq!("code".to_uppercase(), "CODE");
    }

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
