//! The suite's list of its tests with their groups, which its build makes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Tests of the directory `generic` that are in a group, as `generic/001`.
pub(super) fn members(suite: &Path, group: &str) -> Result<Vec<String>> {
    let path = suite.join("tests/generic/group.list");
    let list = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let tests = members_of(&list, group);
    ensure!(!tests.is_empty(), "{}: no test of group {group}", path.display());
    Ok(tests)
}

/// A line has a test's number and its groups.
fn members_of(list: &str, group: &str) -> Vec<String> {
    let test = |line: &str| {
        let (number, groups) = line.split_once(' ').filter(|_| !line.starts_with('#'))?;
        groups.split_whitespace().any(|name| name == group).then(|| format!("generic/{number}"))
    };
    list.lines().filter_map(test).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_a_group_are_found_by_its_whole_name() {
        let list = "# all quick groups\n\n001 rw dir auto quick\n002 auto\n003 quick\n004 quickest\n1007 quick ioctl\n";
        assert_eq!(members_of(list, "quick"), ["generic/001", "generic/003", "generic/1007"]);
    }
}
