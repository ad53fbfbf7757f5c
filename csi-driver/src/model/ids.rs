//! The ids of volumes and snapshots, which this driver issues.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

const KEY_DIGITS: usize = 32;

macro_rules! hashed_id {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// The id for the provisioner's `name`.
            pub(super) fn digest(name: &str) -> Self {
                Self(format!("{}{}", $prefix, key_of(name)))
            }

            /// `None` for a text that this driver never issues: nothing has that id.
            pub fn parse(text: &str) -> Option<Self> {
                Self::from_key(text.strip_prefix($prefix)?)
            }

            /// Parses the digits alone, as in names of directories and manifests.
            pub fn from_key(key: &str) -> Option<Self> {
                is_key(key).then(|| Self(format!("{}{key}", $prefix)))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The digits without the prefix, for names with a prefix of their own.
            pub fn key(&self) -> &str {
                &self.0[$prefix.len()..]
            }

            /// `dir/<id>`: the only way to make a path from an id.
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
    /// `vol-` and 32 hexadecimal digits: half of the SHA-256 of the name in CreateVolume. So one
    /// name is always the same volume, and no name becomes part of a path.
    VolumeId, "vol-"
}

hashed_id! {
    /// `snap-` and 32 hexadecimal digits: half of the SHA-256 of the name in CreateSnapshot.
    SnapshotId, "snap-"
}

fn key_of(name: &str) -> String {
    let mut key = base16ct::lower::encode_string(&Sha256::digest(name.as_bytes()));
    key.truncate(KEY_DIGITS);
    key
}

pub(super) fn is_key(key: &str) -> bool {
    key.len() == KEY_DIGITS && key.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}
