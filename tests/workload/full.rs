//! Files in a volume that is full again and again: what fitted is kept, and no error but ENOSPC is seen.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use tests::random::Random;

use crate::run::{Run, expect_content};

const LARGEST: usize = 200 << 10;
const PIECE: usize = 16 << 10;

pub(crate) fn run(run: &Run) -> Result<()> {
    let mut random = run.random();
    let mut files: BTreeMap<PathBuf, Vec<u8>> = BTreeMap::new();
    let mut full = 0_u64;
    for number in 0_u64.. {
        if !run.goes_on() {
            break;
        }
        let path = run.dir.join(format!("file-{number}"));
        let length = 1 + random.index(LARGEST);
        let bytes = random.bytes(length);
        let (kept, is_full) = run.step(|| write(&path, &bytes))??;
        if let Some(kept) = kept {
            files.insert(path, bytes[..kept].to_vec());
        }
        if is_full {
            full += 1;
            let removed = one(&mut random, &files)?;
            run.step(|| fs::remove_file(&removed))?.context("unlink")?;
            files.remove(&removed);
        }
        let looked_at = one(&mut random, &files)?;
        run.step(|| expect_content(&looked_at, &files[&looked_at]))??;
    }
    ensure!(full > 0, "the volume was never full");
    for (path, content) in &files {
        expect_content(path, content)?;
    }
    Ok(())
}

fn one(random: &mut Random, files: &BTreeMap<PathBuf, Vec<u8>>) -> Result<PathBuf> {
    ensure!(!files.is_empty(), "nothing fits into the volume");
    files.keys().nth(random.index(files.len())).cloned().context("a file")
}

/// How much was written, if the file was made, and whether the volume is full.
fn write(path: &PathBuf, bytes: &[u8]) -> Result<(Option<usize>, bool)> {
    let is_full = |error: &std::io::Error| error.kind() == std::io::ErrorKind::StorageFull;
    let mut file = match File::create_new(path) {
        Ok(file) => file,
        Err(error) if is_full(&error) => return Ok((None, true)),
        Err(error) => bail!("create {}: {error}", path.display()),
    };
    let mut written = 0;
    while written < bytes.len() {
        let end = bytes.len().min(written + PIECE);
        match file.write(&bytes[written..end]) {
            Ok(0) => bail!("write writes nothing"),
            Ok(more) => written += more,
            Err(error) if is_full(&error) => return Ok((Some(written), true)),
            Err(error) => bail!("write {}: {error}", path.display()),
        }
    }
    Ok((Some(written), false))
}
