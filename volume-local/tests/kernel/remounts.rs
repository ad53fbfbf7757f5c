//! What a remount by hand does to a volume that is served.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::mount::MsFlags;

use crate::fixture::{Volume, errno};

#[test]
fn a_remount_drops_cached_entries_and_keeps_open_files() {
    let volume = Volume::new();
    let open = File::options().read(true).write(true).create_new(true).open(volume.path("open")).unwrap();
    fs::write(volume.path("closed"), "content").unwrap();
    volume.remount(MsFlags::empty()).unwrap();
    open.write_all_at(b"still open", 0).unwrap();
    assert_eq!(fs::read_to_string(volume.path("open")).unwrap(), "still open");
    assert_eq!(fs::read_to_string(volume.path("closed")).unwrap(), "content");
}

#[test]
fn a_remount_read_only_is_of_the_whole_file_system_and_waits_for_no_writer() {
    let volume = Volume::new();
    let writer = File::create(volume.path("f")).unwrap();
    assert_eq!(volume.remount(MsFlags::MS_RDONLY), Err(Errno::EBUSY), "a file is open for writing");
    drop(writer);
    // The kernel closes a file of FUSE after close(2) has returned.
    while volume.remount(MsFlags::MS_RDONLY) == Err(Errno::EBUSY) {
        std::thread::yield_now();
    }
    assert_eq!(errno(fs::write(volume.path("f"), "x")), libc::EROFS);
    volume.remount(MsFlags::empty()).unwrap();
    fs::write(volume.path("f"), "x").unwrap();
}
