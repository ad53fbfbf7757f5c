//! The limits that the kernel enforces on a group now, independent of who has set them.

use std::path::Path;

use super::usage::{number, text};
use super::{Hierarchies, Version};

/// `None`: the group has no such limit, or the machine has no such controller.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Enforced {
    /// Bytes; the kernel rounds them down to whole pages.
    pub memory: Option<u64>,
    /// Microseconds of processor time in each period.
    pub cpu_quota: Option<i64>,
    /// Microseconds.
    pub cpu_period: Option<i64>,
    /// Only of cgroup v1: the weights of v2 are coarser, so shares cannot be derived from them.
    pub cpu_shares: Option<i64>,
}

impl Hierarchies {
    /// The limits of the group `path`; `None` if no hierarchy has the group.
    pub fn enforced(&self, path: &Path) -> Option<Enforced> {
        let (memory, cpu) = (self.group_of("memory", path), self.group_of("cpu", path));
        if memory.is_none() && cpu.is_none() {
            return None;
        }
        let limit = self.usage(path).memory.and_then(|memory| memory.limit);
        let mut enforced = Enforced { memory: limit, ..Enforced::default() };
        match cpu {
            Some((Version::V1, dir)) => {
                enforced.cpu_quota = number(&dir, "cpu.cfs_quota_us").filter(|quota| *quota > 0);
                enforced.cpu_period = number(&dir, "cpu.cfs_period_us");
                enforced.cpu_shares = number(&dir, "cpu.shares");
            }
            Some((Version::V2, dir)) => {
                let max = text(&dir, "cpu.max").unwrap_or_default();
                // `max` is no number.
                let mut numbers = max.split_whitespace().map(|word| word.parse().ok());
                (enforced.cpu_quota, enforced.cpu_period) =
                    (numbers.next().flatten(), numbers.next().flatten());
            }
            None => {}
        }
        Some(enforced)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Limits;

    #[test]
    fn what_was_set_is_what_is_enforced() {
        let hierarchies = Hierarchies::detect().unwrap();
        let path = Path::new("/").join(format!("hawser-test-enforced-{}", std::process::id()));
        let limits = Limits {
            memory_bytes: Some(64 << 20),
            cpu_quota: Some(50_000),
            cpu_period: Some(100_000),
            ..Limits::default()
        };
        let (group, unmet) = hierarchies.create(&path, &limits).unwrap();
        let enforced = hierarchies.enforced(&path);
        group.remove().unwrap();
        assert_eq!(unmet, Vec::<String>::new());
        let enforced = enforced.unwrap();
        assert_eq!(
            (enforced.memory, enforced.cpu_quota, enforced.cpu_period),
            (Some(64 << 20), Some(50_000), Some(100_000))
        );
        assert_eq!(hierarchies.enforced(&path), None);
    }
}
