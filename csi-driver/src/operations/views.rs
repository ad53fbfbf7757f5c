//! `hawser-csi volumes`, `snapshots` and `mounts`: what the journal and the kernel
//! say, beside the driver and without it.
//!
//! Only looked at are the journal's files, each of which is whole at any time,
//! and mountinfo; no mount and no pool is asked, and of daemons only whether they
//! answer. How far a copy is that the journal names, the driver is asked that makes it.

mod copies;
mod daemons;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use crate::error::{Error, Result, Step, chain};
use crate::journal::{self, Journal};
use crate::kernel::mounts;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::launch::ProcessId;
use crate::model::records::{SnapshotPhase, SnapshotRecord, VolumeRecord};
use copies::{Copied, Copies};
use daemons::Daemon;

/// What to show instead of running the driver.
#[derive(Debug, Clone, Subcommand)]
pub enum View {
    /// Shows the volumes, and whether those that are staged are served.
    Volumes(Look),
    /// Shows the snapshots.
    Snapshots(Look),
    /// Shows where volumes are mounted, and whether the journal knows.
    Mounts(Look),
}

#[derive(Debug, Clone, Args)]
pub struct Look {
    /// Directory of the driver's journal.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/hawser-csi")]
    pub state_dir: PathBuf,
    /// Directory of the driver's metrics socket, which reports the progress of copies.
    #[arg(long, value_name = "DIR", default_value = "/run/hawser")]
    pub run_dir: PathBuf,
    /// A table for people, or JSON.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Table,
    Json,
}

impl View {
    /// The text to print.
    pub fn show(&self) -> std::result::Result<String, ViewError> {
        let (Self::Volumes(look) | Self::Snapshots(look) | Self::Mounts(look)) = self;
        NoJournal::check(&look.state_dir)?;
        let journal = Journal::look(&look.state_dir)?;
        Ok(match self {
            Self::Volumes(_) => look.output.print(&volumes(&journal, &look.run_dir))?,
            Self::Snapshots(_) => look.output.print(&snapshots(&journal, &look.run_dir))?,
            Self::Mounts(_) => look.output.print(&mounted(&journal, &look.run_dir)?)?,
        })
    }
}

/// No driver has run with this state directory: its volumes, if there are any, are elsewhere.
#[derive(Debug, thiserror::Error)]
#[error(
    "no journal is in {}, for there is no {}: say with --state-dir where the driver has it",
    state_dir.display(),
    missing.display()
)]
pub struct NoJournal {
    state_dir: PathBuf,
    missing: PathBuf,
}

impl NoJournal {
    pub(crate) fn check(state_dir: &Path) -> std::result::Result<(), Self> {
        // What cannot be looked at is told by who opens it.
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

#[derive(Debug, Serialize)]
struct VolumeRow {
    id: String,
    name: Option<String>,
    state: &'static str,
    capacity_bytes: Option<u64>,
    source: Option<String>,
    staging_path: Option<PathBuf>,
    targets: Vec<PathBuf>,
    daemon_pid: Option<i32>,
    /// When a parked daemon is to end, in seconds since 1970.
    parked_until: Option<i64>,
    #[serde(flatten)]
    progress: Progress,
    /// Why the entry cannot be read.
    error: Option<String>,
}

impl Row for VolumeRow {
    const HEADINGS: &'static [&'static str] = &["ID", "NAME", "STATE", "CAPACITY", "TARGETS", "DAEMON"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.clone(),
            self.name.clone().unwrap_or_default(),
            self.state.to_owned() + &self.progress.percent(),
            self.capacity_bytes.map(quantity).unwrap_or_default(),
            self.targets.len().to_string(),
            self.daemon_pid.map(|pid| pid.to_string()).unwrap_or_default(),
        ]
    }
}

/// How far the copy is that makes a volume or snapshot; null where none is under way.
#[derive(Debug, Default, Serialize)]
struct Progress {
    copied_bytes: Option<u64>,
    copy_bytes: Option<u64>,
}

