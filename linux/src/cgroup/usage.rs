//! What the processes of a group use: the same figures from either version.
//!
//! Invariant: the work does not grow with the number of processes or of groups below, which a
//! container chooses.

use std::fs;
use std::path::Path;
use std::str::FromStr;

use super::{Hierarchies, Version};

/// What one group uses. `None`: the machine does not count it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time since the group was made, in nanoseconds, of all processors together.
    pub cpu_nanoseconds: Option<u64>,
    pub memory: Option<Memory>,
    /// Tasks: processes, and their further threads.
    pub tasks: Option<u64>,
}

/// In bytes, with the groups below.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// With the page cache.
    pub usage: u64,
    /// Of the page cache, what the kernel takes back first.
    pub inactive_file: u64,
    /// Anonymous memory.
    pub rss: u64,
    pub page_faults: u64,
    pub major_page_faults: u64,
    /// `None`: unlimited.
    pub limit: Option<u64>,
    /// `None`: the machine does not count swap.
    pub swap: Option<Swap>,
}

impl Memory {
    /// What cannot be taken back easily, as kubelet and cAdvisor count it.
    pub fn working_set(&self) -> u64 {
        self.usage.saturating_sub(self.inactive_file)
    }
}

/// In bytes, with the groups below.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swap {
    pub usage: u64,
    /// `None`: unlimited.
    pub limit: Option<u64>,
}

impl Hierarchies {
    /// What the group `path` uses; everything is `None` if it is gone.
    pub fn usage(&self, path: &Path) -> Usage {
        Usage {
            cpu_nanoseconds: self.cpu_nanoseconds(path),
            memory: self.group_of("memory", path).and_then(|(version, dir)| match version {
                Version::V1 => memory_of_v1(&dir),
                Version::V2 => memory_of_v2(&dir),
            }),
            tasks: self.group_of("pids", path).and_then(|(_, dir)| number(&dir, "pids.current")),
        }
    }

    fn cpu_nanoseconds(&self, path: &Path) -> Option<u64> {
        if let Some((Version::V1, dir)) = self.group_of("cpuacct", path) {
            return number(&dir, "cpuacct.usage");
        }
        // Every group of v2 has it, with or without the controller.
        let (_, dir) = self.group_of("cpu", path).filter(|(version, _)| *version == Version::V2)?;
        field(&text(&dir, "cpu.stat")?, "usage_usec")?.checked_mul(1000)
    }
}

fn memory_of_v1(dir: &Path) -> Option<Memory> {
    let stat = text(dir, "memory.stat")?;
    let of = |name| field(&stat, name);
    // Of a group without a limit: the largest multiple of the page size (mm/memcontrol-v1.c).
    let limited = |bytes: u64| (bytes < i64::MAX.cast_unsigned() - (1 << 20)).then_some(bytes);
    let limit = number(dir, "memory.limit_in_bytes").and_then(limited);
    let with_swap = number(dir, "memory.memsw.limit_in_bytes").and_then(limited);
    let swap = of("total_swap")
        .map(|usage| Swap { usage, limit: with_swap.map(|both| both.saturating_sub(limit.unwrap_or(0))) });
    Some(Memory {
        usage: number(dir, "memory.usage_in_bytes")?,
        inactive_file: of("total_inactive_file")?,
        rss: of("total_rss")?,
        page_faults: of("total_pgfault")?,
        major_page_faults: of("total_pgmajfault")?,
        limit,
        swap,
    })
}

fn memory_of_v2(dir: &Path) -> Option<Memory> {
    let stat = text(dir, "memory.stat")?;
    let of = |name| field(&stat, name);
    let swap = number(dir, "memory.swap.current");
    Some(Memory {
        usage: number(dir, "memory.current")?,
        inactive_file: of("inactive_file")?,
        rss: of("anon")?,
        page_faults: of("pgfault")?,
        major_page_faults: of("pgmajfault")?,
        // `max` is no number.
        limit: number(dir, "memory.max"),
        swap: swap.map(|usage| Swap { usage, limit: number(dir, "memory.swap.max") }),
    })
}

/// `None` if the group or the file is gone.
pub(super) fn text(dir: &Path, file: &str) -> Option<String> {
    fs::read_to_string(dir.join(file)).ok()
}

pub(super) fn number<N: FromStr>(dir: &Path, file: &str) -> Option<N> {
    text(dir, file)?.trim().parse().ok()
}

/// The value of a line `name N`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory with these files, as the kernel shows a group.
    fn group(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn both_versions_give_the_same_figures() {
        let v1 = group(&[
            (
                "memory.stat",
                "rss 1\ninactive_file 1\ntotal_rss 300\ntotal_inactive_file 200\ntotal_pgfault 7\n\
                 total_pgmajfault 2\ntotal_swap 50\n",
            ),
            ("memory.usage_in_bytes", "1000\n"),
            ("memory.limit_in_bytes", "4096\n"),
            ("memory.memsw.limit_in_bytes", "6144\n"),
        ]);
        let v2 = group(&[
            ("memory.stat", "anon 300\nactive_anon 1\ninactive_file 200\npgfault 7\npgmajfault 2\n"),
            ("memory.current", "1000\n"),
            ("memory.max", "4096\n"),
            ("memory.swap.current", "50\n"),
            ("memory.swap.max", "2048\n"),
        ]);
        let found = memory_of_v1(v1.path()).unwrap();
        let swap = Some(Swap { usage: 50, limit: Some(2048) });
        let wanted = Memory {
            usage: 1000,
            inactive_file: 200,
            rss: 300,
            page_faults: 7,
            major_page_faults: 2,
            limit: Some(4096),
            swap,
        };
        assert_eq!(found, wanted);
        assert_eq!(memory_of_v2(v2.path()), Some(wanted));
        assert_eq!(found.working_set(), 800);
    }

    #[test]
    fn no_limit_is_none_in_both_versions() {
        let stat = "total_rss 1\ntotal_inactive_file 1\ntotal_pgfault 1\ntotal_pgmajfault 1\n";
        let v1 = group(&[
            ("memory.stat", stat),
            ("memory.usage_in_bytes", "0\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
        ]);
        let v2 = group(&[
            ("memory.stat", "anon 1\ninactive_file 1\npgfault 1\npgmajfault 1\n"),
            ("memory.current", "0\n"),
            ("memory.max", "max\n"),
        ]);
        for found in [memory_of_v1(v1.path()).unwrap(), memory_of_v2(v2.path()).unwrap()] {
            assert_eq!((found.limit, found.swap), (None, None));
            assert_eq!(found.working_set(), 0, "the page cache may count more than the usage");
        }
    }

    #[test]
    fn a_group_that_is_gone_uses_nothing_that_is_known() {
        let hierarchies = Hierarchies::detect().unwrap();
        assert_eq!(hierarchies.usage(Path::new("/no-such-group/at/all")), Usage::default());
    }
}
