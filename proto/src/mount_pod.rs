//! The contract between `hawser-csi`, which writes the pods of volumes' daemons and of the keeper,
//! and a kubelet that runs them: labels, annotations and names.

/// Where mount pods are.
pub const NAMESPACE: &str = "hawser-system";
/// Label of every mount pod, with the value [`ROLE`].
pub const ROLE_LABEL: &str = "hawser.dev/role";
pub const ROLE: &str = "mount-pod";
/// The value of [`ROLE_LABEL`] of the keeper's pod.
pub const KEEPER_ROLE: &str = "keeper";
/// Label: a digest of the volume's id, since an id may be no label's value.
pub const VOLUME_LABEL: &str = "hawser.dev/volume";
/// Annotation: the volume's id. Users of this volume get an event when the daemon ends.
pub const VOLUME_ID_ANNOTATION: &str = "hawser.dev/volume-id";
/// Annotation: the run directory of the driver that wrote the pod. A driver leaves pods of
/// other drivers alone.
pub const RUN_DIR_ANNOTATION: &str = "hawser.dev/run-dir";
/// Annotation, which any pod may have: with `none`, an empty network namespace, `lo` down, no CNI call.
pub const NETWORK_ANNOTATION: &str = "hawser.dev/network";
/// The container in which the daemon runs.
pub const CONTAINER: &str = "volume";
