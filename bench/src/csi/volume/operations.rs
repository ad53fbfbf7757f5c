//! What `bench volume` does in a directory.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::{Advice, XattrFlags, fadvise, removexattr, setxattr};

/// Of a stream.
const STREAM_BYTES: usize = 64 << 20;
const BLOCK_BYTES: usize = 1 << 20;

/// One kind of work; a step is timed as the mean of all.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operation {
    pub(super) title: &'static str,
    pub(super) steps: usize,
    /// Of each step; not timed.
    pub(super) prepare: fn(&Path) -> std::io::Result<()>,
    pub(super) work: fn(&Path) -> std::io::Result<()>,
}

pub(super) const METADATA: [Operation; 12] = [
    metadata("create+write", nothing, |path| fs::write(path, [7; 4096])),
    metadata("open+append+close", file, |path| {
        OpenOptions::new().append(true).open(path)?.write_all(&[7; 100])
    }),
    metadata("truncate", file, |path| OpenOptions::new().write(true).open(path)?.set_len(100)),
    metadata("mkdir", nothing, |path| fs::create_dir(path)),
    metadata("rmdir", |path| fs::create_dir(path), |path| fs::remove_dir(path)),
    metadata("symlink", nothing, |path| symlink("target", path)),
    metadata("link", file, |path| fs::hard_link(path, other(path))),
    metadata("rename", file, |path| fs::rename(path, other(path))),
    metadata("unlink", file, |path| fs::remove_file(path)),
    metadata("setxattr", file, |path| Ok(setxattr(path, "user.key", b"value", XattrFlags::empty())?)),
    metadata(
        "removexattr",
        |path| {
            file(path)?;
            Ok(setxattr(path, "user.key", b"value", XattrFlags::empty())?)
        },
        |path| Ok(removexattr(path, "user.key")?),
    ),
    metadata("stat of an absent name", nothing, |path| match fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(std::io::Error::other("it is there")),
    }),
];

pub(super) const STREAMS: [Operation; 3] = [
    stream("seq write, buffered, 64 MiB", nothing, |path| {
        let mut file = File::create(path)?;
        let block = vec![7; BLOCK_BYTES];
        (0..STREAM_BYTES / BLOCK_BYTES).try_for_each(|_| file.write_all(&block))
    }),
    stream("seq write and fsync, 64 MiB", nothing, |path| write_stream(path).map(drop)),
    stream("seq read, 64 MiB that are not cached in the volume", uncached_stream, |path| {
        let mut file = File::open(path)?;
        let mut block = vec![0; BLOCK_BYTES];
        while file.read(&mut block)? > 0 {}
        Ok(())
    }),
];

type Step = fn(&Path) -> std::io::Result<()>;

const fn metadata(title: &'static str, prepare: Step, work: Step) -> Operation {
    Operation { title, steps: 300, prepare, work }
}

const fn stream(title: &'static str, prepare: Step, work: Step) -> Operation {
    Operation { title, steps: 1, prepare, work }
}

fn nothing(_path: &Path) -> std::io::Result<()> {
    Ok(())
}

fn file(path: &Path) -> std::io::Result<()> {
    fs::write(path, [7; 4096])
}

fn other(path: &Path) -> PathBuf {
    path.with_extension("other")
}

fn write_stream(path: &Path) -> std::io::Result<File> {
    let mut file = File::create(path)?;
    let block = vec![7; BLOCK_BYTES];
    (0..STREAM_BYTES / BLOCK_BYTES).try_for_each(|_| file.write_all(&block))?;
    file.sync_all()?;
    Ok(file)
}

fn uncached_stream(path: &Path) -> std::io::Result<()> {
    let file = write_stream(path)?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

/// Microseconds of one step, in a new directory, which is removed afterwards.
pub(super) fn time(dir: &Path, steps: usize, prepare: Step, work: Step) -> Result<f64> {
    fs::create_dir(dir).with_context(|| dir.display().to_string())?;
    let paths: Vec<PathBuf> = (0..steps).map(|number| dir.join(format!("f{number}"))).collect();
    for path in &paths {
        prepare(path).with_context(|| path.display().to_string())?;
    }
    let begun = Instant::now();
    for path in &paths {
        work(path).with_context(|| path.display().to_string())?;
    }
    let took_us = begun.elapsed().as_secs_f64() * 1e6 / steps as f64;
    fs::remove_dir_all(dir).with_context(|| dir.display().to_string())?;
    Ok(took_us)
}
