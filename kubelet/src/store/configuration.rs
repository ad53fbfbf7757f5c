//! ConfigMaps and Secrets of the store.

use std::sync::Arc;

use super::{Error, Store};
use crate::objects::{ConfigMap, Secret};

impl Store {
    pub fn config_maps(&self) -> Vec<Arc<ConfigMap>> {
        self.state().config_maps.objects()
    }

    pub fn config_map(&self, namespace: &str, name: &str) -> Option<Arc<ConfigMap>> {
        self.state().config_maps.object(namespace, name)
    }

    pub fn secrets(&self) -> Vec<Arc<Secret>> {
        self.state().secrets.objects()
    }

    pub fn secret(&self, namespace: &str, name: &str) -> Option<Arc<Secret>> {
        self.state().secrets.object(namespace, name)
    }

    #[cfg(test)]
    pub(crate) fn put_secret(&self, secret: Secret) -> Result<(), Error> {
        self.put(secret)
    }

    /// Removes a ConfigMap; succeeds if there is none.
    pub fn remove_config_map(&self, namespace: &str, name: &str) -> Result<(), Error> {
        self.remove::<ConfigMap>(namespace, name)
    }

    /// Removes a Secret; succeeds if there is none.
    pub fn remove_secret(&self, namespace: &str, name: &str) -> Result<(), Error> {
        self.remove::<Secret>(namespace, name)
    }
}