impl Progress {
    fn of(id: &str, copies: &Copies) -> Self {
        let Copied { done_bytes, total_bytes } = match copies.get(id) {
            Some(copied) => *copied,
            None => return Self::default(),
        };
        Self { copied_bytes: Some(done_bytes), copy_bytes: Some(total_bytes) }
    }

    /// ` 33%`, after a state.
    fn percent(&self) -> String {
        match (self.copied_bytes, self.copy_bytes) {
            // What is copied may grow beyond what was counted before.
            (Some(done), Some(total)) if total > 0 => format!(" {}%", (done.min(total) * 100) / total),
            _ => String::new(),
        }
    }
}

fn volumes(journal: &Journal, run_dir: &Path) -> Vec<VolumeRow> {
    let entries = journal.entries();
    let is_filling = |record: &Result<VolumeRecord>| record.as_ref().is_ok_and(|record| !record.filled);
    let copies = match entries.iter().any(|(_, record)| is_filling(record)) {
        true => copies::under_way(run_dir),
        false => Copies::new(),
    };
    let daemons = daemons::look(run_dir, &entries);
    let row = |(id, record)| volume_row(&id, record, &copies, daemons.get(&id).copied());
    entries.into_iter().map(row).collect()
}

fn volume_row(
    id: &VolumeId,
    record: Result<VolumeRecord>,
    copies: &Copies,
    daemon: Option<Daemon>,
) -> VolumeRow {
    let unreadable = |error: &Error| VolumeRow {
        id: id.to_string(),
        name: None,
        state: "unreadable",
        capacity_bytes: None,
        source: None,
        staging_path: None,
        targets: Vec::new(),
        daemon_pid: None,
        parked_until: None,
        progress: Progress::default(),
        error: Some(chain(error)),
    };
    match record {
        Err(error) => unreadable(&error),
        Ok(record) => VolumeRow {
            id: id.to_string(),
            state: volume_state(&record, daemon),
            name: Some(record.name.as_str().to_owned()),
            capacity_bytes: Some(record.capacity_bytes),
            daemon_pid: daemon_of(&record).map(|daemon| daemon.pid),
            source: record.source.map(|source| source.to_string()),
            parked_until: record.parked.as_ref().map(|parked| parked.until.seconds),
            progress: Progress::of(id.as_str(), copies),
            staging_path: record.stage.map(|stage| stage.staging_path),
            targets: record.targets.into_keys().collect(),
            error: None,
        },
    }
}

/// Of a volume that is staged or parked.
fn daemon_of(record: &VolumeRecord) -> Option<ProcessId> {
    let parked = record.parked.as_ref().map(|parked| &parked.stage);
    record.stage.as_ref().or(parked)?.serving.map(|serving| serving.daemon)
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

#[derive(Debug, Serialize)]
struct SnapshotRow {
    id: String,
    name: Option<String>,
    state: &'static str,
    source: Option<String>,
    source_capacity_bytes: Option<u64>,
    used_bytes: Option<u64>,
    /// Seconds since 1970.
    created: Option<i64>,
    pause_us: Option<u64>,
    #[serde(flatten)]
    progress: Progress,
    /// Why it failed, or why the entry cannot be read.
    error: Option<String>,
}

impl Row for SnapshotRow {
    const HEADINGS: &'static [&'static str] = &["ID", "NAME", "STATE", "USED", "PAUSE", "AGE", "SOURCE"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.id.clone(),
            self.name.clone().unwrap_or_default(),
            self.state.to_owned() + &self.progress.percent(),
            self.used_bytes.map(quantity).unwrap_or_default(),
            self.pause_us.map(|us| format!("{}.{:03} ms", us / 1000, us % 1000)).unwrap_or_default(),
            self.created.map(age).unwrap_or_default(),
            self.source.clone().unwrap_or_default(),
        ]
    }
}

