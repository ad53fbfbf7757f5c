//! Which way a volume's data takes, and who keeps a volume within its size.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The way of reads and writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum DataPath {
    /// The volume's daemon answers them.
    #[default]
    Daemon,
    /// The kernel passes them to the backing file (FUSE_PASSTHROUGH, Linux 6.9).
    Passthrough,
}

/// What keeps a volume within its size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CapacityPolicy {
    /// The volume's daemon counts. It sees no write that passes through.
    #[default]
    Daemon,
    /// A quota of the pool's file system.
    Kernel,
    /// Nothing: the volume may fill the pool.
    None,
}

impl DataPath {
    pub(crate) const ALL: [Self; 2] = [Self::Daemon, Self::Passthrough];

    /// The value in a StorageClass.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Passthrough => "passthrough",
        }
    }
}

impl CapacityPolicy {
    pub(crate) const ALL: [Self; 3] = [Self::Daemon, Self::Kernel, Self::None];

    /// The value in a StorageClass.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Kernel => "kernel",
            Self::None => "none",
        }
    }
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for CapacityPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
