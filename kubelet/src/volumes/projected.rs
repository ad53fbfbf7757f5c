//! The files of configMap, secret, projected and downwardAPI volumes, as data. No effects.
//!
//! Sources and their contents are users': paths were checked by `manifest`, and the size of a volume
//! is bounded here.

use std::collections::BTreeMap;

use super::error::Error;
use crate::objects::{
    ConfigMap, ConfigMapVolume, DownwardFile, DownwardVolume, KeyToPath, Kind, Pod, ProjectedVolume, Secret,
    SecretVolume,
};
use crate::pod::fields::{self, Capacity};
use crate::store::Store;

/// The contents of one volume. kubelet has no such limit; a projected volume may name any number of
/// objects of 1 MiB each, and most of these volumes are in memory.
pub(super) const MOST_BYTES: usize = 4 << 20;
/// Files of one volume: far more than 1 MiB of ordinary configuration has.
const MOST_FILES: usize = 20_000;

const DEFAULT_MODE: u32 = 0o644;

/// The source of such a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source {
    ConfigMap(ConfigMapVolume),
    Secret(SecretVolume),
    Downward(DownwardVolume),
    Projected(ProjectedVolume),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct File {
    pub(super) content: Vec<u8>,
    /// Permission bits.
    pub(super) mode: u32,
}

/// By the path below the volume's root.
pub(super) type Files = BTreeMap<String, File>;

impl Source {
    /// kubelet keeps all but configMaps in memory.
    pub(super) fn is_in_memory(&self) -> bool {
        !matches!(self, Self::ConfigMap(_))
    }

    /// Whether a change of this object changes the volume.
    pub(super) fn depends_on(&self, kind: Kind, name: &str) -> bool {
        match (self, kind) {
            (Self::ConfigMap(source), Kind::ConfigMap) => source.name == name,
            (Self::Secret(source), Kind::Secret) => source.secret_name == name,
            (Self::Downward(_), Kind::Pod) => true,
            (Self::Projected(volume), _) => volume.sources.iter().any(|source| match kind {
                Kind::ConfigMap => source.config_map.as_ref().is_some_and(|keys| keys.name == name),
                Kind::Secret => source.secret.as_ref().is_some_and(|keys| keys.name == name),
                Kind::Pod => source.downward_api.is_some(),
                _ => false,
            }),
            _ => false,
        }
    }

    /// The volume's files now.
    pub(super) fn files(&self, store: &Store, pod: &Pod, node: Capacity) -> Result<Files, Error> {
        let mut writer = Writer { store, pod, node, bytes: 0, added: 0, files: Files::new() };
        match self {
            Self::ConfigMap(ConfigMapVolume { name, items, default_mode, optional }) => {
                let keys = Keys { name, items, optional: *optional };
                writer.add_config_map(keys, default_mode.unwrap_or(DEFAULT_MODE))?;
            }
            Self::Secret(SecretVolume { secret_name: name, items, default_mode, optional }) => {
                let keys = Keys { name, items, optional: *optional };
                writer.add_secret(keys, default_mode.unwrap_or(DEFAULT_MODE))?;
            }
            Self::Downward(DownwardVolume { items, default_mode }) => {
                writer.add_fields(items, default_mode.unwrap_or(DEFAULT_MODE))?;
            }
            Self::Projected(ProjectedVolume { sources, default_mode }) => {
                let mode = default_mode.unwrap_or(DEFAULT_MODE);
                for source in sources {
                    if let Some(keys) = &source.config_map {
                        let keys = Keys { name: &keys.name, items: &keys.items, optional: keys.optional };
                        writer.add_config_map(keys, mode)?;
                    }
                    if let Some(keys) = &source.secret {
                        let keys = Keys { name: &keys.name, items: &keys.items, optional: keys.optional };
                        writer.add_secret(keys, mode)?;
                    }
                    if let Some(fields) = &source.downward_api {
                        writer.add_fields(&fields.items, mode)?;
                    }
                }
            }
        }
        check_paths(&writer.files)?;
        Ok(writer.files)
    }
}

/// Which keys of an object become files.
#[derive(Clone, Copy)]
struct Keys<'a> {
    name: &'a str,
    items: &'a [KeyToPath],
    optional: bool,
}

