//! What a suite has killed, and how long its applications paused.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What is killed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Target {
    Daemon,
    Keeper,
    Driver,
    DriverAndDaemon,
}

impl Target {
    pub(crate) const ALL: [Self; 4] = [Self::Daemon, Self::Keeper, Self::Driver, Self::DriverAndDaemon];
}

/// The longest time without an answer at each kill; zero if none was slow.
#[derive(Debug, Default)]
pub(crate) struct Report(BTreeMap<Target, Vec<Duration>>);

impl Report {
    pub(crate) fn add(&mut self, target: Target, pause: Duration) {
        self.0.entry(target).or_default().push(pause);
    }

    pub(crate) fn kills(&self) -> usize {
        self.0.values().map(Vec::len).sum()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kills", self.kills())?;
        for (target, pauses) in &self.0 {
            let mut pauses = pauses.clone();
            pauses.sort();
            let [middle, longest] =
                [pauses[pauses.len() / 2], pauses[pauses.len() - 1]].map(|pause| pause.as_millis());
            write!(f, "; {target:?} {}: pause p50 {middle} ms, max {longest} ms", pauses.len())?;
        }
        Ok(())
    }
}
