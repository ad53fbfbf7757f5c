//! Networks of pods. A conflist is loaded when it is used; its plugins run as libcni runs them, and
//! their results are cached where libcni caches them.
//!
//! Invariant: DEL may follow any prefix of ADD, any number of times.

mod cache;
mod conflist;
pub(crate) mod error;
mod exec;

use std::path::{Path, PathBuf};

use linux::netns::NetNs;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result, chain};
pub(crate) use conflist::NetworkList;
use error::PluginProblem;

#[derive(Debug, Clone)]
pub(crate) struct Cni {
    pub(crate) conf_dir: PathBuf,
    pub(crate) bin_dir: PathBuf,
    pub(crate) cache_dir: PathBuf,
}

/// One container's interface in one network.
#[derive(Debug, Clone)]
pub(crate) struct Attachment {
    pub(crate) container_id: String,
    /// `None` if the namespace is gone; DEL must work without it.
    pub(crate) netns: Option<PathBuf>,
    pub(crate) ifname: &'static str,
    /// CNI_ARGS, in order.
    pub(crate) args: Vec<(String, String)>,
    /// Values for plugins' runtimeConfig, by capability.
    pub(crate) capabilities: Map<String, Value>,
}

impl Cni {
    /// The first configuration in `conf_dir`, by name.
    pub(crate) fn network(&self) -> Result<NetworkList> {
        NetworkList::first_of(&self.conf_dir)
    }

    /// Calls ADD of every plugin in order, and returns the last result. After a failure the caller
    /// must run [`Self::delete`], which undoes the first plugins' work.
    pub(crate) async fn add(&self, list: &NetworkList, attachment: &Attachment) -> Result<Value> {
        let mut result = Value::Null;
        for plugin in &list.plugins {
            let config = list.plugin_config(plugin, &result, &attachment.capabilities);
            let text = exec::run(self, list, plugin, "ADD", attachment, &config).await?;
            result = serde_json::from_slice(&text)
                .map_err(|source| exec::failure(list, plugin, "ADD", PluginProblem::Result { source }))?;
        }
        cache::write(&self.cache_dir, list, attachment, &result)?;
        Ok(result)
    }

    /// The arguments of ADD for the pod's interface, from the cache of results: for a sandbox whose
    /// record is unreadable.
    pub(crate) fn attachments_of(
        &self,
        container_id: &str,
        ifname: &'static str,
    ) -> Vec<(NetworkList, Attachment)> {
        let adds = cache::adds_of(&self.cache_dir, container_id).into_iter();
        adds.filter(|add| add.ifname == ifname)
            .map(|add| {
                let attachment = Attachment {
                    container_id: container_id.to_owned(),
                    netns: add.netns.filter(|path| NetNs::open(path).is_ok()),
                    ifname,
                    args: add.args,
                    capabilities: add.capabilities,
                };
                (add.list, attachment)
            })
            .collect()
    }

    /// Calls DEL of every plugin in reverse order, with the cached result. Continues after an
    /// error, and then keeps the cached result for a retry.
    pub(crate) async fn delete(&self, list: &NetworkList, attachment: &Attachment) -> Result<()> {
        let cached = cache::read(&self.cache_dir, list, attachment)?;
        self.delete_with(cached, list, attachment).await
    }

    /// [`Self::delete`] for the list of an ADD that may have failed. If DEL fails too, and ADD never
    /// succeeded, the list may have a mistake that has since been corrected in `conf_dir`: DEL of the
    /// configured list then suffices. A plugin that refused its configuration made nothing, and the
    /// list's other plugins have had their DEL.
    pub(crate) async fn delete_attempted(&self, list: &NetworkList, attachment: &Attachment) -> Result<()> {
        let cached = cache::read(&self.cache_dir, list, attachment)?;
        let was_added = cached.is_some();
        let Err(failed) = self.delete_with(cached, list, attachment).await else { return Ok(()) };
        let configured = match self.network() {
            Ok(configured) if !was_added && configured != *list => configured,
            _ => return Err(failed),
        };
        match self.delete(&configured, attachment).await {
            Ok(()) => {
                tracing::warn!(error = %chain(&failed), "only DEL by the present configuration succeeded");
                Ok(())
            }
            Err(error) => Err(failed.after_rollback(vec![error])),
        }
    }

