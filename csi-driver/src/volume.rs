//! What volumes and snapshots are called: by the provisioner, by us, and on disk.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// CSI spec, "Size limits": strings are at most 128 bytes.
pub(crate) const MAX_NAME_BYTES: usize = 128;
const KEY_DIGITS: usize = 32;

macro_rules! hashed_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            pub fn for_name(name: &VolumeName) -> Self {
                Self(format!("{}{}", $prefix, key_of(&name.0)))
            }

            /// `None` for a string that this driver never gave out: nothing of that id exists.
            pub fn parse(text: &str) -> Option<Self> {
                Self::from_key(text.strip_prefix($prefix)?)
            }

            /// From the digits alone, as they stand in names of directories and manifests.
            pub fn from_key(key: &str) -> Option<Self> {
                is_key(key).then(|| Self(format!("{}{key}", $prefix)))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The digits without the prefix: for names that have one of their own.
            pub fn key(&self) -> &str {
                &self.0[$prefix.len()..]
            }

            /// `dir/<id>`: the only way from an id to a path.
            pub fn under(&self, dir: &Path) -> PathBuf {
                dir.join(&self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;

            fn try_from(text: String) -> std::result::Result<Self, String> {
                Self::parse(&text).ok_or(text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }
    };
}

hashed_id! {
    /// `vol-` and 32 hexadecimal digits: half of the SHA-256 of the name that
    /// CreateVolume was given, so one name is one volume and no name reaches a path.
    VolumeId, "vol-"
}

hashed_id! {
    /// `snap-` and 32 hexadecimal digits: half of the SHA-256 of the name that
    /// CreateSnapshot was given.
    SnapshotId, "snap-"
}

fn key_of(name: &str) -> String {
    Sha256::digest(name.as_bytes()).iter().take(KEY_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

fn is_key(key: &str) -> bool {
    key.len() == KEY_DIGITS && key.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// What the provisioner calls a volume or a snapshot: 1 to 128 bytes without control characters.
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
