//! Limits of a group, independent of the cgroup version. Pure.

use std::fmt::Display;

/// Limits of one group; `None` leaves the kernel's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<i64>,
    /// Memory and swap together, at least [`Self::memory_bytes`], without which it is left out;
    /// negative: no limit.
    pub memory_and_swap_bytes: Option<i64>,
    /// cgroup v1 meaning: 2..=262144; converted to a weight on v2.
    pub cpu_shares: Option<u64>,
    /// Microseconds per period; negative for none.
    pub cpu_quota: Option<i64>,
    pub cpu_period: Option<u64>,
    pub pids: Option<i64>,
    pub cpuset_cpus: Option<String>,
    pub cpuset_mems: Option<String>,
    /// Page size (`2MB`) and bytes; the largest number means no limit.
    pub hugepages: Vec<(String, u64)>,
    /// Files of cgroup v2 and their contents (`memory.oom.group`, `1`); v1 has none of them.
    pub unified: Vec<(String, String)>,
}

/// One limit with its value. [`super::v1`] and [`super::v2`] translate it to files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Limit<'a> {
    Memory {
        bytes: i64,
    },
    /// Memory, and memory and swap together.
    MemoryAndSwap {
        bytes: i64,
        both: i64,
    },
    CpuShares(u64),
    CpuQuota {
        quota: i64,
        period: u64,
    },
    Pids(i64),
    CpusetCpus(&'a str),
    CpusetMems(&'a str),
    HugePages {
        size: &'a str,
        bytes: u64,
    },
}

impl Limit<'_> {
    pub(super) fn controller(&self) -> &'static str {
        match self {
            Self::Memory { .. } | Self::MemoryAndSwap { .. } => "memory",
            Self::CpuShares(_) | Self::CpuQuota { .. } => "cpu",
            Self::Pids(_) => "pids",
            Self::CpusetCpus(_) | Self::CpusetMems(_) => "cpuset",
            Self::HugePages { .. } => "hugetlb",
        }
    }
}

impl Limits {
    /// The limits that are set, without [`Self::unified`].
    pub(super) fn set(&self) -> Vec<Limit<'_>> {
        let quota = (self.cpu_quota.is_some() || self.cpu_period.is_some()).then(|| Limit::CpuQuota {
            quota: self.cpu_quota.unwrap_or(-1),
            period: self.cpu_period.unwrap_or(100_000),
        });
        let memory = self.memory_bytes.map(|bytes| match self.memory_and_swap_bytes {
            Some(both) => Limit::MemoryAndSwap { bytes, both },
            None => Limit::Memory { bytes },
        });
        let single = [
            memory,
            self.cpu_shares.map(Limit::CpuShares),
            quota,
            self.pids.map(Limit::Pids),
            self.cpuset_cpus.as_deref().map(Limit::CpusetCpus),
            self.cpuset_mems.as_deref().map(Limit::CpusetMems),
        ];
        let huge = self.hugepages.iter().map(|(size, bytes)| Limit::HugePages { size, bytes: *bytes });
        single.into_iter().flatten().chain(huge).collect()
    }

    /// Additional controllers that only these limits need.
    pub(super) fn more_controllers(&self) -> Vec<&'static str> {
        let mut more = Vec::new();
        if self.cpuset_cpus.is_some() || self.cpuset_mems.is_some() {
            more.push("cpuset");
        }
        if !self.hugepages.is_empty() {
            more.push("hugetlb");
        }
        more
    }

    pub(super) fn unified_controllers(&self) -> impl Iterator<Item = &str> {
        self.unified.iter().map(|(file, _)| controller(file))
    }
}

/// The controller that a file of v2 belongs to.
pub(super) fn controller(file: &str) -> &str {
    file.split('.').next().unwrap_or_default()
}

/// File name and content.
pub(super) type Files = Vec<(String, String)>;

pub(super) fn file(name: &str, content: impl Display) -> (String, String) {
    (name.to_owned(), content.to_string())
}

/// `unlimited` for the largest value, which means no limit.
pub(super) fn or_unlimited(bytes: u64, unlimited: &str) -> String {
    if bytes == u64::MAX { unlimited.to_owned() } else { bytes.to_string() }
}

/// `max` for a negative value, which means no limit.
pub(super) fn or_max(value: i64) -> String {
    if value < 0 { "max".to_owned() } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_set_is_no_limit_and_a_quota_has_a_period() {
        assert_eq!(Limits::default().set(), []);
        let limits =
            Limits { cpu_quota: Some(50_000), hugepages: vec![("2MB".into(), 4)], ..Limits::default() };
        let expected =
            [Limit::CpuQuota { quota: 50_000, period: 100_000 }, Limit::HugePages { size: "2MB", bytes: 4 }];
        assert_eq!(limits.set(), expected);
        assert_eq!(limits.more_controllers(), ["hugetlb"]);
    }
}
