//! What a volume is called: by the provisioner, by us, and on disk.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// CSI spec, "Size limits": strings are at most 128 bytes.
pub(crate) const MAX_NAME_BYTES: usize = 128;
const PREFIX: &str = "vol-";
const KEY_DIGITS: usize = 32;

/// `vol-` and 32 hexadecimal digits: half of the SHA-256 of the name that
/// CreateVolume was given, so one name is one volume and no name reaches a path.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeId(String);

impl VolumeId {
    pub fn for_name(name: &VolumeName) -> Self {
        let digest = Sha256::digest(name.0.as_bytes());
        let key: String = digest.iter().take(KEY_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{PREFIX}{key}"))
    }

    /// `None` for a string that this driver never gave out: no such volume exists.
    pub fn parse(text: &str) -> Option<Self> {
        let key = text.strip_prefix(PREFIX)?;
        Self::from_key(key)
    }

    /// From the digits alone, as they stand in names of directories and manifests.
    pub fn from_key(key: &str) -> Option<Self> {
        let is_digit = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
        (key.len() == KEY_DIGITS && key.bytes().all(is_digit)).then(|| Self(format!("{PREFIX}{key}")))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The digits without the prefix: for names that have one of their own.
    pub fn key(&self) -> &str {
        &self.0[PREFIX.len()..]
    }

    /// `dir/<id>`: the only way from an id to a path.
    pub fn under(&self, dir: &Path) -> PathBuf {
        dir.join(&self.0)
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for VolumeId {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        Self::parse(&text).ok_or(text)
    }
}

impl From<VolumeId> for String {
    fn from(id: VolumeId) -> Self {
        id.0
    }
}

/// What the provisioner calls the volume: 1 to 128 bytes without control characters.
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
