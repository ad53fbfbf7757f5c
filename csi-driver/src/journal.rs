//! What survives the driver: one file a volume and one a snapshot, replaced whole.
//!
//! Invariant: an entry says a thing before the kernel or the disk does it, and
//! stops saying so after it is undone. So whatever a killed driver left behind
//! is named here, and nothing that is named is assumed to be there.

mod records;
mod store;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::capacity::{self, Room};
use crate::error::Result;
use crate::volume::{SnapshotId, VolumeId};
pub(crate) use records::{
    Attachment, Serving, SnapshotMode, SnapshotPhase, SnapshotRecord, Source, StageRecord, TargetRecord,
    Timestamp, VolumeRecord,
};
use store::{Key, Leftovers, Record, Store};

#[derive(Debug)]
pub(crate) struct Journal {
    volumes: Store<VolumeId, VolumeRecord>,
    snapshots: Store<SnapshotId, SnapshotRecord>,
    /// Held from the look at what is committed until the new claim counts.
    admission: Mutex<()>,
}

/// Where the entries of volumes and of snapshots lie.
pub(crate) fn dirs(state_dir: &Path) -> [PathBuf; 2] {
    [state_dir.join("volumes"), state_dir.join("snapshots")]
}

impl Journal {
    /// Reads the directories [`dirs`], which must exist. Temporary files of a
    /// killed writer are removed.
    pub(crate) fn open(state_dir: &Path) -> Result<Self> {
        Self::read(state_dir, Leftovers::Remove)
    }

    /// [`Self::open`] for a reader beside the driver: nothing is changed.
    pub(crate) fn look(state_dir: &Path) -> Result<Self> {
        Self::read(state_dir, Leftovers::Keep)
    }

    fn read(state_dir: &Path, leftovers: Leftovers) -> Result<Self> {
        let [volumes, snapshots] = dirs(state_dir);
        Ok(Self {
            volumes: Store::open(&volumes, leftovers)?,
            snapshots: Store::open(&snapshots, leftovers)?,
            admission: Mutex::default(),
        })
    }

    pub(crate) fn snapshots(&self) -> &Store<SnapshotId, SnapshotRecord> {
        &self.snapshots
    }

    /// `None` for a volume that does not exist.
    pub(crate) fn find(&self, id: &VolumeId) -> Result<Option<VolumeRecord>> {
        self.volumes.find(id)
    }

    pub(crate) fn get(&self, id: &VolumeId) -> Result<VolumeRecord> {
        self.volumes.get(id)
    }

    /// Every volume that can be read, by id.
    pub(crate) fn list(&self) -> Vec<(VolumeId, VolumeRecord)> {
        self.volumes.list()
    }

    /// Every volume by id; `Err` says why one cannot be read.
    pub(crate) fn entries(&self) -> Vec<(VolumeId, Result<VolumeRecord>)> {
        self.volumes.entries()
    }

    /// Every volume, readable or not: what belongs to none of them is nobody's.
    pub(crate) fn ids(&self) -> Vec<VolumeId> {
        self.volumes.ids()
    }

    /// On disk when it returns. The caller holds the volume's lock.
    pub(crate) fn put(&self, id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        self.volumes.put(id, record)
    }

    pub(crate) fn remove(&self, id: &VolumeId) -> Result<()> {
        self.volumes.remove(id)
    }

    /// [`Self::put`] of a volume that is new, or larger than it was, if it fits
    /// beside all the others.
    pub(crate) fn admit(&self, id: &VolumeId, record: &VolumeRecord, room: Room) -> Result<()> {
        self.admit_into(&self.volumes, id, record, room)
    }

    /// [`Self::admit`] of a snapshot.
    pub(crate) fn admit_snapshot(&self, id: &SnapshotId, record: &SnapshotRecord, room: Room) -> Result<()> {
        self.admit_into(&self.snapshots, id, record, room)
    }

    fn admit_into<I: Key, R: Record>(
        &self,
        store: &Store<I, R>,
        id: &I,
        record: &R,
        room: Room,
    ) -> Result<()> {
        let before = {
            let _admission = self.admission.lock().unwrap_or_else(PoisonError::into_inner);
            let others = self.committed_bytes().saturating_sub(store.committed_by(id));
            match capacity::refusal(record.committed_bytes(), others, room) {
                Some(refusal) => return Err(refusal),
                None => store.claim(id, record),
            }
        };
        store.fulfil(id, record, before)
    }

