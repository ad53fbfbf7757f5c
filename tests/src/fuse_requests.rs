//! Requests that wait for a volume's daemon.

use std::time::Duration;

use anyhow::{Result, ensure};
use linux::mount::FuseConnections;

use crate::eventually;

/// Until a change of the volume with this connection waits for a daemon that holds changes back.
pub fn wait_for_a_change(connection_minor: u32, limit: Duration) -> Result<()> {
    // What comes first, as a lookup, is answered at once.
    let mut looks = 0;
    eventually("a change waits for the daemon", limit, || {
        let waiting = FuseConnections::open()?.waiting(connection_minor)?;
        looks = if waiting == Some(1) { looks + 1 } else { 0 };
        ensure!(looks >= 30, "{waiting:?}");
        Ok(())
    })
}
