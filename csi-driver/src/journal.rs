//! The driver's persistent state: one file for each volume and each snapshot, replaced as a whole
//! and on disk before anything depends on it. Mounts and daemons are stored apart (`boot`), since
//! they need not survive the machine.
//!
//! Invariant: an entry records a step before the kernel or the disk does it, and drops it after the
//! step is undone. So the journal names everything that a killed driver left behind, and nothing
//! that it names is assumed to exist.

mod boot;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod store;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::Result;
use crate::model::capacity::{self, Room};
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::records::BootRecord;
use crate::model::records::{SnapshotRecord, VolumeRecord};
use boot::BootDir;
use store::{Key, Leftovers, Record, Store};

#[derive(Debug)]
pub(crate) struct Journal {
    volumes: Store<VolumeId, VolumeRecord>,
    snapshots: Store<SnapshotId, SnapshotRecord>,
    boot: BootDir,
    /// Held from reading the committed total until the new claim counts.
    admission: Mutex<()>,
}

/// The directories of volumes' and of snapshots' entries.
pub(crate) fn dirs(state_dir: &Path) -> [PathBuf; 2] {
    [state_dir.join("volumes"), state_dir.join("snapshots")]
}

impl Journal {
    /// Reads the directories [`dirs`], which must exist. Removes temporary files of a killed
    /// writer.
    pub(crate) fn open(state_dir: &Path) -> Result<Self> {
        Self::read(state_dir, Leftovers::Remove)
    }

    /// [`Self::open`] for a reader beside the driver: changes nothing.
    pub(crate) fn look(state_dir: &Path) -> Result<Self> {
        Self::read(state_dir, Leftovers::Keep)
    }

    fn read(state_dir: &Path, leftovers: Leftovers) -> Result<Self> {
        let [volumes, snapshots] = dirs(state_dir);
        let (boot, found) = BootDir::open(state_dir, leftovers)?;
        let journal = Self {
            volumes: Store::open(&volumes, leftovers)?,
            snapshots: Store::open(&snapshots, leftovers)?,
            boot,
            admission: Mutex::default(),
        };
        for (id, record) in journal.volumes.list() {
            journal.bring_up_to_date(&id, record, found.contains_key(&id), leftovers)?;
        }
        for (id, record) in found {
            journal.join(&id, record, leftovers)?;
        }
        Ok(journal)
    }

    /// Splits an entry of a version that wrote everything into one file.
    fn bring_up_to_date(
        &self,
        id: &VolumeId,
        mut record: VolumeRecord,
        is_split: bool,
        leftovers: Leftovers,
    ) -> Result<()> {
        let old = record.of_this_boot();
        if old == BootRecord::default() || leftovers == Leftovers::Keep {
            return Ok(());
        }
        if is_split {
            // The earlier driver was killed between the two writes.
            record.replace_boot(BootRecord::default());
        } else {
            self.boot.put(id, &old)?;
        }
        self.volumes.put(id, &record)
    }

    fn join(&self, id: &VolumeId, found: boot::Found, leftovers: Leftovers) -> Result<()> {
        match (self.volumes.find(id), found) {
            (Ok(Some(mut record)), Ok(found)) => {
                record.replace_boot(found);
                self.volumes.remember(id, &record);
            }
            (Ok(Some(_)), Err(reason)) => self.volumes.mark_unreadable(id, self.boot.path(id), reason),
            // Belongs to a volume that was deleted, or whose entry was removed by hand.
            (Ok(None), _) if leftovers == Leftovers::Remove => self.boot.put(id, &BootRecord::default())?,
            // Kept: once the volume's own entry is repaired, the rest is still there.
            (Ok(None) | Err(_), _) => {}
        }
        Ok(())
    }

    pub(crate) fn snapshots(&self) -> &Store<SnapshotId, SnapshotRecord> {
        &self.snapshots
    }

    /// `None` if the volume does not exist.
    pub(crate) fn find(&self, id: &VolumeId) -> Result<Option<VolumeRecord>> {
        self.volumes.find(id)
    }

