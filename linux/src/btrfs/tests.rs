//! On a file system of the test's own, on a loop device.

use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use super::quota::{self, Quotas};
use super::subvolume::{self, Changeable};
use crate::mount::{self, UnmountMode};
use crate::tree::tests::in_own_mounts;

const MIB: u64 = 1 << 20;

/// Calls `test` with the mount point of a new Btrfs.
pub(crate) fn on_btrfs(test: impl FnOnce(&Path) + Send) {
    in_own_mounts(|| {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("mnt"));
        File::create(&image).unwrap().set_len(512 * MIB).unwrap();
        std::fs::create_dir(&at).unwrap();
        run(Command::new("mkfs.btrfs").args(["-q", "-K"]).arg(&image));
        run(Command::new("mount").args(["-n", "-t", "btrfs", "-o", "loop,commit=1"]).args([&image, &at]));
        test(&at);
        mount::unmount(&at, UnmountMode::Detach).unwrap();
    });
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn enable_quotas(at: &Path) {
    run(Command::new("btrfs").args(["quota", "enable"]).arg(at));
    // Waits for the first count, too.
    run(Command::new("btrfs").args(["quota", "rescan", "-w"]).arg(at));
}

fn open(path: &Path) -> File {
    File::open(path).unwrap()
}

pub(crate) fn create(at: &Path, name: &CStr) -> File {
    subvolume::create(open(at), name).unwrap();
    open(&at.join(name.to_str().unwrap()))
}

/// The bytes that fit into a new file, and the errno of the first that does not.
fn fill(path: &Path, most: u64) -> (u64, Option<i32>) {
    let mut file = File::create(path).unwrap();
    let piece = [7; 64 << 10];
    let mut written = 0;
    while written < most {
        match file.write(&piece) {
            Ok(count) => written += count as u64,
            Err(e) => return (written, e.raw_os_error()),
        }
    }
    (written, None)
}

#[test]
fn a_subvolume_is_made_cut_and_deleted_by_its_number() {
    on_btrfs(|at| {
        let first = create(at, c"first");
        let id = subvolume::with_root(&first).unwrap().expect("a subvolume");
        std::fs::write(at.join("first/file"), "before").unwrap();
        std::fs::create_dir(at.join("first/dir")).unwrap();
        assert_eq!(subvolume::with_root(open(&at.join("first/dir"))).unwrap(), None);
        assert_eq!(subvolume::with_root(open(Path::new("/proc"))).unwrap(), None);

        subvolume::snapshot(&first, open(at), c"cut", Changeable::No).unwrap();
        subvolume::snapshot(open(&at.join("cut")), open(at), c"copy", Changeable::Yes).unwrap();
        std::fs::write(at.join("first/file"), "after").unwrap();
        std::fs::write(at.join("copy/file"), "changed").unwrap();
        assert_eq!(std::fs::read(at.join("cut/file")).unwrap(), b"before");
        let refused = std::fs::write(at.join("cut/file"), "").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));

        // Another directory takes the name: the number still means the same subvolume.
        std::fs::rename(at.join("first"), at.join("moved")).unwrap();
        std::fs::create_dir(at.join("first")).unwrap();
        for name in ["moved", "cut", "copy"] {
            let id = subvolume::with_root(open(&at.join(name))).unwrap().unwrap();
            subvolume::delete(open(at), id).unwrap();
            assert!(!at.join(name).exists(), "{name}");
        }
        assert!(at.join("first").is_dir());
        let gone = subvolume::delete(open(at), id).unwrap_err();
        assert_eq!(gone.errno(), nix::errno::Errno::ENOENT, "{gone}");
    });
}

#[test]
fn a_subvolume_with_another_one_in_it_is_not_deleted() {
    on_btrfs(|at| {
        let outer = create(at, c"outer");
        create(&at.join("outer"), c"inner");
        let id = subvolume::with_root(&outer).unwrap().unwrap();
        let refused = subvolume::delete(&outer, id).unwrap_err();
        assert_eq!(refused.errno(), nix::errno::Errno::ENOTEMPTY, "{refused}");
        assert!(at.join("outer/inner").is_dir());
    });
}

