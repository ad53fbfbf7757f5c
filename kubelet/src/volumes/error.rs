//! Errors of volume operations.

use std::path::{Path, PathBuf};

use crate::clients::{csi, csi_secrets};
use crate::command_line::called_as::called_as;
use crate::objects::Kind;
use crate::store;

/// A failed volume operation. All errors but [`Error::Unsupported`] are retried.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{field} is not supported")]
    Unsupported { field: String },
    #[error(
        "persistentvolumeclaim \"{claim}\" not found: apply it, or correct spec.volumes[].persistentVolumeClaim.claimName"
    )]
    ClaimMissing { claim: String },
    #[error(
        "persistentvolumeclaim \"{claim}\" is not bound to a volume yet: see its events ({} describe pvc {claim})",
        called_as()
    )]
    ClaimPending { claim: String },
    #[error("persistentvolumeclaim \"{claim}\" was not created for this pod: delete it, or rename the pod")]
    ClaimOfOther { claim: String },
    #[error(transparent)]
    Store(store::Error),
    #[error("persistentvolumeclaim \"{claim}\" is being deleted")]
    ClaimDeleted { claim: String },
    #[error(
        "persistentvolumeclaim \"{claim}\" bound to non-existent persistentvolume \"{volume}\": \
         apply that volume again if the driver still has its data, or delete the claim and apply it anew"
    )]
    ClaimLost { claim: String, volume: String },
    #[error("persistentvolume \"{volume}\": spec.{field} {found:?} is not supported: {expected}")]
    VolumeField { volume: String, field: &'static str, found: String, expected: &'static str },
    #[error(
        "driver name {driver} not found in the list of registered CSI drivers: start the driver, with this kubelet's root directory"
    )]
    DriverMissing { driver: String },
    #[error(
        "csidriver \"{driver}\": spec.attachRequired true is not supported: no controller attaches volumes to a node without a cluster"
    )]
    AttachRequired { driver: String },
    #[error("{} \"{name}\" not found: apply it, or mark it as optional", kind.as_str().to_lowercase())]
    ObjectMissing { kind: Kind, name: String },
    #[error("{} \"{name}\" references non-existent key: {key}", kind.as_str().to_lowercase())]
    KeyMissing { kind: Kind, name: String, key: String },
    #[error("two files of the volume exclude each other: \"{parent}\" and \"{path}\"")]
    PathConflict { path: String, parent: String },
    #[error("the volume's content has more than {limit} {of}, the limit")]
    TooLarge { limit: usize, of: &'static str },
    #[error(
        "the configMap, secret, projected and downwardAPI volumes of the pod take more than {limit} bytes \
         together, the limit: each file counts in pages of {page} bytes, and each directory of its path as one"
    )]
    PodTooLarge { limit: usize, page: usize },
    #[error(transparent)]
    Csi(#[from] csi::Error),
    #[error(transparent)]
    Secrets(#[from] csi_secrets::Error),
    #[error("volume uses the ReadWriteOncePod access mode and is already in use by another pod")]
    InUseByOtherPod,
    #[error("the device mount path {} is still mounted by other references {references:?}", path.display())]
    StillReferenced { path: PathBuf, references: Vec<PathBuf> },
    #[error("hostPath type check failed: {} is not a {wanted}", path.display())]
    HostPathType { path: PathBuf, wanted: &'static str },
    #[error("{what}: the file system of {} has not answered within 5 s", path.display())]
    PathTimeout { what: &'static str, path: PathBuf },
    #[error(
        "{what}: {} was not checked, since {late} pods wait for file systems that do not answer",
        path.display()
    )]
    PathUnchecked { what: &'static str, path: PathBuf, late: usize },
    #[error("spec.volumes[].hostPath.type {found:?} is unknown")]
    HostPathTypeUnknown { found: String },
    #[error("spec.volumes[].hostPath.path {found:?} must be absolute and free of \"..\"")]
    HostPathRelative { found: String },
    #[error("subPath {path:?} must be a relative path without \"..\"")]
    SubPath { path: String },
    #[error("{} is still mounted: its content is not removed", path.display())]
    StillMounted { path: PathBuf },
    #[error("{op} {}", path.display())]
    Io {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("change the group of {} to fsGroup {group}", root.display())]
    FsGroup {
        root: PathBuf,
        group: u32,
        #[source]
        source: linux::Error,
    },
    #[error(transparent)]
    Kernel(linux::Error),
    #[error("{what} was interrupted")]
    Interrupted { what: &'static str },
}

impl Error {
    pub(crate) fn io(op: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { op, path: path.to_owned(), source }
    }

    /// Whether only a change of a ConfigMap or Secret can help.
    pub(crate) fn depends_on_configuration(&self) -> bool {
        matches!(
            self,
            Self::Secrets(_)
                | Self::ObjectMissing { .. }
                | Self::KeyMissing { .. }
                | Self::PathConflict { .. }
                | Self::TooLarge { .. }
                | Self::PodTooLarge { .. }
        )
    }

    /// The whole error chain on one line, for an event.
    pub(crate) fn text(&self) -> String {
        linux::chain(self)
    }
}
