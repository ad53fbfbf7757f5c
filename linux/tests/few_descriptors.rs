//! The end of a group with more processes than the caller may open descriptors. The limit holds for the whole
//! process, so this test is alone in its program. Needs root.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod groups;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use linux::cgroup::{Cgroup, Hierarchies};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Free descriptors: enough to list the group, and fewer than it has processes.
const FREE: usize = 12;

/// The limit with which [`FREE`] descriptors are free: the numbers in use may have gaps.
fn limit() -> u64 {
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let open: BTreeSet<u64> =
        open.map(|fd| fd.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    let mut free = (0..).filter(|number| !open.contains(number));
    free.nth(FREE).unwrap()
}

#[test]
fn a_group_with_more_processes_than_free_descriptors_ends() {
    let hierarchies = Hierarchies::detect().unwrap();
    let path = PathBuf::from(format!("/hawser-few-descriptors-{}", std::process::id()));
    let dir = groups::directory(&hierarchies, &path);
    std::fs::create_dir(&dir).unwrap();
    let group = Cgroup::find(&hierarchies, &path);
    let mut sleepers: Vec<Child> =
        (0..3 * FREE).map(|_| Command::new("sleep").arg("100").spawn().unwrap()).collect();
    let procs = dir.join("cgroup.procs");
    let joined: Vec<_> =
        sleepers.iter().map(|sleeper| std::fs::write(&procs, sleeper.id().to_string())).collect();

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, limit(), hard).unwrap();
    let killed = group.kill();
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();

    let ended = group.end(Duration::from_secs(10));
    for sleeper in &mut sleepers {
        // Also after a failure, which leaves them.
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
    group.remove().unwrap();
    for result in joined {
        result.unwrap();
    }
    killed.unwrap();
    ended.unwrap();
}
