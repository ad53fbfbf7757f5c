//! What `cargo xtask lab` runs in a guest beside the tests: what needs a kernel
//! or a disk that only a guest has. Its output reads like a test binary's.

#![expect(clippy::print_stdout, reason = "the guest's serial port shows the report")]

mod fallback;
mod power_cut;
mod project_quota;
mod project_volumes;
mod takeover;

use std::process::ExitCode;

use anyhow::Result;
use tests::csi::snapshots::leaves_no_quota_groups;

type Test = (&'static str, fn() -> Result<()>);

const QUOTA: [Test; 3] = [
    ("a_project_quota_is_enforced_on_ext4", project_quota::enforced_on_ext4),
    ("a_project_quota_is_enforced_on_xfs", project_quota::enforced_on_xfs),
    ("deleted_volumes_and_snapshots_leave_no_quota_groups_on_btrfs", leaves_no_quota_groups),
];

/// Where the kernel has FUSE_PASSTHROUGH.
const PASSING: [Test; 2] = [
    ("the_kernel_limits_volumes_on_ext4_whose_data_passes_through", project_volumes::passing_on_ext4),
    ("the_kernel_limits_volumes_on_xfs_whose_data_passes_through", project_volumes::passing_on_xfs),
];

/// Where it has not.
const BY_DAEMON: [Test; 3] = [
    ("a_volume_that_needs_fuse_passthrough_is_refused_by_name", project_volumes::refused_without_passthrough),
    ("the_kernel_limits_volumes_on_ext4_whose_daemon_writes", project_volumes::by_daemon_on_ext4),
    ("the_kernel_limits_volumes_on_xfs_whose_daemon_writes", project_volumes::by_daemon_on_xfs),
];

const FALLBACK: [Test; 1] = [(
    "a_killed_daemon_ends_io_at_once_and_the_next_pod_has_the_data",
    fallback::killed_daemon_ends_io_and_the_next_pod_has_the_data,
)];

const TAKEOVER: [Test; 2] = [
    ("a_killed_daemon_that_cannot_end_is_followed_by_another_one", takeover::from_a_daemon_that_cannot_end),
    (
        "a_killed_daemon_that_cannot_end_is_followed_also_without_a_deadline",
        takeover::from_a_daemon_that_cannot_end_without_a_deadline,
    ),
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["project-quota", "passthrough"] => run(&[&QUOTA[..], &PASSING].concat()),
        ["project-quota", "daemon"] => run(&[&QUOTA[..], &BY_DAEMON].concat()),
        ["fallback"] => run(&FALLBACK),
        ["takeover"] => run(&TAKEOVER),
        ["power-cut", acknowledged] => power_cut::run(acknowledged.as_ref()),
        _ => {
            println!(
                "usage: lab-guest project-quota passthrough|daemon | fallback | takeover | power-cut FILE"
            );
            ExitCode::FAILURE
        }
    }
}

fn run(tests: &[Test]) -> ExitCode {
    let mut failed = 0;
    for (name, test) in tests {
        // On a thread of its own: each has its own namespaces, and may panic.
        let outcome = std::thread::spawn(*test).join();
        match outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked"))) {
            Ok(()) => println!("test {name} ... ok"),
            Err(error) => {
                println!("{error:#}\ntest {name} ... FAILED");
                failed += 1;
            }
        }
    }
    let word = if failed == 0 { "ok" } else { "FAILED" };
    println!("test result: {word}. {} passed; {failed} failed; 0 ignored", tests.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