    pub(crate) fn get(&self, id: &VolumeId) -> Result<VolumeRecord> {
        self.volumes.get(id)
    }

    /// Every readable volume, by id.
    pub(crate) fn list(&self) -> Vec<(VolumeId, VolumeRecord)> {
        self.volumes.list()
    }

    /// Every volume by id; `Err` is the reason why one is unreadable.
    pub(crate) fn entries(&self) -> Vec<(VolumeId, Result<VolumeRecord>)> {
        self.volumes.entries()
    }

    /// Every volume, readable or not: data without an id in this list belongs to no volume.
    pub(crate) fn ids(&self) -> Vec<VolumeId> {
        self.volumes.ids()
    }

    /// Writes the entry: on disk when this returns, except stage and targets, which are written
    /// without a flush. The caller holds the volume's lock.
    pub(crate) fn put(&self, id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        let boot = record.of_this_boot();
        if let Some(mut known) = self.volumes.find(id)? {
            if known.of_this_boot() != boot {
                self.boot.put(id, &boot)?;
                known.replace_boot(boot);
                self.volumes.remember(id, &known);
            }
            if known == *record {
                return Ok(());
            }
        } else if boot != BootRecord::default() {
            self.boot.put(id, &boot)?;
        }
        self.volumes.put(id, record)
    }

    /// [`Self::put`] of a volume whose deletion begins; also works on a full disk.
    pub(crate) fn put_deleting(&self, id: &VolumeId, record: &VolumeRecord) -> Result<()> {
        match self.put(id, record) {
            Err(error) if store::is_disk_full(&error) => self.volumes.put_deleting(id, record),
            outcome => outcome,
        }
    }

    pub(crate) fn remove(&self, id: &VolumeId) -> Result<()> {
        self.boot.put(id, &BootRecord::default())?;
        self.volumes.remove(id)
    }

    /// The file with the stage and the targets of a volume.
    #[cfg(test)]
    fn boot_path(&self, id: &VolumeId) -> PathBuf {
        self.boot.path(id)
    }

    /// [`Self::put`] of a new or grown volume, if the pool has space for it beside all others.
    pub(crate) fn admit(&self, id: &VolumeId, record: &VolumeRecord, room: Room) -> Result<()> {
        self.admit_into(&self.volumes, id, record, room)
    }

