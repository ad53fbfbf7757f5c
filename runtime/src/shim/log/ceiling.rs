//! Limits the size of a container's logs between two rotations by the kubelet: a kubelet looks
//! every 10 s, and a program can write gigabytes in that time.
//!
//! At the limit, the shim itself rotates the log, under the names that a kubelet gives and counts
//! (`<log>.20060102-150405`), and removes the oldest.
//!
//! Invariant: names grow with time, so the first by name is the oldest.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// For one container: at most `files` files of `bytes` each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogCeiling {
    /// Limit of the current file.
    pub bytes: u64,
    /// Counts the current file too; at least 2.
    pub files: usize,
}

/// The time of a rotation: the second, and the number within that second.
type When = (String, u32);

/// Renames the log and removes the oldest files above the limit.
pub(super) fn rotate(log: &Path, ceiling: LogCeiling) -> io::Result<()> {
    let rotated = rotated(log)?;
    let kept_before = ceiling.files.saturating_sub(2);
    let (too_old, _) = rotated.split_at(rotated.len().saturating_sub(kept_before));
    for (_, name) in too_old {
        remove(&log.with_file_name(name))?;
    }
    let newest = rotated.last().map(|(when, _)| when);
    fs::rename(log, name_at(log, &after(newest, Timestamp::now())))
}

/// The rotated files, oldest first.
fn rotated(log: &Path) -> io::Result<Vec<(When, OsString)>> {
    let dir = log.parent().unwrap_or(Path::new("."));
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name();
        names.extend(when(log, &name).map(|when| (when, name)));
    }
    names.sort();
    Ok(names)
}

/// Parses a rotated log's name: `0.log.20060102-150405`, optionally with `-0001` and `.gz`.
fn when(log: &Path, name: &OsStr) -> Option<When> {
    let rest = name.as_bytes().strip_prefix(log.file_name()?.as_bytes())?.strip_prefix(b".")?;
    let rest = std::str::from_utf8(rest).ok()?;
    let rest = rest.strip_suffix(".gz").or_else(|| rest.strip_suffix(".tmp")).unwrap_or(rest);
    let (second, number) = (rest.get(..SECOND_BYTES)?, &rest[SECOND_BYTES..]);
    let is_second =
        second.bytes().enumerate().all(|(at, c)| if at == 8 { c == b'-' } else { c.is_ascii_digit() });
    let number = match number.strip_prefix('-') {
        Some(digits) if digits.len() >= 4 => digits.parse().ok()?,
        None if number.is_empty() => 0,
        _ => return None,
    };
    is_second.then(|| (second.to_owned(), number))
}

const SECOND_BYTES: usize = "20060102-150405".len();

/// This second, or the next number after the newest name's: there can be several rotations in a
/// second.
fn after(newest: Option<&When>, now: Timestamp) -> When {
    let now = now.strftime("%Y%m%d-%H%M%S").to_string();
    match newest {
        Some((second, number)) if *second >= now => (second.clone(), number + 1),
        _ => (now, 0),
    }
}

fn name_at(log: &Path, (second, number): &When) -> PathBuf {
    let mut name = log.as_os_str().to_owned();
    name.push(format!(".{second}"));
    if *number > 0 {
        name.push(format!("-{number:04}"));
    }
    name.into()
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        // A kubelet may have removed it.
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_go_and_no_name_is_given_twice() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        let ceiling = LogCeiling { bytes: 10, files: 3 };
        let mut seen = std::collections::BTreeSet::new();
        for round in 0..5 {
            fs::write(&log, format!("{round}")).unwrap();
            rotate(&log, ceiling).unwrap();
            let names = rotated(&log).unwrap();
            assert_eq!(names.len(), (round + 1).min(2));
            assert!(seen.insert(names.last().unwrap().clone()), "{names:?}");
        }
        let texts: Vec<String> = rotated(&log)
            .unwrap()
            .iter()
            .map(|(_, name)| fs::read_to_string(dir.path().join(name)).unwrap())
            .collect();
        assert_eq!(texts, ["3", "4"]);
    }

    #[test]
    fn only_logs_of_this_instance_are_counted() {
        let log = Path::new("/l/1.log");
        let when = |name: &str| when(log, OsStr::new(name));
        assert_eq!(when("1.log.20261122-114512.gz"), Some(("20261122-114512".to_owned(), 0)));
        assert_eq!(when("1.log.20261122-114512-0012"), Some(("20261122-114512".to_owned(), 12)));
        for other in ["1.log", "11.log.20261122-114512", "1.log.20261122", "1.log.20261122-114512.old"] {
            assert_eq!(when(other), None, "{other}");
        }
    }
}
