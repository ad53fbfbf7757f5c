//! Reads and writes that an application begins and does not wait for (io_submit(2)).

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::fixture::Volume;

const CHUNK: usize = 64 * 1024;
const CHUNKS: usize = 10;
const ROUNDS: usize = 500;

/// `struct iocb` of linux/aio_abi.h, for a processor that is little-endian.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// IOCB_CMD_PWRITE.
const WRITE: u16 = 1;

/// A context of io_setup(2).
struct Context(u64);

impl Context {
    #[expect(unsafe_code, reason = "no crate wraps these calls")]
    fn new() -> Self {
        let mut id = 0_u64;
        // SAFETY: the kernel writes one number to `id`, which must be 0 before.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, CHUNKS, &raw mut id) };
        assert_eq!(made, 0, "io_setup: {}", std::io::Error::last_os_error());
        Self(id)
    }

    /// Writes `content` from the beginning of the file on, all chunks at a time, and waits for the end.
    #[expect(unsafe_code, reason = "no crate wraps these calls")]
    fn write(&self, file: &File, content: &[u8]) {
        let mut blocks: Vec<Iocb> = content
            .chunks(CHUNK)
            .enumerate()
            .map(|(number, chunk)| Iocb {
                opcode: WRITE,
                fd: file.as_raw_fd().cast_unsigned(),
                buffer: chunk.as_ptr().addr() as u64,
                bytes: chunk.len() as u64,
                offset: i64::try_from(number * CHUNK).unwrap(),
                ..Iocb::default()
            })
            .collect();
        let mut pointers: Vec<*mut Iocb> = blocks.iter_mut().map(std::ptr::from_mut).collect();
        let count = i64::try_from(pointers.len()).unwrap();
        // SAFETY: all pointers lead to blocks, and those to `content`, which live until io_getevents(2)
        // has returned an event of 32 bytes for each of them.
        let (begun, ended, events) = unsafe {
            let begun = libc::syscall(libc::SYS_io_submit, self.0, count, pointers.as_mut_ptr());
            let mut events = vec![[0_i64; 4]; pointers.len()];
            let none = std::ptr::null::<libc::timespec>();
            let ended =
                libc::syscall(libc::SYS_io_getevents, self.0, begun, begun, events.as_mut_ptr(), none);
            (begun, ended, events)
        };
        assert_eq!((begun, ended), (count, count), "{}", std::io::Error::last_os_error());
        // The third number is what write(2) would have returned.
        assert!(events.iter().all(|event| event[2] == CHUNK as i64), "{events:?}");
    }
}

impl Drop for Context {
    #[expect(unsafe_code, reason = "no crate wraps these calls")]
    fn drop(&mut self) {
        // SAFETY: nothing of the context is under way.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// Ends the readers, also when the test panics.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn reads_of_the_page_cache_show_what_asynchronous_direct_writes_have_written() {
    let volume = Volume::new();
    let path = volume.path("f");
    fs::write(&path, vec![0; CHUNKS * CHUNK]).unwrap();
    let is_done = AtomicBool::new(false);
    let stale = thread::scope(|scope| {
        let _end = End(&is_done);
        for _ in 0..2 {
            scope.spawn(|| {
                while !is_done.load(Ordering::Relaxed) {
                    assert_eq!(fs::read(&path).unwrap().len(), CHUNKS * CHUNK);
                }
            });
        }
        let direct = File::options().write(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
        let (cached, context) = (File::open(&path).unwrap(), Context::new());
        let mut seen = vec![0; CHUNKS * CHUNK];
        (1..=ROUNDS).find(|round| {
            let written = u8::try_from(round % 251).unwrap();
            context.write(&direct, &vec![written; CHUNKS * CHUNK]);
            cached.read_exact_at(&mut seen, 0).unwrap();
            seen.iter().any(|byte| *byte != written)
        })
    });
    assert_eq!(stale, None, "the first round after which a read returned what was there before");
}
