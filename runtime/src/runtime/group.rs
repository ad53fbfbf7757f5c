//! The processes in a container's control group.

use std::path::Path;
use std::time::Duration;

use linux::cgroup::{Cgroup, Hierarchies};

use crate::blocking::blocking;
use crate::error::{Result, chain};
use crate::runtime::state::Container;

/// Kills all, and removes the group. `path`: as control groups name it.
pub(crate) fn kill(path: &Path) -> Result<()> {
    // A process that has not ended by then causes EBUSY.
    Ok(Cgroup::find(&Hierarchies::known()?, path).end(Duration::from_secs(5))?)
}

/// Ends the remaining processes of a container that has ended or never started.
pub(crate) async fn end_left_over(container: &Container) {
    let path = container.record.cgroup_path.clone();
    if let Err(error) = blocking("kill cgroup", move || kill(&path)).await {
        tracing::warn!(container_id = container.id, error = %chain(&error), "end the processes of a container that did not start");
    }
}
