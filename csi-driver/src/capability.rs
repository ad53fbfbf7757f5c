//! VolumeCapability, checked: how a volume is to be used.

use std::fmt;

use proto::csi::volume_capability::access_mode::Mode;
use proto::csi::volume_capability::{AccessType, MountVolume};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The access modes that a directory of this node's pool can have: all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AccessMode {
    SingleNodeWriter,
    SingleNodeReaderOnly,
    SingleNodeSingleWriter,
    SingleNodeMultiWriter,
    MultiNodeReaderOnly,
    MultiNodeSingleWriter,
    MultiNodeMultiWriter,
}

impl AccessMode {
    fn from_wire(mode: Mode) -> Option<Self> {
        Some(match mode {
            Mode::Unknown => return None,
            Mode::SingleNodeWriter => Self::SingleNodeWriter,
            Mode::SingleNodeReaderOnly => Self::SingleNodeReaderOnly,
            Mode::SingleNodeSingleWriter => Self::SingleNodeSingleWriter,
            Mode::SingleNodeMultiWriter => Self::SingleNodeMultiWriter,
            Mode::MultiNodeReaderOnly => Self::MultiNodeReaderOnly,
            Mode::MultiNodeSingleWriter => Self::MultiNodeSingleWriter,
            Mode::MultiNodeMultiWriter => Self::MultiNodeMultiWriter,
        })
    }

    pub fn is_reader_only(self) -> bool {
        matches!(self, Self::SingleNodeReaderOnly | Self::MultiNodeReaderOnly)
    }

    /// CSI spec, NodePublishVolume: whether a second target path on this node is allowed.
    pub fn allows_second_target(self) -> bool {
        match self {
            Self::SingleNodeMultiWriter
            | Self::MultiNodeReaderOnly
            | Self::MultiNodeSingleWriter
            | Self::MultiNodeMultiWriter => true,
            Self::SingleNodeWriter | Self::SingleNodeReaderOnly | Self::SingleNodeSingleWriter => false,
        }
    }
}

impl fmt::Display for AccessMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SingleNodeWriter => "SINGLE_NODE_WRITER",
            Self::SingleNodeReaderOnly => "SINGLE_NODE_READER_ONLY",
            Self::SingleNodeSingleWriter => "SINGLE_NODE_SINGLE_WRITER",
            Self::SingleNodeMultiWriter => "SINGLE_NODE_MULTI_WRITER",
            Self::MultiNodeReaderOnly => "MULTI_NODE_READER_ONLY",
            Self::MultiNodeSingleWriter => "MULTI_NODE_SINGLE_WRITER",
            Self::MultiNodeMultiWriter => "MULTI_NODE_MULTI_WRITER",
        })
    }
}

/// A capability that this driver supports, or a publish that asks for less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Access {
    pub mode: AccessMode,
    pub read_only: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.mode, if self.read_only { "read-only" } else { "read-write" })
    }
}

impl Access {
    /// A missing or unsupported part is an error that names it.
    pub(crate) fn parse(capability: Option<&proto::csi::VolumeCapability>) -> Result<Self> {
        let field = "volume_capability";
        let capability = capability.ok_or(Error::MissingField { field })?;
        let read_only_flag = match &capability.access_type {
            None => return Err(Error::MissingField { field: "volume_capability.access_type" }),
            Some(AccessType::Block(_)) => {
                return Err(Error::invalid(field, "block", "volumes are file systems: use mount"));
            }
            Some(AccessType::Mount(mount)) => parse_mount(mount)?,
        };
        let number = capability.access_mode.as_ref().map_or(0, |m| m.mode);
        let mode = Mode::try_from(number).ok().and_then(AccessMode::from_wire).ok_or_else(|| {
            Error::invalid("volume_capability.access_mode", number.to_string(), "unknown access mode")
        })?;
        Ok(Self { mode, read_only: read_only_flag || mode.is_reader_only() })
    }

    /// At least one, each supported.
    pub(crate) fn parse_all(capabilities: &[proto::csi::VolumeCapability]) -> Result<Vec<Self>> {
        if capabilities.is_empty() {
            return Err(Error::MissingField { field: "volume_capabilities" });
        }
        capabilities.iter().map(|c| Self::parse(Some(c))).collect()
    }
}

/// Whether the mount flags ask for read-only.
fn parse_mount(mount: &MountVolume) -> Result<bool> {
    // fs_type is what a block volume is formatted with; some provisioners send a default.
    if !matches!(mount.fs_type.as_str(), "" | "fuse" | "fuse.hawser") {
        let field = "volume_capability.mount.fs_type";
        return Err(Error::invalid(field, &mount.fs_type, "volumes are FUSE: leave it empty"));
    }
    if !mount.volume_mount_group.is_empty() {
        let field = "volume_capability.mount.volume_mount_group";
        return Err(Error::invalid(field, &mount.volume_mount_group, "VOLUME_MOUNT_GROUP is not offered"));
    }
    let mut read_only = false;
    for flag in &mount.mount_flags {
        match flag.as_str() {
            "ro" => read_only = true,
            // What every volume is anyway.
            "rw" | "nosuid" | "nodev" => {}
            other => {
                let field = "volume_capability.mount.mount_flags";
                return Err(Error::invalid(field, other, "known are ro, rw, nosuid, nodev"));
            }
        }
    }
    Ok(read_only)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proto::csi::VolumeCapability;
    use proto::csi::volume_capability::{AccessMode as WireMode, BlockVolume};

    fn capability(mode: Mode, mount: MountVolume) -> VolumeCapability {
        VolumeCapability {
            access_type: Some(AccessType::Mount(mount)),
            access_mode: Some(WireMode { mode: mode.into() }),
        }
    }

    #[test]
    fn reader_only_modes_and_the_ro_flag_are_read_only() {
        let flags = |f: &str| MountVolume { mount_flags: vec![f.into()], ..Default::default() };
        for (mode, mount, read_only) in [
            (Mode::SingleNodeWriter, MountVolume::default(), false),
            (Mode::SingleNodeWriter, flags("ro"), true),
            (Mode::MultiNodeReaderOnly, flags("rw"), true),
        ] {
            assert_eq!(Access::parse(Some(&capability(mode, mount))).unwrap().read_only, read_only);
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let mount = |m: MountVolume| capability(Mode::SingleNodeWriter, m);
        let block = VolumeCapability {
            access_type: Some(AccessType::Block(BlockVolume {})),
            access_mode: Some(WireMode { mode: 1 }),
        };
        for (wire, named) in [
            (mount(MountVolume { fs_type: "ext4".into(), ..Default::default() }), "fs_type: \"ext4\""),
            (mount(MountVolume { mount_flags: vec!["exec".into()], ..Default::default() }), "\"exec\""),
            (
                mount(MountVolume { volume_mount_group: "7".into(), ..Default::default() }),
                "volume_mount_group",
            ),
            (capability(Mode::Unknown, MountVolume::default()), "access_mode"),
            (block, "block"),
            (VolumeCapability { access_type: None, access_mode: None }, "access_type is required"),
        ] {
            let message = Access::parse(Some(&wire)).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }
}
