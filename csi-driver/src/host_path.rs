//! Paths that the caller names: staging and target paths.

use std::ffi::OsStr;
use std::path::{Component, Path, PathBuf};

use crate::error::{Error, Result};

/// PATH_MAX without its terminating zero, and NAME_MAX.
const MAX_BYTES: usize = 4095;
const MAX_NAME_BYTES: usize = 255;

/// Absolute, without `..` and without a zero byte, its symbolic links not looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPath {
    field: &'static str,
    path: PathBuf,
}

impl HostPath {
    /// `field` is what messages call it.
    pub(crate) fn parse(field: &'static str, text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::MissingField { field });
        }
        let path = Path::new(text);
        let reason = if !path.is_absolute() {
            "not an absolute path"
        } else if text.len() > MAX_BYTES || text.contains('\0') {
            "longer than 4095 bytes or with a zero byte"
        } else if path.components().any(|c| c.as_os_str().len() > MAX_NAME_BYTES) {
            "a name in it is longer than 255 bytes"
        } else if path.components().any(|c| c == Component::ParentDir) || path.file_name().is_none() {
            "`..` or no name at its end"
        } else {
            return Ok(Self { field, path: path.components().collect() });
        };
        Err(Error::invalid(field, text, reason))
    }

    /// As the caller wrote it, without what means nothing: `//`, `/./`, a `/` at the end.
    pub(crate) fn as_asked(&self) -> &Path {
        &self.path
    }

    /// The path as mountinfo shows it: links in its parents are followed, as far
    /// as the parents exist. The last component is never looked at: it may be
    /// the root of a FUSE mount whose daemon does not answer.
    pub(crate) fn resolve(&self) -> Result<PathBuf> {
        let mut below: Vec<&OsStr> = Vec::new();
        let mut existing = self.path.as_path();
        while let (Some(parent), Some(name)) = (existing.parent(), existing.file_name()) {
            below.push(name);
            existing = parent;
            match std::fs::canonicalize(parent) {
                Ok(mut resolved) => {
                    resolved.extend(below.into_iter().rev());
                    return utf8(self.field, resolved);
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(Error::unusable(self.field, &self.path, e.to_string())),
            }
        }
        utf8(self.field, self.path.clone())
    }
}

/// The journal is JSON, so what it holds is UTF-8.
fn utf8(field: &'static str, path: PathBuf) -> Result<PathBuf> {
    match path.to_str() {
        Some(_) => Ok(path),
        None => Err(Error::unusable(field, &path, "leads through a name that is not UTF-8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_in_the_parents_are_followed_and_the_last_component_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink("/etc", real.join("last")).unwrap();
        for (below, resolved) in [("link/last", "last"), ("link/a/b", "a/b"), ("real/x/", "x")] {
            let path = HostPath::parse("target_path", dir.path().join(below).to_str().unwrap()).unwrap();
            assert_eq!(path.resolve().unwrap(), real.join(resolved));
        }
    }

    #[test]
    fn relative_and_climbing_paths_are_refused() {
        let long = format!("/a/{}/b", "n".repeat(256));
        for text in ["some/path", "/a/../b", "/", "/a\0b", &long] {
            assert!(
                matches!(HostPath::parse("target_path", text), Err(Error::InvalidField { .. })),
                "{text:?}"
            );
        }
        assert!(matches!(HostPath::parse("target_path", ""), Err(Error::MissingField { .. })));
    }
}
