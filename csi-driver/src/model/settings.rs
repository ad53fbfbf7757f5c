//! The settings that a volume's daemon is started with.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::capability::LaunchOverrides;
use crate::model::parameters::{KNOWN_INODE_LIMIT, LogLevel, Parameters, Resources};
use crate::model::policies::{CapacityPolicy, DataPath, Policies};

pub(crate) const DEFAULT_NAME_PREFIX: &str = "hawser-volume";
const DEFAULT_GRACE_SECONDS: u32 = 5;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LaunchSettings {
    pub name_prefix: String,
    pub labels: BTreeMap<String, String>,
    pub resources: Resources,
    pub log_level: LogLevel,
    /// Time for an unmounted daemon to end, before it is killed.
    pub grace_seconds: u32,
    /// How long the daemon waits for the next stage after an unstage; 0: it does not wait.
    pub delete_delay_seconds: u32,
    /// Event loops; 0: the daemon's default.
    pub threads: u32,
    /// Limit of the inodes that the kernel knows; 0: [`KNOWN_INODE_LIMIT`].
    pub known_inode_limit: u32,
    pub data_path: DataPath,
    pub capacity: CapacityPolicy,
    /// Programs on the node change the volume's files without its mount.
    pub changed_from_outside: bool,
    /// The kernel keeps what is written and sends it to the daemon later.
    pub writeback_cache: bool,
}

impl Default for LaunchSettings {
    fn default() -> Self {
        Self::of(&Parameters::default(), Policies::default(), &LaunchOverrides::default())
    }
}

impl LaunchSettings {
    /// The StorageClass's parameters, overridden by the mount options.
    pub(crate) fn of(parameters: &Parameters, policies: Policies, overrides: &LaunchOverrides) -> Self {
        let pod = &parameters.pod;
        Self {
            name_prefix: pod.name_prefix.clone().unwrap_or_else(|| DEFAULT_NAME_PREFIX.to_owned()),
            labels: pod.labels.clone(),
            resources: pod.resources.clone(),
            log_level: overrides.log_level.or(pod.log_level).unwrap_or_default(),
            grace_seconds: overrides.grace_seconds.or(pod.grace_seconds).unwrap_or(DEFAULT_GRACE_SECONDS),
            delete_delay_seconds: overrides
                .delete_delay_seconds
                .or(pod.delete_delay_seconds)
                .unwrap_or_default(),
            threads: overrides.threads.unwrap_or(parameters.threads),
            known_inode_limit: overrides.known_inode_limit.unwrap_or(parameters.known_inode_limit),
            data_path: policies.data_path,
            capacity: policies.capacity,
            changed_from_outside: parameters.changed_from_outside,
            writeback_cache: parameters.writeback_cache,
        }
    }

    /// Limit of the inodes that the kernel knows before it is asked to forget some.
    pub(crate) fn known_inodes(&self) -> u32 {
        if self.known_inode_limit == 0 { KNOWN_INODE_LIMIT } else { self.known_inode_limit }
    }

    /// Whether a daemon with these settings matches `other`.
    pub(crate) fn is_same_daemon(&self, other: &Self) -> bool {
        // The delay concerns only the driver.
        let Self { delete_delay_seconds, .. } = other;
        *other == Self { delete_delay_seconds: *delete_delay_seconds, ..self.clone() }
    }
}
