//! `delete`: the only way to a claim's data.
//!
//! What a file describes is refused: the next look at the directory would bring
//! it back, and a claim's data would be gone for nothing.

use proto::kubelet::{DeleteProgress, DeleteRequest};
use tokio::sync::{broadcast, mpsc};

use super::Error;
use super::get::plural;
use crate::engine::Handle;
use crate::objects::Kind;
use crate::standalone::provisioner::users_of_claim;
use crate::store::{Change, Store};

type Answers = mpsc::Sender<Result<DeleteProgress, Error>>;

/// A deletion that is on record.
#[derive(Debug)]
pub(super) struct Deletion {
    store: Store,
    engine: Handle,
    changes: broadcast::Receiver<Change>,
    kind: Kind,
    namespace: String,
    name: String,
    /// Of the object that goes: a later one of its name is another.
    uid: String,
    wait: bool,
}

impl Deletion {
    pub(super) fn begin(store: &Store, engine: &Handle, request: DeleteRequest) -> Result<Self, Error> {
        let key = request.key.unwrap_or_default();
        let kind: Kind = key.kind.parse()?;
        if matches!(kind, Kind::Event | Kind::Node) {
            return Err(Error::NotDeletable { kind });
        }
        let namespace = if kind.is_namespaced() { key.namespace } else { String::new() };
        let mut deletion = Self {
            changes: store.subscribe(),
            store: store.clone(),
            engine: engine.clone(),
            kind,
            namespace,
            name: key.name,
            uid: String::new(),
            wait: request.wait,
        };
        deletion.uid = deletion
            .current_uid()
            .ok_or_else(|| Error::NotFound { plural: plural(kind), name: deletion.name.clone() })?;
        deletion.refuse_described()?;
        deletion.mark(request.grace_period_seconds.and_then(|seconds| u64::try_from(seconds).ok()))?;
        Ok(deletion)
    }

    /// Sends what it waits for, and returns when the object is gone.
    pub(super) async fn finish(mut self, answers: Answers) {
        let mut reported = Vec::new();
        while self.wait && self.current_uid().as_ref() == Some(&self.uid) {
            let users = match self.kind {
                Kind::PersistentVolumeClaim => self.users_of_claim(),
                _ => Vec::new(),
            };
            if !users.is_empty() && users != reported {
                let message = format!("waiting for the pods that use it: {}", users.join(", "));
                if answers.send(Ok(DeleteProgress { message })).await.is_err() {
                    return;
                }
                reported = users;
            }
            tokio::select! {
                // Lagging or not: look again.
                change = self.changes.recv() => drop(change),
                () = answers.closed() => return,
            }
        }
    }

    /// The pods that keep a claim from going, as `namespace/name`.
    fn users_of_claim(&self) -> Vec<String> {
        let Some(claim) = self.store.claim(&self.namespace, &self.name) else { return Vec::new() };
        let users = users_of_claim(&self.store, self.engine.volumes(), &claim);
        users.into_iter().map(|pod| format!("{}/{}", pod.metadata.namespace, pod.metadata.name)).collect()
    }

    fn refuse_described(&self) -> Result<(), Error> {
        let described = self.store.describing_file(self.kind, &self.namespace, &self.name);
        // The directory's own view may be some milliseconds behind an rm.
        match described.filter(|file| file.exists()) {
            None => Ok(()),
            Some(file) => Err(Error::DescribedByFile { kind: self.kind, name: self.name.clone(), file }),
        }
    }

    fn mark(&self, grace_seconds: Option<u64>) -> Result<(), Error> {
        let (namespace, name) = (&self.namespace, &self.name);
        match self.kind {
            Kind::Pod => drop(self.store.mark_pod_deleted(namespace, name, grace_seconds)?),
            Kind::PersistentVolumeClaim => drop(self.engine.delete_claim(namespace, name)?),
            Kind::PersistentVolume => drop(self.engine.delete_volume(name)?),
            Kind::StorageClass => self.store.remove_class(name)?,
            Kind::CsiDriver => self.store.remove_csi_driver(name)?,
            Kind::VolumeSnapshot => self.store.mark_snapshot_deleted(namespace, name)?,
            Kind::VolumeSnapshotClass => self.store.remove_snapshot_class(name)?,
            Kind::VolumeSnapshotContent => self.store.mark_snapshot_content_deleted(name)?,
            Kind::ConfigMap => self.store.remove_config_map(namespace, name)?,
            Kind::Secret => self.store.remove_secret(namespace, name)?,
            kind @ (Kind::Event | Kind::Node) => return Err(Error::NotDeletable { kind }),
        }
        Ok(())
    }

    fn current_uid(&self) -> Option<String> {
        self.store.uid_of(self.kind, &self.namespace, &self.name)
    }
}
