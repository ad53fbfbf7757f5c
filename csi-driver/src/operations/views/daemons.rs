//! The state of staged volumes' daemons: the kernel shows whether they run, a ping whether they
//! answer. While no driver runs, the keeper may have given a volume to another daemon, which only the
//! ping shows.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Serialize;

use crate::daemon::control;
use crate::engine::health::is_served;
use crate::error::Result;
use crate::model::ids::VolumeId;
use crate::model::records::VolumeRecord;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Daemon {
    Serves,
    /// It runs and does not answer: stopped or stuck.
    Hung,
    Dead,
}

impl Daemon {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Serves => "serves",
            Self::Hung => "hung",
            Self::Dead => "dead",
        }
    }
}

/// The daemons of all served volumes in the journal. All are asked at the same time.
pub(super) fn look(
    run_dir: &Path,
    entries: &[(VolumeId, Result<VolumeRecord>)],
) -> BTreeMap<VolumeId, Daemon> {
    let is_served = |record: &VolumeRecord| {
        let stage = record.stage.as_ref().filter(|stage| stage.serving.is_some())?;
        Some(is_served(stage).unwrap_or(true))
    };
    let served: Vec<(&VolumeId, bool)> =
        entries.iter().filter_map(|(id, record)| Some((id, is_served(record.as_ref().ok()?)?))).collect();
    let alive = served.iter().filter(|(_, is_alive)| *is_alive).map(|(id, _)| *id);
    let silent = control::silent(run_dir, alive);
    let is_given_up = |record: &VolumeRecord| record.stage.as_ref().is_some_and(|stage| stage.aborted);
    let given_up: BTreeSet<&VolumeId> =
        entries.iter().filter(|(_, r)| r.as_ref().is_ok_and(is_given_up)).map(|(id, _)| id).collect();
    let ended = served.iter().filter(|(id, is_alive)| !is_alive && !given_up.contains(id)).map(|(id, _)| *id);
    let answering = control::answering(run_dir, ended);
    let how = |id: &VolumeId, is_alive: bool| match is_alive {
        true if silent.contains(id) => Daemon::Hung,
        false if !answering.contains(id) => Daemon::Dead,
        true | false => Daemon::Serves,
    };
    served.into_iter().map(|(id, is_alive)| (id.clone(), how(id, is_alive))).collect()
}
