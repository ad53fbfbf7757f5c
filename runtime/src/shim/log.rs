//! Container output in the CRI format: each line has a time, a stream and a tag, which is `F` for a
//! full line or `P` for a partial one.

mod ceiling;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

pub use ceiling::LogCeiling;

/// Longer lines are split into `P` pieces, as in containerd.
const MAX_LINE_BYTES: usize = 16 * 1024;
const READ_BYTES: usize = 64 * 1024;
/// Most output read in one turn: a program that never stops writing must not keep the shim from
/// other work, such as killing it.
pub(super) const TURN_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct LogFile {
    path: Option<PathBuf>,
    /// `None` if there is no path, and while its file cannot be opened.
    file: Option<File>,
    /// Bytes in `file`.
    length: u64,
    ceiling: Option<LogCeiling>,
}

impl LogFile {
    /// `None` discards the output. The directory is made if it is missing.
    pub(super) fn open(path: Option<PathBuf>, ceiling: Option<LogCeiling>) -> io::Result<Self> {
        let mut log = Self { path, file: None, length: 0, ceiling };
        log.reopen()?;
        Ok(log)
    }

    /// Called after the file was moved away: the next line goes into a new file.
    pub(super) fn reopen(&mut self) -> io::Result<()> {
        if let Some(path) = &self.path {
            let file = open_append(path)?;
            self.length = file.metadata()?.len();
            self.file = Some(file);
        }
        Ok(())
    }

    fn append(&mut self, lines: &[u8]) {
        if let Some(text) = self.write(lines) {
            super::note(&text);
        }
    }

    /// A full disk must not stop the container: lines that cannot be written are lost. Returns what
    /// shim.log is to have about it.
    fn write(&mut self, lines: &[u8]) -> Option<String> {
        let note = self.make_room(lines.len() as u64);
        if let Some(file) = &mut self.file {
            match file.write_all(lines) {
                Ok(()) => self.length += lines.len() as u64,
                Err(_full_disk) => self.remove_begun_lines(),
            }
        }
        note
    }

    /// After a write that has perhaps written a part. The file may have been made shorter by others.
    fn remove_begun_lines(&mut self) {
        let Some(file) = &self.file else { return };
        if file.metadata().is_ok_and(|now| now.len() > self.length) {
            let _full_disk = file.set_len(self.length);
        }
    }

    /// Returns what is to be noted.
    fn make_room(&mut self, more: u64) -> Option<String> {
        let path = self.path.as_ref()?;
        if self.file.is_none() {
            let text = format!("log {} is open again", path.display());
            return self.reopen().ok().map(|()| text);
        }
        let ceiling = self.ceiling?;
        if self.length == 0 || self.length + more <= ceiling.bytes {
            return None;
        }
        match ceiling::rotate(path, ceiling) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                let text = format!("rotate {}: {e}", path.display());
                // Do not try again for every line.
                self.length = 0;
                Some(text)
            }
            // Moved by the shim, or by a kubelet that is about to call reopen.
            _ => {
                let text = format!("lines are lost until log {} can be opened", path.display());
                let error = self.reopen().err()?;
                // The open file has reached its limit, under its new name.
                self.file = None;
                Some(format!("{text}: {error}"))
            }
        }
    }
}

fn open_append(path: &Path) -> io::Result<File> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

/// The read end of a container's output pipe, or its terminal.
#[derive(Debug)]
pub(super) struct Stream {
    pipe: File,
    name: &'static str,
    /// The incomplete last line.
    rest: Vec<u8>,
}

impl Stream {
    /// `pipe` must be non-blocking.
    pub(super) fn new(pipe: OwnedFd, name: &'static str) -> Self {
        Self { pipe: File::from(pipe), name, rest: Vec::new() }
    }

