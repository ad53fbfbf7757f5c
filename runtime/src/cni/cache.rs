//! Results of ADD, kept for DEL where and as libcni keeps them:
//! `<cache>/results/<network>-<container>-<ifname>`, kind `cniCacheV1`.

use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use super::{Attachment, NetworkList};
use crate::error::{Error, Result};
use crate::record;

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

/// The result; `None` when there is none, or when it is of another kind.
pub(super) fn read(cache_dir: &Path, list: &NetworkList, attachment: &Attachment) -> Result<Option<Value>> {
    let entry: Option<Value> = record::find(&path(cache_dir, list, attachment))?;
    Ok(entry.filter(|e| e["kind"] == "cniCacheV1").map(|mut e| e["result"].take()).filter(|r| !r.is_null()))
}

pub(super) fn remove(cache_dir: &Path, list: &NetworkList, attachment: &Attachment) -> Result<()> {
    let path = path(cache_dir, list, attachment);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io("remove", &path, e)),
        _ => Ok(()),
    }
}

fn path(cache_dir: &Path, list: &NetworkList, attachment: &Attachment) -> PathBuf {
    cache_dir.join("results").join(format!("{}-{}-{}", list.name, attachment.container_id, attachment.ifname))
}
