//! Which new sizes of a claim are accepted (kubernetes, plugin/pkg/admission/storage/persistentvolume/resize).

use super::{Error, Key, Store};
use crate::objects::{Kind, PersistentVolumeClaim, Quantity};

const FIELD: &str = "spec.resources.requests.storage";

impl Store {
    /// Refuses a size of a bound claim that its volume cannot get. The class counts as it is now. The
    /// caller holds `writing`.
    pub(super) fn refuse_resize(&self, claim: &PersistentVolumeClaim) -> Result<(), Error> {
        let key = Key::of(claim);
        let Some(known) = self.claim(&key.namespace, &key.name) else { return Ok(()) };
        let size = |claim: &PersistentVolumeClaim| {
            claim.spec.resources.requests.get("storage").map_or(0, Quantity::value)
        };
        let (before, now) = (size(&known), size(claim));
        if known.spec.volume_name.is_empty() || now == before {
            return Ok(());
        }
        let capacity = known.status.capacity.get("storage").map_or(0, Quantity::value);
        let rule = if now < before && now < capacity {
            "field can not be less than status.capacity"
        } else if now > before && !self.can_expand(&known) {
            "only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize (allowVolumeExpansion: true)"
        } else {
            return Ok(());
        };
        Err(Error::Immutable { kind: Kind::PersistentVolumeClaim, name: key.name, field: FIELD, rule })
    }

    /// Whether the class of the claim's volume allows it to grow.
    pub(crate) fn can_expand(&self, claim: &PersistentVolumeClaim) -> bool {
        let volume = self.volume(&claim.spec.volume_name);
        let class = volume.and_then(|volume| self.class(&volume.spec.storage_class_name));
        class.is_some_and(|class| class.allow_volume_expansion)
    }
}
