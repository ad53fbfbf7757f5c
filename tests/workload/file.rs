//! Random operations on one file, against a copy of it in memory: read(2), write(2), append, direct
//! I/O, mappings, truncate(2), fallocate(2), copy_file_range(2), fsync(2), and opening it anew.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{FallocateFlags, OFlags, SeekFrom};
use tests::random::Random;

use crate::mapping::Mapping;
use crate::run::{Run, expect_content};

const LARGEST: u64 = 256 << 10;
const LARGEST_WRITE: u64 = 24 << 10;
const BLOCK: u64 = 4096;
const BLOCK_BYTES: usize = 4096;

struct Model {
    path: PathBuf,
    file: File,
    content: Vec<u8>,
    random: Random,
    /// The last operations, for the report of a difference.
    last: Vec<String>,
}

pub(crate) fn run(run: &Run) -> Result<()> {
    let path = run.dir.join("file");
    let file = run.step(|| open(&path, OFlags::CREATE | OFlags::EXCL))??;
    let mut model = Model { path, file, content: Vec::new(), random: run.random(), last: Vec::new() };
    while run.goes_on() {
        run.step(|| model.operation())?.with_context(|| model.last.join("\n"))?;
    }
    expect_content(&model.path, &model.content).with_context(|| model.last.join("\n"))
}

fn open(path: &Path, flags: OFlags) -> Result<File> {
    let flags = i32::try_from(flags.bits()).context("flags of open")?;
    File::options().read(true).write(true).custom_flags(flags).open(path).context("open")
}

impl Model {
    fn operation(&mut self) -> Result<()> {
        let length = self.content.len() as u64;
        let offset = self.random.below(length + 1);
        match self.random.below(14) {
            0..=2 => self.write(),
            3 => self.append(),
            4 => self.write_direct(),
            5 => self.truncate(),
            6 if length > 0 => self.punch(offset),
            7 => self.allocate(offset),
            8 if length > 0 => self.copy(offset),
            9 if length > 0 => self.write_mapped(offset),
            10 if length > 0 => self.read_mapped(offset),
            11 => self.reopen(),
            12 => self.sync(),
            _ => self.read(offset),
        }?;
        // The kernel asks the daemon when its copy of the attributes is old.
        let length = self.file.metadata().context("fstat")?.len();
        ensure!(length == self.content.len() as u64, "{length} bytes, not {}", self.content.len());
        Ok(())
    }

    fn note(&mut self, what: String) {
        if self.last.len() == 30 {
            self.last.remove(0);
        }
        self.last.push(what);
    }

    fn drawn(&mut self) -> Vec<u8> {
        let length = 1 + self.random.index(24 << 10);
        self.random.bytes(length)
    }

    fn store(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        if self.content.len() < end {
            self.content.resize(end, 0);
        }
        self.content[offset..end].copy_from_slice(bytes);
    }

    fn write(&mut self) -> Result<()> {
        let offset = self.random.below(LARGEST - LARGEST_WRITE);
        let bytes = self.drawn();
        self.note(format!("write {} at {offset}", bytes.len()));
        self.file.write_all_at(&bytes, offset).context("write")?;
        self.store(index(offset)?, &bytes);
        Ok(())
    }

    fn append(&mut self) -> Result<()> {
        if self.content.len() as u64 > LARGEST - LARGEST_WRITE {
            return self.truncate();
        }
        let bytes = self.drawn();
        self.note(format!("append {}", bytes.len()));
        let mut file = File::options().append(true).open(&self.path).context("open to append")?;
        file.write_all(&bytes).context("append")?;
        self.content.extend(bytes);
        Ok(())
    }

    /// Direct I/O wants aligned memory: a part of a vector that is larger by a block.
    fn write_direct(&mut self) -> Result<()> {
        let blocks = 1 + self.random.index(4);
        let offset = self.random.below(LARGEST / BLOCK - 4) * BLOCK;
        let bytes = self.random.bytes(blocks * BLOCK_BYTES);
        let mut room = vec![0; bytes.len() + BLOCK_BYTES];
        let begin = room.as_ptr().align_offset(BLOCK_BYTES);
        let aligned = &mut room[begin..begin + bytes.len()];
        aligned.copy_from_slice(&bytes);
        self.note(format!("write {} directly at {offset}", bytes.len()));
        let file = open(&self.path, OFlags::DIRECT)?;
        file.write_all_at(aligned, offset).context("write directly")?;
        self.store(index(offset)?, &bytes);
        aligned.fill(0);
        file.read_exact_at(aligned, offset).context("read directly")?;
        ensure!(aligned == bytes, "other bytes are read directly at {offset}");
        Ok(())
    }

