//! The list of the control groups that this or an earlier runtime made above its containers' groups.
//!
//! The file has a JSON array of paths, then one for each pod since: a pod's start adds to the list,
//! which is long on a node with hundreds of pods, and does not write it anew.
//!
//! Invariant: a group is in the file before it is made. The file may name groups that were not made.

use std::path::{Path, PathBuf};

use linux::atomic_file;

use crate::error::{Error, Result, chain};
use crate::record;

const NAME: &str = "cgroups.json";
/// Far more than thousands of pods need. At that size the list is written anew.
const MOST_BYTES: u64 = 4 << 20;

#[derive(Debug)]
pub(crate) struct CreatedGroups {
    file: PathBuf,
    /// In order of creation.
    groups: Vec<PathBuf>,
}

impl CreatedGroups {
    /// Reads the list of an earlier runtime. What was written last may be torn, and is dropped.
    pub(crate) fn open(root_dir: &Path) -> Result<Self> {
        let file = root_dir.join(NAME);
        let content = match atomic_file::read(&file) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|e| Error::io("read", &file, e))?,
        };
        let mut groups = Vec::new();
        for part in serde_json::Deserializer::from_slice(&content).into_iter::<Vec<PathBuf>>() {
            match part {
                Ok(part) => groups.extend(part),
                Err(error) => {
                    tracing::warn!(path = %file.display(), %error, "dropped the rest of the list of cgroups");
                    break;
                }
            }
        }
        groups.retain(|group| group.exists());
        let list = Self { file, groups };
        // The next line must not follow a torn one.
        list.save()?;
        Ok(list)
    }

    /// Adds groups to the file before they are made.
    pub(crate) fn announce(&self, missing: &[PathBuf]) -> Result<()> {
        let mut line = serde_json::to_vec(missing).expect("paths are strings");
        line.push(b'\n');
        if atomic_file::append(&self.file, &line, MOST_BYTES)? {
            return Ok(());
        }
        record::save(&self.file, &[&self.groups[..], missing].concat())
    }

    /// Adds groups that were announced and then made.
    pub(crate) fn add(&mut self, made: Vec<PathBuf>) {
        self.groups.extend(made);
    }

    /// Removes the groups that are not needed, and returns those that could not be removed to the list.
    pub(crate) fn remove_unused(&mut self, is_needed: impl Fn(&Path) -> bool) {
        let (mut kept, unused): (Vec<PathBuf>, Vec<PathBuf>) =
            self.groups.drain(..).partition(|group| is_needed(group));
        kept.extend(linux::cgroup::remove_dirs(&unused));
        self.groups = kept;
        if let Err(error) = self.save() {
            // Harmless: the list may have groups that are gone.
            tracing::warn!(error = %chain(&error), "list of cgroups");
        }
    }

    fn save(&self) -> Result<()> {
        record::save(&self.file, &self.groups)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(dir: &Path) -> Vec<PathBuf> {
        CreatedGroups::open(dir).unwrap().groups
    }

    #[test]
    fn a_runtime_finds_what_an_earlier_one_made_or_was_about_to_make() {
        let dir = tempfile::tempdir().unwrap();
        let made = ["a", "b", "c"].map(|name| dir.path().join(name));
        made.iter().for_each(|group| std::fs::create_dir(group).unwrap());
        let mut groups = CreatedGroups::open(dir.path()).unwrap();
        groups.announce(&made[..1]).unwrap();
        groups.add(made[..1].to_vec());
        groups.announce(&[made[1].clone(), dir.path().join("never-made")]).unwrap();
        drop(groups);
        assert_eq!(list(dir.path()), made[..2]);

        let groups = CreatedGroups::open(dir.path()).unwrap();
        groups.announce(&made[2..]).unwrap();
        let file = dir.path().join(NAME);
        let content = std::fs::read(&file).unwrap();
        std::fs::write(&file, &content[..content.len() - 3]).unwrap();
        assert_eq!(list(dir.path()), made[..2], "the last line is torn");
        groups.announce(&made[2..]).unwrap();
        assert_eq!(list(dir.path()), made);
    }

    #[test]
    fn groups_that_no_pod_needs_leave_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let made = ["a", "b"].map(|name| dir.path().join(name));
        made.iter().for_each(|group| std::fs::create_dir(group).unwrap());
        let mut groups = CreatedGroups::open(dir.path()).unwrap();
        groups.announce(&made).unwrap();
        groups.add(made.to_vec());
        groups.remove_unused(|group| group.ends_with("a"));
        assert_eq!(list(dir.path()), made[..1]);
        assert!(!made[1].exists());
    }
}
