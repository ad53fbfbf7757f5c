//! What was rotated away from a log, as part of it: the oldest first, compressed
//! or not.

use std::fs::{File, Metadata};
use std::io::{self, BufRead, BufReader, Read, Seek};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use flate2::read::GzDecoder;
use proto::kubelet::LogsChunk;

use super::lines::{Lines, ends_line};
use super::{Answers, CHUNK_BYTES};
use crate::logs::names::{compressed, is_compressed, rotated, rotated_after};

/// So much of two logs is compared.
const BEGIN_BYTES: usize = 64;

/// The identity of a file, which a rename does not change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileId(u64, u64);

impl FileId {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self(metadata.dev(), metadata.ino())
    }
}

/// A file that was opened as the log.
#[derive(Debug)]
pub(super) struct Opened {
    id: FileId,
    file: File,
}

impl Opened {
    pub(super) fn of(file: File) -> io::Result<Self> {
        Ok(Self { id: FileId::of(&file.metadata()?), file })
    }

    /// Whether it was rotated to this name, and perhaps compressed since.
    fn is_rotated_as(&self, path: &Path) -> bool {
        match std::fs::metadata(path) {
            Ok(metadata) if !is_compressed(path) => FileId::of(&metadata) == self.id,
            _ => self.begins_like(&compressed(path)).unwrap_or(false),
        }
    }

    /// Each record begins with its time, in nanoseconds.
    fn begins_like(&self, compressed: &Path) -> io::Result<bool> {
        let mut own = [0; BEGIN_BYTES];
        let length = self.file.read_at(&mut own, 0)?;
        let mut other = Vec::new();
        GzDecoder::new(File::open(compressed)?).take(BEGIN_BYTES as u64).read_to_end(&mut other)?;
        Ok(own[..length] == other)
    }
}

/// How far a log is read: up to a rotated file's name. Unlike the file, its name outlives a
/// compression.
#[derive(Debug)]
pub(super) struct Position {
    log: PathBuf,
    last_read: Option<PathBuf>,
}

impl Position {
    /// The oldest unread file that was rotated away before `opened` began; `opened` was just opened
    /// as the log.
    pub(super) fn unread_before(&self, opened: FileId) -> io::Result<Option<PathBuf>> {
        // `opened` itself may have been rotated since.
        let is_opened = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|m| FileId::of(&m) == opened);
        Ok(self.next()?.filter(|path| !is_opened(path)))
    }

    /// The position after a rotated file.
    pub(super) fn after_rotated(self, path: PathBuf) -> Self {
        Self { last_read: Some(path), ..self }
    }

    /// The position after `opened`, before which nothing is unread; `None` while it is still the log.
    pub(super) fn after(&self, opened: &Opened) -> io::Result<Option<Self>> {
        if FileId::of(&std::fs::metadata(&self.log)?) == opened.id {
            return Ok(None);
        }
        // The first unread file may be another: `opened` was removed after its rotation.
        let name = self.next()?.filter(|path| opened.is_rotated_as(path));
        Ok(Some(Self { log: self.log.clone(), last_read: name.or_else(|| self.last_read.clone()) }))
    }

    fn next(&self) -> io::Result<Option<PathBuf>> {
        Ok(rotated_after(&self.log, self.last_read.as_deref())?.into_iter().next())
    }
}

/// A log at one moment. What is written, rotated and compressed later does not change it; only its
/// oldest files may be removed, unless [`Snapshot::keep_tail`] has opened them.
#[derive(Debug)]
pub(super) struct Snapshot {
    rotated: Vec<Rotated>,
    log: File,
    bytes: u64,
}

/// A rotated file.
#[derive(Debug)]
pub(super) enum Rotated {
    At(PathBuf),
    Open(OpenLog),
}

#[derive(Debug)]
pub(super) struct OpenLog {
    file: File,
    is_compressed: bool,
}

