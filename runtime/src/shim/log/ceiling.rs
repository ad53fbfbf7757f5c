//! The most that a container's logs can take, also before the kubelet rotates them: a
//! kubelet looks every 10 s, and a program can write gigabytes in that time.
//!
//! At the ceiling the shim rotates the log by itself, under the names that a
//! kubelet gives and counts (`<log>.20060102-150405`), and drops the oldest.
//!
//! Invariant: names grow with time, so that the first by name is the oldest.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// For one container: `files` of `bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogCeiling {
    /// The file that is written goes no further.
    pub bytes: u64,
    /// With the one that is written; at least 2.
    pub files: usize,
}

/// When a log was rotated away: its second, and its number within that second.
type When = (String, u32);

/// Moves the log away and removes what is too much with it.
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

/// What was rotated away, the oldest first.
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

/// From a rotated log's name: `0.log.20060102-150405`, perhaps with `-0001`, perhaps with `.gz`.
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

/// This second, or the next number in the newest name's: there can be many a second.
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
        // A kubelet tidies up, too.
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
