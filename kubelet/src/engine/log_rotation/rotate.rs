//! Rotates one log (kubernetes, container_log_manager.go, rotateLog).

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use tracing::warn;

use super::{Limits, Log};
use crate::clients::cri::Cri;
use crate::logs::names::{self, COMPRESSED, UNFINISHED, with_suffix};

#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{op} {}", path.display())]
    File {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Reopen(crate::clients::cri::Error),
    #[error("the rotating thread panicked")]
    Thread,
}

fn at(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { op, path, source }
}

/// Removes old logs, compresses the remaining ones, renames the current log, and makes the runtime
/// open a new one.
pub(super) async fn rotate(cri: &Cri, log: &Log, limits: Limits) -> Result<(), Error> {
    let (path, keep) = (log.path.clone(), limits.max_files.saturating_sub(2));
    let rotated = tokio::task::spawn_blocking(move || tidy(&path, keep)).await;
    let rotated = rotated.map_err(|_| Error::Thread)??;
    let target = names::next(&log.path, &rotated, Timestamp::now());
    match fs::rename(&log.path, &target) {
        // The runtime has rotated it already.
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        renamed => renamed.map_err(at("rename", &log.path))?,
    }
    cri.reopen_container_log(&log.container_id).await.map_err(|error| {
        // The runtime still writes to it, so restore its name.
        let _unrenamed = fs::rename(&target, &log.path);
        Error::Reopen(error)
    })
}

/// Returns the remaining logs, oldest first.
fn tidy(log: &Path, keep: usize) -> Result<Vec<PathBuf>, Error> {
    let listed = names::all(log).map_err(at("list the directory of", log))?;
    for unfinished in listed.iter().filter(|path| names::is_unfinished(path)) {
        remove(unfinished)?;
    }
    let rotated = names::rotated(log).map_err(at("list the directory of", log))?;
    let (too_old, kept) = rotated.split_at(rotated.len().saturating_sub(keep));
    for path in too_old {
        remove(path)?;
        remove(&with_suffix(path, COMPRESSED))?;
    }
    for path in kept.iter().filter(|path| !names::is_compressed(path)) {
        match compress(path) {
            Ok(()) => {}
            // The runtime rotates fast-growing logs itself and has removed this one.
            Err(_) if !path.exists() => {}
            // For example on a full disk. The uncompressed log is removed when it is the oldest.
            Err(error) => {
                warn!(log = %path.display(), error = linux::chain(&error), "log not compressed");
            }
        }
    }
    names::rotated(log).map_err(at("list the directory of", log))
}

fn compress(path: &Path) -> Result<(), Error> {
    let unfinished = with_suffix(path, UNFINISHED);
    let write = || {
        let mut from = File::open(path)?;
        let mut to = GzEncoder::new(File::create(&unfinished)?, Compression::default());
        io::copy(&mut from, &mut to)?;
        to.finish()?;
        fs::set_permissions(&unfinished, from.metadata()?.permissions())
    };
    let written = write().and_then(|()| fs::rename(&unfinished, with_suffix(path, COMPRESSED)));
    written.map_err(|source| {
        let _may_be_gone = fs::remove_file(&unfinished);
        at("compress", path)(source)
    })?;
    remove(path)
}

fn remove(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(at("remove", path)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn old_logs_are_compressed_and_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        for hour in 10..14 {
            fs::write(with_suffix(&log, &format!(".20261122-{hour}0000")), hour.to_string()).unwrap();
        }
        fs::write(with_suffix(&log, ".20261122-120000.tmp"), "half").unwrap();
        let left = tidy(&log, 2).unwrap();
        assert_eq!(left, ["12", "13"].map(|hour| with_suffix(&log, &format!(".20261122-{hour}0000.gz"))));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        let mut text = String::new();
        flate2::read::GzDecoder::new(File::open(&left[0]).unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "12");
        assert_eq!(tidy(&log, 0).unwrap(), [] as [&Path; 0]);
    }
}