    async fn delete_with(
        &self,
        cached: Option<Value>,
        list: &NetworkList,
        attachment: &Attachment,
    ) -> Result<()> {
        let was_added = cached.is_some();
        let prev_result = cached.filter(|_| list.passes_result_to_delete()).unwrap_or(Value::Null);
        let mut errors = Vec::new();
        for plugin in list.plugins.iter().rev() {
            if !was_added && !self.bin_dir.join(&plugin.kind).is_file() {
                // ADD failed because this very plugin is missing: it made nothing.
                continue;
            }
            let config = list.plugin_config(plugin, &prev_result, &attachment.capabilities);
            errors.extend(exec::run(self, list, plugin, "DEL", attachment, &config).await.err());
        }
        if errors.is_empty() {
            return cache::remove(&self.cache_dir, list, attachment);
        }
        let first = errors.remove(0);
        Err(first.after_rollback(errors))
    }
}

/// Addresses of the interface `ifname` in a result of any version, without their prefix lengths. As in containerd, an
/// address of no interface counts; those of a plugin's other interfaces, also inside the pod, are not the pod's.
pub(crate) fn addresses(result: &Value, ifname: &str) -> Vec<String> {
    let without_prefix = |text: &str| text.split('/').next().unwrap_or(text).to_owned();
    let is_its_own = |ip: &Value| match ip["interface"].as_u64().and_then(|n| usize::try_from(n).ok()) {
        None => true,
        Some(index) => result["interfaces"][index]["name"].as_str() == Some(ifname),
    };
    let listed =
        result["ips"].as_array().into_iter().flatten().filter(|ip| is_its_own(ip)).map(|ip| &ip["address"]);
    // Results before 0.3.0 have one address a family.
    let old = [&result["ip4"]["ip"], &result["ip6"]["ip"]];
    listed.chain(old).filter_map(Value::as_str).map(without_prefix).collect()
}

/// The network that brings lo up, as in containerd.
pub(crate) fn loopback() -> NetworkList {
    NetworkList::parse(
        Path::new("cni-loopback"),
        json!({"cniVersion": "1.0.0", "name": "cni-loopback", "plugins": [{"type": "loopback"}]}),
    )
    .expect("the constant is a valid list")
}

impl NetworkList {
    fn error(&self, problem: impl std::fmt::Display) -> Error {
        Error::NetworkConfig { problem: format!("{}: {problem}", self.file.display()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_of_the_pods_interface_count() {
        let result = json!({
            "interfaces": [{"name": "cni0"}, {"name": "net1", "sandbox": "/ns"}, {"name": "eth0", "sandbox": "/ns"}],
            "ips": [{"address": "10.0.0.1/16", "interface": 0}, {"address": "10.1.0.5/16", "interface": 1},
                    {"address": "10.0.0.5/16", "interface": 2}, {"address": "fd00::5/64"},
                    {"address": "10.2.0.5/16", "interface": 3}],
        });
        assert_eq!(addresses(&result, "eth0"), ["10.0.0.5", "fd00::5"]);
        let without_sandbox =
            json!({"interfaces": [{"name": "eth0"}], "ips": [{"address": "10.0.0.6/16", "interface": 0}]});
        assert_eq!(addresses(&without_sandbox, "eth0"), ["10.0.0.6"]);
        assert_eq!(addresses(&json!({"ip4": {"ip": "10.0.0.7/16"}}), "eth0"), ["10.0.0.7"]);
    }

    #[test]
    fn the_loopback_list_is_valid() {
        assert_eq!(loopback().name, "cni-loopback");
    }
}
