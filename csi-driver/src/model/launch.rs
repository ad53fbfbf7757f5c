//! The start of a volume's daemon, as the journal records it.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::model::ids::{self, VolumeId};

/// A process, identified within this boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub pid: i32,
    /// Clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_time: u64,
}

/// What was started, as the journal records it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LaunchId {
    /// A child process of this driver or of an earlier one.
    Process(ProcessId),
    /// A static pod, by its name.
    StaticPod(String),
}

impl fmt::Display for LaunchId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(process) => write!(f, "process {}", process.pid),
            Self::StaticPod(name) => write!(f, "static pod {name}"),
        }
    }
}

impl LaunchId {
    /// The process, if the launcher knows it before the daemon dials in.
    pub(crate) fn process(&self) -> Option<ProcessId> {
        match self {
            Self::Process(process) => Some(*process),
            Self::StaticPod(_) => None,
        }
    }
}

/// Names a launch's directory, control group, log and manifest: the volume's key, or random digits for
/// a daemon that was started before it got a volume.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct LaunchKey(String);

impl LaunchKey {
    /// 32 lower-case hexadecimal digits.
    pub(crate) fn parse(key: &str) -> Option<Self> {
        ids::is_key(key).then(|| Self(key.to_owned()))
    }

    /// Of a random number: no volume has this key.
    pub(crate) fn of_number(random: u128) -> Self {
        Self(format!("{random:032x}"))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The volume that has this key, if one does.
    pub(crate) fn volume_id(&self) -> Option<VolumeId> {
        VolumeId::from_key(&self.0)
    }
}

impl From<&VolumeId> for LaunchKey {
    fn from(volume_id: &VolumeId) -> Self {
        Self(volume_id.key().to_owned())
    }
}

impl From<&Self> for LaunchKey {
    fn from(key: &Self) -> Self {
        key.clone()
    }
}

impl fmt::Display for LaunchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for LaunchKey {
    type Error = String;

    fn try_from(text: String) -> std::result::Result<Self, String> {
        Self::parse(&text).ok_or(text)
    }
}

impl From<LaunchKey> for String {
    fn from(key: LaunchKey) -> Self {
        key.0
    }
}
