//! `test`: everything that must pass, with one sum at the end.

use std::path::Path;

use anyhow::{Result, ensure};
use xtask::build::{cargo, products, require_root, run as run_command, words};
use xtask::foreign::debian_program;
use xtask::libtest::Transcript;
use xtask::progress::{part, say};
use xtask::room;

/// Programs that the tests start, and their Debian packages: mkfs makes the pools
/// of csi-driver's tests; setfacl makes the ACLs of volume-local's; ip, nft, iptables
/// and conntrack witness what the plugins made; busybox is the attacker of
/// `tests/tests/hostile`; fio, git, sqlite3, PostgreSQL and tar are applications of
/// `tests/tests/chaos` and `tests/tests/full_volume.rs`; docker-registry serves images
/// to runtime's tests; containerd and runc are the runtime of `tests/tests/over_containerd.rs`.
pub(crate) const PROGRAMS: [(&str, &str); 18] = [
    ("mkfs.btrfs", "btrfs-progs"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("setfacl", "acl"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("iptables", "iptables"),
    ("conntrack", "conntrack"),
    ("busybox", "busybox-static"),
    ("fio", "fio"),
    ("git", "git"),
    ("sqlite3", "sqlite3"),
    ("pg_ctlcluster", "postgresql"),
    ("tar", "tar"),
    ("docker-registry", "docker-registry"),
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
];

/// Where tests have their sandboxes, with images of disks.
const SANDBOXES: [&str; 2] = ["/tmp", "/var/tmp"];
/// Twice what the tests took there at once, by df(1).
const ROOM_BYTES: u64 = 4 << 30;

/// Tests that have a long form take it.
const LONG: &str = "HAWSER_TEST_LONG";

pub(crate) fn run(filter: Option<&str>, long: bool) -> Result<()> {
    require_root("test")?;
    part("programs of the tests", || {
        for (program, package) in PROGRAMS {
            debian_program(program, package)?;
        }
        Ok(())
    })?;
    let bin_dir = part("build the static binaries", products)?;
    part("build the tests", || run_command(cargo().args(["test", "--workspace", "--no-run"])))?;
    for sandboxes in SANDBOXES {
        room::require(Path::new(sandboxes), ROOM_BYTES, "the tests")?;
    }
    let mut transcript = Transcript::default();
    let passed = part("tests", || {
        let mut command = cargo();
        command.args(["test", "--workspace", "--no-fail-fast"]).args(filter);
        command.env("HAWSER_BIN_DIR", &bin_dir);
        if long {
            command.env(LONG, "1");
        }
        let status = transcript.run(&mut command)?;
        ensure!(status.success(), "{}: {status}", words(&command));
        Ok(())
    });
    transcript.say_failures();
    let counts = transcript.counts();
    // The tests of a binary that died count nothing.
    say(&format!("{} passed, {} failed", counts.passed, counts.failed));
    passed?;
    ensure!(counts.ignored == 0, "{} tests were ignored; a test runs or does not exist", counts.ignored);
    ensure!(counts.passed > 0, "no test ran");
    Ok(())
}
