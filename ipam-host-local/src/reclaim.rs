//! Finds leases from before a reboot. They are reused only if a range set is exhausted (or the only
//! requested address is taken).
//!
//! A lease is dead if no kernel can have its container. The index must show that an ADD of ours
//! made this very lease file (same inode, same change time, which no process can set; same content)
//! on this machine (`Host`), in another boot, by the kernel's boot id. No network namespace
//! outlives its kernel, and a machine runs one kernel at a time.
//!
//! The following proves nothing and does not count. The file's times compared with the time of the
//! boot: clocks are set. A lease of unknown origin that existed in an earlier boot: the reference
//! may have made it, or another machine that shares the directory. A machine without an id, or with
//! a changed one. A lost index. Such a lease stays until its DEL or GC.
//!
//! There is one veto, for machines whose boot id is not the kernel's (a container with its own boot
//! id and shared leases): a lease stays if the runtime's record of the attachment names an existing
//! network namespace.

use std::path::{Path, PathBuf};

use crate::lease::Holder;

/// Directories with libcni's records of attachments, named `<network>-<container id>-<ifname>`;
/// older kubelets use the second one.
const RECORDS: [&str; 2] = ["/var/lib/cni/results", "/var/lib/cni/cache/results"];

/// Whether a record shows that the holder's namespace exists.
pub(crate) fn may_live(network: &str, holder: &Holder) -> bool {
    RECORDS.into_iter().any(|dir| is_on_record(Path::new(dir), network, holder))
}

fn is_on_record(dir: &Path, network: &str, holder: &Holder) -> bool {
    records(dir, network, holder).iter().any(|record| names_a_namespace(record))
}

fn records(dir: &Path, network: &str, holder: &Holder) -> Vec<PathBuf> {
    match holder {
        Holder::Attachment(owner) => {
            vec![dir.join(format!("{network}-{}-{}", owner.container_id, owner.ifname))]
        }
        Holder::Container(id) => {
            let prefix = format!("{network}-{id}-");
            let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
            let ours = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix));
            ours.map(|entry| entry.path()).collect()
        }
        Holder::Empty | Holder::Other => Vec::new(),
    }
}

fn names_a_namespace(record: &Path) -> bool {
    let Ok(bytes) = std::fs::read(record) else { return false };
    let Ok(text) = serde_json::from_slice::<serde_json::Value>(&bytes) else { return false };
    text["netns"].as_str().is_some_and(|path| !path.is_empty() && Path::new(path).exists())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Owner;

    #[test]
    fn a_record_with_a_namespace_that_exists_is_a_veto() {
        let dir = tempfile::tempdir().unwrap();
        let owner = Owner { container_id: "a".to_owned(), ifname: "eth0".to_owned() };
        let (attachment, container) = (Holder::Attachment(owner), Holder::Container("a".to_owned()));
        let vetoed = |content: &str| {
            std::fs::write(dir.path().join("net-a-eth0"), content).unwrap();
            [&attachment, &container].map(|holder| is_on_record(dir.path(), "net", holder))
        };
        assert_eq!(vetoed(r#"{"kind": "cniCacheV1", "netns": "/proc/self/ns/net"}"#), [true, true]);
        assert_eq!(vetoed(r#"{"kind": "cniCacheV1", "netns": "/var/run/netns/gone-4711"}"#), [false, false]);
        assert_eq!(vetoed(r#"{"netns": ""}"#), [false, false]);
        assert_eq!(vetoed("torn {"), [false, false]);
        assert!(!is_on_record(dir.path(), "other", &attachment));
        assert!(!is_on_record(&dir.path().join("missing"), "net", &container));
    }
}
