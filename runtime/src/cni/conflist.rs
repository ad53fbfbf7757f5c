//! Network configuration lists, and the configuration that each plugin gets on stdin.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

const EXTENSIONS: &[&str] = &["conf", "conflist", "json"];

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetworkList {
    /// The file it was read from; every error message names it.
    pub(crate) file: PathBuf,
    pub(crate) name: String,
    pub(crate) cni_version: String,
    pub(crate) plugins: Vec<Plugin>,
    /// The whole list, for the cache.
    pub(crate) source: Value,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plugin {
    /// Name of the executable.
    pub(crate) kind: String,
    pub(crate) config: Map<String, Value>,
}

impl NetworkList {
    pub(super) fn first_of(conf_dir: &Path) -> Result<Self> {
        let unreadable =
            |path: &Path, source| Error::NetworkConfigUnreadable { path: path.to_owned(), source };
        let first = std::fs::read_dir(conf_dir)
            .map_err(|source| unreadable(conf_dir, source))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().and_then(|e| e.to_str()).is_some_and(|e| EXTENSIONS.contains(&e)))
            .min()
            .ok_or_else(|| Error::NetworkConfig {
                problem: format!("no network configuration in {}", conf_dir.display()),
            })?;
        let bytes = std::fs::read(&first).map_err(|source| unreadable(&first, source))?;
        match serde_json::from_slice(&bytes) {
            Ok(source) => Self::parse(&first, source),
            Err(source) => Err(Error::NetworkConfigInvalid { path: first, source }),
        }
    }

    /// A list, or a single plugin's configuration as a list of one.
    pub(super) fn parse(file: &Path, source: Value) -> Result<Self> {
        let mut list = Self {
            file: file.to_owned(),
            name: text(&source, "name"),
            cni_version: text(&source, "cniVersion"),
            plugins: Vec::new(),
            source,
        };
        if !is_name(&list.name) {
            return Err(
                list.error(format!("name {:?}: letters, digits, '_', '.' and '-' are needed", list.name))
            );
        }
        let configs = match list.source.get("plugins") {
            Some(Value::Array(plugins)) => plugins.clone(),
            Some(_) => return Err(list.error("plugins: not a list")),
            None => {
                // As in libcni; the cached configuration is then a list, too.
                let single = list.source.clone();
                list.source = json!({"cniVersion": list.cni_version, "name": list.name, "plugins": [single]});
                vec![single]
            }
        };
        for config in configs {
            let kind = text(&config, "type");
            let Value::Object(config) = config else {
                return Err(list.error("plugins: an entry is no object"));
            };
            if kind.is_empty() || kind.contains('/') {
                return Err(list.error(format!("plugins: type {kind:?} is not the name of an executable")));
            }
            list.plugins.push(Plugin { kind, config });
        }
        if list.plugins.is_empty() {
            return Err(list.error("plugins: empty"));
        }
        Ok(list)
    }

    /// stdin of one plugin: its own configuration with name, version, the previous result, and the
    /// capabilities that it declares.
    pub(super) fn plugin_config(
        &self,
        plugin: &Plugin,
        prev_result: &Value,
        offered: &Map<String, Value>,
    ) -> Value {
        let mut config = plugin.config.clone();
        config.insert("name".to_owned(), json!(self.name));
        config.insert("cniVersion".to_owned(), json!(self.cni_version));
        if !prev_result.is_null() {
            config.insert("prevResult".to_owned(), prev_result.clone());
        }
        let declared = plugin.config.get("capabilities").and_then(Value::as_object);
        let wanted: Map<String, Value> = offered
            .iter()
            .filter(|(name, _)| declared.is_some_and(|d| d.get(*name) == Some(&json!(true))))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        if !wanted.is_empty() {
            config.insert("runtimeConfig".to_owned(), Value::Object(wanted));
        }
        Value::Object(config)
    }

    /// Before 0.4.0, DEL had no prevResult.
    pub(super) fn passes_result_to_delete(&self) -> bool {
        let number = |n: Option<&str>| n.and_then(|n| n.parse::<u32>().ok()).unwrap_or(0);
        let mut parts = self.cni_version.split('.');
        (number(parts.next()), number(parts.next())) >= (0, 4)
    }
}

fn text(value: &Value, key: &str) -> String {
    value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn is_name(name: &str) -> bool {
    let mut bytes = name.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphanumeric())
        && bytes.all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<NetworkList> {
        NetworkList::parse(Path::new("/conf/10.conflist"), serde_json::from_str(text).unwrap())
    }

    #[test]
    fn a_single_configuration_becomes_a_list_of_one() {
        let list = parse(r#"{"cniVersion":"1.0.0","name":"net","type":"bridge","mtu":1400}"#).unwrap();
        assert_eq!(list.plugins[0].kind, "bridge");
        assert_eq!(list.source["plugins"][0]["mtu"], 1400);
    }

    #[test]
    fn a_plugin_sees_only_the_capabilities_it_declares() {
        let list = parse(
            r#"{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"portmap","capabilities":{"portMappings":true}}]}"#,
        )
        .unwrap();
        let offered = json!({"portMappings": [1], "dns": {}});
        let config = list.plugin_config(&list.plugins[0], &json!({"ips": []}), offered.as_object().unwrap());
        assert_eq!(config["runtimeConfig"], json!({"portMappings": [1]}));
        assert_eq!(config["prevResult"], json!({"ips": []}));
        assert_eq!(config["name"], "net");
    }

    #[test]
    fn what_is_wrong_is_said_with_the_file() {
        let err = parse(r#"{"name":"net","plugins":[{"type":"../x"}]}"#).unwrap_err();
        assert_eq!(
            err.to_string(),
            "cni: /conf/10.conflist: plugins: type \"../x\" is not the name of an executable"
        );
    }

    #[test]
    fn the_first_file_in_order_of_name_is_used() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("00-readme.txt"), "no").unwrap();
        std::fs::write(dir.path().join("20.conf"), r#"{"name":"b","type":"bridge"}"#).unwrap();
        std::fs::write(dir.path().join("10.conflist"), r#"{"name":"a","plugins":[{"type":"bridge"}]}"#)
            .unwrap();
        assert_eq!(NetworkList::first_of(dir.path()).unwrap().name, "a");
    }

    #[test]
    fn an_empty_directory_is_said_to_be_empty() {
        let dir = tempfile::tempdir().unwrap();
        let err = NetworkList::first_of(dir.path()).unwrap_err();
        assert_eq!(err.to_string(), format!("cni: no network configuration in {}", dir.path().display()));
    }

    #[test]
    fn a_file_that_cannot_be_read_or_parsed_is_named_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("10.conflist");
        let reason = || crate::error::chain(&NetworkList::first_of(dir.path()).unwrap_err());
        std::fs::write(&file, "{").unwrap();
        let parse = format!("cni: parse {}: EOF while parsing", file.display());
        assert!(reason().starts_with(&parse), "{}", reason());
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink("gone", &file).unwrap();
        let read = format!("cni: read {}: No such file", file.display());
        assert!(reason().starts_with(&read), "{}", reason());
    }

    #[test]
    fn delete_has_a_result_from_0_4_0_on() {
        let of = |version: &str| {
            parse(&format!(r#"{{"cniVersion":"{version}","name":"n","type":"t"}}"#))
                .unwrap()
                .passes_result_to_delete()
        };
        assert!(!of("0.3.1") && of("0.4.0") && of("1.0.0") && !of(""));
    }
}
