//! The node that a state directory belongs to.
//!
//! The cluster refers to volumes by node: the topology segment of a PersistentVolume and every
//! attachment contain the node id. A driver that started under another name with the same volumes
//! would make all of them unreachable without an error.
//!
//! `<state-dir>/node-id` has the id on one line. If the journal is empty, a new name is harmless
//! and is accepted. A torn file is ignored and written anew.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Result, Step};
use crate::journal::Journal;
use crate::model::records::VolumeRecord;
use crate::model::topology::Segment;

const FILE: &str = "node-id";
const FILE_MODE: u32 = 0o600;

/// The volumes and snapshots in the journal belong to another node.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "--node-id {wanted:?}: {} is of node {found:?} (volumes and snapshots: {objects}, attachments: \
     {attachments}): start with --node-id {found:?}, which need not be the machine's name, or, if they are to \
     be this node's, remove {}, and the label that kubelet otherwise refuses to change: kubectl label node \
     NODE {topology_key}-",
    state_dir.display(),
    state_dir.join(FILE).display()
)]
pub struct OtherNode {
    pub(crate) state_dir: PathBuf,
    pub(crate) topology_key: String,
    pub(crate) wanted: String,
    pub(crate) found: String,
    pub(crate) objects: usize,
    pub(crate) attachments: usize,
}

/// `Some` if the journal's contents belong to another node than that of `own`, which the caller
/// starts as.
pub(crate) fn find_other(state_dir: &Path, own: &Segment, journal: &Journal) -> Result<Option<OtherNode>> {
    let found = match recorded(state_dir)? {
        Some(found) if found != own.value => found,
        Some(_) | None => return Ok(None),
    };
    let objects = journal.ids().len() + journal.snapshots().ids().len();
    if objects == 0 {
        return Ok(None);
    }
    let is_attached = |record: &VolumeRecord| record.attachments.contains_key(&found);
    let attachments = journal.list().iter().filter(|(_, record)| is_attached(record)).count();
    let (state_dir, Segment { key: topology_key, value: wanted }) = (state_dir.to_owned(), own.clone());
    Ok(Some(OtherNode { state_dir, topology_key, wanted, found, objects, attachments }))
}

/// Records that the state directory belongs to `node_id`.
pub(crate) fn record(state_dir: &Path, node_id: &str) -> Result<()> {
    let path = state_dir.join(FILE);
    linux::atomic_file::remove_leftovers(&path).step("record node id")?;
    linux::atomic_file::write(&path, format!("{node_id}\n").as_bytes(), FILE_MODE).step("record node id")
}

/// Whether the state directory belongs to `node_id` already.
pub(crate) fn is_recorded(state_dir: &Path, node_id: &str) -> Result<bool> {
    Ok(recorded(state_dir)?.as_deref() == Some(node_id))
}

fn recorded(state_dir: &Path) -> Result<Option<String>> {
    let path = state_dir.join(FILE);
    match linux::atomic_file::read(&path) {
        Ok(content) => {
            let line = String::from_utf8(content).ok();
            // An id may end with blanks.
            let id = line.and_then(|line| line.strip_suffix('\n').map(str::to_owned));
            let id = id.filter(|id| !id.is_empty() && !id.contains(char::is_control));
            if id.is_none() {
                tracing::warn!(path = %path.display(), "unreadable: assuming that --node-id is unchanged");
            }
            Ok(id)
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(linux::Error::at("read", &path, e)).step("look at node id"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal;
    use crate::model::access_mode::AccessMode;
    use crate::model::capability::Access;
    use crate::model::ids::VolumeId;
    use crate::model::name::VolumeName;
    use crate::model::parameters::Parameters;
    use crate::model::records::Attachment;

    #[test]
    fn another_node_is_refused_where_there_are_volumes_and_taken_where_there_are_none() {
        let dir = tempfile::tempdir().unwrap();
        for dir in journal::dirs(dir.path()) {
            std::fs::create_dir(dir).unwrap();
        }
        let journal = Journal::open(dir.path()).unwrap();
        let own = |node_id: &str| Segment { key: "topology.d/node".to_owned(), value: node_id.to_owned() };
        let find = |node_id: &str| find_other(dir.path(), &own(node_id), &journal).unwrap();
        assert_eq!(find("a"), None, "it belongs to no node yet");
        record(dir.path(), "a").unwrap();
        assert_eq!(find("b"), None, "with nothing in it");
        record(dir.path(), "b").unwrap();

        let name = VolumeName::parse("pvc-1").unwrap();
        let id = VolumeId::for_name(&name);
        let mut volume = VolumeRecord::new(name, 1, Parameters::default());
        let access = Access::plain(AccessMode::SingleNodeWriter);
        let nonce = "n".to_owned();
        volume.attachments.insert("b".to_owned(), Attachment { access, nonce });
        journal.put(&id, &volume).unwrap();
        assert_eq!(find("b"), None);
        let message = find("a").unwrap().to_string();
        let shown = dir.path().display();
        assert_eq!(
            message,
            format!(
                "--node-id \"a\": {shown} is of node \"b\" (volumes and snapshots: 1, attachments: 1): start with \
                 --node-id \"b\", which need not be the machine's name, or, if they are to be this node's, \
                 remove {shown}/node-id, and the label that kubelet otherwise refuses to change: kubectl label \
                 node NODE topology.d/node-"
            )
        );
        // As an administrator would do.
        std::fs::remove_file(dir.path().join(FILE)).unwrap();
        assert_eq!(find("a"), None);
        record(dir.path(), "a").unwrap();
        assert!(find("b").is_some());
        assert_eq!(std::fs::read_to_string(dir.path().join(FILE)).unwrap(), "a\n");
        for torn in [&b""[..], b"\n", b"a", b"\0\0\0\n", b"\xff\n"] {
            std::fs::write(dir.path().join(FILE), torn).unwrap();
            assert_eq!(find("b"), None, "{torn:?}");
            record(dir.path(), "b").unwrap();
            assert!(find("a").is_some());
        }
    }
}
