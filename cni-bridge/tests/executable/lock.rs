//! The lock of a bridge, where its file cannot be made and where it is left over.

use std::io::ErrorKind;
use std::path::Path;

use linux::mount::{self, MountFlags};
use nix::sched::{CloneFlags, unshare};

use crate::sandbox::{DUAL, Sandbox};

/// Runs `test` where /run refuses files by `error`.
fn with_run(flags: MountFlags, options: &str, error: ErrorKind, test: impl FnOnce() + Send) {
    let alone = || {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount::make_private(Path::new("/")).unwrap();
        mount::mount_fs("tmpfs", "run", Path::new("/run"), flags, options).unwrap();
        assert_eq!(std::fs::write("/run/file", "").unwrap_err().kind(), error);
        test();
    };
    std::thread::scope(|scope| scope.spawn(alone).join().unwrap());
}

#[test]
fn a_read_only_run_keeps_no_container_from_its_network() {
    let read_only = MountFlags { read_only: true, ..MountFlags::default() };
    containers_get_their_network(read_only, "", ErrorKind::ReadOnlyFilesystem);
}

#[test]
fn a_full_run_keeps_no_container_from_its_network() {
    // The one inode is that of /run itself.
    containers_get_their_network(MountFlags::default(), "nr_inodes=1", ErrorKind::StorageFull);
}

fn containers_get_their_network(flags: MountFlags, options: &str, error: ErrorKind) {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    with_run(flags, options, error, || {
        let mut conf = sandbox.attachment("c1", DUAL);
        conf.conf["ipMasq"] = true.into();
        let second = sandbox.attachment("c2", &conf.conf.to_string());
        let calls = [conf.spawn("ADD"), second.spawn("ADD")];
        for call in calls {
            let output = call.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
        conf.del();
        second.del();
    });
    sandbox.assert_detached();
}

#[test]
fn the_file_of_a_killed_call_goes_with_the_next_one() {
    let sandbox = Sandbox::new().with_host_local();
    std::fs::write(format!("/run/hawser-bridge-{}.lock", sandbox.bridge), "").unwrap();
    let attachment = sandbox.attachment("c1", DUAL).added();
    attachment.del();
    sandbox.assert_detached();
}
