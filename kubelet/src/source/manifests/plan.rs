//! Compares the files with the store's objects from files. Pure.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};

use super::Scope;
use super::directory::Files;
use crate::manifest::Manifest;
use crate::objects::Kind;
use crate::store::{AnyObject, Declaration, Declared};

/// The result of one scan.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    /// What the scan applies.
    pub(super) wanted: Vec<Wanted<'a>>,
    /// Further descriptions of a wanted object in changed files, each with the file that is used.
    pub(super) duplicates: Vec<(Wanted<'a>, &'a Path)>,
    pub(super) findings: Vec<Finding>,
}

#[derive(Debug)]
pub(super) struct Wanted<'a> {
    pub(super) path: &'a Path,
    pub(super) manifest: &'a Manifest,
    /// Its file has changed since the last scan.
    pub(super) is_new: bool,
}

/// A change that a second scan must confirm.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Finding {
    /// No file describes it.
    Gone(Declared),
    /// The file has mistakes.
    Broken(PathBuf),
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Name<'a> {
    kind: Kind,
    namespace: &'a str,
    name: &'a str,
}

/// Few objects differ in nothing else, and a plan hashes all objects twice.
impl Hash for Name<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// The names of the objects that files describe.
#[derive(Debug, Default)]
pub(super) struct Names(HashSet<(Kind, String, String)>);

impl Names {
    pub(super) fn of(files: &Files) -> Self {
        let mut names = Self::default();
        files.iter().flat_map(|(_, file)| file.manifests.iter()).for_each(|manifest| {
            names.insert(manifest);
        });
        names
    }

    /// Whether it is new.
    fn insert(&mut self, manifest: &Manifest) -> bool {
        let meta = manifest.object.metadata();
        self.0.insert((manifest.object.kind(), meta.namespace.clone(), meta.name.clone()))
    }
}

impl<'a> Plan<'a> {
    /// The plan when files were only added. Adds the names of their objects to `names`. `None` if one of the objects
    /// is already described: the plan must then be a full one, and `names` be made anew.
    ///
    /// Beside hundreds of objects, looking at each of them takes longer than reading the new file.
    pub(super) fn of_added(files: &'a Files, names: &mut Names) -> Option<Self> {
        let mut plan = Self { wanted: Vec::new(), duplicates: Vec::new(), findings: Vec::new() };
        for (path, file) in files.iter().filter(|(_, file)| file.is_new) {
            for manifest in file.manifests.iter() {
                if !names.insert(manifest) {
                    return None;
                }
                plan.wanted.push(Wanted { path, manifest, is_new: true });
            }
            if !file.mistakes.is_empty() {
                plan.findings.push(Finding::Broken(path.to_owned()));
            }
        }
        Some(plan)
    }

    pub(super) fn new(files: &'a Files, scope: Scope, declared: &[Declaration<'_>]) -> Self {
        let described = described(files, declared);
        let mut findings = Vec::new();
        for known in declared {
            // A file with mistakes may still describe its object. A file that is still being read may
            // contain an object of another file, for example after a rename.
            let is_described = described.contains_key(&declared_name(known));
            if !is_described && !files.is_unread() && !files.is_broken(known.path) {
                findings.push(Finding::Gone(known.to_declared()));
            }
        }
        let broken = files.iter().filter(|(_, file)| !file.mistakes.is_empty());
        findings.extend(broken.map(|(path, _)| Finding::Broken(path.to_owned())));
        let duplicates = duplicates(files, &described);
        let in_scope = |wanted: &Wanted<'_>| wanted.is_new || scope == Scope::Everything;
        let mut wanted: Vec<Wanted<'_>> = described.into_values().filter(in_scope).collect();
        wanted.sort_by_key(|wanted| (wanted.path, wanted.manifest.line));
        Self { wanted, duplicates, findings }
    }
}

fn duplicates<'a>(
    files: &'a Files,
    described: &HashMap<Name<'a>, Wanted<'a>>,
) -> Vec<(Wanted<'a>, &'a Path)> {
    let mut duplicates = Vec::new();
    for (path, file) in files.iter().filter(|(_, file)| file.is_new) {
        for manifest in file.manifests.iter() {
            let winner = described.get(&object_name(&manifest.object));
            if let Some(winner) = winner.filter(|winner| !std::ptr::eq(winner.manifest, manifest)) {
                duplicates.push((Wanted { path, manifest, is_new: true }, winner.path));
            }
        }
    }
    duplicates
}

/// One description per object: its current file takes precedence, then the first file by name.
fn described<'a>(files: &'a Files, declared: &[Declaration<'_>]) -> HashMap<Name<'a>, Wanted<'a>> {
    let mut described = HashMap::with_capacity(declared.len());
    for (path, file) in files.iter() {
        for manifest in file.manifests.iter() {
            let wanted = Wanted { path, manifest, is_new: file.is_new };
            match described.entry(object_name(&manifest.object)) {
                Entry::Vacant(entry) => drop(entry.insert(wanted)),
                Entry::Occupied(mut entry) => {
                    // Rare.
                    let holder = declared.iter().find(|known| declared_name(known) == *entry.key());
                    let is_holder = holder.is_some_and(|holder| holder.path == path);
                    if is_holder && entry.get().path != path {
                        entry.insert(wanted);
                    }
                }
            }
        }
    }
    described
}

fn object_name(object: &AnyObject) -> Name<'_> {
    let meta = object.metadata();
    Name { kind: object.kind(), namespace: &meta.namespace, name: &meta.name }
}

fn declared_name<'a>(declared: &Declaration<'a>) -> Name<'a> {
    Name { kind: declared.kind, namespace: declared.namespace, name: declared.name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_object_is_gone_while_a_file_is_read() {
        let path = Path::new("a.yaml");
        let declared = [Declaration { path, kind: Kind::Pod, namespace: "default", name: "web" }];
        let findings = |files: &Files| Plan::new(files, Scope::Everything, &declared).findings;
        assert_eq!(findings(&Files::default()), [Finding::Gone(declared[0].to_declared())]);
        assert_eq!(findings(&Files::reading("b.yaml")), []);
    }
}
