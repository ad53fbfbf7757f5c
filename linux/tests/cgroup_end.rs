//! The end of groups whose processes resist it. Needs root.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod groups;

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use linux::cgroup::{Cgroup, Hierarchies};

/// Directory, file and value that freeze a group `path`: of v1's freezer, or of v2.
fn freezer(hierarchies: &Hierarchies, path: &Path) -> (PathBuf, &'static str, &'static str) {
    let is_v1 = hierarchies.dir("freezer", path).is_some();
    let (file, value) = if is_v1 { ("freezer.state", "FROZEN") } else { ("cgroup.freeze", "1") };
    (groups::directory(hierarchies, path), file, value)
}

fn start_in(group: &Path, program: &mut Command) -> Child {
    let child = program.spawn().unwrap();
    std::fs::write(group.join("cgroup.procs"), child.id().to_string()).unwrap();
    child
}

#[test]
fn a_group_ends_whose_processes_freeze_it_again_and_again() {
    let hierarchies = Hierarchies::detect().unwrap();
    let path = PathBuf::from(format!("/hawser-refrozen-{}", std::process::id()));
    let (dir, file, value) = freezer(&hierarchies, &path);
    let frozen = dir.join("frozen");
    std::fs::create_dir_all(&frozen).unwrap();
    let mut sleeper = start_in(&frozen, Command::new("sleep").arg("100"));
    let freeze = format!("while :; do echo {value} > {}; done", frozen.join(file).display());
    let mut freezing = start_in(&dir, Command::new("sh").args(["-c", &freeze]));
    let deadline = Instant::now() + Duration::from_secs(10);
    while std::fs::read_to_string(frozen.join(file)).unwrap().trim() != value {
        assert!(Instant::now() < deadline, "the group is not frozen");
        std::thread::yield_now();
    }
    let ended = Cgroup::find(&hierarchies, &path).end(Duration::from_secs(10));
    for child in [&mut freezing, &mut sleeper] {
        // Also after a failure, which leaves them.
        child.kill().unwrap();
    }
    freezing.wait().unwrap();
    drop(std::fs::write(frozen.join(file), if value == "1" { "0" } else { "THAWED" }));
    sleeper.wait().unwrap();
    let was_removed = !dir.exists();
    linux::cgroup::remove_tree(&dir).unwrap();
    ended.unwrap();
    assert!(was_removed);
}
