//! The VolumeCapability of each call to a driver.

use proto::csi::{
    VolumeCapability,
    volume_capability::{AccessMode as CsiAccessMode, AccessType, MountVolume, access_mode::Mode},
};

use super::error::Error;
use crate::clients::csi::NodeCapabilities;
use crate::objects::{AccessMode, PersistentVolume, VolumeMode};

/// Like kubelet, uses only the first of a PV's access modes.
pub(crate) fn of_volume(
    volume: &PersistentVolume,
    node: NodeCapabilities,
    fs_group: Option<u32>,
) -> Result<VolumeCapability, Error> {
    let field = |field, found: String, expected| Error::VolumeField {
        volume: volume.metadata.name.clone(),
        field,
        found,
        expected,
    };
    if volume.spec.volume_mode != VolumeMode::Filesystem {
        return Err(field("volumeMode", "Block".to_owned(), "use Filesystem"));
    }
    let Some(access_mode) = volume.spec.access_modes.first() else {
        return Err(field("accessModes", "[]".to_owned(), "set at least one"));
    };
    let csi = volume.spec.csi.as_ref();
    let mount = MountVolume {
        fs_type: csi.map(|c| c.fs_type.clone()).unwrap_or_default(),
        mount_flags: volume.spec.mount_options.clone(),
        volume_mount_group: match fs_group {
            Some(group) if node.mount_group => group.to_string(),
            _ => String::new(),
        },
    };
    Ok(mounted(mount, mode(*access_mode, node.single_node_multi_writer)))
}

/// For CreateVolume: one capability for each access mode of the claim.
pub(crate) fn of_claim(
    modes: &[AccessMode],
    fs_type: &str,
    mount_options: &[String],
    single_node_multi_writer: bool,
) -> Vec<VolumeCapability> {
    let mount = MountVolume {
        fs_type: fs_type.to_owned(),
        mount_flags: mount_options.to_vec(),
        volume_mount_group: String::new(),
    };
    modes.iter().map(|m| mounted(mount.clone(), mode(*m, single_node_multi_writer))).collect()
}

fn mounted(mount: MountVolume, mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_mode: Some(CsiAccessMode { mode: mode.into() }),
        access_type: Some(AccessType::Mount(mount)),
    }
}

fn mode(mode: AccessMode, single_node_multi_writer: bool) -> Mode {
    match (mode, single_node_multi_writer) {
        (AccessMode::ReadWriteOnce, false) | (AccessMode::ReadWriteOncePod, false) => Mode::SingleNodeWriter,
        (AccessMode::ReadWriteOnce, true) => Mode::SingleNodeMultiWriter,
        (AccessMode::ReadWriteOncePod, true) => Mode::SingleNodeSingleWriter,
        (AccessMode::ReadOnlyMany, _) => Mode::MultiNodeReaderOnly,
        (AccessMode::ReadWriteMany, _) => Mode::MultiNodeMultiWriter,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_once_modes_depend_on_the_drivers_capabilities() {
        assert_eq!(mode(AccessMode::ReadWriteOnce, false), Mode::SingleNodeWriter);
        assert_eq!(mode(AccessMode::ReadWriteOnce, true), Mode::SingleNodeMultiWriter);
        assert_eq!(mode(AccessMode::ReadWriteOncePod, true), Mode::SingleNodeSingleWriter);
        assert_eq!(mode(AccessMode::ReadWriteMany, true), Mode::MultiNodeMultiWriter);
    }

    #[test]
    fn the_mount_group_is_passed_only_to_drivers_that_take_it() {
        let volume: PersistentVolume = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "v"},
            "spec": {"accessModes": ["ReadWriteMany"], "csi": {"driver": "d", "volumeHandle": "h"}}
        }))
        .unwrap();
        let group = |caps| match of_volume(&volume, caps, Some(2000)).unwrap().access_type {
            Some(AccessType::Mount(mount)) => mount.volume_mount_group,
            _ => panic!("a mounted volume"),
        };
        assert_eq!(group(NodeCapabilities::default()), "");
        assert_eq!(group(NodeCapabilities { mount_group: true, ..NodeCapabilities::default() }), "2000");
    }
}
