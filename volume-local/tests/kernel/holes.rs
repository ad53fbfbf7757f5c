//! Holes, while stores by a mapping are in the kernel alone.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::fixture::{ROOT, Setup, Stage, Volume};
use crate::known::until;
use crate::mapping::{BYTES, Mapping};

const MIB: u64 = 1 << 20;
const AT: usize = 2 << 20;

fn seek(path: &Path, position: SeekFrom) -> Result<u64, Errno> {
    rustix::fs::seek(File::open(path).unwrap(), position)
}

/// Every copy has what was stored.
fn is_copied_whole(volume: &Volume) {
    let mut content = vec![0; BYTES];
    content[AT] = b'M';
    assert!(fs::read(volume.path("f")).unwrap() == content);
    for (copy, how) in [
        ("cp", "cp f cp"),
        ("sparse", "cp --sparse=always f sparse"),
        ("tar", "tar -c --sparse -f /proc/self/fd/1 f | tar -x -O > tar"),
    ] {
        volume.shell(ROOT, how);
        assert!(fs::read(volume.path(copy)).unwrap() == content, "{how}");
    }
    let copy = File::create(volume.path("range")).unwrap();
    let data = seek(&volume.path("f"), SeekFrom::Data(0)).unwrap();
    assert!(data <= AT as u64, "{data}");
    let end = seek(&volume.path("f"), SeekFrom::Hole(AT as u64)).unwrap();
    assert!(end > AT as u64, "{end}");
    assert_eq!(seek(&volume.path("f"), SeekFrom::Data(BYTES as u64)), Err(Errno::NXIO));
    let file = File::open(volume.path("f")).unwrap();
    let copied =
        rustix::fs::copy_file_range(file.as_fd(), Some(&mut { data }), copy.as_fd(), None, BYTES).unwrap();
    assert_eq!(copied, BYTES - usize::try_from(data).unwrap());
}

#[test]
fn what_is_stored_by_a_mapping_is_no_hole() {
    for changed_from_outside in [false, true] {
        let volume = Volume::with(Setup { changed_from_outside, ..Setup::default() });
        let path = volume.path("f");
        let mapping = Mapping::of_new(&path);
        assert_eq!(fs::metadata(&path).unwrap().blocks() > 0, changed_from_outside, "nothing is stored");
        mapping.store(AT);
        assert!(fs::metadata(&path).unwrap().blocks() > 0);
        is_copied_whole(&volume);
        drop(mapping);
        // The kernel has sent it. RELEASE may be on its way.
        let native = |position| seek(&volume.backing.join("f"), position);
        let is_native = |position| seek(&path, position) == native(position);
        for at in [0, MIB, AT as u64, 3 * MIB] {
            for position in [SeekFrom::Data(at), SeekFrom::Hole(at)] {
                until("the holes are the backing file's", || is_native(position));
            }
        }
        assert_eq!(seek(&path, SeekFrom::Hole(0)), Ok(0));
    }
}

#[test]
fn what_is_stored_to_pages_that_were_read_before_is_no_hole() {
    let volume = Volume::new();
    let path = volume.path("f");
    File::create(&path).unwrap().set_len(BYTES as u64).unwrap();
    assert!(fs::read(&path).unwrap() == vec![0; BYTES]);
    assert_eq!(seek(&path, SeekFrom::Data(0)), Err(Errno::NXIO), "no one can have stored anything");
    fs::metadata(&path).unwrap();
    let mapping = Mapping::of(&OpenOptions::new().read(true).write(true).open(&path).unwrap());
    mapping.store(AT);
    assert!(fs::metadata(&path).unwrap().blocks() > 0);
    is_copied_whole(&volume);
}

#[test]
fn a_file_that_is_open_for_writing_has_the_holes_that_were_not_read() {
    let volume = Volume::new();
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("f")).unwrap();
    file.write_all_at(&vec![7; BYTES], 0).unwrap();
    let mut content = vec![0; BYTES];
    file.read_exact_at(&mut content, 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, MIB, MIB).unwrap();
    let holes = || [0, MIB, 2 * MIB].map(|at| rustix::fs::seek(&file, SeekFrom::Hole(at)));
    let data = || [0, MIB, 2 * MIB].map(|at| rustix::fs::seek(&file, SeekFrom::Data(at)));
    assert_eq!(holes(), [Ok(MIB), Ok(MIB), Ok(4 * MIB)]);
    assert_eq!(data(), [Ok(0), Ok(2 * MIB), Ok(2 * MIB)]);
    let mapping = Mapping::of(&file);
    assert_eq!(holes(), [Ok(MIB), Ok(MIB), Ok(4 * MIB)], "a mapping alone changes nothing");
    mapping.store(usize::try_from(MIB).unwrap() + 100);
    assert!(data()[1].unwrap() <= MIB + 100);
    rustix::fs::fallocate(&file, punch, 3 * MIB, MIB).unwrap();
    assert_eq!(holes()[2], Ok(3 * MIB), "and only where zeros were read");
}

#[test]
fn what_is_stored_while_a_daemon_follows_another_is_no_hole() {
    let setup = Setup::default();
    let mut volume = Volume::with(Setup { successors: 1, ..setup });
    let path = volume.path("f");
    let mapping = Mapping::of_new(&path);
    mapping.store(AT);
    volume.kill();
    volume.take_over(setup);
    is_copied_whole(&volume);
    drop(mapping);
    let native = seek(&volume.backing.join("f"), SeekFrom::Data(0));
    until("the holes are the backing file's", || seek(&path, SeekFrom::Data(0)) == native);
}

/// The kernel keeps a page of which a part is punched, and fills that with zeros.
#[test]
fn what_is_stored_to_a_page_whose_part_was_punched_is_no_hole() {
    const PAGE: usize = 4096;
    const SIZE: usize = BYTES - 2000;
    let last = BYTES - PAGE;
    let modes = [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE];
    let cases = ["ext4", "xfs", "btrfs"].into_iter().flat_map(|kind| modes.map(|mode| (kind, mode)));
    for (kind, mode) in cases {
        let volume = Volume::on(Stage::on_file_system(kind), Setup::default());
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("f")).unwrap();
        file.write_all_at(&vec![7; SIZE], 0).unwrap();
        file.read_exact_at(&mut vec![0; SIZE], 0).unwrap();
        let mapping = Mapping::of(&file);
        rustix::fs::fallocate(&file, mode | FallocateFlags::KEEP_SIZE, last as u64, (SIZE - last) as u64)
            .unwrap();
        mapping.store(last + 100);
        let data = rustix::fs::seek(&file, SeekFrom::Data(last as u64));
        assert!(data.is_ok_and(|data| data <= last as u64 + 100), "{kind} {mode:?}: {data:?}");
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(last as u64)).unwrap();
        assert!(hole > last as u64 + 100, "{kind} {mode:?}: {hole}");
    }
}
