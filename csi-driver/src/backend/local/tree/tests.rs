use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::Path;

use ::tests::loop_device::{FileSystem, IMAGE_BYTES, LoopMount};
use ::tests::{Sandbox, subvolume};
use rustix::fs::{CWD, ResolveFlags};

use super::*;
use crate::model::policies::{Allowance, Policies};

const MIB: u64 = 1 << 20;

/// The file systems that pools stand on, and how a copy comes about on each.
const POOLS: [(FileSystem, CopyMode); 3] = [
    (FileSystem::Btrfs, CopyMode::Reflink),
    (FileSystem::Xfs, CopyMode::Reflink),
    (FileSystem::Ext4, CopyMode::Bytes),
];

/// Runs `test` in a directory on each of [`POOLS`].
fn on_each_pool(test: impl Fn(&Path, CopyMode)) {
    for (kind, mode) in POOLS {
        let sandbox = Sandbox::new();
        let mount = LoopMount::new(&sandbox, "pool", kind, IMAGE_BYTES).unwrap();
        test(mount.dir(), mode);
    }
}

fn open(dir: &Path) -> OwnedFd {
    open_dir(CWD, dir, ResolveFlags::empty()).unwrap()
}

/// Copies `pool/from` to `pool/to`, and nothing of the copier's own stays.
fn copy(pool: &Path, mode: CopyMode) -> linux::Result<Count> {
    for dir in ["to", "links"] {
        fs::create_dir(pool.join(dir)).unwrap();
    }
    let [from, to, links] = ["from", "to", "links"].map(|name| open(&pool.join(name)));
    let copied = copy_tree(from.as_fd(), to.as_fd(), links.as_fd(), mode, &Progress::default());
    if copied.is_ok() {
        assert_eq!(fs::read_dir(pool.join("links")).unwrap().count(), 0);
    }
    copied
}

/// All that can be seen of a tree: by path, one line a property. Hard links are
/// numbered by their first path.
fn describe(root: &Path) -> BTreeMap<String, String> {
    fn visit(
        root: &Path,
        path: &Path,
        firsts: &mut BTreeMap<u64, String>,
        all: &mut BTreeMap<String, String>,
    ) {
        let name = path.strip_prefix(root).unwrap().display().to_string();
        let stat = fs::symlink_metadata(path).unwrap();
        let mut text = format!(
            "mode {:o} owner {}:{} mtime {}.{:09}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.mtime(),
            stat.mtime_nsec()
        );
        if stat.is_dir() {
            let mut entries: Vec<_> = fs::read_dir(path).unwrap().map(|e| e.unwrap().path()).collect();
            entries.sort();
            entries.iter().for_each(|entry| visit(root, entry, firsts, all));
        } else {
            text += &format!(
                " links {} of {}",
                stat.nlink(),
                firsts.entry(stat.ino()).or_insert_with(|| name.clone())
            );
        }
        if stat.is_symlink() {
            text += &format!(" -> {}", fs::read_link(path).unwrap().display());
        }
        if stat.is_file() {
            if stat.nlink() == 1 {
                // Only here: reading one name of a file changes the access time seen by the others.
                text += &format!(" atime {}.{:09}", stat.atime(), stat.atime_nsec());
            }
            let content = fs::read(path).unwrap();
            let sum =
                content.iter().fold(0u64, |sum, byte| sum.wrapping_mul(31).wrapping_add((*byte).into()));
            text += &format!(" size {} sum {sum}", stat.len());
        }
        let mut names = vec![0; XATTR_SIZE_MAX];
        let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
        let mut names: Vec<_> = names[..length].split_inclusive(|b| *b == 0).collect();
        names.sort_unstable();
        for attribute in names {
            let attribute = CStr::from_bytes_with_nul(attribute).unwrap();
            let mut value = vec![0; XATTR_SIZE_MAX];
            let length = rustix::fs::lgetxattr(path, attribute, &mut value[..]).unwrap();
            text += &format!(" {attribute:?}={}", value[..length].escape_ascii());
        }
        all.insert(name, text);
    }
    let mut all = BTreeMap::new();
    visit(root, root, &mut BTreeMap::new(), &mut all);
    all
}

