//! Reads the files that `-f` names.

mod walk;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use super::Error;
use crate::manifest;

/// A text and its name in errors.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) source: String,
    pub(super) content: Vec<u8>,
}

/// Which manifests of a directory are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Directories {
    /// Those in the directory itself.
    Flat,
    /// Those below it too.
    Recursive,
}

impl Directories {
    pub(super) fn of(recursive: bool) -> Self {
        if recursive { Self::Recursive } else { Self::Flat }
    }
}

/// The content of all files of a directory.
const DIRECTORY_BYTES: usize = 256 << 20;

/// Reads files, the manifests of directories (kubectl's suffixes), and `-` for stdin.
pub(super) fn read(filenames: &[PathBuf], directories: Directories) -> Result<Vec<Document>, Error> {
    let mut documents = Vec::new();
    for name in filenames {
        if name.as_os_str() == "-" {
            documents.push(read_stdin()?);
        } else if name.is_dir() {
            read_directory(name, directories, &mut documents)?;
        } else {
            documents.push(read_limited(open(name, OFlag::empty())?, name)?);
        }
    }
    Ok(documents)
}

fn read_directory(dir: &Path, which: Directories, documents: &mut Vec<Document>) -> Result<(), Error> {
    let paths = walk::manifests(dir, which)?;
    if paths.is_empty() {
        return Err(Error::NoManifests { dir: dir.to_owned() });
    }
    let mut bytes = 0;
    for path in paths {
        // A FIFO that has taken the file's place meanwhile does not keep the command waiting.
        let file = open(&path, OFlag::O_NONBLOCK)?;
        let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
        if !is_file {
            continue;
        }
        let document = read_limited(file, &path)?;
        bytes += document.content.len();
        if bytes > DIRECTORY_BYTES {
            let (dir, limit) = (dir.to_owned(), DIRECTORY_BYTES);
            return Err(Error::LargeDirectory { dir, limit, of: "bytes of manifests" });
        }
        documents.push(document);
    }
    Ok(())
}

fn read_stdin() -> Result<Document, Error> {
    read_limited(io::stdin().lock(), Path::new("stdin"))
}

fn open(path: &Path, flags: OFlag) -> Result<File, Error> {
    let opened = File::options().read(true).custom_flags(flags.bits()).open(path);
    opened.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::NoFile { path: path.to_owned() },
        _ => Error::ReadFile { path: path.to_owned(), source },
    })
}

/// Reads at most one byte more than a manifest may have.
fn read_limited(file: impl Read, path: &Path) -> Result<Document, Error> {
    let source = path.display().to_string();
    let mut content = Vec::new();
    let read = file.take(manifest::FILE_BYTES as u64 + 1).read_to_end(&mut content);
    read.map_err(|source| Error::ReadFile { path: path.to_owned(), source })?;
    match manifest::too_large(content.len(), &source) {
        Some(error) => Err(Error::Manifest { mistakes: vec![error.to_string()] }),
        None => Ok(Document { source, content }),
    }
}
