//! Listing.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};

use crate::fixture::{ALICE, BOB, ROOT, Setup, Stage, Volume, errno};
use crate::known::until;

#[test]
fn five_thousand_entries_are_listed_once_each_while_every_second_is_removed() {
    let volume = Volume::new();
    let directory = volume.path("d");
    fs::create_dir(&directory).unwrap();
    for n in 0..5000 {
        fs::write(directory.join(format!("f{n:04}")), "").unwrap();
    }
    let mut seen = BTreeSet::new();
    for (n, entry) in fs::read_dir(&directory).unwrap().enumerate() {
        let entry = entry.unwrap();
        assert!(seen.insert(entry.file_name()), "{:?} twice", entry.file_name());
        if n % 2 == 0 {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    assert_eq!(seen.len(), 5000);
    assert_eq!(fs::read_dir(&directory).unwrap().count(), 2500);
}

#[test]
fn a_listing_names_the_inodes_that_stat_names() {
    let volume = Volume::new();
    volume.shell(ROOT, "mkdir d; touch f; ln -s f l; mkfifo p");
    for entry in fs::read_dir(&volume.path).unwrap() {
        let entry = entry.unwrap();
        let metadata = fs::symlink_metadata(entry.path()).unwrap();
        assert_eq!(std::os::unix::fs::DirEntryExt::ino(&entry), metadata.ino(), "{entry:?}");
        assert_eq!(entry.file_type().unwrap(), metadata.file_type(), "{entry:?}");
        let backing = fs::symlink_metadata(volume.backing.join(entry.file_name())).unwrap();
        assert_eq!(metadata.ino(), backing.ino(), "inode numbers are the backing files'");
    }
    assert_eq!(fs::metadata(&volume.path).unwrap().ino(), 1);
}

#[test]
fn removing_what_is_not_there_or_not_empty_says_so() {
    let volume = Volume::new();
    fs::create_dir_all(volume.path("d/inner")).unwrap();
    assert_eq!(errno(fs::remove_dir(volume.path("d"))), libc::ENOTEMPTY);
    assert_eq!(errno(fs::remove_file(volume.path("d"))), libc::EISDIR);
    assert_eq!(errno(fs::remove_file(volume.path("none"))), libc::ENOENT);
    fs::remove_dir_all(volume.path("d")).unwrap();
    assert_eq!(fs::read_dir(&volume.backing).unwrap().count(), 0);
}

#[test]
fn a_very_deep_tree_is_built_and_removed() {
    let volume = Volume::new();
    volume.shell(
        ROOT,
        "i=0; while [ $i -lt 400 ]; do mkdir d && cd d && i=$((i+1)); done; echo deep > f; cat f",
    );
    volume.shell(ROOT, "rm -r d");
    assert_eq!(fs::read_dir(&volume.path).unwrap().count(), 0);
}

#[test]
fn a_name_is_at_most_255_bytes_and_any_bytes() {
    let volume = Volume::new();
    fs::write(volume.path(&"n".repeat(255)), "").unwrap();
    assert_eq!(errno(fs::write(volume.path(&"n".repeat(256)), "")), libc::ENAMETOOLONG);
    let odd = std::os::unix::ffi::OsStrExt::from_bytes(b"\xff\n\"");
    fs::write(volume.path.join::<&std::ffi::OsStr>(odd), "odd").unwrap();
    assert!(volume.backing.join::<&std::ffi::OsStr>(odd).exists());
}

#[test]
fn a_symbolic_link_is_as_long_as_the_file_system_below_keeps_it() {
    let target = |bytes: usize| "t/".repeat(bytes.div_ceil(2))[..bytes].to_owned();
    for (kind, longest) in [("xfs", 1023), ("ext4", 4095)] {
        let volume = Volume::on(Stage::on_file_system(kind), Setup::default());
        symlink(target(longest), volume.path("longest")).unwrap();
        assert_eq!(fs::read_link(volume.path("longest")).unwrap().as_os_str().len(), longest, "{kind}");
        assert_eq!(errno(symlink(target(longest + 1), volume.path("longer"))), libc::ENAMETOOLONG, "{kind}");
        assert!(!volume.path("longer").is_symlink(), "{kind}");
    }
}

#[test]
fn a_directory_of_btrfs_has_one_link_whatever_it_holds() {
    for (kind, links) in [("btrfs", 1), ("xfs", 4)] {
        let volume = Volume::on(Stage::on_file_system(kind), Setup::default());
        volume.shell(ROOT, "mkdir -p d/one d/two");
        assert_eq!(fs::metadata(volume.path("d")).unwrap().nlink(), links, "{kind}");
    }
}

/// With 256 descriptors, 40 directories may be open, and 32 of one user.
#[test]
fn directories_that_one_user_holds_leave_room_for_others() {
    let setup = Setup { descriptors: 256, ..Setup::default() };
    let mut volume = Volume::with(Setup { successors: 1, ..setup });
    volume.shell(ROOT, "mkdir -m 777 d; touch d/f");
    let open = || File::open(volume.path("d"));
    let fill = || {
        let mut held = Vec::new();
        let refused = loop {
            match open() {
                Ok(directory) => held.push(directory),
                Err(error) => break error.raw_os_error(),
            }
        };
        assert_eq!(refused, Some(libc::EMFILE));
        held
    };
    let mut held = fill();
    assert_eq!(held.len(), 32);
    for user in [ALICE, BOB] {
        assert_eq!(volume.shell(user, "ls d"), "f");
    }
    held.pop();
    // RELEASEDIR may be on its way.
    until("one more may be open", || open().map(|directory| held.push(directory)).is_ok());
    assert_eq!(errno(open()), libc::EMFILE);
    volume.kill();
    volume.take_over(setup);
    assert_eq!(errno(File::open(volume.path("d"))), libc::EMFILE, "the next daemon knows whose they are");
    assert_eq!(volume.shell(ALICE, "ls d"), "f");
}
