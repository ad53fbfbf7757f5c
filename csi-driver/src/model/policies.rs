//! Which way a volume's data takes, and who keeps a volume within its size.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Whether a new volume whose limit the kernel enforces passes its data through, unless its class says
/// otherwise.
const PASSES_THROUGH_BY_DEFAULT: bool = true;

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

/// What was chosen for a volume when it was created. It stays for the volume's life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Policies {
    pub data_path: DataPath,
    pub capacity: CapacityPolicy,
}

/// What a volume may hold, and who keeps it within that.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allowance {
    pub(crate) capacity_bytes: u64,
    pub(crate) policies: Policies,
}

/// What a class asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) data_path: Option<DataPath>,
    pub(crate) capacity: Option<CapacityPolicy>,
}

/// What a pool and its node support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Supported {
    /// The pool's file system enforces limits.
    pub(crate) kernel_quota: bool,
    /// The kernel has FUSE_PASSTHROUGH.
    pub(crate) passthrough: bool,
    /// The driver has a keeper that registers files for it.
    pub(crate) keeper: bool,
}

/// What a class asks for and is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lacking {
    KernelQuota,
    Passthrough,
    Keeper,
}

impl Policies {
    /// The policies of a new volume.
    pub(crate) fn choose(wanted: Wanted, supported: Supported) -> Result<Self, Lacking> {
        use {CapacityPolicy::Kernel, DataPath::Passthrough};
        let Wanted { data_path, capacity } = wanted;
        if data_path == Some(Passthrough) && !supported.passthrough {
            return Err(Lacking::Passthrough);
        }
        // The daemon counts nothing that passes through.
        let needs_quota = capacity == Some(Kernel) || (data_path == Some(Passthrough) && capacity.is_none());
        if needs_quota && !supported.kernel_quota {
            return Err(Lacking::KernelQuota);
        }
        if data_path == Some(Passthrough) && !supported.keeper {
            return Err(Lacking::Keeper);
        }
        let capacity = capacity.unwrap_or(match supported.kernel_quota {
            true => Kernel,
            false => CapacityPolicy::Daemon,
        });
        let can_pass = supported.passthrough && supported.keeper;
        let passes = PASSES_THROUGH_BY_DEFAULT && can_pass && capacity == Kernel;
        let data_path = data_path.unwrap_or(if passes { Passthrough } else { DataPath::Daemon });
        Ok(Self { data_path, capacity })
    }

    /// Whether the kernel would limit a new volume of such a class, where the pool has quotas.
    pub(crate) fn has_kernel_limit(wanted: Wanted) -> bool {
        let all = Supported { kernel_quota: true, passthrough: true, keeper: true };
        Self::choose(wanted, all).is_ok_and(|chosen| chosen.capacity == CapacityPolicy::Kernel)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Supported = Supported { kernel_quota: true, passthrough: true, keeper: true };

    fn choose(
        data_path: Option<DataPath>,
        capacity: Option<CapacityPolicy>,
        supported: Supported,
    ) -> Result<(DataPath, CapacityPolicy), Lacking> {
        Policies::choose(Wanted { data_path, capacity }, supported)
            .map(|Policies { data_path, capacity }| (data_path, capacity))
    }

    #[test]
    fn the_kernel_keeps_a_volume_within_its_size_where_it_can() {
        let by_default = if PASSES_THROUGH_BY_DEFAULT { DataPath::Passthrough } else { DataPath::Daemon };
        assert_eq!(choose(None, None, ALL), Ok((by_default, CapacityPolicy::Kernel)));
        for supported in [Supported { passthrough: false, ..ALL }, Supported { keeper: false, ..ALL }] {
            assert_eq!(choose(None, None, supported), Ok((DataPath::Daemon, CapacityPolicy::Kernel)));
        }
        for passthrough in [true, false] {
            let supported = Supported { kernel_quota: false, passthrough, keeper: true };
            assert_eq!(choose(None, None, supported), Ok((DataPath::Daemon, CapacityPolicy::Daemon)));
        }
    }

    #[test]
    fn what_a_class_asks_for_is_given_or_refused() {
        use {CapacityPolicy as C, DataPath as D};
        for (data_path, capacity, chosen) in [
            (None, Some(C::Daemon), (D::Daemon, C::Daemon)),
            (None, Some(C::None), (D::Daemon, C::None)),
            (Some(D::Daemon), None, (D::Daemon, C::Kernel)),
            (Some(D::Passthrough), None, (D::Passthrough, C::Kernel)),
            (Some(D::Passthrough), Some(C::None), (D::Passthrough, C::None)),
        ] {
            assert_eq!(choose(data_path, capacity, ALL), Ok(chosen));
        }
        let no_quota = Supported { kernel_quota: false, ..ALL };
        assert_eq!(choose(None, Some(C::Kernel), no_quota), Err(Lacking::KernelQuota));
        assert_eq!(choose(Some(D::Passthrough), None, no_quota), Err(Lacking::KernelQuota));
        let none = choose(Some(D::Passthrough), Some(C::None), no_quota);
        assert_eq!(none, Ok((D::Passthrough, C::None)));
        let old_kernel = Supported { passthrough: false, ..ALL };
        assert_eq!(choose(Some(D::Passthrough), None, old_kernel), Err(Lacking::Passthrough));
        let no_keeper = Supported { keeper: false, ..ALL };
        for capacity in [None, Some(C::None)] {
            assert_eq!(choose(Some(D::Passthrough), capacity, no_keeper), Err(Lacking::Keeper));
        }
    }
}
