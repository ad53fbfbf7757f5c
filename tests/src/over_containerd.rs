//! Which tests of whole nodes run over containerd too, and why the others cannot.
//!
//! Invariant: every suite of `tests/tests` is in exactly one of the two tables of suites.

/// Suites about the kubelet's behaviour, or about a driver under a kubelet: they hold with any CRI runtime.
pub const SUITES: [&str; 16] = [
    "bad_input",
    "claims",
    "endpoints",
    "examples",
    "keepers",
    "keyboard",
    "manifest_directory",
    "node_pressure",
    "pod_changes",
    "pod_chaos",
    "pod_life",
    "pod_volumes",
    "refusals",
    "snapshots",
    "streams",
    "two_pods",
];

/// Suites that are about something else, each with what that is.
pub const OTHER_SUITES: [(&str, &str); 13] = [
    ("chaos", "the driver and its daemons, without a kubelet"),
    ("cni_crash", "the CNI plugins alone"),
    ("cni_old_kernel", "the CNI plugins alone"),
    ("cni_storm", "the CNI plugins alone"),
    ("container_ends", "also what containerd 1.6 ignores, such as recursiveReadOnly"),
    ("full_volume", "the driver and its daemons"),
    ("hostile", "what the embedded runtime lets a container do"),
    ("kills", "the driver and its daemons"),
    ("kit", "the test support itself"),
    ("over_containerd", "a part of this run that every `cargo test` has"),
    ("registries", "the embedded runtime's pulls and its settings"),
    ("seeds", "the test support itself"),
    ("trace_steps", "the steps inside the embedded runtime"),
];

/// A test that cannot hold over containerd 1.6.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unmet {
    pub suite: &'static str,
    pub test: &'static str,
    /// The fact about containerd 1.6 that it meets.
    pub reason: &'static str,
}

const fn unmet(suite: &'static str, test: &'static str, reason: &'static str) -> Unmet {
    Unmet { suite, test, reason }
}

pub const UNMET: [Unmet; 3] = [
    unmet(
        "keyboard",
        "a_copy_into_a_full_volume_ends_with_the_exit_code_of_tar",
        "it does not report the end of a program that has not read its whole input; the copy ends after 60 s",
    ),
    unmet(
        "streams",
        "a_command_that_is_killed_takes_its_program_along",
        "containerd does not end a program whose client has gone",
    ),
    unmet(
        "two_pods",
        "two_pods_share_a_volume_served_by_one_confined_mount_pod",
        "CRI has no request for a pod without a network, so containerd gives the mount pod one",
    ),
];

/// What to run of a suite whose tests are `all`. An error names a row of [`UNMET`] for a test that does not exist.
pub fn runnable(suite: &str, all: &[String]) -> anyhow::Result<(Vec<String>, Vec<Unmet>)> {
    let rows: Vec<Unmet> = UNMET.into_iter().filter(|row| row.suite == suite).collect();
    for row in &rows {
        anyhow::ensure!(all.iter().any(|test| test == row.test), "{suite} has no test {}", row.test);
    }
    let meets = |test: &&String| rows.iter().all(|row| row.test != test.as_str());
    Ok((all.iter().filter(meets).cloned().collect(), rows))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_suite_is_in_one_table() {
        let dir = crate::binaries::workspace_root().join("tests/tests");
        let found: BTreeSet<String> = std::fs::read_dir(&dir)
            .unwrap()
            .map(|entry| entry.unwrap().path().file_stem().unwrap().display().to_string())
            .collect();
        let named: Vec<&str> =
            SUITES.into_iter().chain(OTHER_SUITES.into_iter().map(|(suite, _)| suite)).collect();
        let once: BTreeSet<String> = named.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(once, found);
        assert_eq!(once.len(), named.len(), "a suite is named twice");
        for row in UNMET {
            assert!(SUITES.contains(&row.suite) && !row.reason.is_empty(), "{row:?}");
        }
    }

    #[test]
    fn a_row_without_a_test_is_an_error() {
        let row = UNMET.first().expect("a row");
        let (run, rows) = runnable(row.suite, &["other".to_owned(), row.test.to_owned()]).unwrap();
        assert_eq!((run, rows[0]), (vec!["other".to_owned()], *row));
        let error = runnable(row.suite, &[]).unwrap_err().to_string();
        assert!(error.contains(row.test), "{error}");
    }
}