/// linux/posix_acl_xattr.h: version 2, and user 1234 beside owner, group, mask and others.
fn acl() -> Vec<u8> {
    let none = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, none), (2, 5, 1234), (4, 4, none), (0x10, 5, none), (0x20, 0, none)];
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// What of a file is not a hole.
fn data_bytes(path: &Path) -> u64 {
    let file = OwnedFd::from(File::open(path).unwrap());
    let size = stat(file.as_fd(), c"").unwrap().stx_size;
    let (mut offset, mut sum) = (0, 0);
    while let Some((start, end)) = next_data(&file, offset, size).unwrap() {
        sum += end - start;
        offset = end;
    }
    sum
}

fn set(path: &Path, attribute: &CStr, value: &[u8]) {
    rustix::fs::lsetxattr(path, attribute, value, XattrFlags::empty()).unwrap();
}

fn chmod(path: &Path, mode: u32) {
    rustix::fs::chmod(path, Mode::from_raw_mode(mode)).unwrap();
}

fn set_times(path: &Path, seconds: i64) {
    let stamp = |tv_nsec| Timespec { tv_sec: seconds, tv_nsec };
    let times = Timestamps { last_access: stamp(123_456_789), last_modification: stamp(987_654_321) };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// One of everything that a volume can hold.
fn furnish(root: &Path) {
    fs::create_dir_all(root.join("dir/empty")).unwrap();
    fs::create_dir(root.join("acl")).unwrap();
    set(&root.join("acl"), c"system.posix_acl_default", &acl());
    fs::write(root.join("acl/inherits"), "x").unwrap();
    let long = "n".repeat(255);
    fs::write(root.join(&long), "content").unwrap();
    set(&root.join(&long), c"system.posix_acl_access", &acl());
    fs::write(root.join("dir/program"), "#!").unwrap();
    std::os::unix::fs::chown(root.join("dir/program"), Some(1000), Some(2000)).unwrap();
    // VFS_CAP_REVISION_2 and effective; CAP_NET_RAW permitted (linux/capability.h).
    let mut capability = 0x0200_0001u32.to_le_bytes().to_vec();
    capability.extend([0, 0x20, 0, 0].iter().chain(&[0; 12]));
    set(&root.join("dir/program"), c"security.capability", &capability);
    chmod(&root.join("dir/program"), 0o6755);
    fs::write(root.join("a"), vec![7; 10_000]).unwrap();
    set(&root.join("a"), c"user.note", b"\x00\xff binary");
    fs::hard_link(root.join("a"), root.join("dir/a again")).unwrap();
    fs::hard_link(root.join("a"), root.join("dir/empty/a third")).unwrap();
    let sparse = File::create(root.join("sparse")).unwrap();
    sparse.write_all_at(&[1; 4096], MIB).unwrap();
    sparse.write_all_at(&[2; 4096], 3 * MIB).unwrap();
    sparse.set_len(5 * MIB + 17).unwrap();
    File::create(root.join("only a hole")).unwrap().set_len(MIB).unwrap();
    fs::write(root.join("nothing"), "").unwrap();
    for kind in [FileType::Fifo, FileType::Socket] {
        rustix::fs::mknodat(CWD, root.join(format!("{kind:?}")), kind, Mode::from_raw_mode(0o624), 0)
            .unwrap();
    }
    for (name, target) in [("dangling", "/nonexistent"), ("escaping", "../../../../etc"), ("within", "dir")] {
        symlink(target, root.join(name)).unwrap();
        std::os::unix::fs::lchown(root.join(name), Some(3000), Some(3001)).unwrap();
    }
    set(&root.join("dangling"), c"trusted.note", b"of the link");
    fs::hard_link(root.join("within"), root.join("dir/within")).unwrap();
    chmod(&root.join("dir"), 0o3711);
    chmod(&root.join("dir/empty"), 0);
    for (seconds, name) in ["sparse", "within", "Fifo", "dir/empty", "dir", "acl", ""].iter().enumerate() {
        set_times(&root.join(name), i64::try_from(seconds).unwrap() - 3);
    }
}

#[test]
fn a_tree_is_copied_with_everything_it_has() {
    on_each_pool(|pool, mode| {
        let from = pool.join("from");
        fs::create_dir(&from).unwrap();
        furnish(&from);
        let counted = count_tree(open(&from).as_fd(), &AtomicBool::new(false)).unwrap();
        let copied = copy(pool, mode).unwrap();
        let (wanted, found) = (describe(&from), describe(&pool.join("to")));
        assert_eq!(found.len(), wanted.len(), "{mode:?}");
        for (name, wanted) in &wanted {
            assert_eq!(found.get(name), Some(wanted), "{mode:?}: {name:?}");
        }
        for name in ["sparse", "only a hole"] {
            let [source, copy] = [&from, &pool.join("to")].map(|root| data_bytes(&root.join(name)));
            assert!(copy <= source && copy < MIB, "{mode:?}: {name:?}: {copy} bytes of {source}");
        }
        assert_eq!(copied.inodes, counted.inodes);
        // Three names are further links.
        let names_taken = if linux::btrfs::is_btrfs(open(pool)).unwrap() { 0 } else { 3 };
        assert_eq!(counted.inodes, wanted.len() as u64 - names_taken);
    });
}

/// Deeper than the limits of descriptors and of path lengths.
#[test]
fn a_tree_of_any_depth_is_copied() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::create_dir(dir.path().join("from")).unwrap();
    let mut at = open(&dir.path().join("from"));
    for _ in 0..3000 {
        for name in ["down", "aside"] {
            rustix::fs::mkdirat(&at, name, Mode::RWXU).unwrap();
        }
        at = open_dir(&at, c"down", WITHIN).unwrap();
    }
    let flags = OFlags::CREATE | OFlags::WRONLY;
    drop(rustix::fs::openat(&at, "bottom", flags, Mode::RUSR).unwrap());
    assert_eq!(copy(dir.path(), CopyMode::Bytes).unwrap().inodes, 6002);
    let mut at = open(&dir.path().join("to"));
    for _ in 0..3000 {
        at = open_dir(&at, c"down", WITHIN).unwrap();
    }
    stat(at.as_fd(), c"bottom").unwrap();
    drop(at);
    for name in ["from", "to"] {
        linux::tree::remove(&dir.path().join(name)).unwrap();
    }
}