    /// `stdout` or `stderr`.
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Reads the available output, up to `max_bytes`, into `log`, and shows it to `also`. `false` if the stream has
    /// ended.
    pub(super) fn pump(&mut self, log: &mut LogFile, max_bytes: usize, mut also: impl FnMut(&[u8])) -> bool {
        let mut buffer = [0; READ_BYTES];
        let mut taken = 0;
        while taken < max_bytes {
            let most = READ_BYTES.min(max_bytes - taken);
            match self.pipe.read(&mut buffer[..most]) {
                Ok(0) => {
                    self.finish(log);
                    return false;
                }
                Ok(length) => {
                    self.take(&buffer[..length], log);
                    also(&buffer[..length]);
                    taken += length;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // A pipe has no other errors; EIO of a terminal: all programs have closed it.
                Err(_) => {
                    self.finish(log);
                    return false;
                }
            }
        }
        true
    }

    /// All available output, without changes: for an OCI runtime's error message.
    pub(super) fn read_raw(&mut self) -> Vec<u8> {
        let mut text = Vec::new();
        let _would_block_or_end = self.pipe.read_to_end(&mut text);
        text
    }

    /// Writes an incomplete last line as a piece.
    pub(super) fn finish(&mut self, log: &mut LogFile) {
        if !self.rest.is_empty() {
            let rest = std::mem::take(&mut self.rest);
            let mut out = Vec::new();
            write_line(&mut out, &prefix(self.name), b'P', &rest);
            log.append(&out);
        }
    }

    fn take(&mut self, bytes: &[u8], log: &mut LogFile) {
        log.append(&format_lines(&mut self.rest, bytes, &prefix(self.name)));
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

/// `<RFC3339Nano> <stream> `
fn prefix(stream: &str) -> String {
    format!("{:.9} {stream} ", jiff::Timestamp::now())
}

fn format_lines(rest: &mut Vec<u8>, bytes: &[u8], prefix: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + prefix.len() * 4);
    rest.extend_from_slice(bytes);
    let mut done = 0;
    loop {
        let open = &rest[done..];
        let window = &open[..open.len().min(MAX_LINE_BYTES + 1)];
        match window.iter().position(|b| *b == b'\n') {
            Some(end) => {
                write_line(&mut out, prefix, b'F', &open[..end]);
                done += end + 1;
            }
            None if open.len() > MAX_LINE_BYTES => {
                write_line(&mut out, prefix, b'P', &open[..MAX_LINE_BYTES]);
                done += MAX_LINE_BYTES;
            }
            None => break,
        }
    }
    rest.drain(..done);
    out
}

fn write_line(out: &mut Vec<u8>, prefix: &str, tag: u8, line: &[u8]) {
    out.extend_from_slice(prefix.as_bytes());
    out.extend_from_slice(&[tag, b' ']);
    out.extend_from_slice(line);
    out.push(b'\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    use linux::mount::MountFlags;

    #[test]
    fn lines_are_whole_and_the_open_one_waits() {
        let mut rest = Vec::new();
        assert_eq!(format_lines(&mut rest, b"one\ntw", "T stdout "), b"T stdout F one\n");
        assert_eq!(format_lines(&mut rest, b"o\n\n", "T stdout "), b"T stdout F two\nT stdout F \n");
        assert!(rest.is_empty());
    }

    #[test]
    fn a_line_beyond_the_limit_is_cut_into_pieces() {
        let mut rest = Vec::new();
        let mut line = vec![b'x'; MAX_LINE_BYTES + 5];
        line.push(b'\n');
        let out = format_lines(&mut rest, &line, "T ");
        let lines: Vec<&[u8]> = out.split(|b| *b == b'\n').collect();
        assert!(lines[0].starts_with(b"T P x") && lines[0].len() == 4 + MAX_LINE_BYTES);
        assert_eq!(lines[1], b"T F xxxxx");
    }

    #[test]
    fn a_line_of_exactly_the_limit_is_whole() {
        let mut rest = Vec::new();
        let mut line = vec![b'x'; MAX_LINE_BYTES];
        line.push(b'\n');
        assert!(format_lines(&mut rest, &line, "T ").starts_with(b"T F x"));
    }

    #[test]
    fn a_program_that_never_stops_writing_gets_its_turn_and_no_more() {
        let (ours, mut theirs) = io::pipe().unwrap();
        rustix::fs::fcntl_setfl(&ours, rustix::fs::OFlags::NONBLOCK).unwrap();
        let mut stream = Stream::new(ours.into(), "stdout");
        let mut log = LogFile::open(None, None).unwrap();
        let writer = std::thread::spawn(move || while theirs.write_all(&[b'y'; READ_BYTES]).is_ok() {});
        assert!(stream.pump(&mut log, TURN_BYTES, |_| {}), "it returns while the writer goes on");
        drop(stream);
        writer.join().unwrap();
    }

    #[test]
    fn lines_that_are_lost_on_a_full_disk_count_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("0.log");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        let ceiling = LogCeiling { bytes: 100, files: 2 };
        let mut log = LogFile::open(Some(path.clone()), Some(ceiling)).unwrap();
        for _ in 0..100 {
            log.append(b"T stdout F a line\n");
        }
        assert_eq!(log.length, 0);
        assert_eq!(names(dir.path()), [path], "no older file was replaced by an empty one");
    }

    #[test]
    fn a_log_that_cannot_be_opened_again_grows_no_further() {
        // Removed after the namespace that has a mount on it.
        let removed_last = tempfile::tempdir().unwrap();
        let dir = removed_last.path().to_owned();
        let in_own_mounts = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
            linux::mount::make_private(Path::new("/")).unwrap();
            let one_file = "nr_inodes=2";
            linux::mount::mount_fs("tmpfs", "logs", &dir, MountFlags::default(), one_file).unwrap();
            let path = dir.join("0.log");
            let ceiling = LogCeiling { bytes: 100, files: 3 };
            let mut log = LogFile::open(Some(path.clone()), Some(ceiling)).unwrap();
            let line = b"T stdout F a line\n";
            let notes: Vec<String> = (0..20).filter_map(|_| log.write(line)).collect();
            assert!(notes.len() == 1 && notes[0].contains("No space left"), "{notes:?}");
            let [rotated] = <[_; 1]>::try_from(names(&dir)).unwrap();
            assert_ne!(rotated, path);
            let length = std::fs::metadata(&rotated).unwrap().len();
            assert!(length <= ceiling.bytes, "{length}");

            std::fs::remove_file(rotated).unwrap();
            let notes: Vec<String> = (0..2).filter_map(|_| log.write(line)).collect();
            assert!(notes.len() == 1 && notes[0].contains("open again"), "{notes:?}");
            assert_eq!(std::fs::read(path).unwrap(), line.repeat(2));
        });
        in_own_mounts.join().unwrap();
    }

    fn names(dir: &Path) -> Vec<PathBuf> {
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
    }

    #[test]
    fn times_are_rfc3339_with_nanoseconds() {
        let prefix = prefix("stderr");
        let (time, rest) = prefix.split_once(' ').unwrap();
        assert_eq!(rest, "stderr ");
        assert_eq!(time.len(), "2026-11-20T17:53:02.596223978Z".len(), "{time}");
    }
}
