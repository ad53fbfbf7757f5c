//! What `-f` names.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::Error;

/// A text and what errors call it.
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
    let mut content = Vec::new();
    let read = io::stdin().lock().read_to_end(&mut content);
    read.map_err(|cause| Error::ReadFile { path: "stdin".into(), cause })?;
    Ok(Document { source: "stdin".to_owned(), content })
}

fn read_file(path: &Path) -> Result<Document, Error> {
    let content = std::fs::read(path).map_err(|cause| match cause.kind() {
        io::ErrorKind::NotFound => Error::NoFile { path: path.to_owned() },
        _ => Error::ReadFile { path: path.to_owned(), cause },
    })?;
    Ok(Document { source: path.display().to_string(), content })
}

fn manifests_in(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let unreadable = |cause| Error::ReadFile { path: dir.to_owned(), cause };
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
