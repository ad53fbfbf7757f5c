//! Limits of a group, and which files they are on cgroup v1 and on v2. Pure.
//!
//! Invariant: a limit that one version has under another name or scale is
//! converted here and nowhere else.

/// Limits of one group; `None` leaves the kernel's default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory_bytes: Option<i64>,
    /// cgroup v1 meaning: 2..=262144; converted to a weight on v2.
    pub cpu_shares: Option<u64>,
    /// Microseconds per period; negative for none.
    pub cpu_quota: Option<i64>,
    pub cpu_period: Option<u64>,
    pub pids: Option<i64>,
    pub cpuset_cpus: Option<String>,
    pub cpuset_mems: Option<String>,
    /// Page size (`2MB`) and bytes.
    pub hugepages: Vec<(String, u64)>,
    /// Files of cgroup v2 and their contents (`memory.oom.group`, `1`); v1 has none of them.
    pub unified: Vec<(String, String)>,
}

impl Limits {
    /// Controllers that only these limits need.
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

/// One limit, in the words of both versions.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) controller: &'static str,
    pub(super) v1: Files,
    pub(super) v2: Files,
    /// Written where the kernel has the file.
    pub(super) v2_if_there: Files,
}

/// What to write for the limits that are set.
pub(super) fn settings(limits: &Limits) -> Vec<Setting> {
    let pair = |file: &str, value: String| (file.to_owned(), value);
    let max = |value: i64| if value < 0 { "max".to_owned() } else { value.to_string() };
    let mut out = Vec::new();
    let mut add = |controller, v1, v2| out.push(Setting { controller, v1, v2, v2_if_there: Vec::new() });
    if let Some(bytes) = limits.memory_bytes {
        let v1 = vec![pair("memory.limit_in_bytes", bytes.to_string())];
        add("memory", v1, vec![pair("memory.max", max(bytes))]);
    }
    if let Some(shares) = limits.cpu_shares {
        let v1 = vec![pair("cpu.shares", shares.to_string())];
        add("cpu", v1, vec![pair("cpu.weight", weight(shares).to_string())]);
    }
    if limits.cpu_quota.is_some() || limits.cpu_period.is_some() {
        let period = limits.cpu_period.unwrap_or(100_000);
        let quota = limits.cpu_quota.unwrap_or(-1);
        let v1 =
            vec![pair("cpu.cfs_period_us", period.to_string()), pair("cpu.cfs_quota_us", quota.to_string())];
        add("cpu", v1, vec![pair("cpu.max", format!("{} {period}", max(quota)))]);
    }
    if let Some(pids) = limits.pids {
        add("pids", vec![pair("pids.max", max(pids))], vec![pair("pids.max", max(pids))]);
    }
    for (file, value) in [("cpuset.cpus", &limits.cpuset_cpus), ("cpuset.mems", &limits.cpuset_mems)] {
        if let Some(value) = value {
            add("cpuset", vec![pair(file, value.clone())], vec![pair(file, value.clone())]);
        }
    }
    for (size, bytes) in &limits.hugepages {
        let bytes = bytes.to_string();
        out.push(Setting {
            controller: "hugetlb",
            v1: vec![pair(&format!("hugetlb.{size}.limit_in_bytes"), bytes.clone())],
            v2: vec![pair(&format!("hugetlb.{size}.max"), bytes.clone())],
            // Reservations (Linux 5.7): without them a process dies by SIGBUS when it
            // touches a page that mmap(2) promised.
            v2_if_there: vec![pair(&format!("hugetlb.{size}.rsvd.max"), bytes)],
        });
    }
    out
}

/// cgroup v2's cpu.weight of v1's cpu.shares: the kernel's own bounds, mapped as
/// runc does, 2..262144 -> 1..10000.
pub fn weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_become_a_weight_on_v2() {
        let limits = Limits { cpu_shares: Some(1024), cpu_quota: Some(-1), ..Limits::default() };
        let [weight, max] = &settings(&limits)[..] else { panic!("two settings") };
        assert_eq!(weight.v2, [("cpu.weight".to_owned(), "39".to_owned())]);
        assert_eq!(max.v2, [("cpu.max".to_owned(), "max 100000".to_owned())]);
    }

    #[test]
    fn huge_pages_are_limited_when_reserved_and_when_used() {
        let limits = Limits { hugepages: vec![("2MB".to_owned(), 4 << 20)], ..Limits::default() };
        let [setting] = &settings(&limits)[..] else { panic!("one setting") };
        assert_eq!(setting.v1[0].0, "hugetlb.2MB.limit_in_bytes");
        assert_eq!(setting.v2[0].0, "hugetlb.2MB.max");
        assert_eq!(setting.v2_if_there[0].0, "hugetlb.2MB.rsvd.max");
        assert_eq!(limits.more_controllers(), ["hugetlb"]);
    }
}
