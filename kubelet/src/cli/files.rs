//! Reads the files that `-f` names.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::Error;
use crate::manifest;

/// A text and its name in errors.
#[derive(Debug)]
pub(super) struct Document {
    pub(super) source: String,
    pub(super) content: Vec<u8>,
}

/// Reads files, the manifests of directories (kubectl's suffixes), and `-` for stdin.
pub(super) fn read(filenames: &[PathBuf]) -> Result<Vec<Document>, Error> {
    let mut documents = Vec::new();
    for name in filenames {
        if name.as_os_str() == "-" {
            documents.push(read_stdin()?);
        } else if name.is_dir() {
            for path in manifests_in(name)? {
                documents.push(read_file(&path)?);
            }
        } else {
            documents.push(read_file(name)?);
        }
    }
    Ok(documents)
}

fn read_stdin() -> Result<Document, Error> {
    read_limited(io::stdin().lock(), Path::new("stdin"))
}

fn read_file(path: &Path) -> Result<Document, Error> {
    let file = std::fs::File::open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => Error::NoFile { path: path.to_owned() },
        _ => Error::ReadFile { path: path.to_owned(), source },
    })?;
    read_limited(file, path)
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

fn manifests_in(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let unreadable = |source| Error::ReadFile { path: dir.to_owned(), source };
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let suffix = path.extension().and_then(|suffix| suffix.to_str());
        if path.is_file() && matches!(suffix, Some("yaml" | "yml" | "json")) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}
