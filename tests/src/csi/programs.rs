//! Programs that a test makes for the driver to execute, and may replace while it runs.

#![expect(clippy::unwrap_used, reason = "what fails here fails the test that uses it")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::scene::TIMEOUT;
use crate::eventually;

/// Puts a program with this content at `path`, in one step.
///
/// Returns once no process has it open for writing: the kernel executes no such file (ETXTBSY). Children that other
/// tests start meanwhile have all descriptors of this process until they execute their own program.
pub fn install(path: &Path, content: &[u8]) {
    let new = path.with_extension("new");
    fs::write(&new, content).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    // None can open it: only this function knows the path.
    eventually("no process has the program open", TIMEOUT, || {
        let having = having_open(&new);
        anyhow::ensure!(having.is_empty(), "{} is open: {having:?}", new.display());
        Ok(())
    })
    .unwrap();
    fs::rename(&new, path).unwrap();
}

/// Descriptors of the file, as paths in /proc. They are not followed: what others have open may not answer.
fn having_open(path: &Path) -> Vec<PathBuf> {
    let path = fs::canonicalize(path).unwrap();
    let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    // A process that ends meanwhile has none.
    let processes = entries(Path::new("/proc")).filter(|process| process.join("fd").is_dir());
    let descriptors = processes.flat_map(|process| entries(&process.join("fd")).collect::<Vec<_>>());
    descriptors.filter(|fd| fs::read_link(fd).is_ok_and(|target| target == path)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;
    use std::process::{Command, Stdio};

    use super::*;

    /// Children of other tests may have it too.
    #[test]
    fn a_program_that_another_process_has_open_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        let file = OwnedFd::from(File::create(&path).unwrap());
        let mut other = Command::new("sleep").arg("1000").stdout(Stdio::from(file)).spawn().unwrap();
        let its = PathBuf::from(format!("/proc/{}/fd/1", other.id()));
        assert!(having_open(&path).contains(&its));
        other.kill().unwrap();
        other.wait().unwrap();
        eventually("no process has it open", TIMEOUT, || {
            let having = having_open(&path);
            anyhow::ensure!(having.is_empty(), "{having:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn an_installed_program_takes_the_place_of_one_that_runs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("program");
        install(&path, b"#!/bin/sh\nread line\nexit 3\n");
        let mut first = Command::new(&path).stdin(Stdio::piped()).spawn().unwrap();
        install(&path, b"#!/bin/sh\nexit 4\n");
        assert_eq!(Command::new(&path).status().unwrap().code(), Some(4));
        drop(first.stdin.take());
        assert_eq!(first.wait().unwrap().code(), Some(3));
    }
}
