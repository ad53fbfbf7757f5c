//! Modes, times, extended attributes, statfs.

use std::fs::{self, File, FileTimes, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::time::{Duration, SystemTime};

use rustix::fs::{XattrFlags, getxattr, lgetxattr, listxattr, removexattr, setxattr};
use rustix::io::Errno;

use crate::fixture::{ALICE, BOB, ROOT, Setup, Stage, Volume, errno};

fn mode(path: &std::path::Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o7777
}

fn set_mode(path: &std::path::Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn extended_attributes_are_kept_listed_and_removed() {
    let volume = Volume::new();
    let path = volume.path("f");
    fs::write(&path, "").unwrap();
    setxattr(&path, c"user.colour", b"blue", XattrFlags::CREATE).unwrap();
    assert_eq!(setxattr(&path, c"user.colour", b"red", XattrFlags::CREATE), Err(Errno::EXIST));
    let mut value = [0; 16];
    assert_eq!(getxattr(&path, c"user.colour", &mut value), Ok(4));
    assert_eq!(&value[..4], b"blue");
    assert_eq!(getxattr(&path, c"user.colour", &mut [0; 2]), Err(Errno::RANGE));
    let mut names = [0; 64];
    let length = listxattr(&path, &mut names).unwrap();
    assert_eq!(&names[..length], b"user.colour\0");
    removexattr(&path, c"user.colour").unwrap();
    assert_eq!(getxattr(&path, c"user.colour", &mut value), Err(Errno::NODATA));
}

#[test]
fn trusted_attributes_are_refused_even_to_root() {
    let volume = Volume::new();
    fs::write(volume.path("f"), "").unwrap();
    let set = setxattr(volume.path("f"), c"trusted.hawser", b"x", XattrFlags::empty());
    assert_eq!(set, Err(Errno::PERM));
    setxattr(volume.backing.join("f"), c"trusted.hidden", b"x", XattrFlags::empty()).unwrap();
    assert_eq!(listxattr(volume.path("f"), &mut [0_u8; 64]), Ok(0));
}

#[test]
fn security_attributes_are_refused_even_to_root() {
    let volume = Volume::new();
    fs::write(volume.path("f"), "").unwrap();
    let set = setxattr(volume.path("f"), c"security.hawser", b"x", XattrFlags::empty());
    assert_eq!(set, Err(Errno::PERM));
}

#[test]
fn file_capabilities_are_refused_even_to_root() {
    let volume = Volume::new();
    fs::write(volume.path("f"), "").unwrap();
    // Version 2, CAP_NET_RAW permitted and effective (linux/capability.h, vfs_cap_data).
    let mut capability = [0_u8; 20];
    capability[..8].copy_from_slice(&[1, 0, 0, 2, 0, 0x20, 0, 0]);
    let set = setxattr(volume.path("f"), c"security.capability", &capability, XattrFlags::empty());
    assert_eq!(set, Err(Errno::PERM));
}

#[test]
fn an_attribute_of_a_symbolic_link_is_the_links_own() {
    let volume = Volume::new();
    fs::write(volume.path("f"), "").unwrap();
    setxattr(volume.path("f"), c"user.is", b"file", XattrFlags::empty()).unwrap();
    symlink("f", volume.path("l")).unwrap();
    assert_eq!(lgetxattr(volume.path("l"), c"user.is", &mut [0_u8; 8]), Err(Errno::NODATA));
}

#[test]
fn an_acl_is_enforced_and_a_default_acl_is_inherited_instead_of_the_umask() {
    let volume = Volume::new();
    // user::rw-, user:1001:r--, group::---, mask::r--, other::--- (linux/posix_acl_xattr.h)
    let acl = |entries: &[(u16, u16, u32)]| {
        let mut value = 2_u32.to_le_bytes().to_vec();
        for (tag, permissions, id) in entries {
            value.extend(tag.to_le_bytes());
            value.extend(permissions.to_le_bytes());
            value.extend(id.to_le_bytes());
        }
        value
    };
    let any = u32::MAX;
    let path = volume.path("f");
    fs::write(&path, "secret").unwrap();
    let access = acl(&[(1, 6, any), (2, 4, ALICE.uid), (4, 0, any), (0x10, 4, any), (0x20, 0, any)]);
    setxattr(&path, c"system.posix_acl_access", &access, XattrFlags::empty()).unwrap();
    assert_eq!(volume.shell(ALICE, "cat f"), "secret");
    assert!(!volume.try_shell(crate::fixture::BOB, "cat f").status.success());

    let inherited = acl(&[(1, 7, any), (4, 7, any), (0x10, 7, any), (0x20, 0, any)]);
    fs::create_dir(volume.path("d")).unwrap();
    setxattr(volume.path("d"), c"system.posix_acl_default", &inherited, XattrFlags::empty()).unwrap();
    volume.shell(ROOT, "umask 077; echo > d/f");
    assert_eq!(mode(&volume.path("d/f")), 0o660);
}

#[test]
fn times_are_set_to_the_nanosecond_before_and_after_1970() {
    let volume = Volume::new();
    let file = File::create(volume.path("f")).unwrap();
    let before = SystemTime::UNIX_EPOCH - Duration::from_millis(1200);
    let after = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
    file.set_times(FileTimes::new().set_accessed(before).set_modified(after)).unwrap();
    let backing = fs::metadata(volume.backing.join("f")).unwrap();
    for metadata in [file.metadata().unwrap(), backing] {
        assert_eq!((metadata.atime(), metadata.atime_nsec()), (-2, 800_000_000));
        assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (1_000_000_000, 123_456_789));
    }
    symlink("f", volume.path("l")).unwrap();
    volume.shell(ROOT, "touch -h -d @86400 l");
    assert_eq!(fs::symlink_metadata(volume.path("l")).unwrap().mtime(), 86400);
    assert_eq!(fs::metadata(volume.path("f")).unwrap().mtime(), 1_000_000_000);
}

#[test]
fn statfs_reports_the_capacity_that_was_assigned() {
    let volume = Volume::with(Setup { capacity_bytes: 1 << 30, ..Setup::default() });
    let statistics = rustix::fs::statvfs(&volume.path).unwrap();
    assert_eq!(statistics.f_blocks * statistics.f_frsize, 1 << 30);
    assert!(statistics.f_bavail <= statistics.f_blocks);
    assert_eq!(statistics.f_namemax, 255);
}

#[test]
fn statfs_shows_what_is_used_and_as_available_what_the_pool_has_left() {
    const CAPACITY: u64 = 4 << 30;
    let setup = Setup { capacity_bytes: CAPACITY, inode_limit: 1 << 40, ..Setup::default() };
    let volume = Volume::on(Stage::on_file_system("xfs"), setup);
    fs::write(volume.path("f"), vec![1; 1 << 20]).unwrap();
    let used = volume.usage();
    let statistics = rustix::fs::statvfs(&volume.path).unwrap();
    let pool = rustix::fs::statvfs(&volume.backing).unwrap();
    let bytes = |blocks: u64| blocks * statistics.f_frsize;
    assert_eq!(bytes(statistics.f_blocks - statistics.f_bfree), used.used_bytes);
    assert_eq!(bytes(statistics.f_bavail), pool.f_bavail * pool.f_frsize);
    assert!(bytes(statistics.f_bavail) < CAPACITY / 4);
    assert_eq!(statistics.f_files - statistics.f_ffree, used.used_inodes);
}

#[test]
fn statfs_without_a_capacity_is_the_backing_file_systems() {
    let volume = Volume::new();
    let (own, backing) =
        (rustix::fs::statvfs(&volume.path).unwrap(), rustix::fs::statvfs(&volume.backing).unwrap());
    assert_eq!((own.f_blocks, own.f_frsize), (backing.f_blocks, backing.f_frsize));
}

#[test]
fn suid_and_sgid_go_when_somebody_else_writes_truncates_or_when_the_owner_changes() {
    let volume = Volume::new();
    let path = volume.path("program");
    fs::write(&path, "content").unwrap();
    for change in ["echo x >> program", "truncate -s 3 program", "fallocate -l 9 program"] {
        set_mode(&path, 0o6777);
        volume.shell(ALICE, change);
        assert_eq!(mode(&path), 0o777, "{change}");
        assert_eq!(mode(&volume.backing.join("program")), 0o777, "{change}");
    }
    set_mode(&path, 0o6755);
    volume.shell(ROOT, "chown 1001:2001 program");
    assert_eq!(mode(&path), 0o755);
}

/// As on the backing file system itself.
#[test]
fn members_keep_sgid_of_what_they_may_not_execute_and_others_do_not() {
    let volume = Volume::with(Setup { in_a_group: true, ..Setup::default() });
    let commands = [
        "echo x >> f",
        "truncate -s 3 f",
        "fallocate -l 9 f",
        "fallocate -p -l 4096 f",
        "fallocate -z -l 9 f",
        "setfacl -m u:1005:r f",
    ];
    let modes = [0o2666, 0o4666, 0o6666, 0o2676, 0o6676, 0o6777, 0o2767];
    for command in commands {
        for bits in modes {
            // The last is the daemon's own group.
            for (user, group) in [(ALICE, 2001), (ALICE, 2005), (BOB, 2001), (ALICE, 0)] {
                if command.starts_with("setfacl") && user.uid == BOB.uid {
                    continue;
                }
                let [through, native] = [&volume.path, &volume.backing.join("native")].map(|directory| {
                    fs::create_dir_all(directory).unwrap();
                    fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).unwrap();
                    let file = directory.join("f");
                    fs::write(&file, "content").unwrap();
                    std::os::unix::fs::chown(&file, Some(1001), Some(group)).unwrap();
                    set_mode(&file, bits);
                    volume.shell(user, &format!("cd {} && {command}", directory.display()));
                    let mode = mode(&file);
                    fs::remove_file(&file).unwrap();
                    mode
                });
                assert_eq!(through, native, "{command} of {bits:o} by {user:?}, group {group}");
            }
        }
    }
}