    /// [`Self::admit`] for a snapshot.
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
            if let Some(refusal) = capacity::refusal(record.committed_bytes(), others, room) {
                return Err(refusal);
            }
            if let Some(inodes) = room.inodes {
                let each = inodes.bytes_each;
                let wanted = record.committed_inodes(each);
                let others = self.committed_inodes(each).saturating_sub(store.committed_inodes_by(id, each));
                if let Some(refusal) = capacity::inode_refusal(wanted, others, inodes) {
                    return Err(refusal);
                }
            }
            store.claim(id, record)
        };
        store.persist(id, record, before)
    }

    /// The sum of all volumes' inode limits and of all snapshots' inodes.
    pub(crate) fn committed_inodes(&self, bytes_each: u64) -> u64 {
        let of_snapshots = self.snapshots.committed_inodes(bytes_each);
        self.volumes.committed_inodes(bytes_each).saturating_add(of_snapshots)
    }

    /// The sum of all volumes' sizes and of all snapshots' bytes.
    pub(crate) fn committed_bytes(&self) -> u64 {
        self.volumes.committed_bytes().saturating_add(self.snapshots.committed_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::model::access_mode::AccessMode;
    use crate::model::capability::Access;
    use crate::model::launch::LaunchId;
    use crate::model::launch::ProcessId;
    use crate::model::name::VolumeName;
    use crate::model::parameters::Parameters;
    use crate::model::records::{
        Attachment, Serving, SnapshotPhase, Source, StageRecord, StageSpec, TargetRecord, Timestamp,
    };
    use crate::model::snapshot_mode::SnapshotMode;

    const TEN: Room = Room { pool_bytes: 10, promised_bytes: 10, inodes: None };

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
            used_inodes: 3,
            created: Timestamp { seconds: 5, nanos: 6 },
            mode: SnapshotMode::Reflink,
            phase: SnapshotPhase::Ready,
            pause_us: 1,
            from_unlimited: false,
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
        let spec = StageSpec { staging_path: "/s".into(), access, settings: Default::default() };
        record.stage = Some(StageRecord {
            launch: Some(LaunchId::Process(ProcessId { pid: 3, start_time: 4 })),
            ..StageRecord::begin(spec)
        });
        record
            .targets
            .insert("/t".into(), TargetRecord { access, published: true, asked: None, owes_group: false });
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

    /// Staged by a daemon that runs, and published.
    fn served(name: &str) -> (VolumeId, VolumeRecord) {
        let (id, mut record) = record(name, 7);
        let access = Access::plain(AccessMode::MultiNodeMultiWriter);
        let daemon = ProcessId { pid: 3, start_time: 4 };
        let spec = StageSpec { staging_path: "/s".into(), access, settings: Default::default() };
        record.stage = Some(StageRecord {
            launch: Some(LaunchId::Process(daemon)),
            serving: Some(Serving { connection_minor: 5, daemon, since: None, is_sole_holder: false }),
            ..StageRecord::begin(spec)
        });
        record
            .targets
            .insert("/t".into(), TargetRecord { access, published: true, asked: None, owes_group: false });
        (id, record)
    }

    #[test]
    fn targets_are_found_by_the_path_that_was_asked_for_and_an_earlier_versions_by_their_own() {
        let (_, mut record) = served("a");
        let target = record.targets[Path::new("/t")].clone();
        assert!(!serde_json::to_string(&target).unwrap().contains("asked"));
        let earlier = serde_json::json!({ "access": target.access, "published": true });
        assert_eq!(serde_json::from_value::<TargetRecord>(earlier).unwrap(), target);
        let linked = TargetRecord { asked: Some("/link/t".into()), ..target };
        record.targets.insert("/u".into(), linked.clone());
        record.targets.insert("/v".into(), linked);
        assert_eq!(record.targets_asked_at(Path::new("/t")), [Path::new("/t")]);
        assert_eq!(record.targets_asked_at(Path::new("/link/t")), [Path::new("/u"), Path::new("/v")]);
        assert_eq!(record.targets_asked_at(Path::new("/u")), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_stage_touches_nothing_that_a_power_cut_must_not_take() {
        let (dir, journal) = state();
        let (id, staged) = served("a");
        let file = dir.path().join(format!("volumes/{id}.json"));
        journal.put(&id, &record("a", 7).1).unwrap();
        assert!(!journal.boot_path(&id).exists());
        // A later write of the entry replaces this content.
        std::fs::write(&file, "untouched").unwrap();
        journal.put(&id, &staged).unwrap();
        assert_eq!(journal.get(&id).unwrap(), staged);
        assert!(journal.boot_path(&id).exists());
        journal.put(&id, &record("a", 7).1).unwrap();
        assert!(!journal.boot_path(&id).exists());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "untouched");
        journal.put(&id, &staged).unwrap();
        journal.remove(&id).unwrap();
        assert!(!journal.boot_path(&id).exists() && !file.exists());
    }

    #[test]
    fn an_entry_is_marked_as_deleted_where_no_file_can_be_made() {
        let (dir, journal) = state();
        let (id, mut volume) = record("\"deleting\": false", 7);
        let (snapshot_id, mut cut) = snapshot("a", 3);
        journal.put(&id, &volume).unwrap();
        journal.snapshots().put(&snapshot_id, &cut).unwrap();
        (volume.deleting, cut.deleting) = (true, true);
        journal.volumes.overwrite(&id, &volume).unwrap();
        journal.snapshots().overwrite(&snapshot_id, &cut).unwrap();
        for journal in [journal, Journal::open(dir.path()).unwrap()] {
            assert_eq!(journal.get(&id).unwrap(), volume);
            assert_eq!(journal.snapshots().get(&snapshot_id).unwrap(), cut);
        }
    }

    #[test]
    fn a_line_that_was_cut_short_was_not_taken_and_a_file_does_not_grow_for_ever() {
        let (dir, journal) = state();
        let (id, staged) = served("a");
        let published = VolumeRecord { targets: Default::default(), ..staged.clone() };
        journal.put(&id, &staged).unwrap();
        let path = journal.boot_path(&id);
        let line = std::fs::read(&path).unwrap();
        let mut most = 0;
        for _ in 0..500 {
            journal.put(&id, &published).unwrap();
            journal.put(&id, &staged).unwrap();
            most = most.max(std::fs::metadata(&path).unwrap().len());
        }
        assert!((1 << 13..=1 << 14).contains(&most), "{most}");
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, [&whole, &line[..line.len() / 2]].concat()).unwrap();
        assert_eq!(Journal::look(dir.path()).unwrap().get(&id).unwrap(), staged);
        let journal = Journal::open(dir.path()).unwrap();
        assert_eq!(journal.get(&id).unwrap(), staged);
        assert_eq!(std::fs::read(&path).unwrap(), whole, "without the half line");
        journal.put(&id, &published).unwrap();
        assert_eq!(Journal::look(dir.path()).unwrap().get(&id).unwrap(), published);
    }

    /// Where no room was reserved, as the disk was nearly full then.
    #[test]
    fn a_volume_is_taken_down_and_a_boot_is_taken_over_without_room_for_a_line() {
        let (dir, journal) = state();
        let [(a, staged), (b, left)] = ["a", "b"].map(served);
        let published = VolumeRecord { targets: Default::default(), ..staged.clone() };
        for (id, record) in [(&a, &staged), (&b, &left)] {
            journal.put(id, record).unwrap();
            let path = journal.boot_path(id);
            let text = std::fs::read(&path).unwrap();
            assert!(boot::overwrite_last(&path, &text).unwrap(), "its own room");
            assert_eq!(std::fs::read(&path).unwrap(), text);
        }
        let path = journal.boot_path(&a);
        let before = std::fs::metadata(&path).unwrap().len();
        let mut line = serde_json::to_vec(&published.of_this_boot()).unwrap();
        line.push(b'\n');
        assert!(boot::overwrite_last(&path, &line).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), before, "in its place");
        assert_eq!(Journal::look(dir.path()).unwrap().get(&a).unwrap(), published);
        journal.put(&b, &left).unwrap();
        let taken_down =
            VolumeRecord { stage: None, restage: left.stage.as_ref().map(StageSpec::again), ..left };
        let mut shorter = serde_json::to_vec(&taken_down.of_this_boot()).unwrap();
        shorter.push(b'\n');
        assert!(boot::overwrite_last(&journal.boot_path(&b), &shorter).unwrap());
        assert_eq!(Journal::look(dir.path()).unwrap().get(&b).unwrap(), taken_down);
        line.splice(..1, [b'{'].into_iter().chain(vec![b' '; 1 << 14]));
        assert!(!boot::overwrite_last(&path, &line).unwrap(), "a longer line has no place there");
        assert_eq!(Journal::look(dir.path()).unwrap().get(&a).unwrap(), published);
    }

    const ANOTHER_BOOT: &str = "0f0f0f0f-0000-4000-8000-000000000000";

    #[test]
    fn what_other_programs_leave_among_the_boots_is_left_alone() {
        let (dir, journal) = state();
        let (id, record) = served("a");
        journal.put(&id, &record).unwrap();
        let boots = journal.boot_path(&id).parent().unwrap().with_file_name("stray.jsonl");
        let lost = boots.with_file_name("lost+found");
        std::fs::write(&boots, "{}").unwrap();
        std::fs::create_dir(&lost).unwrap();
        std::fs::write(lost.join("kept"), "").unwrap();
        for journal in [Journal::look(dir.path()).unwrap(), Journal::open(dir.path()).unwrap()] {
            assert_eq!(journal.get(&id).unwrap(), record);
            assert!(boots.exists() && lost.join("kept").exists());
        }
    }

    #[test]
    fn of_another_boot_its_processes_are_forgotten_and_what_is_torn_is_nothing() {
        let (dir, journal) = state();
        let [(a, mut a_record), (b, b_record), (c, c_record)] = ["a", "b", "c"].map(served);
        a_record.restage = a_record.stage.as_ref().map(StageSpec::again);
        for (id, record) in [(&a, &a_record), (&b, &b_record), (&c, &c_record)] {
            journal.put(id, record).unwrap();
        }
        std::fs::write(journal.boot_path(&b), "{").unwrap();
        std::fs::write(journal.boot_path(&c), "").unwrap();
        let this = journal.boot_path(&a).parent().unwrap().to_owned();
        let other = this.with_file_name(ANOTHER_BOOT);
        std::fs::rename(&this, &other).unwrap();

        let mut stage = a_record.stage.clone().unwrap();
        (stage.launch, stage.serving) = (None, None);
        // kubelet stages anew after a reboot: no publish does it before.
        let left = VolumeRecord { stage: Some(stage), restage: None, ..a_record };
        assert_eq!(left.answered_stage(), None);
        let nothing = |record: &VolumeRecord| VolumeRecord {
            stage: None,
            targets: Default::default(),
            ..record.clone()
        };
        for _again in 0..2 {
            let looked = Journal::look(dir.path()).unwrap();
            assert_eq!(looked.get(&a).unwrap(), left);
            assert!(other.exists() && !this.exists(), "a look changes nothing");
        }
        for _again in 0..2 {
            let journal = Journal::open(dir.path()).unwrap();
            assert_eq!(journal.get(&a).unwrap(), left);
            assert_eq!(journal.get(&b).unwrap(), nothing(&b_record));
            assert_eq!(journal.get(&c).unwrap(), nothing(&c_record));
            assert!(!other.exists());
        }
    }

    /// With neither a byte nor an inode left, no file can be replaced and no directory made.
    #[test]
    fn what_another_boot_left_is_taken_over_on_a_full_disk() {
        let disk = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| scope.spawn(|| take_over_on_a_full_disk(disk.path())).join()).unwrap();
    }

    /// On a thread of its own, which ends with its mount namespace.
    fn take_over_on_a_full_disk(disk: &Path) {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).unwrap();
        linux::mount::make_slave(Path::new("/")).unwrap();
        let flags = linux::mount::MountFlags::default();
        linux::mount::mount_fs("tmpfs", "full", disk, flags, "size=256k,nr_inodes=32").unwrap();
        dirs(disk).iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
        let journal = Journal::open(disk).unwrap();
        let [(a, a_record), (b, b_record)] = ["a", "b"].map(served);
        journal.put(&a, &a_record).unwrap();
        journal.put(&b, &b_record).unwrap();
        let this = journal.boot_path(&a).parent().unwrap().to_owned();
        std::fs::rename(&this, this.with_file_name(ANOTHER_BOOT)).unwrap();
        let mut filler = std::fs::File::create(disk.join("filler")).unwrap();
        while std::io::Write::write(&mut filler, &[0; 4096]).is_ok() {}
        let mut files = 0..64;
        assert!(files.any(|number| std::fs::File::create(disk.join(format!("empty{number}"))).is_err()));

        for _again in 0..2 {
            let journal = Journal::open(disk).unwrap();
            for (id, before) in [(&a, &a_record), (&b, &b_record)] {
                let stage = journal.get(id).unwrap().stage.unwrap();
                assert_eq!((stage.launch, stage.serving), (None, None));
                assert_eq!(journal.get(id).unwrap().targets, before.targets);
            }
        }
    }

    #[test]
    fn a_torn_stage_of_this_boot_keeps_its_volume_as_it_is() {
        let (dir, journal) = state();
        let (id, record) = served("a");
        journal.put(&id, &record).unwrap();
        let torn = journal.boot_path(&id);
        std::fs::write(&torn, "").unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        let error = journal.get(&id).unwrap_err();
        assert!(matches!(&error, Error::JournalUnreadable { path, .. } if *path == torn), "{error}");
        journal.put(&id, &record).unwrap_err();
    }

    #[test]
    fn a_stage_of_a_volume_that_is_gone_goes_too_and_of_an_unreadable_one_stays() {
        let (dir, journal) = state();
        let [(a, a_record), (b, b_record)] = ["a", "b"].map(served);
        journal.put(&a, &a_record).unwrap();
        journal.put(&b, &b_record).unwrap();
        let file = |id: &VolumeId| dir.path().join(format!("volumes/{id}.json"));
        std::fs::remove_file(file(&a)).unwrap();
        let whole = std::fs::read(file(&b)).unwrap();
        std::fs::write(file(&b), "{").unwrap();
        Journal::look(dir.path()).unwrap();
        assert!(journal.boot_path(&a).exists());
        let again = Journal::open(dir.path()).unwrap();
        assert!(!journal.boot_path(&a).exists());
        assert_eq!(again.ids(), std::slice::from_ref(&b));
        std::fs::write(file(&b), whole).unwrap();
        assert_eq!(Journal::open(dir.path()).unwrap().get(&b).unwrap(), b_record);
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
        let file = dir.path().join(format!("volumes/{id}.json"));
        let looked = Journal::look(dir.path()).unwrap().get(&id).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), old, "a look changes nothing");
        let found = Journal::open(dir.path()).unwrap().get(&id).unwrap();
        assert_eq!(found, looked);
        let plain = Access { read_only: true, ..Access::plain(AccessMode::SingleNodeWriter) };
        assert!(found.filled, "a volume of a version that filled none is complete");
        assert_eq!(found.parameters, Parameters { threads: 2, ..Default::default() });
        assert_eq!(found.stage.as_ref().unwrap().access, plain);
        assert!(found.targets[Path::new("/t")].published);
        let written = std::fs::read_to_string(&file).unwrap();
        assert!(!written.contains("stage"), "what ends with the boot is kept apart: {written}");
        // Killed before that was written, and the next driver has changed it since.
        std::fs::write(&file, old).unwrap();
        for _again in 0..2 {
            let journal = Journal::open(dir.path()).unwrap();
            assert_eq!(journal.get(&id).unwrap(), found);
            let unstaged = VolumeRecord { stage: None, ..found.clone() };
            journal.put(&id, &unstaged).unwrap();
            assert_eq!(Journal::look(dir.path()).unwrap().get(&id).unwrap(), unstaged);
            journal.put(&id, &found).unwrap();
        }
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
        journal.admit_snapshot(&s, &s_record, Room { promised_bytes: 11, ..TEN }).unwrap();
        assert_eq!(journal.committed_bytes(), 11);
        let failed = SnapshotRecord { phase: SnapshotPhase::Failed { reason: "why".into() }, ..s_record };
        journal.snapshots().put(&s, &failed).unwrap();
        assert_eq!(journal.committed_bytes(), 6, "nothing is left of a failed one but its word");
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
    fn a_torn_entry_keeps_its_part_of_the_pool_and_one_in_the_wrong_place_is_not_believed() {
        let (dir, journal) = state();
        let (a, a_record) = record("a", 6);
        let (b, b_record) = record("b", 3);
        journal.put(&a, &a_record).unwrap();
        journal.put(&b, &b_record).unwrap();
        let path = |id: &VolumeId| dir.path().join(format!("volumes/{id}.json"));
        let text = std::fs::read_to_string(path(&a)).unwrap();
        std::fs::write(path(&a), text.trim_end().trim_end_matches('}')).unwrap();
        let torn = Journal::open(dir.path()).unwrap();
        torn.get(&a).unwrap_err();
        assert_eq!(torn.committed_bytes(), 9);

        std::fs::write(path(&b), text).unwrap();
        let wrong = Journal::open(dir.path()).unwrap();
        let message = wrong.get(&b).unwrap_err().to_string();
        assert!(message.contains("it is the entry of \"a\", which has another id"), "{message}");
        assert_eq!(wrong.committed_bytes(), 12);
        std::fs::write(path(&b), "{\"name\":").unwrap();
        assert_eq!(Journal::open(dir.path()).unwrap().committed_bytes(), 6);
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
