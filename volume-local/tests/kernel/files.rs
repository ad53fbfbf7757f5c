//! Names and contents.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FallocateFlags, RenameFlags, renameat_with};

use crate::fixture::{ALICE, ROOT, Setup, Volume, errno};

#[test]
fn what_is_written_is_read_and_is_in_the_backing_directory() {
    let volume = Volume::new();
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(volume.path("large"), &content).unwrap();
    assert!(fs::read(volume.path("large")).unwrap() == content);
    assert!(fs::read(volume.backing.join("large")).unwrap() == content);
    assert_eq!(volume.max_write_bytes, 256 * 1024);
}

#[test]
fn truncation_shortens_and_extends_with_zeroes() {
    let volume = Volume::new();
    let path = volume.path("f");
    fs::write(&path, "0123456789").unwrap();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(4).unwrap();
    file.set_len(6).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"0123\0\0");
    fs::write(&path, "x").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"x");
}

#[test]
fn rename_replaces_and_with_noreplace_refuses() {
    let volume = Volume::new();
    let (a, b) = (volume.path("a"), volume.path("b"));
    fs::write(&a, "a").unwrap();
    fs::write(&b, "b").unwrap();
    let refused = renameat_with(CWD, &a, CWD, &b, RenameFlags::NOREPLACE).unwrap_err();
    assert_eq!(refused, rustix::io::Errno::EXIST);
    fs::rename(&a, &b).unwrap();
    assert_eq!(fs::read_to_string(&b).unwrap(), "a");
    assert_eq!(errno(fs::metadata(&a)), libc::ENOENT);
}

#[test]
fn rename_with_exchange_swaps_a_file_and_a_directory() {
    let volume = Volume::new();
    let (a, b) = (volume.path("a"), volume.path("b"));
    fs::write(&a, "file").unwrap();
    fs::create_dir(&b).unwrap();
    fs::write(b.join("inside"), "").unwrap();
    renameat_with(CWD, &a, CWD, &b, RenameFlags::EXCHANGE).unwrap();
    assert_eq!(fs::read_to_string(&b).unwrap(), "file");
    assert!(a.join("inside").exists());
    fs::write(a.join("inside too"), "").unwrap();
    assert!(volume.backing.join("a/inside too").exists());
}

#[test]
fn a_renamed_directory_keeps_its_open_files_and_its_children() {
    let volume = Volume::new();
    fs::create_dir_all(volume.path("a/b")).unwrap();
    let mut open = File::create(volume.path("a/b/f")).unwrap();
    fs::create_dir(volume.path("c")).unwrap();
    fs::rename(volume.path("a"), volume.path("c/a")).unwrap();
    open.write_all(b"still").unwrap();
    assert_eq!(fs::read_to_string(volume.path("c/a/b/f")).unwrap(), "still");
}

#[test]
fn hard_links_are_one_file_and_count() {
    let volume = Volume::new();
    let (a, b) = (volume.path("a"), volume.path("b"));
    fs::write(&a, "one").unwrap();
    fs::hard_link(&a, &b).unwrap();
    let (first, second) = (fs::metadata(&a).unwrap(), fs::metadata(&b).unwrap());
    assert_eq!((first.nlink(), first.ino()), (2, second.ino()));
    fs::write(&b, "two").unwrap();
    assert_eq!(fs::read_to_string(&a).unwrap(), "two");
    fs::remove_file(&a).unwrap();
    assert_eq!(fs::metadata(&b).unwrap().nlink(), 1);
    assert_eq!(fs::read_to_string(&b).unwrap(), "two");
}

#[test]
fn a_hard_link_to_a_symbolic_link_links_the_link() {
    let volume = Volume::new();
    symlink("nowhere", volume.path("a")).unwrap();
    fs::hard_link(volume.path("a"), volume.path("b")).unwrap();
    assert_eq!(fs::read_link(volume.path("b")).unwrap().to_str(), Some("nowhere"));
}

