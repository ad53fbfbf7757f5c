//! kubelet's names for rotated logs: `0.log.20060102-150405`, with `.gz` once it is compressed, and
//! `.tmp` during compression. Further ones within a second are numbered:
//! `0.log.20060102-150405-0001`.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

const SECOND_BYTES: usize = "20060102-150405".len();
pub(crate) const COMPRESSED: &str = ".gz";
pub(crate) const UNFINISHED: &str = ".tmp";

/// When a log was rotated: the second, and its number within that second.
type When = (String, u32);

/// The logs rotated from `log`, oldest first, without duplicates.
pub(crate) fn rotated(log: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = all(log)?;
    found.retain(|path| !ends_with(path, UNFINISHED));
    // A kill between compression and removal leaves both: use the plain one.
    let plain: Vec<PathBuf> = found.iter().filter(|path| !is_compressed(path)).cloned().collect();
    found.retain(|path| !is_compressed(path) || !plain.contains(&path.with_extension("")));
    Ok(found)
}

/// Those of `rotated` that are later than `earlier`; all without it.
pub(crate) fn rotated_after(log: &Path, earlier: Option<&Path>) -> io::Result<Vec<PathBuf>> {
    let earlier = earlier.and_then(|path| when(log, path));
    let mut found = rotated(log)?;
    found.retain(|path| when(log, path) > earlier);
    Ok(found)
}

/// Includes unfinished ones.
pub(crate) fn all(log: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(log.parent().unwrap_or(Path::new(".")))? {
        let path = entry?.path();
        found.extend(when(log, &path).map(|when| (when, path)));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

pub(crate) fn is_compressed(path: &Path) -> bool {
    ends_with(path, COMPRESSED)
}

/// The name of a rotated log after its compression.
pub(crate) fn compressed(path: &Path) -> PathBuf {
    if is_compressed(path) { path.to_owned() } else { with_suffix(path, COMPRESSED) }
}

pub(crate) fn is_unfinished(path: &Path) -> bool {
    ends_with(path, UNFINISHED)
}

/// The name of the log rotated now.
pub(crate) fn next(log: &Path, rotated: &[PathBuf], now: Timestamp) -> PathBuf {
    let now = now.strftime("%Y%m%d-%H%M%S").to_string();
    match rotated.last().and_then(|newest| when(log, newest)) {
        Some((second, number)) if second >= now => with_suffix(log, &format!(".{second}-{:04}", number + 1)),
        _ => with_suffix(log, &format!(".{now}")),
    }
}

pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn when(log: &Path, path: &Path) -> Option<When> {
    let name = path.file_name()?.as_bytes();
    let rest = name.strip_prefix(log.file_name()?.as_bytes())?.strip_prefix(b".")?;
    let rest = std::str::from_utf8(rest).ok()?;
    let rest = rest.strip_suffix(COMPRESSED).or_else(|| rest.strip_suffix(UNFINISHED)).unwrap_or(rest);
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

fn ends_with(path: &Path, suffix: &str) -> bool {
    path.as_os_str().as_bytes().ends_with(suffix.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotated_logs_are_listed_in_order_without_duplicates() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        for name in [
            "0.log",
            "0.log.20261122-110000.gz",
            "0.log.20261122-110000",
            "0.log.20261122-110000-0012",
            "0.log.20261122-110000-0002.gz",
            "0.log.20261122-100000.gz",
            "0.log.20261122-120000.tmp",
            "10.log.20261122-100000",
            "0.log.old",
        ] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let found = rotated(&log).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap()).collect();
        let expected = [
            "0.log.20261122-100000.gz",
            "0.log.20261122-110000",
            "0.log.20261122-110000-0002.gz",
            "0.log.20261122-110000-0012",
        ];
        assert_eq!(names, expected);
        // A name stays in its place after its compression.
        let read = dir.path().join("0.log.20261122-110000.gz");
        assert_eq!(rotated_after(&log, Some(&read)).unwrap(), found[2..]);
        assert_eq!(rotated_after(&log, None).unwrap(), found);
        let now = "2026-11-22T11:00:00Z".parse().unwrap();
        assert!(next(&log, &found, now).ends_with("0.log.20261122-110000-0013"));
        assert!(next(&log, &[], now).ends_with("0.log.20261122-110000"));
    }
}