#[test]
fn a_group_limits_what_its_subvolume_holds_and_its_snapshots_inherit_the_limit() {
    on_btrfs(|at| {
        let volume = create(at, c"volume");
        let id = subvolume::with_root(&volume).unwrap().unwrap();
        assert_eq!(quota::quotas(&volume).unwrap(), Quotas::Off);
        assert_eq!(quota::group(&volume, id).unwrap(), None);
        let off = quota::limit(&volume, MIB).unwrap_err();
        assert_eq!(off.errno(), nix::errno::Errno::ENOTCONN, "{off}");

        enable_quotas(at);
        assert_eq!(quota::quotas(&volume).unwrap(), Quotas::Groups { exact: true });
        assert_eq!(quota::group(&volume, id).unwrap().unwrap().limit_bytes, None);
        quota::limit(&volume, 8 * MIB).unwrap();
        let (written, refusal) = fill(&at.join("volume/data"), 16 * MIB);
        assert_eq!(refusal, Some(libc::EDQUOT));
        assert!(written > 6 * MIB && written <= 8 * MIB, "{written}");
        rustix::fs::syncfs(&volume).unwrap();
        let group = quota::group(&volume, id).unwrap().unwrap();
        assert_eq!(group.limit_bytes, Some(8 * MIB));
        assert!(group.referenced_bytes >= written, "{group:?}, {written} written");
        assert!(group.referenced_bytes + group.reserved_bytes <= 8 * MIB, "{group:?}");

        subvolume::snapshot(&volume, open(at), c"cut", Changeable::Yes).unwrap();
        let cut = open(&at.join("cut"));
        let of_cut = quota::group(&cut, subvolume::with_root(&cut).unwrap().unwrap()).unwrap().unwrap();
        assert_eq!(of_cut.referenced_bytes, group.referenced_bytes);
        assert_eq!(of_cut.limit_bytes, group.limit_bytes);
        // What is not limited is not affected.
        assert_eq!(fill(&at.join("outside"), 16 * MIB), (16 * MIB, None));

        quota::limit(&volume, 16 * MIB).unwrap();
        assert_eq!(fill(&at.join("volume/more"), 4 * MIB), (4 * MIB, None));
    });
}

#[test]
fn the_group_of_a_deleted_subvolume_is_gone_once_all_of_it_is() {
    on_btrfs(|at| {
        enable_quotas(at);
        let volume = create(at, c"volume");
        let id = subvolume::with_root(&volume).unwrap().unwrap();
        fill(&at.join("volume/data"), MIB);
        drop(volume);
        subvolume::delete(open(at), id).unwrap();
        // Removed by this call, or by the kernel itself.
        drop(quota::remove(open(at), id));
        rustix::fs::syncfs(open(at)).unwrap();
        run(Command::new("btrfs").args(["subvolume", "sync", "-s", "1"]).arg(at));
        drop(quota::remove(open(at), id));
        assert_eq!(quota::group(open(at), id).unwrap(), None);
    });
}

#[test]
fn quotas_without_groups_are_recognized_and_counting_goes_on_through_deletions() {
    on_btrfs(|at| {
        enable_quotas(at);
        assert!(quota::count_through_deletions(open(at)).unwrap());
        quota::rescan(open(at)).unwrap();
        quota::rescan(open(at)).unwrap();
        run(Command::new("btrfs").args(["quota", "rescan", "-w"]).arg(at));
        assert_eq!(quota::quotas(open(at)).unwrap(), Quotas::Groups { exact: true });
        run(Command::new("btrfs").args(["quota", "disable"]).arg(at));
        assert_eq!(quota::quotas(open(at)).unwrap(), Quotas::Off);
    });
}
