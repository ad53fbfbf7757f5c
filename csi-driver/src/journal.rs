//! What survives the driver: one file a volume, replaced whole.
//!
//! Invariant: an entry says a thing before the kernel or the disk does it, and
//! stops saying so after it is undone. So whatever a killed driver left behind
//! is named here, and nothing that is named is assumed to be there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::capability::Access;
use crate::capacity;
use crate::error::{Error, Result, Step};
use crate::launcher::LaunchId;
use crate::parameters::Parameters;
use crate::process::ProcessId;
use crate::volume::{VolumeId, VolumeName};

const EXTENSION: &str = "json";
const FILE_MODE: u32 = 0o600;

/// One volume, from CreateVolume to the end of DeleteVolume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VolumeRecord {
    pub name: VolumeName,
    pub capacity_bytes: u64,
    pub parameters: Parameters,
    /// DeleteVolume has begun: its data are going.
    pub deleting: bool,
    pub stage: Option<StageRecord>,
    /// By target path: references are named, never counted.
    pub targets: BTreeMap<PathBuf, TargetRecord>,
}

impl VolumeRecord {
    pub(crate) fn new(name: VolumeName, capacity_bytes: u64, parameters: Parameters) -> Self {
        Self { name, capacity_bytes, parameters, deleting: false, stage: None, targets: BTreeMap::new() }
    }
}

