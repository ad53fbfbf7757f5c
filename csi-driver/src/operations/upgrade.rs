//! `hawser-csi upgrade`: asks the running driver to replace daemons, one volume after the other.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use proto::admin::admin_client::AdminClient;
use proto::admin::{ListVolumesRequest, Upgrade as Row, UpgradeRequest, Volume};
use tonic::Status;
use tonic::transport::Channel;

use super::admin::client::{ask, ask_within};
use super::views::{Format, NoJournal, Place};
use crate::error::Error;
use crate::model::limits;

/// For one volume: its turn, the start of a daemon, and a roll-back.
const LIMIT: Duration = limits::TURN.saturating_add(limits::OPERATION).saturating_add(limits::OPERATION);

#[derive(Debug, Clone, Args)]
pub struct Upgrade {
    /// Id of a staged volume (`hawser-csi volumes`), unless --all is given
    #[arg(value_name = "VOLUME", required_unless_present = "all", conflicts_with = "all")]
    pub volume: Option<String>,
    /// Each staged volume, one after the other: goes on after one that fails
    #[arg(long)]
    pub all: bool,
    /// Replaces a daemon of the same program too, such as one of an image tag that has moved
    #[arg(long)]
    pub force: bool,
    #[command(flatten)]
    pub place: Place,
    /// A table for people, or JSON.
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub output: Format,
}

/// What was done.
#[derive(Debug)]
pub struct Report {
    pub text: String,
    /// Each volume's daemon is of the configured program.
    pub is_complete: bool,
}

/// Why nothing was done.
#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    #[error(transparent)]
    NoJournal(#[from] NoJournal),
    #[error(
        "no driver that can replace daemons answers in {} for {}: start one of this release, or pass its \
         --run-dir and --state-dir",
        run_dir.display(),
        state_dir.display()
    )]
    NoDriver { run_dir: PathBuf, state_dir: PathBuf },
    #[error("ask the running driver")]
    Driver(#[from] Status),
    #[error(transparent)]
    Print(#[from] Error),
}

impl Upgrade {
    /// Asks the driver, and returns what to print.
    pub fn run(&self) -> Result<Report, UpgradeError> {
        NoJournal::check(&self.place.state_dir)?;
        let volumes = match &self.volume {
            Some(volume) => vec![volume.clone()],
            None => self.place.staged()?,
        };
        let mut rows: Vec<Row> = Vec::new();
        for volume in volumes {
            let row = match self.upgrade(volume.clone()) {
                // The driver ended meanwhile.
                Err(error @ UpgradeError::NoDriver { .. }) if !rows.is_empty() => {
                    failed(volume, &error.to_string())
                }
                row => row?,
            };
            rows.push(row);
        }
        let is_complete = rows.iter().all(|row| matches!(row.result.as_str(), "upgraded" | "current"));
        Ok(Report { text: self.output.print(&rows)?, is_complete })
    }

    fn upgrade(&self, volume: String) -> Result<Row, UpgradeError> {
        let Place { run_dir, state_dir } = &self.place;
        let (force, id) = (self.force, volume.clone());
        let asked = async |mut driver: AdminClient<Channel>, state_dir| {
            driver.upgrade(UpgradeRequest { state_dir, volume: id, force }).await
        };
        match ask_within(LIMIT, run_dir, state_dir, asked) {
            Some(Ok(answer)) => Ok(answer.upgrade.unwrap_or_default()),
            Some(Err(status)) => Ok(failed(volume, status.message())),
            None => Err(self.place.no_driver()),
        }
    }
}

fn failed(volume: String, reason: &str) -> Row {
    let (result, reason) = ("failed".to_owned(), Some(reason.to_owned()));
    Row { volume, result, reason, ..Row::default() }
}

impl Place {
    /// The volumes that have a daemon and are not parked.
    fn staged(&self) -> Result<Vec<String>, UpgradeError> {
        let listed = self.list().ok_or_else(|| self.no_driver())??;
        let is_staged = |volume: &Volume| volume.staging_path.is_some() && volume.daemon_pid.is_some();
        Ok(listed.into_iter().filter(is_staged).map(|volume| volume.id).collect())
    }

    fn list(&self) -> Option<Result<Vec<Volume>, Status>> {
        let asked = async |mut driver: AdminClient<Channel>, state_dir| {
            driver.list_volumes(ListVolumesRequest { state_dir }).await
        };
        ask(&self.run_dir, &self.state_dir, asked).map(|answer| answer.map(|answer| answer.volumes))
    }

    fn no_driver(&self) -> UpgradeError {
        UpgradeError::NoDriver { run_dir: self.run_dir.clone(), state_dir: self.state_dir.clone() }
    }
}

impl super::views::Row for Row {
    const HEADINGS: &'static [&'static str] = &["VOLUME", "RESULT", "PAUSE", "FROM", "TO", "REASON"];

    fn cells(&self) -> Vec<String> {
        vec![
            self.volume.clone(),
            self.result.clone(),
            self.pause_us.map(|us| format!("{}.{:03} ms", us / 1000, us % 1000)).unwrap_or_default(),
            self.from.clone().unwrap_or_default(),
            self.to.clone().unwrap_or_default(),
            self.reason.clone().unwrap_or_default(),
        ]
    }
}