fn snapshots(journal: &Journal, run_dir: &Path) -> Vec<SnapshotRow> {
    let entries = journal.snapshots().entries();
    let is_copying = |record: &Result<SnapshotRecord>| {
        record.as_ref().is_ok_and(|record| record.phase == SnapshotPhase::Copying)
    };
    let copies = match entries.iter().any(|(_, record)| is_copying(record)) {
        true => copies::under_way(run_dir),
        false => Copies::new(),
    };
    entries.into_iter().map(|(id, record)| snapshot_row(&id, record, &copies)).collect()
}

fn snapshot_row(id: &SnapshotId, record: Result<SnapshotRecord>, copies: &Copies) -> SnapshotRow {
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
        Some((SnapshotPhase::Failed { reason }, false)) => ("failed", Some(reason.clone())),
    };
    SnapshotRow {
        id: id.to_string(),
        name: record.as_ref().map(|record| record.name.as_str().to_owned()),
        state,
        source: record.as_ref().map(|record| record.source.to_string()),
        source_capacity_bytes: record.as_ref().map(|record| record.source_capacity_bytes),
        used_bytes: record.as_ref().map(|record| record.used_bytes),
        created: record.as_ref().map(|record| record.created.seconds),
        pause_us: record.as_ref().map(|record| record.pause_us),
        progress: Progress::of(id.as_str(), copies),
        error: failure.or(unreadable),
    }
}

#[derive(Debug, Serialize)]
struct MountRow {
    path: PathBuf,
    volume: String,
    /// `staged`, `published`, or `unknown`: the journal does not name it.
    state: &'static str,
    /// Of the connection that is mounted; null where the journal does not name it.
    daemon: Option<Daemon>,
    read_only: bool,
    /// The number of its directory in fusectl.
    connection: u32,
}

impl Row for MountRow {
    const HEADINGS: &'static [&'static str] = &["VOLUME", "STATE", "DAEMON", "MODE", "CONNECTION", "PATH"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.volume.clone(),
            self.state.to_owned(),
            self.daemon.map(Daemon::as_str).unwrap_or_default().to_owned(),
            if self.read_only { "ro" } else { "rw" }.to_owned(),
            self.connection.to_string(),
            self.path.display().to_string(),
        ]
    }
}

fn mounted(journal: &Journal, run_dir: &Path) -> Result<Vec<MountRow>> {
    let daemons = daemons::look(run_dir, &journal.entries());
    let all = linux::mountinfo::read().step("read mountinfo")?;
    let row = |mount: linux::mountinfo::MountEntry| {
        let volume = mount.source.to_string_lossy().into_owned();
        let id = VolumeId::parse(&volume);
        let record = id.as_ref().and_then(|id| journal.find(id).ok().flatten());
        let serving = record.as_ref().and_then(|record| record.stage.as_ref()?.serving);
        let daemon = match (id, serving) {
            (Some(id), Some(serving)) if serving.connection_minor == mount.minor => daemons.get(&id).copied(),
            // A volume that was staged anew has another than its older pods'.
            (Some(_), Some(_)) => Some(Daemon::Dead),
            _ => None,
        };
        MountRow {
            state: record.map_or("unknown", |record| mount_state(&record, &mount.mount_point)),
            daemon,
            read_only: mount.is_read_only(),
            connection: mount.minor,
            path: mount.mount_point,
            volume,
        }
    };
    Ok(all.into_iter().filter(|mount| mount.fs_type == mounts::FS_TYPE).map(row).collect())
}

fn mount_state(record: &VolumeRecord, path: &Path) -> &'static str {
    if record.stage.as_ref().is_some_and(|stage| stage.staging_path == path) {
        "staged"
    } else if record.targets.contains_key(path) {
        "published"
    } else {
        "unknown"
    }
}

/// Columns as wide as their widest cell, two spaces between them.
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

/// As Kubernetes writes it, with the largest unit that leaves a whole number.
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