struct Writer<'a> {
    store: &'a Store,
    pod: &'a Pod,
    node: Capacity,
    bytes: usize,
    /// Files, with those that a later source has replaced.
    added: usize,
    files: Files,
}

impl Writer<'_> {
    fn add_config_map(&mut self, keys: Keys<'_>, mode: u32) -> Result<(), Error> {
        let map = self.store.config_map(&self.pod.metadata.namespace, keys.name);
        self.add_keys(Kind::ConfigMap, keys, map.as_deref().map(ConfigMap::entries), mode)
    }

    fn add_secret(&mut self, keys: Keys<'_>, mode: u32) -> Result<(), Error> {
        let secret = self.store.secret(&self.pod.metadata.namespace, keys.name);
        self.add_keys(Kind::Secret, keys, secret.as_deref().map(Secret::entries), mode)
    }

    fn add_keys(
        &mut self,
        kind: Kind,
        keys: Keys<'_>,
        entries: Option<BTreeMap<&str, &[u8]>>,
        mode: u32,
    ) -> Result<(), Error> {
        let Some(entries) = entries else {
            if keys.optional {
                return Ok(());
            }
            return Err(Error::ObjectMissing { kind, name: keys.name.to_owned() });
        };
        if keys.items.is_empty() {
            return entries.iter().try_for_each(|(key, content)| self.add(key, content, mode));
        }
        for KeyToPath { key, path, mode: own } in keys.items {
            match entries.get(key.as_str()) {
                Some(content) => self.add(path, content, own.unwrap_or(mode))?,
                None if keys.optional => {}
                None => {
                    let (name, key) = (keys.name.to_owned(), key.clone());
                    return Err(Error::KeyMissing { kind, name, key });
                }
            }
        }
        Ok(())
    }

    fn add_fields(&mut self, items: &[DownwardFile], mode: u32) -> Result<(), Error> {
        for item in items {
            let value = match (&item.field_ref, &item.resource_field_ref) {
                (Some(field), _) => fields::of_file(&field.field_path, self.pod),
                (None, Some(resource)) => fields::of_resource(resource, None, self.pod, self.node),
                (None, None) => None,
            };
            let Some(value) = value else {
                return Err(Error::Unsupported { field: format!("downwardAPI.items[path={}]", item.path) });
            };
            self.add(&item.path, value.as_bytes(), item.mode.unwrap_or(mode))?;
        }
        Ok(())
    }

    /// As with kubelet, a later source replaces the file of an earlier one.
    fn add(&mut self, path: &str, content: &[u8], mode: u32) -> Result<(), Error> {
        self.bytes = self.bytes.saturating_add(content.len());
        if self.bytes > MOST_BYTES {
            return Err(Error::TooLarge { limit: MOST_BYTES, of: "bytes" });
        }
        // Also those that replace others: the work counts.
        self.added += 1;
        if self.added > MOST_FILES {
            return Err(Error::TooLarge { limit: MOST_FILES, of: "files" });
        }
        self.files.insert(path.to_owned(), File { content: content.to_vec(), mode });
        Ok(())
    }
}