#[test]
fn a_reflink_takes_no_room_and_is_a_copy_all_the_same() {
    for kind in [FileSystem::Btrfs, FileSystem::Xfs] {
        let sandbox = Sandbox::new();
        let mount = LoopMount::new(&sandbox, "pool", kind, IMAGE_BYTES).unwrap();
        let pool = mount.dir();
        fs::create_dir(pool.join("from")).unwrap();
        fs::write(pool.join("from/file"), vec![9; 64 << 20]).unwrap();
        let free = || {
            rustix::fs::syncfs(open(pool)).unwrap();
            let fs = rustix::fs::statvfs(pool).unwrap();
            fs.f_bfree * fs.f_frsize
        };
        let before = free();
        let copied = copy(pool, CopyMode::Reflink).unwrap();
        assert!(before - free() < 4 * MIB, "{kind:?}: {} bytes", before - free());
        assert!(copied.bytes >= 64 * MIB, "charged as if it were its own: {copied:?}");
        let file = File::options().write(true).open(pool.join("from/file")).unwrap();
        file.write_all_at(b"changed", 5).unwrap();
        assert!(fs::read(pool.join("to/file")).unwrap().iter().all(|byte| *byte == 9));
    }
}

#[test]
fn a_cancelled_copy_stops_and_reports_its_progress() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["from", "to", "links"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("from/file"), vec![1; 3 * CHUNK + 5]).unwrap();
    let [from, to, links] = ["from", "to", "links"].map(|name| open(&dir.path().join(name)));
    let progress = Progress::default();
    copy_tree(from.as_fd(), to.as_fd(), links.as_fd(), CopyMode::Bytes, &progress).unwrap();
    assert_eq!(progress.done_bytes.into_inner(), 3 * CHUNK as u64 + 5);

    fs::remove_file(dir.path().join("to/file")).unwrap();
    let stopped = Progress { stop: AtomicBool::new(true), ..Default::default() };
    let error = copy_tree(from.as_fd(), to.as_fd(), links.as_fd(), CopyMode::Bytes, &stopped).unwrap_err();
    assert_eq!(error.errno(), nix::errno::Errno::ECANCELED);
}

