//! What `hawser-csi doctor --repair` does: what a starting driver does, once.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use linux::mount::UnmountMode;

use super::{DoctorError, Finding};
use crate::config::{self, Config};
use crate::engine::driver::{self, Driver};
use crate::error::{Result, Step};
use crate::model::limits;

/// A driver with another state directory serves the volumes of the same run directory.
pub(super) fn check_no_driver_answers(config: &Config) -> std::result::Result<(), DoctorError> {
    let sockets = [config::admin_socket(&config.run_dir), config.csi_socket()];
    match sockets.into_iter().find(|socket| UnixStream::connect(socket).is_ok()) {
        Some(socket) => Err(DoctorError::RunningElsewhere { socket, state_dir: config.state_dir.clone() }),
        None => Ok(()),
    }
}

pub(super) fn repair(config: &Config, found: &BTreeSet<Finding>) -> Result<()> {
    let (driver, _notices) = Driver::open(config.clone(), driver::backend(config)?)?;
    let driver = Arc::new(driver);
    // First, since a mounted volume is not repaired.
    for path in found.iter().filter_map(|finding| finding.unmount.as_ref()) {
        tracing::info!(path = %path.display(), "unmounting");
        linux::mount::unmount(path, UnmountMode::Detach).step("unmount")?;
    }
    driver.reconciler.reconcile(limits::OPERATION)
}
