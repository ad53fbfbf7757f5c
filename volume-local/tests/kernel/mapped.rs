//! Files that are written by write(2) while others read them or have them mapped.

use std::fs::{self, File, OpenOptions};
use std::io::IoSlice;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::ReadWriteFlags;

use crate::fixture::{ALICE, Setup, Stage, Volume};
use crate::mapping::{BYTES, Mapping};

const PAGE: usize = 4096;
const PAGES: usize = 16;
const ROUNDS: usize = 2000;
const SYNCHRONISED: usize = 20;

fn only_writing() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    options
}

/// The place and the value of a round.
fn of_round(round: usize) -> (usize, u8) {
    (round % PAGES * PAGE, u8::try_from(round / PAGES % 256).unwrap())
}

/// Until `act` has ended, also by a panic.
fn beside(others: &[&(dyn Fn(usize) + Sync)], act: impl FnOnce()) {
    struct Over<'a>(&'a AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for other in others {
            let is_over = &is_over;
            scope.spawn(move || (0..).take_while(|_| !is_over.load(Ordering::Relaxed)).for_each(other));
        }
        let _over = Over(&is_over);
        act();
    });
}

/// Others read the pages all the time, so that a page is often read while it is written.
#[test]
fn what_is_written_is_seen_at_once_by_readers_and_mappings() {
    let volume = Volume::new();
    let path = volume.path("f");
    fs::write(&path, vec![0; BYTES]).unwrap();
    let mapped = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let mapping = Mapping::of(&mapped);
    let (reader, writer) = (File::open(&path).unwrap(), only_writing().open(&path).unwrap());
    let read = |round| reader.read_exact_at(&mut [0; 1], of_round(round).0 as u64).unwrap();
    beside(&[&read, &read], || {
        for round in 0..ROUNDS {
            let (at, value) = of_round(round);
            writer.write_all_at(&[value; PAGE], at as u64).unwrap();
            let mut seen = [0; 1];
            reader.read_exact_at(&mut seen, at as u64).unwrap();
            assert_eq!((seen[0], mapping.load(at)), (value, value), "round {round}: read, mapped");
        }
    });
}

/// A store makes the page dirty as it was before a write to another part of it, if the two are not ordered.
#[test]
fn stores_by_a_mapping_undo_no_write_to_the_same_page() {
    let volume = Volume::new();
    let mapping = Mapping::of_new(&volume.path("f"));
    let (reader, writer) =
        (File::open(volume.path("f")).unwrap(), only_writing().open(volume.path("f")).unwrap());
    let store = |round| mapping.store(of_round(round).0);
    beside(&[&store], || {
        for round in 0..ROUNDS {
            let (at, value) = of_round(round);
            writer.write_all_at(&[value; 100], at as u64 + 1).unwrap();
            let mut seen = [0; 100];
            reader.read_exact_at(&mut seen, at as u64 + 1).unwrap();
            assert_eq!(seen, [value; 100], "round {round}");
        }
    });
    drop(mapping);
    let content = fs::read(volume.path("f")).unwrap();
    let stored = fs::read(volume.backing.join("f")).unwrap();
    assert!(stored == content, "the backing file");
    let (_, last) = of_round(ROUNDS - 1);
    assert_eq!(content[..101], [&b"M"[..], &[last; 100]].concat());
}

/// Cache flushes that the file system has sent to its device (block/stat.rst).
fn flushes(volume: &Volume) -> u64 {
    let device = fs::metadata(&volume.backing).unwrap().dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let figures = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/stat")).unwrap();
    figures.split_whitespace().nth(15).unwrap().parse().unwrap()
}

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
}

/// The kernel executes a file with the bits that it knows.
#[test]
fn a_program_that_another_user_has_overwritten_runs_without_its_owners_rights() {
    let volume = Volume::new();
    let flags = nix::mount::MsFlags::MS_REMOUNT | nix::mount::MsFlags::MS_BIND;
    nix::mount::mount(None::<&str>, &volume.path, None::<&str>, flags, None::<&str>).unwrap();
    let path = volume.path("id");
    fs::copy("/usr/bin/id", &path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o4777)).unwrap();
    assert_eq!(volume.shell(ALICE, "./id -u"), "0", "with suid");
    // Nothing asks for the attributes between the write and the program's start.
    let overwrite = "dd if=/usr/bin/id of=id bs=4096 count=1 conv=notrunc 2> /dev/null && ./id -u";
    assert_eq!(volume.shell(ALICE, overwrite), ALICE.uid.to_string());
}
