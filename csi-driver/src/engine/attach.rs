//! Attachments, with --attach: which nodes may use a volume.
//!
//! Each attachment has a new random number in `publish_context`. The driver refuses a stage or
//! publish without it. So a node that was detached without noticing cannot return to a volume that
//! another node writes to.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::Config;
use crate::engine::locks::Locks;
use crate::engine::stage::Stages;
use crate::error::{Error, Result, Step};
use crate::journal::Journal;
use crate::kernel::mounts;
use crate::model::access_mode::AccessMode;
use crate::model::capability::Access;
use crate::model::ids::VolumeId;
use crate::model::records::{Attachment, VolumeRecord};

/// The key in `publish_context`.
pub(crate) const ATTACHMENT_KEY: &str = "hawser.dev/attachment";

/// Records which nodes may use which volumes.
#[derive(Debug)]
pub(crate) struct Attachments {
    pub(crate) config: Arc<Config>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) locks: Locks,
    pub(crate) stages: Arc<Stages>,
    /// Held from counting a node's attachments until the new one is in the journal.
    pub(crate) counting: Mutex<()>,
}

/// What an attachment allows its node (CSI: PUBLISH_READONLY).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowed {
    read_only: bool,
}

impl Allowed {
    /// The access that a publish gets.
    pub(crate) fn limit(self, access: Access) -> Access {
        Access { read_only: access.read_only || self.read_only, ..access }
    }

    /// The access that a stage gets. The stage itself stays writable, since a volume has one mount for
    /// all publishes, but a node that only reads does not change the files' group.
    pub(crate) fn limit_stage(self, access: Access) -> Access {
        Access { group: access.group.filter(|_| !self.read_only), ..access }
    }
}

impl Attachments {
    /// ControllerPublishVolume: returns the number that the node must present.
    pub(crate) fn attach(&self, volume_id: &VolumeId, node_id: &str, access: Access) -> Result<String> {
        let mut record = self.journal.get(volume_id)?;
        record.check_usable(volume_id)?;
        self.check_node(node_id)?;
        if let Some(found) = record.attachments.get(node_id) {
            if found.access == access {
                return Ok(found.nonce.clone());
            }
            return Err(Error::AttachedOtherwise {
                volume_id: volume_id.clone(),
                node_id: node_id.to_owned(),
                found: found.access.to_string(),
                wanted: access.to_string(),
            });
        }
        if let Some((other, _)) =
            record.attachments.iter().find(|(_, other)| !may_share(other.access, access))
        {
            let (node_id, mode) = (other.clone(), access.mode);
            return Err(Error::AttachedElsewhere { volume_id: volume_id.clone(), node_id, mode });
        }
        // Otherwise two volumes could both take the last place.
        let _counting = self.counting.lock().unwrap_or_else(PoisonError::into_inner);
        self.check_limit(node_id)?;
        let nonce = linux::random::hexadecimal().step("draw nonce")?;
        record.attachments.insert(node_id.to_owned(), Attachment { access, nonce: nonce.clone() });
        self.journal.put(volume_id, &record)?;
        Ok(nonce)
    }

    /// ControllerUnpublishVolume, from every node if none is named. A volume that is not attached
    /// is a success.
    pub(crate) fn detach(&self, volume_id: &VolumeId, node_id: Option<&str>) -> Result<()> {
        let Some(mut record) = self.journal.find(volume_id)? else { return Ok(()) };
        let leaves = |node: &String| node_id.is_none_or(|wanted| wanted == node);
        if !record.attachments.keys().any(leaves) {
            return Ok(());
        }
        if record.attachments.keys().any(|node| leaves(node) && *node == self.config.node_id) {
            self.check_unstaged(volume_id, &mut record)?;
            // A node keeps nothing of a volume that is not attached to it.
            if record.parked.is_some() {
                self.locks.check_not_copied(volume_id)?;
                self.stages.end_parked(volume_id, &mut record)?;
            }
            record.restage = None;
        }
        record.attachments.retain(|node, _| !leaves(node));
        self.journal.put(volume_id, &record)
    }

