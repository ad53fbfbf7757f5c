//! Mounts the parts of volumes that a container asks for, before it is created.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::Worker;
use crate::container_config;
use crate::container_config::environment::Origins;
use crate::objects::Container;
use crate::pod::fields::PodFacts;

impl Worker {
    /// The places of the parts, by the index of the volumeMount; or why the container cannot be
    /// configured.
    pub(super) async fn mount_sub_paths(
        &self,
        container: &Container,
        facts: &PodFacts,
    ) -> Result<BTreeMap<usize, PathBuf>, String> {
        let (pod, tools) = (&self.pod, &self.tools);
        let origins = Origins { pod, container, facts, store: &tools.store, root_dir: &tools.root_dir };
        let parts = container_config::sub_paths(origins).map_err(|e| linux::chain(&e))?;
        let mut places = BTreeMap::new();
        for part in parts {
            let volume = self.mounted.as_ref().and_then(|mounted| mounted.get(&part.volume));
            let volume =
                volume.ok_or_else(|| format!("volumeMounts {}: the pod has no such volume", part.volume))?;
            let (number, name) = (part.number, part.volume.clone());
            let place = tools.volumes.mount_sub_path(pod, volume, part).await;
            let failed = |e: crate::volumes::Error| {
                format!(
                    "failed to prepare subPath for volumeMount \"{name}\" of container \"{}\": {}",
                    container.name,
                    e.text()
                )
            };
            places.insert(number, place.map_err(failed)?);
        }
        Ok(places)
    }
}