    fn truncate(&mut self) -> Result<()> {
        let length = self.random.below(LARGEST - LARGEST_WRITE);
        self.note(format!("truncate to {length}"));
        self.file.set_len(length).context("truncate")?;
        self.content.resize(index(length)?, 0);
        Ok(())
    }

    fn punch(&mut self, offset: u64) -> Result<()> {
        let length = 1 + self.random.below(LARGEST_WRITE);
        self.note(format!("punch {length} at {offset}"));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, offset, length).context("punch a hole")?;
        let end = (offset + length).min(self.content.len() as u64);
        self.content[index(offset)?..index(end)?].fill(0);
        Ok(())
    }

    fn allocate(&mut self, offset: u64) -> Result<()> {
        let length = 1 + self.random.below(LARGEST_WRITE);
        self.note(format!("allocate {length} at {offset}"));
        rustix::fs::fallocate(&self.file, FallocateFlags::empty(), offset, length).context("fallocate")?;
        let end = index(offset + length)?.max(self.content.len());
        self.content.resize(end, 0);
        Ok(())
    }

    /// Within the file; the ranges do not overlap, which the kernel would refuse.
    fn copy(&mut self, from: u64) -> Result<()> {
        let length = (1 + self.random.below(LARGEST_WRITE)).min(self.content.len() as u64 - from);
        let to = from + length + self.random.below(BLOCK);
        if length == 0 || to + length > LARGEST {
            return Ok(());
        }
        self.note(format!("copy {length} from {from} to {to}"));
        let (mut source, mut target, mut left) = (from, to, index(length)?);
        while left > 0 {
            let (input, output) = (Some(&mut source), Some(&mut target));
            let copied = rustix::fs::copy_file_range(&self.file, input, &self.file, output, left);
            let copied = copied.context("copy_file_range")?;
            ensure!(copied > 0, "copy_file_range copies nothing");
            left -= copied;
        }
        let bytes = self.content[index(from)?..index(from + length)?].to_vec();
        self.store(index(to)?, &bytes);
        Ok(())
    }

    fn write_mapped(&mut self, offset: u64) -> Result<()> {
        let offset = index(offset)?;
        let mut bytes = self.drawn();
        bytes.truncate(self.content.len() - offset);
        self.note(format!("write {} through a mapping at {offset}", bytes.len()));
        let mut mapping = Mapping::new(&self.file, self.content.len())?;
        mapping.write(offset, &bytes);
        self.store(offset, &bytes);
        // Otherwise the kernel writes it at some time.
        if self.random.below(2) == 0 { mapping.flush() } else { Ok(()) }
    }

    fn read_mapped(&mut self, offset: u64) -> Result<()> {
        let offset = index(offset)?;
        let found = Mapping::new(&self.file, self.content.len())?.read(offset, self.content.len() - offset);
        ensure!(found == self.content[offset..], "other bytes are mapped from {offset} on");
        Ok(())
    }

    fn reopen(&mut self) -> Result<()> {
        self.note("open anew".to_owned());
        self.file = open(&self.path, OFlags::empty())?;
        expect_content(&self.path, &self.content)
    }

    fn sync(&mut self) -> Result<()> {
        self.file.sync_all().context("fsync")?;
        let end = rustix::fs::seek(&self.file, SeekFrom::End(0)).context("lseek")?;
        ensure!(end == self.content.len() as u64, "lseek finds the end at {end}, not {}", self.content.len());
        Ok(())
    }

    fn read(&mut self, offset: u64) -> Result<()> {
        let begin = index(offset)?;
        let length = self.random.index(24 << 10).min(self.content.len() - begin);
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, offset).context("read")?;
        let wanted = &self.content[begin..begin + length];
        if let Some(at) = bytes.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
            bail!("another byte at {}", begin + at);
        }
        Ok(())
    }
}

fn index(offset: u64) -> Result<usize> {
    usize::try_from(offset).context("an offset")
}