#[test]
fn a_group_gets_every_file_and_the_root_last() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    let root = dir.path();
    fs::create_dir(root.join("dir")).unwrap();
    chmod(root, 0o700);
    chmod(&root.join("dir"), 0o705);
    fs::write(root.join("dir/file"), "").unwrap();
    chmod(&root.join("dir/file"), 0o4711);
    fs::write(outside.path().join("file"), "").unwrap();
    chmod(&outside.path().join("file"), 0o600);
    symlink(outside.path().join("file"), root.join("dir/link")).unwrap();
    let root_fd = open(root);
    tree::give_group(root_fd.as_fd(), 4242, GroupAccess::ReadWrite, &AtomicBool::new(false)).unwrap();
    let seen = |path: &Path| {
        let stat = fs::symlink_metadata(path).unwrap();
        (stat.gid(), stat.mode() & 0o7777)
    };
    assert_eq!(seen(root), (4242, 0o2770));
    assert_eq!(seen(&root.join("dir")), (4242, 0o2775));
    assert_eq!(seen(&root.join("dir/file")), (4242, 0o771), "no program that runs with the group");
    assert_eq!(seen(&root.join("dir/link")).0, 4242);
    assert_eq!(seen(&outside.path().join("file")), (0, 0o600));

    // What cut a walk short left the root as it was: the next walk begins anew.
    tree::give_group(root_fd.as_fd(), 4343, GroupAccess::ReadWrite, &AtomicBool::new(true)).unwrap_err();
    assert_eq!(seen(root), (4242, 0o2770));
}

#[test]
fn a_copy_of_more_than_its_volume_may_hold_ends() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::create_dir(&from).unwrap();
    let copied = |what: &dyn Fn()| {
        what();
        for name in ["to", "links"] {
            let name = dir.path().join(name);
            drop(fs::remove_dir_all(&name));
            fs::create_dir(&name).unwrap();
        }
        let [from, to, links] = ["from", "to", "links"].map(|name| open(&dir.path().join(name)));
        let progress = Progress::default();
        progress.bound(Allowance { capacity_bytes: MIB, policies: Policies::default() });
        copy_tree(from.as_fd(), to.as_fd(), links.as_fd(), CopyMode::Bytes, &progress)
    };
    let write = |name: &str, bytes| fs::write(from.join(name), vec![b'x'; bytes]).unwrap();
    copied(&|| write("all", 1 << 20)).unwrap();
    copied(&|| (0..1024).for_each(|n| write(&n.to_string(), 0))).unwrap();
    let refused = |what: &dyn Fn()| {
        let error = copied(what).unwrap_err();
        assert_eq!(error.errno(), nix::errno::Errno::EDQUOT, "{error}");
        fs::remove_dir_all(&from).unwrap();
        fs::create_dir(&from).unwrap();
    };
    refused(&|| write("more", 32 << 20));
    refused(&|| {
        for n in 0..800 {
            write(&n.to_string(), 0);
            let file = from.join(n.to_string());
            rustix::fs::setxattr(&file, "user.x", &[b'x'; 3500], XattrFlags::empty()).unwrap();
        }
    });
    refused(&|| (0..6000).for_each(|n| write(&n.to_string(), 0)));
    refused(&|| (0..6000).for_each(|n| fs::create_dir(from.join(n.to_string())).unwrap()));
}

#[test]
fn a_tree_with_read_only_subvolumes_is_removed() {
    let sandbox = Sandbox::new();
    let mount = LoopMount::new(&sandbox, "pool", FileSystem::Btrfs, IMAGE_BYTES).unwrap();
    let tree = mount.dir().join("tree");
    fs::create_dir(&tree).unwrap();
    let original = tree.join("s");
    subvolume::create(&original).unwrap();
    fs::create_dir(original.join("d")).unwrap();
    fs::write(original.join("d/f"), "x").unwrap();
    subvolume::snapshot(&original, &tree.join("copy")).unwrap();
    subvolume::make_read_only(&original).unwrap();
    assert!(fs::remove_file(original.join("d/f")).is_err(), "it is read-only");
    linux::tree::remove(&tree).unwrap();
    assert!(!tree.exists());
}
