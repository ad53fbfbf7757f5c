//! `hawser-csi volumes`, `snapshots` and `mounts`: the state in the journal and the kernel, with or
//! without a running driver.
//!
//! A running driver answers over its admin socket. Without one, the command reads mountinfo and the
//! journal's files, each of which is always complete. It accesses no mount and no pool, and only
//! pings the daemons.

mod daemons;
mod legends;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueEnum};
use linux::mountinfo::MountEntry;
use proto::admin::admin_client::AdminClient;
use proto::admin::{ListMountsRequest, ListSnapshotsRequest, ListVolumesRequest, Mount, Snapshot, Volume};
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;

use crate::config;
use crate::daemon::control;
use crate::daemon::keeper::Holders;
use crate::error::{Error, Result, Step, chain};
use crate::journal::{self, Journal};
use crate::kernel::mounts::FS_TYPE;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::launch::ProcessId;
use crate::model::records::{SnapshotPhase, SnapshotRecord, VolumeRecord};
use crate::operations::admin::client::ask;
use crate::operations::sub_paths;
use daemons::Daemon;

/// FUSE_NOTIFY_RESEND: without it, a connection that is held makes requests of a dead daemon wait for
/// ever.
const OLD_KERNEL: &str = "kernel before 6.9";

/// What to show instead of running the driver.
#[derive(Debug, Clone, Subcommand)]
pub enum View {
    /// Shows the volumes, and whether those that are staged are served.
    #[command(after_long_help = legends::VOLUMES)]
    Volumes(Look),
    /// Shows the snapshots.
    #[command(after_long_help = legends::SNAPSHOTS)]
    Snapshots(Look),
    /// Shows where volumes are mounted, and whether the journal knows.
    #[command(after_long_help = legends::MOUNTS)]
    Mounts(Look),
}

/// How to reach a driver.
#[derive(Debug, Clone, Args)]
pub struct Place {
    /// Directory of the driver's journal.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/hawser-csi")]
    pub state_dir: PathBuf,
    /// Directory of the driver's admin socket.
    #[arg(long, value_name = "DIR", default_value = "/run/hawser")]
    pub run_dir: PathBuf,
}

#[derive(Debug, Clone, Args)]
pub struct Look {
    #[command(flatten)]
    pub place: Place,
    /// A table for people, or JSON.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

/// Copied and total bytes, by the id of the volume or snapshot that is made.
pub(crate) type Copies = HashMap<String, (u64, u64)>;

/// What a view prints.
#[derive(Debug)]
pub struct Shown {
    pub text: String,
    /// No driver has answered.
    pub without_driver: Option<WithoutDriver>,
}

/// Why the text may be incomplete, for standard error.
#[derive(Debug, thiserror::Error)]
#[error(
    "no driver with --state-dir {} answers at --run-dir {}: shown is what the journal and the mount table have",
    state_dir.display(),
    run_dir.display()
)]
pub struct WithoutDriver {
    state_dir: PathBuf,
    run_dir: PathBuf,
}

impl View {
    /// Asks the driver, or looks itself if none answers.
    pub fn show(&self) -> std::result::Result<Shown, ViewError> {
        let (Self::Volumes(look) | Self::Snapshots(look) | Self::Mounts(look)) = self;
        let (run_dir, state_dir, output) = (&look.place.run_dir, &look.place.state_dir, look.output);
        NoJournal::check(state_dir)?;
        // Without a driver no copy runs.
        let no_copies = Copies::new();
        let mut without_driver = None;
        let mut look_at_journal = || {
            without_driver = Some(WithoutDriver { state_dir: state_dir.clone(), run_dir: run_dir.clone() });
            Journal::look(state_dir)
        };
        let text = match self {
            Self::Volumes(_) => {
                let asked = async |mut driver: AdminClient<Channel>, state_dir| {
                    driver.list_volumes(ListVolumesRequest { state_dir }).await
                };
                let rows = match ask(run_dir, state_dir, asked) {
                    Some(answer) => answer?.volumes,
                    None => volumes(&look_at_journal()?, run_dir, &no_copies),
                };
                output.print(&rows)
            }
            Self::Snapshots(_) => {
                let asked = async |mut driver: AdminClient<Channel>, state_dir| {
                    driver.list_snapshots(ListSnapshotsRequest { state_dir }).await
                };
                let rows = match ask(run_dir, state_dir, asked) {
                    Some(answer) => answer?.snapshots,
                    None => snapshots(&look_at_journal()?, &no_copies),
                };
                output.print(&rows)
            }
            Self::Mounts(_) => {
                let asked = async |mut driver: AdminClient<Channel>, state_dir| {
                    driver.list_mounts(ListMountsRequest { state_dir }).await
                };
                let rows = match ask(run_dir, state_dir, asked) {
                    Some(answer) => answer?.mounts,
                    None => {
                        let holders = Holders::of_keeper_at(&config::keeper_socket(run_dir));
                        mounts(&look_at_journal()?, run_dir, &holders)?
                    }
                };
                output.print(&rows)
            }
        };
        Ok(Shown { text: text?, without_driver })
    }
}

