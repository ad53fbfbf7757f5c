//! Finds the manifests of a directory, in the order in which kubectl reads them: by name, and a directory's
//! at the place of its name.
//!
//! Links to directories are not followed, as with kubectl, so that the walk ends and stays in the directory.

use std::io;
use std::path::{Path, PathBuf};

use super::Directories;
use crate::cli::Error;

/// Far more than a person writes; a tree of a file system's size is a mistake.
const MAX_FILES: usize = 10_000;
const MAX_ENTRIES: usize = 200_000;
const MAX_DEPTH: usize = 64;

/// Regular files with kubectl's suffixes, and links to such files.
pub(super) fn manifests(dir: &Path, which: Directories) -> Result<Vec<PathBuf>, Error> {
    let mut walk = Walk { top: dir, which, entries: 0, found: Vec::new() };
    walk.enter(dir, 0)?;
    Ok(walk.found)
}

struct Walk<'a> {
    top: &'a Path,
    which: Directories,
    entries: usize,
    found: Vec<PathBuf>,
}

impl Walk<'_> {
    fn enter(&mut self, dir: &Path, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(self.too_large(MAX_DEPTH, "levels of directories"));
        }
        let unreadable = |source: io::Error| Error::ReadFile { path: dir.to_owned(), source };
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(unreadable)? {
            self.entries += 1;
            if self.entries > MAX_ENTRIES {
                return Err(self.too_large(MAX_ENTRIES, "files and directories"));
            }
            entries.push(entry.map_err(unreadable)?);
        }
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            if entry.file_type().map_err(unreadable)?.is_dir() {
                if self.which == Directories::Recursive {
                    self.enter(&path, depth + 1)?;
                }
            } else if is_manifest(&path) {
                self.found.push(path);
                if self.found.len() > MAX_FILES {
                    return Err(self.too_large(MAX_FILES, "manifests"));
                }
            }
        }
        Ok(())
    }

    fn too_large(&self, limit: usize, of: &'static str) -> Error {
        Error::LargeDirectory { dir: self.top.to_owned(), limit, of }
    }
}

fn is_manifest(path: &Path) -> bool {
    let suffix = path.extension().and_then(|suffix| suffix.to_str());
    matches!(suffix, Some("yaml" | "yml" | "json")) && path.is_file()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(dir: &Path, which: Directories) -> Vec<String> {
        let found = manifests(dir, which).unwrap();
        found.iter().map(|path| path.strip_prefix(dir).unwrap().display().to_string()).collect()
    }

    #[test]
    fn a_directory_is_walked_in_the_order_of_names_and_links_do_not_lead_away() {
        let root = tempfile::tempdir().unwrap();
        let (dir, elsewhere) = (root.path().join("dir"), root.path().join("elsewhere"));
        for path in [dir.join("b/deep/er"), dir.join("empty.yaml"), elsewhere.clone()] {
            fs::create_dir_all(path).unwrap();
        }
        for name in ["a.yaml", "c.json", "b/x.yml", "b/deep/y.yaml", "b/deep/er/z.yaml", "b/notes.txt"] {
            fs::write(dir.join(name), "").unwrap();
        }
        fs::write(elsewhere.join("secret.yaml"), "").unwrap();
        symlink(&elsewhere, dir.join("b/away")).unwrap();
        symlink(&dir, dir.join("b/deep/loop.yaml")).unwrap();
        symlink("x.yml", dir.join("b/w.yaml")).unwrap();
        symlink("nowhere", dir.join("b/v.yaml")).unwrap();
        nix::unistd::mkfifo(&dir.join("b/fifo.yaml"), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert_eq!(names(&dir, Directories::Flat), ["a.yaml", "c.json"]);
        assert_eq!(
            names(&dir, Directories::Recursive),
            ["a.yaml", "b/deep/er/z.yaml", "b/deep/y.yaml", "b/w.yaml", "b/x.yml", "c.json"]
        );
    }

    #[test]
    fn a_tree_has_limits() {
        let root = tempfile::tempdir().unwrap();
        let deep: PathBuf = (0..=MAX_DEPTH).map(|_| "d").collect();
        fs::create_dir_all(root.path().join(deep)).unwrap();
        let error = manifests(root.path(), Directories::Recursive).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{} has more than 64 levels of directories, the limit", root.path().display())
        );
        assert!(names(root.path(), Directories::Flat).is_empty());
        let many = tempfile::tempdir().unwrap();
        for number in 0..=MAX_FILES {
            fs::write(many.path().join(format!("{number}.yaml")), "").unwrap();
        }
        let error = manifests(many.path(), Directories::Flat).unwrap_err().to_string();
        assert!(error.ends_with("has more than 10000 manifests, the limit"), "{error}");
    }
}
