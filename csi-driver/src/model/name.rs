//! The provisioner's names of volumes and snapshots.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::ids::{SnapshotId, VolumeId};

/// CSI spec, "Size limits": strings are at most 128 bytes.
pub(crate) const MAX_NAME_BYTES: usize = 128;

/// The provisioner's name of a volume or snapshot: 1 to 128 bytes without control characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeName(String);

impl VolumeName {
    pub fn parse(text: &str) -> Result<Self> {
        let reason = if text.is_empty() {
            return Err(Error::MissingField { field: "name" });
        } else if text.len() > MAX_NAME_BYTES {
            "longer than 128 bytes"
        } else if text.chars().any(char::is_control) {
            "a control character"
        } else {
            return Ok(Self(text.to_owned()));
        };
        Err(Error::invalid("name", text, reason))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl VolumeId {
    pub fn for_name(name: &VolumeName) -> Self {
        Self::digest(&name.0)
    }
}

impl SnapshotId {
    pub fn for_name(name: &VolumeName) -> Self {
        Self::digest(&name.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> VolumeId {
        VolumeId::for_name(&VolumeName::parse(name).unwrap())
    }

    #[test]
    fn a_name_has_one_id_and_the_id_reads_back() {
        assert_eq!(id("pvc-1"), id("pvc-1"));
        assert_ne!(id("pvc-1"), id("pvc-2"));
        assert_eq!(VolumeId::parse(id("pvc-1").as_str()), Some(id("pvc-1")));
        assert_eq!(VolumeId::from_key(id("pvc-1").key()), Some(id("pvc-1")));
    }

    #[test]
    fn volumes_and_snapshots_of_one_name_are_told_apart() {
        let snapshot = SnapshotId::for_name(&VolumeName::parse("pvc-1").unwrap());
        assert_eq!(snapshot.key(), id("pvc-1").key());
        assert_eq!(VolumeId::parse(snapshot.as_str()), None);
        assert_eq!(SnapshotId::parse(snapshot.as_str()), Some(snapshot));
    }

    #[test]
    fn a_name_of_128_bytes_has_a_short_id() {
        assert_eq!(id(&"n".repeat(128)).as_str().len(), 36);
    }

    #[test]
    fn what_could_leave_its_directory_is_no_id() {
        for text in [
            "",
            "vol-",
            "../../etc",
            "vol-../../../../../../../../../etc/x",
            "vol-ABCDEF00ABCDEF00ABCDEF00ABCDEF00",
        ] {
            assert_eq!(VolumeId::parse(text), None, "{text}");
            assert_eq!(SnapshotId::parse(text), None, "{text}");
        }
    }

    #[test]
    fn empty_long_and_unprintable_names_are_refused() {
        assert!(matches!(VolumeName::parse(""), Err(Error::MissingField { field: "name" })));
        for text in [&"n".repeat(129), "a\nb"] {
            assert!(
                matches!(VolumeName::parse(text), Err(Error::InvalidField { field: "name", .. })),
                "{text}"
            );
        }
    }
}
