//! Writes nodes, handles and charges as one message: what a daemon needs to continue with this
//! one's connection.

use proto::local::{OpenDirectory, OpenFile, State};

use super::Volume;

impl Volume {
    pub(crate) fn state(&self) -> State {
        let file = |handle, node, flags| OpenFile { handle, node, flags };
        State {
            nodes: self.nodes.state(),
            files: self
                .files
                .all()
                .iter()
                .map(|(handle, open)| file(*handle, open.id, open.flags.bits()))
                .collect(),
            directories: self
                .directories
                .all()
                .iter()
                .map(|(handle, open)| OpenDirectory { handle: *handle, node: open.id })
                .collect(),
            next_file_handle: self.files.next(),
            next_directory_handle: self.directories.next(),
            charges: self.quota.as_ref().map(|quota| quota.state()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::sync::Arc;

    use linux::credentials::Caller;
    use linux::fs_at::DescriptorDir;
    use prost::Message;
    use proto::local::{Charge, Node, Place};
    use rustix::fs::{AtFlags, Mode, OFlags};
    use std::ffi::OsStr;
    use volume_fs::figures::{Counted, Limits};
    use volume_fs::file::{Handle, Name, NodeId};
    use volume_fs::request::{Data, Permissions};

    use super::*;
    use crate::nodes::NodeLimits;
    use crate::quota::{Quota, Use};

    const CALLER: Caller = Caller { uid: 0, gid: 0 };
    const PERMISSIONS: Permissions = Permissions { mode: 0o755, umask: 0 };

    fn volume(directory: &std::path::Path) -> Volume {
        let root = rustix::fs::open(directory, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let found = Use { counted: Counted { bytes: 4096, inodes: 1 }, unsettled: Vec::new() };
        let quota = Arc::new(Quota::new(Limits::default(), Some(found), 4));
        let limits = NodeLimits { descriptors: 1024, known: 1000, event_loops: 4 };
        Volume::open(root, false, DescriptorDir::open().unwrap(), limits, Some(quota)).unwrap()
    }

    fn name(directory: NodeId, name: &str) -> Name<'_> {
        Name { directory, name: OsStr::from_bytes(name.as_bytes()) }
    }

    #[test]
    fn what_the_kernel_knows_has_open_and_is_charged_for_is_written_down() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let volume = volume(dir.path());
        let below = volume.make_directory(name(NodeId::ROOT, "d"), PERMISSIONS, CALLER).unwrap();
        let below = below.attributes.id;
        let create = |file: &str| {
            let flags = OFlags::RDWR | OFlags::APPEND;
            volume.create(name(below, file), PERMISSIONS, flags, CALLER).unwrap()
        };
        let ((kept, _), (removed, open)) = (create("kept"), create("removed"));
        volume.write(open, Data { offset: 0, bytes: &[1; 5000], clears_setid: false }).unwrap();
        volume.look_up(name(below, "kept")).unwrap();
        volume.release_file(Handle(1));
        volume.remove(name(below, "removed"), AtFlags::empty(), 1001).unwrap();
        let listed = volume.open_directory(below).unwrap();

        let mut state = State::decode(&*volume.state().encode_to_vec()).unwrap();
        let (kept, removed) = (kept.attributes.id.0, removed.attributes.id.0);
        let place = |directory: NodeId, name: &str| Some(Place { directory: directory.0, name: name.into() });
        let mut nodes = [
            Node { id: below.0, lookups: 1, place: place(NodeId::ROOT, "d"), removed_by: None },
            Node { id: kept, lookups: 2, place: place(below, "kept"), removed_by: None },
            Node { id: removed, lookups: 1, place: None, removed_by: Some(1001) },
        ];
        nodes.sort_by_key(|node| node.id);
        state.nodes.sort_by_key(|node| node.id);
        assert_eq!(state.nodes, nodes);
        let flags = OFlags::RDWR.bits();
        assert_eq!(state.files, [OpenFile { handle: open.0, node: removed, flags }]);
        assert_eq!(state.directories, [OpenDirectory { handle: listed.0, node: below.0 }]);
        assert_eq!((state.next_file_handle, state.next_directory_handle), (3, 2));
        let charges = state.charges.unwrap();
        assert_eq!((charges.used_inodes, charges.counting), (4, false));
        let of_removed = charges.of_nodes.iter().find(|charge| charge.node == removed);
        assert!(matches!(of_removed, Some(Charge { bytes: 8192, removed: true, .. })), "{of_removed:?}");
    }
}
