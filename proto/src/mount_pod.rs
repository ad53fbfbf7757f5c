//! By which labels and annotations `hawser-kubelet` knows the pod of a volume's daemon that
//! `hawser-csi` has written.

/// Label of every mount pod, with the value [`ROLE`].
pub const ROLE_LABEL: &str = "hawser.dev/role";
pub const ROLE: &str = "mount-pod";
/// Label: a digest of the volume's id, since an id may be no label's value.
pub const VOLUME_LABEL: &str = "hawser.dev/volume";
/// Annotation: the volume's id, whose users hear of the daemon's end.
pub const VOLUME_ID_ANNOTATION: &str = "hawser.dev/volume-id";
/// Annotation, which any pod may have: with `none`, an empty network namespace, `lo` down, no CNI call.
pub const NETWORK_ANNOTATION: &str = "hawser.dev/network";
