//! Cached results of ADD, in libcni's format and place:
//! `<cache>/results/<network>-<container>-<ifname>`, kind `cniCacheV1`.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::{Attachment, NetworkList};
use crate::disk::record;
use crate::error::Result;

pub(super) fn write(
    cache_dir: &Path,
    list: &NetworkList,
    attachment: &Attachment,
    result: &Value,
) -> Result<()> {
    let path = path(cache_dir, list, attachment);
    if let Some(dir) = path.parent() {
        record::ensure_dir(dir)?;
    }
    let mut entry = json!({
        "kind": "cniCacheV1",
        "containerId": attachment.container_id,
        "config": STANDARD.encode(list.source.to_string()),
        "ifName": attachment.ifname,
        "networkName": list.name,
        "netns": attachment.netns,
        "cniArgs": attachment.args,
        "result": result,
    });
    if !attachment.capabilities.is_empty() {
        entry["capabilityArgs"] = Value::Object(attachment.capabilities.clone());
    }
    record::save(&path, &entry)
}

/// The result; `None` if there is none, or if it is of another kind.
pub(super) fn read(cache_dir: &Path, list: &NetworkList, attachment: &Attachment) -> Result<Option<Value>> {
    // A file that a power cut has torn counts as missing: DEL works without a result.
    let entry: Option<Value> = record::find_or_drop(&path(cache_dir, list, attachment))?;
    Ok(entry.filter(|e| e["kind"] == "cniCacheV1").map(|mut e| e["result"].take()).filter(|r| !r.is_null()))
}

/// The arguments of one ADD.
#[derive(Debug)]
pub(super) struct CachedAdd {
    pub(super) list: NetworkList,
    pub(super) ifname: String,
    pub(super) netns: Option<PathBuf>,
    pub(super) args: Vec<(String, String)>,
    pub(super) capabilities: Map<String, Value>,
}

impl CachedAdd {
    fn of(file: &Path, entry: &Value) -> Option<Self> {
        let source = STANDARD.decode(entry["config"].as_str()?).ok()?;
        let pair = |pair: &Value| Some((pair[0].as_str()?.to_owned(), pair[1].as_str()?.to_owned()));
        Some(Self {
            list: NetworkList::parse(file, serde_json::from_slice(&source).ok()?).ok()?,
            ifname: entry["ifName"].as_str()?.to_owned(),
            netns: entry["netns"].as_str().map(PathBuf::from),
            args: entry["cniArgs"].as_array().into_iter().flatten().filter_map(pair).collect(),
            capabilities: entry["capabilityArgs"].as_object().cloned().unwrap_or_default(),
        })
    }
}

/// Every cached ADD of a container. Skips unreadable entries.
pub(super) fn adds_of(cache_dir: &Path, container_id: &str) -> Vec<CachedAdd> {
    let dir = cache_dir.join("results");
    let entries = record::names(&dir).unwrap_or_default().into_iter().filter_map(|name| {
        let path = dir.join(name);
        let entry: Value = record::find(&path).ok().flatten()?;
        if entry["kind"] != "cniCacheV1" || entry["containerId"] != container_id {
            return None;
        }
        CachedAdd::of(&path, &entry)
    });
    entries.collect()
}

/// Removes the entry, and the temporary file of a writer that was killed.
pub(super) fn remove(cache_dir: &Path, list: &NetworkList, attachment: &Attachment) -> Result<()> {
    let path = path(cache_dir, list, attachment);
    linux::atomic_file::discard(&path)?;
    Ok(linux::atomic_file::remove_leftovers(&path)?)
}

fn path(cache_dir: &Path, list: &NetworkList, attachment: &Attachment) -> PathBuf {
    cache_dir.join("results").join(format!("{}-{}-{}", list.name, attachment.container_id, attachment.ifname))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_writer_left_goes_with_the_entry_and_that_of_others_stays() {
        let dir = tempfile::tempdir().unwrap();
        let source = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge"}]});
        let list = NetworkList::parse(Path::new("net.conflist"), source).unwrap();
        let attachment = Attachment {
            container_id: "one".into(),
            netns: None,
            ifname: "eth0",
            args: Vec::new(),
            capabilities: serde_json::Map::new(),
        };
        remove(dir.path(), &list, &attachment).expect("there is no cache yet");
        write(dir.path(), &list, &attachment, &json!({})).unwrap();
        let results = dir.path().join("results");
        for half in [".net-one-eth0.12.tmp", ".net-two-eth0.12.tmp"] {
            std::fs::write(results.join(half), "{").unwrap();
        }
        remove(dir.path(), &list, &attachment).unwrap();
        assert_eq!(record::names(&results).unwrap(), [".net-two-eth0.12.tmp"]);
    }
}