/// No driver has used this state directory: its volumes, if any, are elsewhere.
#[derive(Debug, thiserror::Error)]
#[error(
    "no journal is in {}: {} is missing: pass the driver's --state-dir",
    state_dir.display(),
    missing.display()
)]
pub struct NoJournal {
    state_dir: PathBuf,
    missing: PathBuf,
}

impl NoJournal {
    pub(crate) fn check(state_dir: &Path) -> std::result::Result<(), Self> {
        // The code that opens the directory reports other errors.
        let is_missing = |dir: &PathBuf| matches!(dir.try_exists(), Ok(false));
        match journal::dirs(state_dir).into_iter().find(is_missing) {
            Some(missing) => Err(Self { state_dir: state_dir.to_owned(), missing }),
            None => Ok(()),
        }
    }
}

/// Why there is nothing to show.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    #[error(transparent)]
    NoJournal(#[from] NoJournal),
    #[error(transparent)]
    Look(#[from] Error),
    #[error("ask the running driver")]
    Driver(#[from] Status),
}

impl Format {
    pub(crate) fn print<R: Row>(self, rows: &[R]) -> Result<String> {
        match self {
            Self::Table => Ok(table(R::HEADINGS, rows.iter().map(Row::cells))),
            Self::Json => serde_json::to_string_pretty(rows)
                .map(|text| text + "\n")
                .map_err(|e| linux::Error::new("write", "JSON", std::io::Error::from(e)))
                .step("print"),
        }
    }
}

pub(crate) trait Row: Serialize {
    const HEADINGS: &'static [&'static str];
    fn cells(&self) -> Vec<String>;
}

impl Row for Volume {
    const HEADINGS: &'static [&'static str] = &["ID", "NAME", "STATE", "CAPACITY", "TARGETS", "DAEMON"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.clone(),
            self.name.clone().unwrap_or_default(),
            self.state.clone() + &percent(self.copied_bytes, self.copy_bytes),
            self.capacity_bytes.map(quantity).unwrap_or_default(),
            self.targets.len().to_string(),
            self.daemon_pid.map(|pid| pid.to_string()).unwrap_or_default(),
        ]
    }
}

/// ` 33%`, appended to a state.
fn percent(copied_bytes: Option<u64>, copy_bytes: Option<u64>) -> String {
    match (copied_bytes, copy_bytes) {
        // The source may grow beyond its first count.
        (Some(done), Some(total)) if total > 0 => format!(" {}%", (done.min(total) * 100) / total),
        _ => String::new(),
    }
}

pub(crate) fn volumes(journal: &Journal, run_dir: &Path, copies: &Copies) -> Vec<Volume> {
    let entries = journal.entries();
    let daemons = daemons::look(run_dir, &entries);
    let row = |(id, record)| volume_row(&id, record, copies, daemons.get(&id).copied());
    entries.into_iter().map(row).collect()
}

fn volume_row(
    id: &VolumeId,
    record: Result<VolumeRecord>,
    copies: &Copies,
    daemon: Option<Daemon>,
) -> Volume {
    let record = match record {
        Ok(record) => record,
        Err(error) => {
            let (id, state) = (id.to_string(), "unreadable".to_owned());
            return Volume { id, state, error: Some(chain(&error)), ..Volume::default() };
        }
    };
    let copy = copies.get(id.as_str()).copied();
    Volume {
        id: id.to_string(),
        state: volume_state(&record, daemon).to_owned(),
        name: Some(record.name.as_str().to_owned()),
        capacity_bytes: Some(record.capacity_bytes),
        data_path: Some(record.data_path().to_string()),
        capacity_policy: Some(record.policies().capacity.to_string()),
        writeback_cache: Some(record.writeback_cache()),
        daemon_pid: daemon_of(&record).map(|daemon| daemon.pid),
        source: record.source.map(|source| source.to_string()),
        parked_until: record.parked.as_ref().map(|parked| parked.until.seconds),
        copied_bytes: copy.map(|(copied_bytes, _)| copied_bytes),
        copy_bytes: copy.map(|(_, copy_bytes)| copy_bytes),
        staging_path: record.stage.map(|stage| text(&stage.staging_path)),
        targets: record.targets.into_keys().map(|path| text(&path)).collect(),
        error: None,
    }
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// The daemon of a staged or parked volume.
fn daemon_of(record: &VolumeRecord) -> Option<ProcessId> {
    record.stage_or_parked()?.serving.map(|serving| serving.daemon)
}

fn volume_state(record: &VolumeRecord, daemon: Option<Daemon>) -> &'static str {
    match &record.stage {
        _ if record.deleting => "deleting",
        _ if !record.filled => "filling",
        None if record.parked.is_some() => "parked",
        None => "unstaged",
        Some(_) => match daemon {
            None => "staging",
            Some(ill @ (Daemon::Dead | Daemon::Hung)) => ill.as_str(),
            Some(Daemon::Serves) if record.targets.is_empty() => "staged",
            Some(Daemon::Serves) => "published",
        },
    }
}

