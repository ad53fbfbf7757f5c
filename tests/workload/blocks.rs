//! Threads that write and read pieces of all sizes, each in a file of its own. A daemon that has just
//! started meets large requests too.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use tests::random::Random;

use crate::run::Run;

const THREADS: u64 = 4;
const LARGEST: usize = 1 << 20;
const PIECES: u64 = 4;

pub(crate) fn run(run: &Run) -> Result<()> {
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads = (0..THREADS).map(|number| scope.spawn(move || write_and_read(run, number)));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| bail!("a panic"))).collect()
    });
    results.into_iter().collect()
}

fn write_and_read(run: &Run, number: u64) -> Result<()> {
    let mut random = Random::new(run.seed.wrapping_add(number));
    let path = run.dir.join(format!("blocks-{number}"));
    let file = run.step(|| open(&path))??;
    while run.goes_on() {
        let offset = random.below(PIECES) * LARGEST as u64;
        let length = 1 + (random.index(LARGEST) >> random.index(8));
        let bytes = random.bytes(length);
        run.step(|| file.write_all_at(&bytes, offset))?
            .with_context(|| format!("write {length} at {offset}"))?;
        let mut found = vec![0; length];
        run.step(|| file.read_exact_at(&mut found, offset))?
            .with_context(|| format!("read {length} at {offset}"))?;
        ensure!(found == bytes, "other bytes at {offset}");
    }
    Ok(())
}

fn open(path: &Path) -> Result<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path);
    file.with_context(|| format!("open {}", path.display()))
}