impl Snapshot {
    /// `None`: `opened`, which was just opened as the log, has been rotated since.
    pub(super) fn of(log: &Path, opened: File) -> io::Result<Option<(Self, Position)>> {
        let paths = rotated(log)?;
        let metadata = opened.metadata()?;
        let is_log = match std::fs::metadata(log) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => false,
            at_path => FileId::of(&at_path?) == FileId::of(&metadata),
        };
        if !is_log {
            return Ok(None);
        }
        let position = Position { log: log.to_owned(), last_read: paths.last().cloned() };
        let rotated = paths.into_iter().map(Rotated::At).collect();
        Ok(Some((Self { rotated, bytes: metadata.len(), log: opened }, position)))
    }

    /// Leaves out the files before the last `lines`, and opens the others: in a flood of lines they may be
    /// removed at any time. Returns how many lines of the first remaining file to skip.
    pub(super) fn keep_tail(&mut self, lines: u64) -> io::Result<u64> {
        let mut log = &self.log;
        log.rewind()?;
        let found = count_lines(BufReader::new(log.take(self.bytes)))?;
        let earlier = std::mem::take(&mut self.rotated);
        let Some(mut missing) = lines.checked_sub(found) else { return Ok(found - lines) };
        for rotated in earlier.into_iter().rev() {
            let Some(open) = rotated.open()? else { break };
            let found = count_lines(open.records()?)?;
            self.rotated.insert(0, Rotated::Open(open));
            if found >= missing {
                return Ok(found - missing);
            }
            missing -= found;
        }
        Ok(0)
    }

    /// Sends what was rotated away. `None` when the client has gone, or has all that it asked for.
    pub(super) async fn send_rotated(
        &mut self,
        mut lines: Lines,
        answers: &Answers,
    ) -> io::Result<Option<Lines>> {
        for rotated in std::mem::take(&mut self.rotated) {
            let Some(rest) = send(rotated, lines, answers).await? else { return Ok(None) };
            lines = rest;
        }
        Ok(Some(lines))
    }

    /// The log itself, from its beginning, and how many of its bytes belong to the snapshot.
    pub(super) fn into_log(mut self) -> io::Result<(File, u64)> {
        self.log.rewind()?;
        Ok((self.log, self.bytes))
    }
}

fn count_lines(mut records: impl BufRead) -> io::Result<u64> {
    let (mut number, mut record) = (0, Vec::new());
    while records.read_until(b'\n', &mut record)? > 0 {
        number += u64::from(record.ends_with(b"\n") && ends_line(&record));
        record.clear();
    }
    Ok(number)
}

impl Rotated {
    /// `None` if the file was removed, because it was the oldest.
    fn open(self) -> io::Result<Option<OpenLog>> {
        let path = match self {
            Self::At(path) => path,
            Self::Open(open) => return Ok(Some(open)),
        };
        // It may have been compressed since it was listed.
        for path in [&path, &compressed(&path)] {
            match File::open(path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                opened => return Ok(Some(OpenLog { file: opened?, is_compressed: is_compressed(path) })),
            }
        }
        Ok(None)
    }
}

impl OpenLog {
    /// From its beginning.
    fn records(&self) -> io::Result<BufReader<Box<dyn Read + Send>>> {
        let mut file = self.file.try_clone()?;
        file.rewind()?;
        Ok(BufReader::new(if self.is_compressed { Box::new(GzDecoder::new(file)) } else { Box::new(file) }))
    }
}

/// Sends a rotated file piece by piece: no thread waits for the client. `None` when the client has gone,
/// or has all that it asked for.
pub(super) async fn send(rotated: Rotated, mut lines: Lines, answers: &Answers) -> io::Result<Option<Lines>> {
    let records = move || rotated.open()?.map(|open| open.records()).transpose();
    let Some(mut records) = blocking(records).await? else { return Ok(Some(lines)) };
    loop {
        let data;
        (data, records, lines) = blocking(move || {
            let data = next_piece(&mut records, &mut lines)?;
            Ok((data, records, lines))
        })
        .await?;
        let is_end = data.is_empty();
        if !is_end && answers.send(Ok(LogsChunk { data })).await.is_err() || lines.are_complete() {
            return Ok(None);
        }
        if is_end {
            return Ok(Some(lines));
        }
    }
}