impl Row for Snapshot {
    const HEADINGS: &'static [&'static str] = &["ID", "NAME", "STATE", "USED", "PAUSE", "AGE", "SOURCE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.clone(),
            self.name.clone().unwrap_or_default(),
            self.state.clone() + &percent(self.copied_bytes, self.copy_bytes),
            self.used_bytes.map(quantity).unwrap_or_default(),
            self.pause_us.map(|us| format!("{}.{:03} ms", us / 1000, us % 1000)).unwrap_or_default(),
            self.created.map(age).unwrap_or_default(),
            self.source.clone().unwrap_or_default(),
        ]
    }
}

pub(crate) fn snapshots(journal: &Journal, copies: &Copies) -> Vec<Snapshot> {
    let entries = journal.snapshots().entries();
    entries.into_iter().map(|(id, record)| snapshot_row(&id, record, copies)).collect()
}

fn snapshot_row(id: &SnapshotId, record: Result<SnapshotRecord>, copies: &Copies) -> Snapshot {
    let (record, unreadable) = match record {
        Ok(record) => (Some(record), None),
        Err(error) => (None, Some(chain(&error))),
    };
    let (state, failure) = match record.as_ref().map(|record| (&record.phase, record.deleting)) {
        None => ("unreadable", None),
        Some((_, true)) => ("deleting", None),
        Some((SnapshotPhase::Begun, false)) => ("begun", None),
        Some((SnapshotPhase::Copying, false)) => ("copying", None),
        Some((SnapshotPhase::Ready, false)) => ("ready", None),
        Some((phase @ (SnapshotPhase::Lost | SnapshotPhase::Failed { .. }), false)) => {
            ("failed", phase.failure().map(str::to_owned))
        }
    };
    let copy = copies.get(id.as_str()).copied();
    Snapshot {
        id: id.to_string(),
        name: record.as_ref().map(|record| record.name.as_str().to_owned()),
        state: state.to_owned(),
        source: record.as_ref().map(|record| record.source.to_string()),
        source_capacity_bytes: record.as_ref().map(|record| record.source_capacity_bytes),
        used_bytes: record.as_ref().map(|record| record.used_bytes),
        created: record.as_ref().map(|record| record.created.seconds),
        pause_us: record.as_ref().map(|record| record.pause_us),
        copied_bytes: copy.map(|(copied_bytes, _)| copied_bytes),
        copy_bytes: copy.map(|(_, copy_bytes)| copy_bytes),
        error: failure.or(unreadable),
    }
}

impl Row for Mount {
    const HEADINGS: &'static [&'static str] = &[
        "VOLUME",
        "STATE",
        "DAEMON",
        "PID",
        "SINCE",
        "TAKEOVERS",
        "HOLDERS",
        "NEEDS NEW STAGE",
        "MODE",
        "DATA PATH",
        "LIMITED BY",
        "CONNECTION",
        "PATH",
    ];

    fn cells(&self) -> Vec<String> {
        vec![
            self.volume.clone(),
            self.state.clone(),
            match (&self.daemon, self.counted_files) {
                (Some(daemon), Some(files)) => format!("{daemon} (counts: {files} files so far)"),
                (daemon, _) => daemon.clone().unwrap_or_default(),
            },
            self.daemon_pid.map(|pid| pid.to_string()).unwrap_or_default(),
            self.served_since.map(age).unwrap_or_default(),
            self.takeovers.to_string(),
            match &self.sole_holder_reason {
                Some(reason) => format!("{} ({reason})", self.holders.join(",")),
                None => self.holders.join(","),
            },
            self.needs_new_stage.join(","),
            if self.read_only { "ro" } else { "rw" }.to_owned(),
            match (&self.data_path, self.writeback_cache) {
                (Some(data_path), Some(true)) => format!("{data_path} (writeback cache)"),
                (data_path, _) => data_path.clone().unwrap_or_default(),
            },
            self.capacity_policy.clone().unwrap_or_default(),
            self.connection.to_string(),
            self.path.clone(),
        ]
    }
}

