//! `resolv.conf`, which is bytes of anybody's.
#![no_main]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

#[path = "../../ipam-host-local/src/resolv_conf.rs"]
mod resolv_conf;

/// What the reader makes of a failure; here there is nobody to tell.
struct Error;

impl Error {
    fn disk(_: &str, _: &Path, _: io::Error) -> Self {
        Self
    }
}

/// In memory, without a name.
static FILE: LazyLock<File> = LazyLock::new(|| tempfile::tempfile_in("/dev/shm").expect("a file in memory"));

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    FILE.set_len(0).and_then(|()| FILE.write_all_at(input, 0)).expect("write to memory");
    let path = PathBuf::from(format!("/proc/self/fd/{}", FILE.as_raw_fd()));
    let Ok(dns) = resolv_conf::read(Some(&path)) else { return };
    let words = dns.nameservers.iter().chain(&dns.search).chain(&dns.options);
    assert!(words.chain([&dns.domain]).all(|word| !word.contains(char::is_whitespace)));
});