/// What is to be shown of the next records; nothing at their end.
fn next_piece(records: &mut impl BufRead, lines: &mut Lines) -> io::Result<Vec<u8>> {
    let (mut record, mut data) = (Vec::new(), Vec::new());
    while data.len() <= CHUNK_BYTES && !lines.are_complete() && records.read_until(b'\n', &mut record)? > 0 {
        lines.push(&record, &mut data);
        record.clear();
    }
    Ok(data)
}

pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use flate2::{Compression, write::GzEncoder};
    use proto::kubelet::LogsRequest;
    use tokio::sync::mpsc;

    use super::*;

    struct Log {
        dir: tempfile::TempDir,
        path: PathBuf,
    }

    impl Log {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("0.log");
            std::fs::write(&path, "first\n").unwrap();
            Self { dir, path }
        }

        fn open(&self) -> (File, FileId) {
            let file = File::open(&self.path).unwrap();
            let id = FileId::of(&file.metadata().unwrap());
            (file, id)
        }

        fn rotated(&self, minute: u32) -> PathBuf {
            self.dir.path().join(format!("0.log.20261122-11{minute:02}00"))
        }

        fn rotate(&self, minute: u32) -> PathBuf {
            let name = self.rotated(minute);
            std::fs::rename(&self.path, &name).unwrap();
            std::fs::write(&self.path, format!("after {minute}\n")).unwrap();
            name
        }
    }

    fn compress(path: &Path) -> PathBuf {
        let to = compressed(path);
        let mut encoder = GzEncoder::new(File::create(&to).unwrap(), Compression::default());
        encoder.write_all(&std::fs::read(path).unwrap()).unwrap();
        encoder.finish().unwrap();
        std::fs::remove_file(path).unwrap();
        to
    }

    /// A position before the log, which is open.
    fn opened(log: &Log) -> (Position, Opened) {
        compress(&log.rotate(1));
        let position = Position { log: log.path.clone(), last_read: None }.after_rotated(log.rotated(1));
        let opened = Opened::of(log.open().0).unwrap();
        assert_eq!(position.unread_before(opened.id).unwrap(), None);
        assert_eq!(position.after(&opened).unwrap().map(|after| after.last_read), None);
        (position, opened)
    }

    fn unread(log: &Log, position: &Position) -> Option<PathBuf> {
        position.unread_before(log.open().1).unwrap()
    }

    #[test]
    fn a_file_that_is_compressed_while_it_is_read_has_its_successor() {
        let log = Log::new();
        let (position, opened) = opened(&log);
        let done = log.rotate(2);
        let early = position.after(&opened).unwrap().unwrap();
        assert_eq!(unread(&log, &early), None);
        compress(&done);
        let next = log.rotate(3);
        let late = position.after(&opened).unwrap().unwrap();
        for position in [&early, &late] {
            assert_eq!(unread(&log, position), Some(next.clone()));
        }
        let next = compress(&next);
        let newest = log.rotate(4);
        let late = position.after(&opened).unwrap().unwrap();
        for position in [early, late] {
            assert_eq!(unread(&log, &position), Some(next.clone()));
            let position = position.after_rotated(next.clone());
            assert_eq!(unread(&log, &position), Some(newest.clone()));
            assert_eq!(unread(&log, &position.after_rotated(newest.clone())), None);
        }
    }

    #[test]
    fn a_file_that_is_removed_while_it_is_read_has_its_successor() {
        let log = Log::new();
        let (position, opened) = opened(&log);
        std::fs::remove_file(log.rotate(2)).unwrap();
        let next = log.rotate(3);
        let unread_after = || unread(&log, &position.after(&opened).unwrap().unwrap());
        assert_eq!(unread_after(), Some(next.clone()));
        let next = compress(&next);
        assert_eq!(unread_after(), Some(next));
    }

    #[test]
    fn a_file_that_was_rotated_since_it_was_opened_is_not_read_twice() {
        let log = Log::new();
        let (position, opened) = opened(&log);
        log.rotate(2);
        assert_eq!(position.unread_before(opened.id).unwrap(), None);
        assert_eq!(unread(&log, &position.after(&opened).unwrap().unwrap()), None);
    }

    fn snapshot(log: &Log) -> Snapshot {
        Snapshot::of(&log.path, log.open().0).unwrap().unwrap().0
    }

    /// What is sent of a snapshot, with the lines of the log itself.
    async fn shown(mut snapshot: Snapshot, skipped: u64) -> String {
        let mut lines = Lines::new(&LogsRequest::default());
        lines.skip(skipped);
        let (answers, mut received) = mpsc::channel(10);
        let mut lines = snapshot.send_rotated(lines, &answers).await.unwrap().unwrap();
        let (rest, bytes) = snapshot.into_log().unwrap();
        let mut shown = Vec::new();
        while let Ok(piece) = received.try_recv() {
            shown.extend(piece.unwrap().data);
        }
        shown.extend(next_piece(&mut BufReader::new(rest.take(bytes)), &mut lines).unwrap());
        String::from_utf8(shown).unwrap()
    }

    #[tokio::test]
    async fn what_is_written_and_rotated_after_a_snapshot_is_no_part_of_it() {
        let log = Log::new();
        log.rotate(1);
        let snapshot = snapshot(&log);
        let (missed, _id) = log.open();
        File::options().append(true).open(&log.path).unwrap().write_all(b"later\n").unwrap();
        for minute in 2..4 {
            compress(&log.rotate(minute));
        }
        assert!(Snapshot::of(&log.path, missed).unwrap().is_none());
        assert_eq!(shown(snapshot, 0).await, "first\nafter 1\n");
    }

    #[tokio::test]
    async fn a_tail_has_all_its_lines_though_files_are_removed_meanwhile() {
        let log = Log::new();
        std::fs::write(&log.path, "first\nsecond\nthird\n").unwrap();
        let oldest = log.rotate(1);
        let next = compress(&log.rotate(2));
        let tail = |lines| {
            let mut snapshot = snapshot(&log);
            let skipped = snapshot.keep_tail(lines).unwrap();
            shown(snapshot, skipped)
        };
        assert_eq!(tail(0).await, "");
        let all = "first\nsecond\nthird\nafter 1\nafter 2\n";
        for (lines, from) in [(1, "after 2"), (2, "after 1"), (4, "second"), (5, "first"), (9, "first")] {
            assert_eq!(tail(lines).await, all[all.find(from).unwrap()..], "{lines}");
        }
        let shown = tail(3);
        for path in [oldest, next] {
            std::fs::remove_file(path).unwrap();
        }
        assert_eq!(shown.await, "third\nafter 1\nafter 2\n");
        assert_eq!(tail(3).await, "after 2\n");
    }

    #[test]
    fn a_client_that_takes_nothing_holds_no_thread() {
        let log = Log::new();
        std::fs::write(&log.path, "a line\n".repeat(CHUNK_BYTES)).unwrap();
        let rotated = Rotated::At(log.rotate(1));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(1)
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (answers, _takes_nothing) = mpsc::channel(1);
            let sending =
                tokio::spawn(
                    async move { send(rotated, Lines::new(&LogsRequest::default()), &answers).await },
                );
            for _ in 0..10 {
                let other = tokio::time::timeout(Duration::from_secs(30), blocking(|| Ok(())));
                other.await.expect("the thread is free").unwrap();
                tokio::task::yield_now().await;
            }
            assert!(!sending.is_finished());
        });
        runtime.shutdown_background();
    }

    #[tokio::test]
    async fn a_file_that_is_compressed_after_the_listing_is_read() {
        let log = Log::new();
        let listed = log.rotate(1);
        compress(&listed);
        let (answers, mut received) = mpsc::channel(1);
        let lines = Lines::new(&LogsRequest::default());
        let lines = send(Rotated::At(listed.clone()), lines, &answers).await.unwrap().unwrap();
        assert_eq!(received.try_recv().unwrap().unwrap().data, b"first\n");
        std::fs::remove_file(compressed(&listed)).unwrap();
        assert!(send(Rotated::At(listed), lines, &answers).await.unwrap().is_some());
        assert_eq!(received.try_recv().unwrap_err(), mpsc::error::TryRecvError::Empty);
    }
}