    /// The sum of all volumes' sizes and of what snapshots hold.
    pub(crate) fn committed_bytes(&self) -> u64 {
        self.volumes.committed_bytes().saturating_add(self.snapshots.committed_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::{Access, AccessMode};
    use crate::error::Error;
    use crate::launcher::LaunchId;
    use crate::parameters::Parameters;
    use crate::process::ProcessId;
    use crate::volume::VolumeName;

    const TEN: Room = Room { pool_bytes: 10, promised_bytes: 10 };

    fn state() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        for dir in dirs(dir.path()) {
            std::fs::create_dir(dir).unwrap();
        }
        let journal = Journal::open(dir.path()).unwrap();
        (dir, journal)
    }

    fn record(name: &str, capacity_bytes: u64) -> (VolumeId, VolumeRecord) {
        let name = VolumeName::parse(name).unwrap();
        let id = VolumeId::for_name(&name);
        (id, VolumeRecord::new(name, capacity_bytes, Parameters::default()))
    }

    fn snapshot(name: &str, used_bytes: u64) -> (SnapshotId, SnapshotRecord) {
        let name = VolumeName::parse(name).unwrap();
        let record = SnapshotRecord {
            source: VolumeId::for_name(&name),
            source_capacity_bytes: used_bytes,
            used_bytes,
            created: Timestamp { seconds: 5, nanos: 6 },
            mode: SnapshotMode::Reflink,
            phase: SnapshotPhase::Ready,
            pause_us: 1,
            deleting: false,
            name: name.clone(),
        };
        (SnapshotId::for_name(&name), record)
    }

    #[test]
    fn what_was_put_is_there_after_a_restart() {
        let (dir, journal) = state();
        let (id, mut record) = record("a", 7);
        let access = Access::plain(AccessMode::MultiNodeMultiWriter);
        record.stage = Some(StageRecord {
            staging_path: "/s".into(),
            access,
            launch: Some(LaunchId::Process(ProcessId { pid: 3, start_time: 4 })),
            serving: None,
            settings: Default::default(),
        });
        record.targets.insert("/t".into(), TargetRecord { access, published: true });
        record.source = Some(Source::Volume(id.clone()));
        record.attachments.insert("node".to_owned(), Attachment { access, nonce: "n".to_owned() });
        let (snapshot_id, snapshot) = snapshot("a", 3);
        journal.put(&id, &record).unwrap();
        journal.snapshots().put(&snapshot_id, &snapshot).unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        assert_eq!(journal.get(&id).unwrap(), record);
        assert_eq!(journal.snapshots().get(&snapshot_id).unwrap(), snapshot);
        journal.remove(&id).unwrap();
        journal.snapshots().remove(&snapshot_id).unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        assert_eq!((journal.list(), journal.snapshots().list()), (vec![], vec![]));
    }

    #[test]
    fn an_old_journal_entry_opens() {
        let (dir, _) = state();
        let (id, _) = record("a", 7);
        let old = r#"{"name":"a","capacity_bytes":7,"parameters":{"threads":2},"deleting":false,
            "stage":{"staging_path":"/s","access":{"mode":"single_node_writer","read_only":true},
                     "launch":{"static_pod":"hawser-volume-x"},"serving":null},
            "targets":{"/t":{"access":{"mode":"single_node_writer","read_only":true},"published":true}}}"#;
        std::fs::write(dir.path().join(format!("volumes/{id}.json")), old).unwrap();
        let found = Journal::open(dir.path()).unwrap().get(&id).unwrap();
        let plain = Access { read_only: true, ..Access::plain(AccessMode::SingleNodeWriter) };
        assert!(found.filled, "a volume of a version that filled none is complete");
        assert_eq!(found.parameters, Parameters { threads: 2, ..Default::default() });
        assert_eq!(found.stage.unwrap().access, plain);
    }

    #[test]
    fn volumes_are_admitted_until_the_pool_is_committed() {
        let (_dir, journal) = state();
        let (a, a_record) = record("a", 6);
        let (b, b_record) = record("b", 5);
        journal.admit(&a, &a_record, TEN).unwrap();
        let refusal = journal.admit(&b, &b_record, TEN).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "claim of 5 bytes exceeds what is left of the pool: 6 of 10 bytes are committed"
        );
        journal.remove(&a).unwrap();
        journal.admit(&b, &b_record, TEN).unwrap();
    }

    #[test]
    fn snapshots_take_their_part_of_the_pool() {
        let (_dir, journal) = state();
        let (a, a_record) = record("a", 6);
        let (s, s_record) = snapshot("a", 5);
        journal.admit(&a, &a_record, TEN).unwrap();
        assert!(matches!(
            journal.admit_snapshot(&s, &s_record, TEN),
            Err(Error::PoolFull { wanted_bytes: 5, committed_bytes: 6, .. })
        ));
        journal.admit_snapshot(&s, &s_record, Room { pool_bytes: 10, promised_bytes: 11 }).unwrap();
        assert_eq!(journal.committed_bytes(), 11);
    }

    #[test]
    fn growing_counts_a_volume_once() {
        let (_dir, journal) = state();
        let (a, mut a_record) = record("a", 6);
        journal.admit(&a, &a_record, TEN).unwrap();
        a_record.capacity_bytes = 10;
        journal.admit(&a, &a_record, TEN).unwrap();
        a_record.capacity_bytes = 11;
        assert!(matches!(journal.admit(&a, &a_record, TEN), Err(Error::LargerThanPool { .. })));
        assert_eq!(journal.get(&a).unwrap().capacity_bytes, 10);
    }

    #[test]
    fn a_claim_that_is_not_written_is_given_back() {
        let (dir, journal) = state();
        let (a, mut a_record) = record("a", 6);
        let (b, b_record) = record("b", 4);
        journal.admit(&a, &a_record, TEN).unwrap();
        std::fs::remove_dir_all(dir.path().join("volumes")).unwrap();
        journal.admit(&b, &b_record, TEN).unwrap_err();
        a_record.capacity_bytes = 10;
        journal.admit(&a, &a_record, TEN).unwrap_err();
        assert_eq!(journal.committed_bytes(), 6);
        assert_eq!(journal.ids(), [a]);
    }

    #[test]
    fn a_torn_entry_is_an_error_of_its_volume_alone() {
        let (dir, _) = state();
        let volumes = dir.path().join("volumes");
        let (a, _) = record("a", 1);
        let (b, b_record) = record("b", 1);
        let half = volumes.join(format!(".{b}.json.1.tmp"));
        std::fs::write(volumes.join(format!("{a}.json")), "{\"name\":").unwrap();
        std::fs::write(&half, "half").unwrap();
        Journal::look(dir.path()).unwrap();
        assert!(half.exists(), "a look changes nothing");
        let journal = Journal::open(dir.path()).unwrap();
        assert!(matches!(journal.get(&a), Err(Error::JournalUnreadable { .. })));
        journal.put(&b, &b_record).unwrap();
        assert_eq!(journal.get(&b).unwrap(), b_record);
        assert!(!half.exists());
    }
}