#[test]
fn a_symbolic_link_is_followed_in_the_users_tree_and_never_by_the_daemon() {
    let volume = Volume::new();
    fs::write(volume.path("target"), "inside").unwrap();
    symlink("target", volume.path("relative")).unwrap();
    assert_eq!(fs::read_to_string(volume.path("relative")).unwrap(), "inside");
    // An absolute one means the reader's own root: the same as on any file system.
    symlink("/etc/hostname", volume.path("absolute")).unwrap();
    assert_eq!(fs::read_link(volume.path("absolute")).unwrap().to_str(), Some("/etc/hostname"));
    // One that stands in the backing directory, where a directory was, leads nowhere else.
    fs::create_dir(volume.path("d")).unwrap();
    fs::write(volume.path("d/f"), "mine").unwrap();
    fs::rename(volume.backing.join("d"), volume.backing.join("gone")).unwrap();
    symlink("/etc", volume.backing.join("d")).unwrap();
    let found = fs::metadata(volume.path("d/passwd"));
    // The kernel asks for `passwd` in the old directory, or follows the link itself, as any user may.
    assert!(found.is_err() || found.unwrap().ino() == fs::metadata("/etc/passwd").unwrap().ino());
    assert!(!volume.backing.join("gone/passwd").exists());
}

#[test]
fn dot_dot_of_the_volumes_root_is_where_it_is_mounted() {
    let volume = Volume::new();
    let above = fs::metadata(volume.path("..")).unwrap();
    let parent = fs::metadata(volume.path.parent().unwrap()).unwrap();
    assert_eq!((above.dev(), above.ino()), (parent.dev(), parent.ino()));
    // The daemon itself has nothing above: its own listing says so.
    assert_eq!(volume.shell(ROOT, "ls -ai | grep ' \\.$'").split_whitespace().next(), Some("1"));
}

#[test]
fn appends_from_two_openers_never_overwrite_each_other() {
    let volume = Volume::new();
    let path = volume.path("log");
    let append = || OpenOptions::new().append(true).create(true).open(&path).unwrap();
    let (mut one, mut two) = (append(), append());
    for n in 0..50 {
        writeln!(one, "one {n}").unwrap();
        writeln!(two, "two {n}").unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 100);
}

#[test]
fn an_unlinked_file_that_is_open_is_read_written_and_changed() {
    let volume = Volume::new();
    let path = volume.path("f");
    let mut file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    file.write_all(b"before ").unwrap();
    fs::remove_file(&path).unwrap();
    file.write_all(b"after").unwrap();
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let mut content = String::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_string(&mut content).unwrap();
    assert_eq!(content, "before after");
    let metadata = file.metadata().unwrap();
    assert_eq!((metadata.nlink(), metadata.mode() & 0o777, metadata.len()), (0, 0o600, 12));
    assert_eq!(fs::read_dir(&volume.backing).unwrap().count(), 0);
}

#[test]
fn a_file_replaced_by_rename_stays_open_with_its_old_content() {
    let volume = Volume::new();
    fs::write(volume.path("f"), "old").unwrap();
    let mut open = File::open(volume.path("f")).unwrap();
    fs::write(volume.path("new"), "new").unwrap();
    fs::rename(volume.path("new"), volume.path("f")).unwrap();
    let mut content = String::new();
    open.read_to_string(&mut content).unwrap();
    assert_eq!((content.as_str(), open.metadata().unwrap().nlink()), ("old", 0));
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "new");
}

#[test]
fn holes_are_found_and_cost_nothing() {
    let volume = Volume::new();
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("sparse")).unwrap();
    file.write_at(b"end", 8 * 1024 * 1024).unwrap();
    file.sync_all().unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!(metadata.len(), 8 * 1024 * 1024 + 3);
    assert!(metadata.blocks() * 512 < 1024 * 1024, "{} blocks", metadata.blocks());
    let seek = |position| rustix::fs::seek(&file, position);
    assert_eq!(seek(rustix::fs::SeekFrom::Data(0)), Ok(8 * 1024 * 1024));
    assert_eq!(seek(rustix::fs::SeekFrom::Hole(0)), Ok(0));
    assert_eq!(seek(rustix::fs::SeekFrom::Data(9 * 1024 * 1024)), Err(rustix::io::Errno::NXIO));
}

