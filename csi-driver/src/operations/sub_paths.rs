//! Mounts of parts of volumes (`subPath` in a pod's volumeMounts). kubelet makes and unmounts them
//! itself, so the journal names none of them.

use std::path::{Path, PathBuf};

use linux::mountinfo::MountEntry;

use crate::model::records::VolumeRecord;

/// `<kubelet-dir>/pods/<uid>/volume-subpaths/<volume>/<container>/<number>`, where kubelet mounts one part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SubPath<'a> {
    pod_dir: &'a Path,
}

impl<'a> SubPath<'a> {
    pub(crate) fn parse(mount_point: &'a Path) -> Option<Self> {
        let of_pod = mount_point.parent()?.parent()?.parent()?;
        let pod_dir = of_pod.parent()?;
        let is_kubelets =
            of_pod.file_name()? == "volume-subpaths" && pod_dir.parent()?.file_name()? == "pods";
        is_kubelets.then_some(Self { pod_dir })
    }

    /// kubelet's directories of the pod's volumes, with their `vol_data.json`. A part's own directory has the name
    /// of the PersistentVolume, or that of the volume in the pod.
    pub(crate) fn volume_dirs(self) -> impl Iterator<Item = PathBuf> {
        let entries = std::fs::read_dir(self.pod_dir.join("volumes/kubernetes.io~csi"));
        entries.into_iter().flatten().flatten().map(|entry| entry.path())
    }
}

/// Whether `mount` is a part of a volume that is staged and published for the same pod. kubelet unmounts
/// the parts before it unpublishes the volume: later ones are left over. A volume that was staged again
/// has another connection than the parts of its older pods.
pub(crate) fn is_of_published(record: &VolumeRecord, mount: &MountEntry) -> bool {
    let serving = record.stage.as_ref().and_then(|stage| stage.serving);
    let is_staged = serving.is_some_and(|serving| serving.connection_minor == mount.minor);
    let is_pods = |part: SubPath<'_>| record.targets.keys().any(|target| target.starts_with(part.pod_dir));
    is_staged && SubPath::parse(&mount.mount_point).is_some_and(is_pods)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_place_where_kubelet_mounts_a_part_is_one() {
        let part = Path::new("/k/pods/u/volume-subpaths/pv/main/0");
        assert_eq!(SubPath::parse(part), Some(SubPath { pod_dir: Path::new("/k/pods/u") }));
        for other in [
            "/",
            "/k/pods/u/volumes/kubernetes.io~csi/pv/mount",
            "/k/pods/u/volume-subpaths/pv/main",
            "/k/pods/u/volume-subpaths/pv/main/0/inside",
            "/k/others/u/volume-subpaths/pv/main/0",
        ] {
            assert_eq!(SubPath::parse(Path::new(other)), None, "{other}");
        }
    }
}
