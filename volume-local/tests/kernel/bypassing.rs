//! Writes that bypass the kernel's pages.

use std::fs::{self, File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

use linux::release::Release;
use rustix::io::ReadWriteFlags;
use volume_local::pages::follow_bypassing_writes;

use crate::fixture::{ALICE, Setup, Stage, Volume};
use crate::mapping::{BYTES, Mapping};
use crate::metrics::requests;

const PAGE: usize = 4096;
const PAGES: usize = 16;
const SYNCHRONISED: usize = 20;

fn only_writing() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    options
}

/// Others read the pages all the time, so that a page is often read while it is written.
#[test]
fn what_bypasses_the_pages_is_seen_at_once_by_readers_and_mappings() {
    let volume = Volume::new();
    let path = volume.path("f");
    fs::write(&path, vec![0; BYTES]).unwrap();
    let mapped = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mapping = Mapping::of(&mapped);
    let (reader, writer) = (File::open(&path).unwrap(), only_writing().open(&path).unwrap());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (file, is_over) = (File::open(&path).unwrap(), &is_over);
            scope.spawn(move || {
                let mut seen = [0; 1];
                let mut page = thread;
                while !is_over.load(Ordering::Relaxed) {
                    file.read_exact_at(&mut seen, (page % PAGES * PAGE) as u64).unwrap();
                    page += 1;
                }
            });
        }
        for round in 0..4000_usize {
            let (at, value) = (round % PAGES * PAGE, u8::try_from(round / PAGES % 256).unwrap());
            writer.write_all_at(&[value; PAGE], at as u64).unwrap();
            let mut seen = [0; 1];
            reader.read_exact_at(&mut seen, at as u64).unwrap();
            if (seen[0], mapping.load(at)) != (value, value) {
                is_over.store(true, Ordering::Relaxed);
                panic!("round {round}: {value} was written, {} read, {} mapped", seen[0], mapping.load(at));
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn stores_by_a_mapping_stay_beside_what_bypasses_the_pages() {
    let volume = Volume::new();
    let mapping = Mapping::of_new(&volume.path("f"));
    let writer = only_writing().open(volume.path("f")).unwrap();
    mapping.store(1);
    writer.write_all_at(b"w", 2).unwrap();
    mapping.store(3);
    writer.write_all_at(b"ww", PAGE as u64 - 1).unwrap();
    let content = fs::read(volume.path("f")).unwrap();
    assert_eq!((&content[..4], &content[PAGE - 1..=PAGE + 1]), (b"\0MwM".as_slice(), b"ww\0".as_slice()));
    drop(mapping);
    let stored = fs::read(volume.backing.join("f")).unwrap();
    assert!(stored == content, "the backing file");
}

/// Cache flushes that the file system has sent to its device (block/stat.rst).
fn flushes(volume: &Volume) -> u64 {
    let device = fs::metadata(&volume.backing).unwrap().dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let figures = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
    figures.split_whitespace().nth(15).unwrap().parse().unwrap()
}

/// The kernel sends no FSYNC for them.
#[test]
fn a_write_that_is_to_be_synchronised_is_on_the_disk_when_it_returns() {
    let volume = Volume::on(Stage::on_file_system("ext4"), Setup { confine: true, ..Setup::default() });
    let opened = |flags| only_writing().create(true).custom_flags(flags).open(volume.path("f")).unwrap();
    let none = ReadWriteFlags::empty();
    for (open, write) in
        [(libc::O_DSYNC, none), (libc::O_SYNC, none), (0, ReadWriteFlags::DSYNC), (0, ReadWriteFlags::SYNC)]
    {
        let file = opened(open);
        let before = flushes(&volume);
        for number in 0..SYNCHRONISED {
            let data = vec![u8::try_from(number).unwrap(); PAGE];
            let written =
                rustix::io::pwritev2(&file, &[IoSlice::new(&data)], (number * PAGE) as u64, write).unwrap();
            assert_eq!(written, PAGE);
        }
        let flushed = flushes(&volume) - before;
        assert!(flushed >= SYNCHRONISED as u64, "{open:#x} {write:?}: {flushed} flushes");
    }
    if follow_bypassing_writes(Release::running()) {
        assert_eq!(requests(&volume, "fsync"), 0, "the daemon has synchronised each before its answer");
    }
}

/// The kernel executes a file with the bits that it knows.
#[test]
fn a_program_that_another_user_has_overwritten_runs_without_its_owners_rights() {
    let volume = Volume::new();
    nix::mount::mount(
        None::<&str>,
        &volume.path,
        None::<&str>,
        nix::mount::MsFlags::MS_REMOUNT | nix::mount::MsFlags::MS_BIND,
        None::<&str>,
    )
    .unwrap();
    let path = volume.path("id");
    fs::copy("/usr/bin/id", &path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4777)).unwrap();
    assert_eq!(volume.shell(ALICE, "./id -u"), "0", "with suid");
    // Nothing asks for the attributes between the write and the program's start.
    let overwrite = "dd if=/usr/bin/id of=id bs=4096 count=1 conv=notrunc 2> /dev/null && ./id -u";
    assert_eq!(volume.shell(ALICE, overwrite), ALICE.uid.to_string());
}

#[test]
fn what_does_not_fit_of_a_write_is_left_out() {
    let setup = Setup { capacity_bytes: 4 * PAGE as u64, ..Setup::default() };
    let volume = Volume::with(setup);
    let file = only_writing().create(true).open(volume.path("f")).unwrap();
    let written = file.write_at(&[7; 8 * PAGE], 0).unwrap();
    assert!(written < 8 * PAGE && written.is_multiple_of(PAGE), "{written}");
    assert_eq!(file.write_at(&[7; PAGE], written as u64).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(fs::read(volume.path("f")).unwrap(), vec![7; written]);
}
