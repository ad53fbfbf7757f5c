//! The list of the control groups that this or an earlier runtime made above its containers' groups.
//!
//! The file has a JSON array of paths, then one for each pod since: a pod's start adds to the list,
//! which is long on a node with hundreds of pods, and does not write it anew.
//!
//! Invariant: a group is in the file before it is made. The file may name groups that were not made.

use std::path::{Path, PathBuf};

use linux::atomic_file;

use crate::disk::record;
use crate::error::{Result, chain};

const NAME: &str = "cgroups.json";
/// Far more than thousands of pods need. At that size the list is written anew.
const MOST_BYTES: u64 = 4 << 20;

#[derive(Debug)]
pub(crate) struct CreatedGroups {
    file: PathBuf,
    /// In order of creation.
    groups: Vec<PathBuf>,
    /// The file's last line must not be continued.
    is_torn: bool,
}

impl CreatedGroups {
    /// Reads the list of an earlier runtime. What was written last may be torn, and is dropped. Writes
    /// nothing if it need not: a node must start on a full disk.
    pub(crate) fn open(root_dir: &Path) -> Self {
        let file = root_dir.join(NAME);
        let mut list = Self { file, groups: Vec::new(), is_torn: false };
        match atomic_file::read(&list.file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => list.drop_the_rest(&error),
            Ok(content) => {
                for part in serde_json::Deserializer::from_slice(&content).into_iter::<Vec<PathBuf>>() {
                    match part {
                        Ok(part) => list.groups.extend(part),
                        Err(error) => list.drop_the_rest(&error),
                    }
                }
            }
        }
        list.groups.retain(|group| group.exists());
        list
    }

    fn drop_the_rest(&mut self, error: &dyn std::error::Error) {
        tracing::warn!(path = %self.file.display(), %error, "dropped the rest of the list of cgroups");
        self.is_torn = true;
    }

    /// Adds groups to the file before they are made.
    pub(crate) fn announce(&mut self, missing: &[PathBuf]) -> Result<()> {
        let mut line = serde_json::to_vec(missing).expect("paths are strings");
        line.push(b'\n');
        if !self.is_torn && atomic_file::append(&self.file, &line, MOST_BYTES)? {
            return Ok(());
        }
        record::save(&self.file, &[&self.groups[..], missing].concat())?;
        self.is_torn = false;
        Ok(())
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
        match record::save(&self.file, &self.groups) {
            Ok(()) => self.is_torn = false,
            // Harmless: the list may have groups that are gone.
            Err(error) => tracing::warn!(error = %chain(&error), "list of cgroups"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(dir: &Path) -> Vec<PathBuf> {
        CreatedGroups::open(dir).groups
    }

    #[test]
    fn a_runtime_finds_what_an_earlier_one_made_or_was_about_to_make() {
        let dir = tempfile::tempdir().unwrap();
        let made = ["a", "b", "c"].map(|name| dir.path().join(name));
        made.iter().for_each(|group| std::fs::create_dir(group).unwrap());
        let mut groups = CreatedGroups::open(dir.path());
        groups.announce(&made[..1]).unwrap();
        groups.add(made[..1].to_vec());
        groups.announce(&[made[1].clone(), dir.path().join("never-made")]).unwrap();
        drop(groups);
        assert_eq!(list(dir.path()), made[..2]);

        let mut groups = CreatedGroups::open(dir.path());
        groups.announce(&made[2..]).unwrap();
        let file = dir.path().join(NAME);
        let content = std::fs::read(&file).unwrap();
        std::fs::write(&file, &content[..content.len() - 3]).unwrap();
        let mut groups = CreatedGroups::open(dir.path());
        assert_eq!(groups.groups, made[..2], "the last line is torn");
        groups.announce(&made[2..]).unwrap();
        assert_eq!(list(dir.path()), made);
    }

    #[test]
    fn groups_that_no_pod_needs_leave_the_list() {
        let dir = tempfile::tempdir().unwrap();
        let made = ["a", "b"].map(|name| dir.path().join(name));
        made.iter().for_each(|group| std::fs::create_dir(group).unwrap());
        let mut groups = CreatedGroups::open(dir.path());
        groups.announce(&made).unwrap();
        groups.add(made.to_vec());
        groups.remove_unused(|group| group.ends_with("a"));
        assert_eq!(list(dir.path()), made[..1]);
        assert!(!made[1].exists());
    }
}