    /// DeleteVolume requires that the volume is attached to no node.
    pub(crate) fn check_detached(&self, volume_id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        match record.attachments.keys().next() {
            Some(node_id) if self.config.attach => {
                let (volume_id, node_id) = (volume_id.clone(), node_id.clone());
                Err(Error::StillAttached { volume_id, node_id })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// For stage and publish: the caller must present the number of this node's attachment. Without
    /// --attach, every call passes. Returns what the attachment allows.
    pub(crate) fn check_attachment(
        &self,
        volume_id: &VolumeId,
        publish_context: &HashMap<String, String>,
    ) -> Result<Allowed> {
        if !self.config.attach {
            return Ok(Allowed { read_only: false });
        }
        let (record, node_id) = (self.journal.get(volume_id)?, &self.config.node_id);
        if let Some(attachment) = record.attachments.get(node_id)
            && publish_context.get(ATTACHMENT_KEY) == Some(&attachment.nonce)
        {
            return Ok(Allowed { read_only: attachment.access.read_only });
        }
        let (volume_id, node_id) = (volume_id.clone(), node_id.clone());
        Err(Error::NotAttached { volume_id, node_id, key: ATTACHMENT_KEY })
    }

    fn check_node(&self, node_id: &str) -> Result<()> {
        let known = || std::iter::once(&self.config.node_id).chain(&self.config.peer_nodes);
        if known().any(|node| node == node_id) {
            return Ok(());
        }
        let known = known().map(String::as_str).collect::<Vec<_>>().join(", ");
        Err(Error::UnknownNode { node_id: node_id.to_owned(), known })
    }

    fn check_limit(&self, node_id: &str) -> Result<()> {
        let limit = self.config.max_volumes;
        let attached =
            || self.journal.list().iter().filter(|(_, r)| r.attachments.contains_key(node_id)).count();
        if limit == 0 || u64::try_from(attached()).unwrap_or(u64::MAX) < u64::from(limit) {
            return Ok(());
        }
        Err(Error::TooManyVolumes { node_id: node_id.to_owned(), limit: limit.into() })
    }

    fn check_unstaged(&self, volume_id: &VolumeId, record: &mut VolumeRecord) -> Result<()> {
        for target in record.targets.keys() {
            if mounts::is_mounted(target, volume_id)? {
                return Err(Error::StillPublished { volume_id: volume_id.clone(), path: target.clone() });
            }
        }
        self.stages.check_unused(volume_id, record)
    }
}

/// Whether two nodes may use one volume with these access modes.
fn may_share(one: Access, other: Access) -> bool {
    let is_multi_node = |access: Access| match access.mode {
        AccessMode::MultiNodeReaderOnly
        | AccessMode::MultiNodeSingleWriter
        | AccessMode::MultiNodeMultiWriter => true,
        AccessMode::SingleNodeWriter
        | AccessMode::SingleNodeReaderOnly
        | AccessMode::SingleNodeSingleWriter
        | AccessMode::SingleNodeMultiWriter => false,
    };
    let is_exclusive = |access: Access| access.mode == AccessMode::MultiNodeSingleWriter && !access.read_only;
    let both_write = !one.read_only && !other.read_only;
    is_multi_node(one) && is_multi_node(other) && !(both_write && (is_exclusive(one) || is_exclusive(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_modes_of_many_nodes_are_shared_and_a_single_writer_has_no_second() {
        use AccessMode::*;
        let read_write = Access::plain;
        let read_only = |mode| Access { read_only: true, ..Access::plain(mode) };
        for (one, other, shared) in [
            (read_write(MultiNodeMultiWriter), read_write(MultiNodeMultiWriter), true),
            (read_only(MultiNodeReaderOnly), read_only(MultiNodeReaderOnly), true),
            (read_write(MultiNodeSingleWriter), read_write(MultiNodeSingleWriter), false),
            (read_write(MultiNodeSingleWriter), read_only(MultiNodeSingleWriter), true),
            (read_write(MultiNodeSingleWriter), read_write(MultiNodeMultiWriter), false),
            (read_write(SingleNodeWriter), read_write(SingleNodeWriter), false),
            (read_write(SingleNodeMultiWriter), read_write(MultiNodeMultiWriter), false),
            (read_only(SingleNodeReaderOnly), read_only(MultiNodeReaderOnly), false),
        ] {
            assert_eq!(may_share(one, other), shared, "{one} and {other}");
            assert_eq!(may_share(other, one), shared, "{other} and {one}");
        }
    }
}