#[test]
fn fallocate_reserves_and_punches_holes() {
    let volume = Volume::new();
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("f")).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    file.write_all_at(&[7; 8192], 0).unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, punch, 0, 4096).unwrap();
    let mut content = [1; 8192];
    file.read_exact_at(&mut content, 0).unwrap();
    assert!(content[..4096].iter().all(|b| *b == 0) && content[4096..].iter().all(|b| *b == 7));
}

#[test]
fn copy_file_range_copies_inside_the_volume() {
    let volume = Volume::new();
    fs::write(volume.path("from"), "0123456789").unwrap();
    let (from, to) = (File::open(volume.path("from")).unwrap(), File::create(volume.path("to")).unwrap());
    let mut at = 3;
    let copied = rustix::fs::copy_file_range(from.as_fd(), Some(&mut at), to.as_fd(), None, 5).unwrap();
    assert_eq!(copied, 5);
    assert_eq!(fs::read_to_string(volume.path("to")).unwrap(), "34567");
}

/// Stores an `M` by a shared mapping of the file, which has two pages.
#[expect(unsafe_code, reason = "there is no safe mmap")]
pub(crate) fn store_by_mapping(path: &Path, at: usize) {
    use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    assert!(at < 8192);
    // SAFETY: the mapping is new, 8192 bytes long, used only between here and
    // munmap, and the file is not shortened meanwhile.
    unsafe {
        let mapped =
            mmap(std::ptr::null_mut(), 8192, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
                .unwrap();
        mapped.cast::<u8>().add(at).write(b'M');
        msync(mapped, 8192, MsyncFlags::SYNC).unwrap();
        munmap(mapped, 8192).unwrap();
    }
}

#[test]
fn what_is_written_through_a_shared_mapping_is_in_the_file() {
    let volume = Volume::new();
    let path = volume.path("mapped");
    fs::write(&path, [b'-'; 8192]).unwrap();
    store_by_mapping(&path, 5000);
    assert_eq!(fs::read(volume.backing.join("mapped")).unwrap()[4999..5002], *b"-M-");
}

#[test]
fn fsync_of_files_and_directories_succeeds() {
    let volume = Volume::new();
    let file = File::create(volume.path("f")).unwrap();
    file.sync_all().unwrap();
    file.sync_data().unwrap();
    File::open(&volume.path).unwrap().sync_all().unwrap();
}

#[test]
fn fifos_and_sockets_work_between_users_of_the_volume() {
    let volume = Volume::new();
    assert_eq!(volume.shell(ALICE, "mkfifo pipe; echo through > pipe & cat pipe; wait"), "through");
    let listener = std::os::unix::net::UnixListener::bind(volume.path("socket")).unwrap();
    let _dialled = std::os::unix::net::UnixStream::connect(volume.path("socket")).unwrap();
    listener.accept().unwrap();
}

#[test]
fn data_and_holes_beyond_the_file_are_enxio() {
    use rustix::fs::{SeekFrom, seek};
    let volume = Volume::new();
    fs::write(volume.path("f"), "content").unwrap();
    let [through, native] = [&volume.path, &volume.backing].map(|directory| {
        let file = File::open(directory.join("f")).unwrap();
        // rustix's offsets have no sign.
        let before = SeekFrom::Hole(u64::MAX);
        let positions = [SeekFrom::Data(6), SeekFrom::Hole(6), SeekFrom::Data(7), SeekFrom::Hole(7)];
        let beyond = [SeekFrom::Data(1 << 40), SeekFrom::Hole(1 << 40), SeekFrom::Data(u64::MAX), before];
        positions.into_iter().chain(beyond).map(|position| seek(&file, position)).collect::<Vec<_>>()
    });
    assert_eq!(through, native);
    assert_eq!(through[2..], [Err(rustix::io::Errno::NXIO); 6]);
}

#[test]
fn direct_reads_and_writes_need_no_alignment() {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    let volume = Volume::new();
    fs::write(volume.path("f"), "some content").unwrap();
    let flags = libc::O_DIRECT;
    let file = File::options().read(true).write(true).custom_flags(flags).open(volume.path("f")).unwrap();
    file.write_all_at(b"new", 5).unwrap();
    let mut part = [0; 7];
    file.read_exact_at(&mut part, 5).unwrap();
    assert_eq!(&part, b"newtent");
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "some newtent");
    assert_eq!(fs::read_to_string(volume.backing.join("f")).unwrap(), "some newtent");
}