/// No file lies below another one.
fn check_paths(files: &Files) -> Result<(), Error> {
    for path in files.keys() {
        let mut parents = path.match_indices('/').map(|(at, _)| &path[..at]);
        if let Some(parent) = parents.find(|parent| files.contains_key(*parent)) {
            return Err(Error::PathConflict { path: path.clone(), parent: parent.to_owned() });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::manifest;
    use crate::store;

    fn pod() -> Pod {
        from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": "default", "uid": "u"},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "2"}}}]}
        }))
        .unwrap()
    }

    fn store(text: &str) -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), "node").unwrap();
        let parsed = manifest::parse(text.as_bytes(), "test.yaml");
        assert_eq!(parsed.errors, []);
        for object in parsed.manifests {
            store.apply(object.described(), store::Source::Api).unwrap();
        }
        (dir, store)
    }

    const OBJECTS: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: settings}\ndata: {a: one, b: two}\n---\n\
                           apiVersion: v1\nkind: Secret\nmetadata: {name: token}\nstringData: {a: hush}\n";

    fn shown(files: &Files) -> Vec<(&str, &str, u32)> {
        let shown = |(path, file)| -> (&str, &str, u32) {
            let (path, file): (&String, &File) = (path, file);
            (path, std::str::from_utf8(&file.content).unwrap(), file.mode)
        };
        files.iter().map(shown).collect()
    }

    fn files(source: &Source, store: &Store) -> Result<Files, Error> {
        source.files(store, &pod(), Capacity::default())
    }

    #[test]
    fn keys_become_files_with_their_modes() {
        let (_dir, store) = store(OBJECTS);
        let all = Source::ConfigMap(from_value(json!({"name": "settings", "defaultMode": 0o600})).unwrap());
        assert_eq!(shown(&files(&all, &store).unwrap()), [("a", "one", 0o600), ("b", "two", 0o600)]);
        let items = json!([{"key": "b", "path": "x/y"}, {"key": "a", "path": "z", "mode": 0o400}]);
        let some = Source::ConfigMap(from_value(json!({"name": "settings", "items": items})).unwrap());
        assert_eq!(shown(&files(&some, &store).unwrap()), [("x/y", "two", 0o644), ("z", "one", 0o400)]);
    }

    #[test]
    fn what_is_missing_is_named_unless_it_is_optional() {
        let (_dir, store) = store(OBJECTS);
        let source = |volume| Source::Secret(from_value(volume).unwrap());
        let error = files(&source(json!({"secretName": "none"})), &store).unwrap_err();
        assert!(error.to_string().starts_with("secret \"none\" not found"), "{error}");
        let absent_key = json!({"secretName": "token", "items": [{"key": "b", "path": "b"}]});
        let error = files(&source(absent_key.clone()), &store).unwrap_err();
        assert_eq!(error.to_string(), "secret \"token\" references non-existent key: b");
        for mut volume in [json!({"secretName": "none"}), absent_key] {
            volume["optional"] = true.into();
            assert_eq!(files(&source(volume), &store).unwrap(), Files::new());
        }
    }

    #[test]
    fn a_projected_volume_has_the_files_of_all_its_sources() {
        let (_dir, store) = store(OBJECTS);
        let sources = json!([
            {"configMap": {"name": "settings", "items": [{"key": "a", "path": "config/a"}]}},
            {"secret": {"name": "token"}},
            {"downwardAPI": {"items": [
                {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}},
                {"path": "cpu", "resourceFieldRef": {"containerName": "c", "resource": "limits.cpu"}, "mode": 0o440},
            ]}},
        ]);
        let volume = json!({"sources": sources, "defaultMode": 0o444});
        let source = Source::Projected(from_value(volume).unwrap());
        assert_eq!(
            shown(&files(&source, &store).unwrap()),
            [("a", "hush", 0o444), ("config/a", "one", 0o444), ("cpu", "2", 0o440), ("name", "web", 0o444)]
        );
        assert!(source.depends_on(Kind::Secret, "token") && source.depends_on(Kind::Pod, "web"));
        assert!(!source.depends_on(Kind::ConfigMap, "token"));
    }

    #[test]
    fn a_file_below_a_file_and_too_much_content_are_refused() {
        let (_dir, mut_store) = store(OBJECTS);
        let items = json!([{"key": "a", "path": "x"}, {"key": "b", "path": "x/y"}]);
        let source = Source::ConfigMap(from_value(json!({"name": "settings", "items": items})).unwrap());
        let error = files(&source, &mut_store).unwrap_err();
        assert_eq!(error.to_string(), "two files of the volume exclude each other: \"x\" and \"x/y\"");

        let large = "x".repeat(1 << 20);
        let (_dir, large_store) = store(&format!(
            "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: large}}\ndata: {{a: {large}}}\n"
        ));
        let sources: Vec<_> = (0..5)
            .map(|number| json!({"configMap": {"name": "large", "items": [{"key": "a", "path": number.to_string()}]}}))
            .collect();
        let source =
            |number: usize| Source::Projected(from_value(json!({"sources": sources[..number]})).unwrap());
        assert_eq!(files(&source(4), &large_store).unwrap().len(), 4);
        let error = files(&source(5), &large_store).unwrap_err();
        assert_eq!(error.to_string(), "the volume's content has more than 4194304 bytes, the limit");
    }
}