/// NodeStageVolume has begun, and has come as far as the options are filled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StageRecord {
    pub staging_path: PathBuf,
    pub access: Access,
    pub launch: Option<LaunchId>,
    /// Set once the daemon has answered that it serves.
    pub serving: Option<Serving>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Serving {
    /// `st_dev` minor of the FUSE mount (its major is 0), the number of its fusectl directory.
    pub connection_minor: u32,
    pub daemon: ProcessId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TargetRecord {
    pub access: Access,
    /// False from before the bind mount until it has been verified.
    pub published: bool,
}

#[derive(Debug)]
pub(crate) struct Journal {
    dir: PathBuf,
    /// What is on disk. Lock order: a volume's lock first, then this; never held while waiting.
    volumes: Mutex<BTreeMap<VolumeId, Entry>>,
}

#[derive(Debug)]
enum Entry {
    Readable(Box<VolumeRecord>),
    /// Not ours to guess: every operation on the volume says so.
    Unreadable {
        reason: String,
    },
}

impl Journal {
    /// Reads `dir`, which must exist. Temporary files of a killed writer are removed.
    pub(crate) fn open(dir: &Path) -> Result<Self> {
        let mut volumes = BTreeMap::new();
        let io = |op, e| Error::Kernel { step: "open journal", source: linux::Error::at(op, dir, e) };
        for item in std::fs::read_dir(dir).map_err(|e| io("list", e))? {
            let path = item.map_err(|e| io("list", e))?.path();
            if let Some(id) = volume_of(&path) {
                volumes.insert(id, read(&path));
            } else if path.extension().is_some_and(|e| e == "tmp") {
                linux::atomic_file::remove(&path).step("remove temporary file")?;
            } else {
                tracing::warn!(path = %path.display(), "not a journal entry");
            }
        }
        Ok(Self { dir: dir.to_owned(), volumes: Mutex::new(volumes) })
    }

    /// `None` for a volume that does not exist.
    pub(crate) fn find(&self, id: &VolumeId) -> Result<Option<VolumeRecord>> {
        match self.locked().get(id) {
            None => Ok(None),
            Some(Entry::Readable(record)) => Ok(Some((**record).clone())),
            Some(Entry::Unreadable { reason }) => {
                Err(Error::JournalUnreadable { path: self.path(id), reason: reason.clone() })
            }
        }
    }

    pub(crate) fn get(&self, id: &VolumeId) -> Result<VolumeRecord> {
        self.find(id)?.ok_or_else(|| Error::UnknownVolume { volume_id: id.to_string() })
    }

    /// Every volume that can be read.
    pub(crate) fn list(&self) -> Vec<(VolumeId, VolumeRecord)> {
        let readable = |(id, entry): (&VolumeId, &Entry)| match entry {
            Entry::Readable(record) => Some((id.clone(), (**record).clone())),
            Entry::Unreadable { .. } => None,
        };
        self.locked().iter().filter_map(readable).collect()
    }

    /// Every volume, readable or not: what belongs to none of them is nobody's.
    pub(crate) fn ids(&self) -> Vec<VolumeId> {
        self.locked().keys().cloned().collect()
    }

    /// On disk when it returns. The caller holds the volume's lock.
    pub(crate) fn put(&self, id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        self.write(id, record)?;
        self.locked().insert(id.clone(), Entry::Readable(Box::new(record.clone())));
        Ok(())
    }

    /// [`Self::put`] of a new volume, if it fits into `pool_bytes` beside all the others.
    pub(crate) fn admit(&self, id: &VolumeId, record: &VolumeRecord, pool_bytes: u64) -> Result<()> {
        {
            let mut volumes = self.locked();
            if let Some(refusal) = capacity::refusal(record.capacity_bytes, committed(&volumes), pool_bytes) {
                return Err(refusal);
            }
            volumes.insert(id.clone(), Entry::Readable(Box::new(record.clone())));
        }
        self.write(id, record).inspect_err(|_| {
            self.locked().remove(id);
        })
    }

    pub(crate) fn remove(&self, id: &VolumeId) -> Result<()> {
        linux::atomic_file::remove(&self.path(id)).step("remove journal entry")?;
        self.locked().remove(id);
        Ok(())
    }

    /// The sum of all volumes' sizes.
    pub(crate) fn committed_bytes(&self) -> u64 {
        committed(&self.locked())
    }

    fn write(&self, id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(record)
            .map_err(|e| Error::JournalUnreadable { path: self.path(id), reason: e.to_string() })?;
        text.push(b'\n');
        linux::atomic_file::write(&self.path(id), &text, FILE_MODE).step("write journal entry")
    }

    fn path(&self, id: &VolumeId) -> PathBuf {
        id.under(&self.dir).with_extension(EXTENSION)
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Entry>> {
        // Every critical section leaves the map whole at each step.
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn committed(volumes: &BTreeMap<VolumeId, Entry>) -> u64 {
    let size = |entry: &Entry| match entry {
        Entry::Readable(record) => record.capacity_bytes,
        Entry::Unreadable { .. } => 0,
    };
    volumes.values().map(size).fold(0, u64::saturating_add)
}

fn volume_of(path: &Path) -> Option<VolumeId> {
    let is_entry = path.extension().is_some_and(|e| e == EXTENSION);
    is_entry.then(|| path.file_stem()?.to_str()).flatten().and_then(VolumeId::parse)
}

fn read(path: &Path) -> Entry {
    let parsed = std::fs::read(path)
        .map_err(|e| e.to_string())
        .and_then(|text| serde_json::from_slice(&text).map_err(|e| e.to_string()));
    match parsed {
        Ok(record) => Entry::Readable(record),
        Err(reason) => {
            tracing::error!(path = %path.display(), reason, "unreadable journal entry");
            Entry::Unreadable { reason }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capability::AccessMode;

    fn record(name: &str, capacity_bytes: u64) -> (VolumeId, VolumeRecord) {
        let name = VolumeName::parse(name).unwrap();
        let id = VolumeId::for_name(&name);
        (id, VolumeRecord::new(name, capacity_bytes, Parameters { threads: 0 }))
    }

    #[test]
    fn what_was_put_is_there_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let (id, mut record) = record("a", 7);
        let access = Access { mode: AccessMode::MultiNodeMultiWriter, read_only: false };
        record.stage = Some(StageRecord {
            staging_path: "/s".into(),
            access,
            launch: Some(LaunchId::Process(ProcessId { pid: 3, start_time: 4 })),
            serving: None,
        });
        record.targets.insert("/t".into(), TargetRecord { access, published: true });
        Journal::open(dir.path()).unwrap().put(&id, &record).unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        assert_eq!(journal.get(&id).unwrap(), record);
        journal.remove(&id).unwrap();
        assert_eq!(Journal::open(dir.path()).unwrap().list(), []);
    }

    #[test]
    fn volumes_are_admitted_until_the_pool_is_committed() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let (a, a_record) = record("a", 6);
        let (b, b_record) = record("b", 5);
        journal.admit(&a, &a_record, 10).unwrap();
        let refusal = journal.admit(&b, &b_record, 10).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "claim of 5 bytes exceeds what is left of the pool: 6 of 10 bytes are committed"
        );
        journal.remove(&a).unwrap();
        journal.admit(&b, &b_record, 10).unwrap();
    }

    #[test]
    fn a_torn_entry_is_an_error_of_its_volume_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (a, _) = record("a", 1);
        let (b, b_record) = record("b", 1);
        std::fs::write(dir.path().join(format!("{a}.json")), "{\"name\":").unwrap();
        std::fs::write(dir.path().join(format!(".{b}.json.1.tmp")), "half").unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        assert!(matches!(journal.get(&a), Err(Error::JournalUnreadable { .. })));
        journal.put(&b, &b_record).unwrap();
        assert_eq!(journal.get(&b).unwrap(), b_record);
        assert!(!dir.path().join(format!(".{b}.json.1.tmp")).exists());
    }
}
