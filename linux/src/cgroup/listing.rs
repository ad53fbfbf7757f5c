//! Lists existing and missing groups in all hierarchies.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::{Hierarchies, WANTED, first_of, under};
use crate::{Error, Result};

impl Hierarchies {
    /// Names of the groups directly below `path` in any hierarchy: if a program was killed while it
    /// made or removed a group, the group is only in some of them.
    pub fn names_below(&self, path: &Path) -> Result<BTreeSet<String>> {
        let mut names = BTreeSet::new();
        for root in self.v1.iter().chain(&self.unified) {
            let dir = under(root, path);
            let failed = |e| Error::at("list cgroup", &dir, e);
            match fs::read_dir(&dir) {
                Err(e) if e.kind() == ErrorKind::NotFound => {}
                Err(e) => return Err(failed(e)),
                Ok(entries) => {
                    for entry in entries {
                        let entry = entry.map_err(failed)?;
                        let is_group = entry.file_type().map_err(failed)?.is_dir();
                        names.extend(is_group.then(|| entry.file_name().to_string_lossy().into_owned()));
                    }
                }
            }
        }
        Ok(names)
    }

    /// The missing groups that [`Self::ensure_parent`] and similar functions may make for `path`,
    /// parents first. The caller records them before, so that a kill in between leaves no unknown
    /// group.
    pub fn missing_parents(&self, path: &Path) -> Vec<PathBuf> {
        let mut missing = Vec::new();
        for place in self.all_places(WANTED) {
            for path in [path.to_owned(), place.path(path), first_of(path)] {
                let dir = under(place.root, &path);
                let mut above: Vec<&Path> = dir.ancestors().take_while(|dir| *dir != place.root).collect();
                above.reverse();
                missing.extend(above.into_iter().filter(|dir| !dir.exists()).map(Path::to_owned));
            }
        }
        let mut known = BTreeSet::new();
        missing.retain(|dir| known.insert(dir.clone()));
        missing
    }
}