#[test]
fn moving_content_and_sharing_blocks_are_refused() {
    use rustix::fs::{FallocateFlags, fallocate, ioctl_ficlone};
    use rustix::io::Errno;
    let volume = Volume::new();
    let open =
        |name| File::options().read(true).write(true).create_new(true).open(volume.path(name)).unwrap();
    let (from, to) = (open("from"), open("to"));
    from.set_len(1 << 20).unwrap();
    for mode in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE] {
        assert_eq!(fallocate(&from, mode, 4096, 4096), Err(Errno::OPNOTSUPP), "{mode:?}");
    }
    assert_eq!(ioctl_ficlone(&to, &from), Err(Errno::OPNOTSUPP));
}

#[test]
fn the_time_of_birth_is_not_reported() {
    use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
    let volume = Volume::new();
    fs::write(volume.path("f"), "").unwrap();
    let found = statx(CWD, volume.path("f"), AtFlags::empty(), StatxFlags::BTIME).unwrap();
    assert_eq!(found.stx_mask & StatxFlags::BTIME.bits(), 0);
}

/// struct file_handle, with space for a handle of FUSE.
#[repr(C)]
struct FileHandle {
    bytes: u32,
    kind: i32,
    handle: [u8; 128],
}

#[test]
#[expect(unsafe_code, reason = "no crate wraps these calls")]
fn a_file_handle_is_stale_once_the_kernel_has_forgotten_the_file() {
    let volume = Volume::new();
    fs::write(volume.path("f"), "").unwrap();
    let name = std::ffi::CString::new(volume.path("f").into_os_string().into_encoded_bytes()).unwrap();
    let mut handle = FileHandle { bytes: 128, kind: 0, handle: [0; 128] };
    let mut mount = 0;
    let root = File::open(&volume.path).unwrap();
    // SAFETY: the name ends with NUL, and the handle has the space that it names.
    let made = unsafe {
        let handle = &raw mut handle;
        libc::syscall(libc::SYS_name_to_handle_at, libc::AT_FDCWD, name.as_ptr(), handle, &raw mut mount, 0)
    };
    assert_eq!(made, 0, "{}", std::io::Error::last_os_error());
    let mut open = || {
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        // SAFETY: as above; the result is a new descriptor.
        unsafe {
            let fd = libc::syscall(libc::SYS_open_by_handle_at, root.as_raw_fd(), &raw mut handle, flags);
            let fd = i32::try_from(fd).unwrap();
            if fd < 0 { Err(std::io::Error::last_os_error()) } else { Ok(File::from_raw_fd(fd)) }
        }
    };
    drop(open().unwrap());
    // The kernel keeps the file until the daemon has answered the RELEASE of the
    // write above, for which close(2) does not wait.
    let deadline = Instant::now() + Duration::from_secs(30);
    let error = loop {
        volume.remount(nix::mount::MsFlags::empty()).unwrap();
        match open() {
            Ok(_) => assert!(Instant::now() < deadline, "the kernel still knows the file"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.raw_os_error(), Some(libc::ESTALE));
}

#[test]
fn device_nodes_are_refused_even_to_root() {
    let volume = Volume::new();
    for kind in ["c 1 3", "b 7 0", "c 0 0"] {
        let output = volume.try_shell(ROOT, &format!("mknod device {kind}"));
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("Operation not permitted"), "{kind}: {message}");
    }
    assert_eq!(fs::read_dir(&volume.path).unwrap().count(), 0);
}

#[test]
fn locks_exclude_other_processes_on_the_node() {
    let volume = Volume::new();
    let held = "exec 9>lock; flock -n 9 && flock -n lock true";
    assert_eq!(volume.try_shell(ALICE, held).status.code(), Some(1));
    assert!(volume.try_shell(ALICE, "flock -n lock true").status.success());
}

#[test]
fn a_read_only_assignment_refuses_every_change() {
    let volume = Volume::with(Setup { read_only: true, ..Setup::default() });
    fs::write(volume.backing.join("f"), "content").unwrap();
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "content");
    assert_eq!(errno(fs::write(volume.path("f"), "x")), libc::EROFS);
    assert_eq!(errno(fs::create_dir(volume.path("d"))), libc::EROFS);
    assert_eq!(errno(fs::remove_file(volume.path("f"))), libc::EROFS);
}