/// Of a caller's groups FUSE names only the first.
#[test]
fn members_by_a_supplementary_group_lose_sgid_when_they_set_an_acl() {
    let volume = Volume::new();
    let member = crate::fixture::User { group: Some(2005), ..ALICE };
    fs::write(volume.path("f"), "content").unwrap();
    fs::create_dir(volume.path("d")).unwrap();
    for name in ["f", "d"] {
        std::os::unix::fs::chown(volume.path(name), Some(1001), Some(2005)).unwrap();
        set_mode(&volume.path(name), 0o2775);
        volume.shell(member, &format!("setfacl -m u:1005:r {name}"));
    }
    assert_eq!((mode(&volume.path("f")), mode(&volume.path("d"))), (0o775, 0o2775));
}

#[test]
fn root_keeps_suid_when_it_writes_but_not_when_it_truncates() {
    let volume = Volume::new();
    let path = volume.path("program");
    fs::write(&path, "content").unwrap();
    set_mode(&path, 0o4755);
    OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap();
    assert_eq!(mode(&path), 0o4755);
    OpenOptions::new().write(true).open(&path).unwrap().set_len(2).unwrap();
    assert_eq!(mode(&path), 0o755);
}

#[test]
fn a_write_to_a_plain_file_costs_no_attribute_round_trip() {
    let volume = Volume::new();
    let before = requests(&volume);
    let mut file = File::create(volume.path("f")).unwrap();
    for _ in 0..500 {
        file.write_all(b"x").unwrap();
    }
    drop(file);
    let made = requests(&volume) - before;
    // One WRITE each; with a GETXATTR before each it would be twice as many.
    assert!(made < 600, "{made} requests for 500 writes");
}

/// Reads the daemon makes: one per request, and one per thread that waits.
fn requests(volume: &Volume) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", volume.pid())).unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix("syscr: ")).unwrap();
    line.parse().unwrap()
}

#[test]
fn inode_numbers_reused_by_the_backing_file_system_are_new_files() {
    let volume = Volume::new();
    for n in 0..200 {
        let path = volume.path("f");
        fs::write(&path, n.to_string()).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), n.to_string());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(fs::metadata(&path).unwrap().is_dir());
        fs::remove_dir(&path).unwrap();
    }
    assert_eq!(errno(fs::metadata(volume.path("f"))), libc::ENOENT);
}