pub(crate) fn mounts(journal: &Journal, run_dir: &Path, holders: &Holders) -> Result<Vec<Mount>> {
    let daemons = daemons::look(run_dir, &journal.entries());
    let serving = daemons.iter().filter(|(_, daemon)| **daemon == Daemon::Serves).map(|(id, _)| id);
    let counted = control::counting(run_dir, serving);
    let all = linux::mountinfo::read().step("read mountinfo")?;
    let row = |mount: MountEntry| {
        let volume = mount.source.to_string_lossy().into_owned();
        let id = VolumeId::parse(&volume);
        let record = id.as_ref().and_then(|id| journal.find(id).ok().flatten());
        let stage = record.as_ref().and_then(|record| record.stage.as_ref());
        let serving = stage.and_then(|stage| stage.serving);
        let is_its = serving.filter(|serving| serving.connection_minor == mount.minor);
        let holders = match (&id, is_its) {
            (Some(id), Some(_)) => holders_of(id, daemons.get(id).copied(), holders),
            _ => Vec::new(),
        };
        let counted_files = id.as_ref().filter(|_| is_its.is_some()).and_then(|id| counted.get(id).copied());
        let takeovers = stage.filter(|_| is_its.is_some()).map_or(0, |stage| stage.takeovers);
        let daemon = match (id, serving) {
            (Some(id), Some(serving)) if serving.connection_minor == mount.minor => daemons.get(&id).copied(),
            // A volume that was staged again has another daemon than its older pods.
            (Some(_), Some(_)) => Some(Daemon::Dead),
            _ => None,
        };
        Mount {
            state: record.as_ref().map_or("unknown", |record| mount_state(record, &mount)).to_owned(),
            daemon: daemon.map(|daemon| daemon.as_str().to_owned()),
            read_only: mount.is_read_only(),
            connection: mount.minor,
            daemon_pid: is_its.map(|serving| serving.daemon.pid),
            takeovers,
            holders,
            sole_holder_reason: is_its.filter(|its| its.is_sole_holder).map(|_| OLD_KERNEL.to_owned()),
            served_since: is_its.and_then(|its| its.since),
            needs_new_stage: stage
                .filter(|_| is_its.is_some())
                .map(|stage| stage.needs_new_stage.clone())
                .unwrap_or_default(),
            data_path: record.as_ref().map(|record| record.data_path().to_string()),
            capacity_policy: record.as_ref().map(|record| record.policies().capacity.to_string()),
            writeback_cache: record.as_ref().map(VolumeRecord::writeback_cache),
            counted_files,
            path: text(&mount.mount_point),
            volume,
        }
    };
    Ok(all.into_iter().filter(|mount| mount.fs_type == FS_TYPE).map(row).collect())
}

fn holders_of(volume_id: &VolumeId, daemon: Option<Daemon>, holders: &Holders) -> Vec<String> {
    let all = [
        ("daemon", daemon.is_some_and(|daemon| daemon != Daemon::Dead)),
        ("driver", holders.driver.contains(volume_id)),
        ("keeper", holders.keeper.contains(volume_id)),
    ];
    all.into_iter().filter(|(_, holds)| *holds).map(|(name, _)| name.to_owned()).collect()
}

fn mount_state(record: &VolumeRecord, mount: &MountEntry) -> &'static str {
    let path = &mount.mount_point;
    if record.stage.as_ref().is_some_and(|stage| stage.staging_path == *path) {
        "staged"
    } else if record.targets.contains_key(path) {
        "published"
    } else if sub_paths::is_of_published(record, mount) {
        "subpath"
    } else {
        "unknown"
    }
}

/// Each column is as wide as its widest cell, with two spaces between columns.
fn table(headings: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let mut lines: Vec<Vec<String>> = vec![headings.iter().map(|&heading| heading.to_owned()).collect()];
    lines.extend(rows);
    let width = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// In Kubernetes' notation, with the largest unit that gives a whole number.
fn quantity(bytes: u64) -> String {
    let units = [("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10)];
    let whole = units.iter().find(|(_, shift)| bytes > 0 && bytes.trailing_zeros() >= *shift);
    whole.map_or_else(|| bytes.to_string(), |(unit, shift)| format!("{}{unit}", bytes >> shift))
}

fn age(created: i64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let seconds = now.saturating_sub(u64::try_from(created).unwrap_or(0));
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        let rows = [vec!["a".to_owned(), "1".to_owned()], vec!["longer".to_owned(), String::new()]];
        let text = table(&["ID", "N"], rows.into_iter());
        assert_eq!(text, "ID      N\na       1\nlonger\n");
    }

    #[test]
    fn sizes_are_whole_numbers_of_the_largest_unit() {
        for (bytes, text) in [
            (0, "0"),
            (1, "1"),
            (1024, "1Ki"),
            (1536, "1536"),
            (3 << 30, "3Gi"),
            ((1 << 30) + 1024, "1048577Ki"),
        ] {
            assert_eq!(quantity(bytes), text);
        }
    }
}
