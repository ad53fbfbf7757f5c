//! What was rotated away from a log, as part of it: the oldest first, compressed
//! or not.

use std::fs::{File, Metadata};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use proto::kubelet::LogsChunk;

use super::lines::{Lines, ends_line};
use super::{Answers, CHUNK_BYTES};
use crate::logs::{is_compressed, rotated};

/// The identity of a file, which a rename does not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId(u64, u64);

impl FileId {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self(metadata.dev(), metadata.ino())
    }
}

/// Sends all that was rotated away before `current` began. `false` when the
/// client has gone, or has all that it asked for.
pub(super) fn send_before(
    log: &Path,
    current: FileId,
    lines: &mut Lines,
    answers: &Answers,
) -> io::Result<bool> {
    for path in rotated(log)? {
        match File::open(&path) {
            // Rotated since it was opened: it is sent as the current one.
            Ok(file) if FileId::of(&file.metadata()?) == current => break,
            Ok(file) => {
                if !send(&path, file, lines, answers)? {
                    return Ok(false);
                }
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// The file that was begun after `done` was rotated away; `None` while `done` is
/// the newest.
pub(super) fn next_after(log: &Path, done: FileId) -> io::Result<Option<PathBuf>> {
    if FileId::of(&std::fs::metadata(log)?) == done {
        return Ok(None);
    }
    let rotated = rotated(log)?;
    let is_done = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|found| FileId::of(&found) == done);
    let after = rotated.iter().position(is_done).and_then(|at| rotated.get(at + 1));
    Ok(Some(after.map_or_else(|| log.to_owned(), Clone::clone)))
}

/// The lines of the log, with those that were rotated away.
pub(super) fn count(log: &Path) -> io::Result<u64> {
    let mut number = 0;
    for path in rotated(log)?.into_iter().chain([log.to_owned()]) {
        let file = match File::open(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        let (mut records, mut record) = (reader(&path, file), Vec::new());
        while records.read_until(b'\n', &mut record)? > 0 {
            number += u64::from(record.ends_with(b"\n") && ends_line(&record));
            record.clear();
        }
    }
    Ok(number)
}

fn reader(path: &Path, file: File) -> BufReader<Box<dyn Read>> {
    BufReader::new(if is_compressed(path) { Box::new(GzDecoder::new(file)) } else { Box::new(file) })
}

fn send(path: &Path, file: File, lines: &mut Lines, answers: &Answers) -> io::Result<bool> {
    let mut records = reader(path, file);
    let (mut record, mut data) = (Vec::new(), Vec::new());
    while records.read_until(b'\n', &mut record)? > 0 {
        lines.push(&record, &mut data);
        record.clear();
        if (data.len() > CHUNK_BYTES || lines.are_complete())
            && (answers.blocking_send(Ok(LogsChunk { data: std::mem::take(&mut data) })).is_err()
                || lines.are_complete())
        {
            return Ok(false);
        }
    }
    Ok(data.is_empty() || answers.blocking_send(Ok(LogsChunk { data })).is_ok())
}