#[test]
fn thousands_of_files_fit_through_few_descriptors() {
    let volume = Volume::with(Setup { descriptors: 256, ..Setup::default() });
    let path = |n: u32| volume.path(&format!("d{}/f{n}", n % 30));
    for n in 0..30 {
        fs::create_dir(volume.path(&format!("d{n}"))).unwrap();
    }
    let mut open = Vec::new();
    for n in 0..3300 {
        fs::write(path(n), n.to_string()).unwrap();
        if n % 50 == 0 {
            open.push((n, File::open(path(n)).unwrap()));
        }
    }
    for n in (0..30).rev() {
        fs::rename(volume.path(&format!("d{n}")), volume.path(&format!("d{}", n + 1))).unwrap();
    }
    for n in 0..3300 {
        let moved = volume.path(&format!("d{}/f{n}", n % 30 + 1));
        assert_eq!(fs::read_to_string(moved).unwrap(), n.to_string());
    }
    for (n, mut file) in open {
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, n.to_string());
    }
    let held = fs::read_dir(format!("/proc/{}/fd", volume.pid())).unwrap().count();
    assert!(held < 256, "{held} descriptors");
}

#[test]
fn who_opens_too_many_files_shuts_nobody_out() {
    use proto::control::{Ping, request};
    let volume = Volume::with(Setup { descriptors: 256, ..Setup::default() });
    fs::create_dir(volume.path("d")).unwrap();
    for n in 0..300 {
        fs::write(volume.path(&format!("d/f{n}")), "x").unwrap();
    }
    let mut open = Vec::new();
    let refused = loop {
        match File::open(volume.path(&format!("d/f{}", open.len()))) {
            Ok(file) => open.push(file),
            Err(error) => break error.raw_os_error(),
        }
    };
    assert_eq!(refused, Some(libc::EMFILE));
    assert!(open.len() >= 100, "{} files", open.len());
    assert_eq!(errno(File::create(volume.path("new"))), libc::EMFILE);
    assert!(!volume.path("new").exists());
    assert_eq!(fs::read_dir(volume.path("d")).unwrap().count(), 300);
    let connections: Vec<_> = (0..20).map(|_| volume.control()).collect();
    let last = connections.last().unwrap().ask(request::Kind::Ping(Ping {}));
    assert_eq!(last, crate::fixture::pong(), "idle connections are closed for a new one");
    assert!(!crate::metrics::knows_nothing(&volume), "and the scraper is answered");
    drop(open);
    File::create(volume.path("new")).unwrap();
}

#[test]
fn a_file_changed_behind_the_mount_is_seen_after_the_next_open() {
    let volume = Volume::with(Setup { changed_from_outside: true, ..Setup::default() });
    fs::write(volume.path("f"), "old").unwrap();
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "old");
    fs::write(volume.backing.join("f"), "NEW").unwrap();
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "NEW");
}

#[test]
fn unnamed_files_and_inode_flags_are_refused() {
    use rustix::fs::{Mode, OFlags};
    let volume = Volume::new();
    let unnamed = rustix::fs::open(&volume.path, OFlags::TMPFILE | OFlags::RDWR, Mode::RUSR).unwrap_err();
    assert_eq!(unnamed, rustix::io::Errno::OPNOTSUPP);
    let file = File::create(volume.path("f")).unwrap();
    assert_eq!(rustix::fs::ioctl_getflags(&file).unwrap_err(), rustix::io::Errno::NOTTY);
}

#[test]
fn a_truncation_to_the_same_size_changes_the_times() {
    let volume = Volume::new();
    let path = volume.path("f");
    fs::write(&path, "content").unwrap();
    let epoch = std::time::SystemTime::UNIX_EPOCH;
    File::options().write(true).open(&path).unwrap().set_modified(epoch).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), epoch);
    nix::unistd::truncate(&path, 7).unwrap();
    for file in [path, volume.backing.join("f")] {
        assert_ne!(fs::metadata(file).unwrap().modified().unwrap(), epoch);
    }
}
