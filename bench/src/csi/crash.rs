//! The first stage of a volume of a million files after a crash: its daemon counts what it holds. Then walks over all of
//! them.

use std::fs::{self, File};
use std::time::Instant;

use ::tests::{Sandbox, eventually};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use xtask::progress::step;

use super::client::Client;
use super::takeover::{end, pids};
use super::{TIMEOUT, start, walk};
use crate::rows::{Row, milliseconds};

const DIRECTORIES: usize = 1000;
const FILES_IN_EACH: usize = 1000;
/// Its limit of inodes allows so many files.
const VOLUME_BYTES: i64 = 64 << 30;

pub(super) fn scene(sandbox: &Sandbox, _runs: usize) -> Result<Vec<Row>> {
    let (mut driver, client) = start(sandbox)?;
    let volume = client.create_of("crash", VOLUME_BYTES)?;
    Client::make_directories(&volume)?;
    client.stage(&volume)?;
    let daemons = pids(sandbox, "hawser-volume")?;
    end(*daemons.first().context("no daemon serves")?, Signal::SIGKILL)?;
    eventually("the volume is unstaged", TIMEOUT, || client.unstage(&volume))?;

    let data = volume.data(&sandbox.path("pool"));
    let files = DIRECTORIES * FILES_IN_EACH;
    step(&format!("{files} files"), || {
        for directory in 0..DIRECTORIES {
            let directory = data.join(directory.to_string());
            fs::create_dir(&directory).with_context(|| directory.display().to_string())?;
            for file in 0..FILES_IN_EACH {
                let path = directory.join(file.to_string());
                File::create(&path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    })?;

    let (staged, changed) = step("the stage after the crash", || {
        let begun = Instant::now();
        client.stage(&volume)?;
        fs::metadata(&volume.globalmount).context("stat the volume")?;
        let staged = begun.elapsed();
        fs::create_dir(volume.globalmount.join("new")).context("make a directory")?;
        Ok((staged, begun.elapsed()))
    })?;
    ensure!(changed > staged, "no change waited for the count");
    let mut walks = step("walks over them", || walk::over(sandbox, &volume, files))?;
    client.unstage(&volume)?;
    client.delete(&volume)?;
    step("remove them", || {
        eventually("the pool is empty", 10 * TIMEOUT, || {
            let left = fs::read_dir(sandbox.path("pool/trash")).map_or(0, Iterator::count);
            ensure!(left == 0, "{left} volumes are in the trash");
            Ok(())
        })
    })?;
    driver.stop(TIMEOUT)?;
    let title = |what| format!("NodeStageVolume after a crash, {files} files, until {what}");
    let mut rows = vec![
        Row::new(title("the first stat"), "ms", vec![milliseconds(staged)], None),
        Row::new(
            title("the first change, which waits for the count"),
            "ms",
            vec![milliseconds(changed)],
            None,
        ),
    ];
    rows.append(&mut walks);
    Ok(rows)
}
