//! The node's huge pages, and what a container may use of them (hugetlbpage.rst; kubelet,
//! kuberuntime_container_linux.go: `GetHugepageLimitsFromResources`).

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::OnceLock;

use proto::cri::HugepageLimit;

use crate::objects::Resources;

/// Begins the names of these resources, and of the kernel's pools.
pub(crate) const PREFIX: &str = "hugepages-";
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// The bytes of the pool that the administrator reserved for each page size in bytes.
pub(crate) type Pools = BTreeMap<u64, u64>;

/// The machine's pools when the kubelet first looks; none if it has no huge pages.
pub(crate) fn pools() -> &'static Pools {
    static FOUND: OnceLock<Pools> = OnceLock::new();
    FOUND.get_or_init(|| read(Path::new(POOLS)))
}

fn read(dir: &Path) -> Pools {
    let pool = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        let kib: u64 = name.to_str()?.strip_prefix(PREFIX)?.strip_suffix("kB")?.parse().ok()?;
        let pages = std::fs::read_to_string(entry.path().join("nr_hugepages")).unwrap_or_default();
        let page_size = kib.checked_mul(1024)?;
        Some((page_size, page_size.saturating_mul(pages.trim().parse().unwrap_or(0))))
    };
    std::fs::read_dir(dir).into_iter().flatten().flatten().filter_map(pool).collect()
}

/// Kubernetes' name of a page size: `hugepages-2Mi`.
pub(crate) fn resource(page_size: u64) -> String {
    format!("{PREFIX}{}", crate::objects::Quantity::from_bytes(page_size))
}

/// The limit for each page size of the node: 0 for those that `limits` does not have.
pub(crate) fn limits(limits: &Resources, pools: &Pools) -> Vec<HugepageLimit> {
    let limit = |page_size: &u64| HugepageLimit {
        page_size: in_cgroup_files(*page_size),
        limit: limits.get(&resource(*page_size)).map_or(0, |limit| limit.value()),
    };
    pools.keys().map(limit).collect()
}

/// As in the names of cgroup files, `hugetlb.2MB.max` (mm/hugetlb_cgroup.c, `mem_fmt`).
fn in_cgroup_files(page_size: u64) -> String {
    match page_size {
        GIB.. => format!("{}GB", page_size / GIB),
        MIB.. => format!("{}MB", page_size / MIB),
        _ => format!("{}KB", page_size / 1024),
    }
}

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pools_are_read_as_the_kernel_shows_them() {
        let dir = tempfile::tempdir().unwrap();
        for (name, pages) in [("hugepages-2048kB", "3\n"), ("hugepages-1048576kB", "0\n"), ("other", "1\n")] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(name).join("nr_hugepages"), pages).unwrap();
        }
        assert_eq!(read(dir.path()), Pools::from([(2 << 20, 6 << 20), (1 << 30, 0)]));
        assert_eq!(read(&dir.path().join("absent")), Pools::new());
    }

    #[test]
    fn every_page_size_has_a_limit_under_its_names() {
        let pools = Pools::from([(64 << 10, 0), (2 << 20, 0), (1 << 30, 0)]);
        let wanted: Resources = serde_json::from_str(r#"{"hugepages-2Mi": "4Mi", "memory": "1Gi"}"#).unwrap();
        let limits = limits(&wanted, &pools);
        let found: Vec<_> = limits.iter().map(|limit| (limit.page_size.as_str(), limit.limit)).collect();
        assert_eq!(found, [("64KB", 0), ("2MB", 4 << 20), ("1GB", 0)]);
        let names: Vec<String> = pools.keys().map(|page_size| resource(*page_size)).collect();
        assert_eq!(names, ["hugepages-64Ki", "hugepages-2Mi", "hugepages-1Gi"]);
    }
}
