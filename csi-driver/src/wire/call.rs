//! Runs every RPC, and answers refused ones.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tonic::Status;
use tracing::{Instrument, Span};

use crate::engine::driver::Driver;
use crate::engine::locks::{Lock, VolumeGuard};
use crate::error::{Error, Result, chain};
use crate::model::limits;
use crate::model::sizes::MAX_STRING_BYTES;
use crate::wire::status::status;

/// The span of NodeUnpublishVolume.
pub(crate) const UNPUBLISH: &str = "csi.NodeUnpublishVolume";
/// Retry interval while a daemon's start holds the volume's lock.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Runs one RPC: `operation` runs on a thread that may block, with `lock` held, and to its end even
/// if the caller goes away or the limit passes. `name` is the span's name: `csi.NodeStageVolume`.
pub(crate) async fn run<T: Send + 'static>(
    driver: &Arc<Driver>,
    name: &'static str,
    lock: Lock<'_>,
    operation: impl FnOnce(&Arc<Driver>) -> Result<T> + Send + 'static,
) -> std::result::Result<T, Status> {
    let span = tracing::info_span!("csi", span = name, volume_id = lock.id());
    run_in(span, driver, name, lock, operation).await
}

/// [`run`] of a call that creates an object: the log also shows the name in the request, which the
/// caller knows, unlike the id.
pub(crate) async fn run_creation<T: Send + 'static>(
    driver: &Arc<Driver>,
    name: &'static str,
    (lock, created): (Lock<'_>, &str),
    operation: impl FnOnce(&Arc<Driver>) -> Result<T> + Send + 'static,
) -> std::result::Result<T, Status> {
    let span = tracing::info_span!("csi", span = name, volume_id = lock.id(), name = created);
    run_in(span, driver, name, lock, operation).await
}

async fn run_in<T: Send + 'static>(
    span: Span,
    driver: &Arc<Driver>,
    name: &'static str,
    lock: Lock<'_>,
    operation: impl FnOnce(&Arc<Driver>) -> Result<T> + Send + 'static,
) -> std::result::Result<T, Status> {
    let result = locked(driver, name, lock, operation).instrument(span.clone()).await;
    result.map_err(|error| span.in_scope(|| refused(name, &error)))
}

/// The reply to a refused request. Only this function logs it.
pub(crate) fn refused(name: &'static str, error: &Error) -> Status {
    let status = status(error);
    tracing::warn!(rpc = name, code = ?status.code(), error = chain(error), "refused");
    status
}

/// [`refused`] before [`run_creation`], for a request that could not be parsed.
pub(crate) fn refused_creation(name: &'static str, created: &str, error: &Error) -> Status {
    // Also of a name that is refused since it is longer.
    let created: String = created.chars().take(MAX_STRING_BYTES).collect();
    tracing::info_span!("csi", span = name, name = created).in_scope(|| refused(name, error))
}

/// Waits while the volume's lock is held for the start of a daemon. Such starts follow each other
/// closely, and kubelet calls again minutes later: a pod that ends would wait until the last one.
async fn hold_after_start(driver: &Driver, lock: Lock<'_>) -> Result<VolumeGuard> {
    let (begun, mut has_waited) = (Instant::now(), false);
    loop {
        let held = driver.locks.hold(lock);
        has_waited |= driver.daemons.waits.is_waiting(lock.id());
        match held {
            Err(Error::Pending { .. }) if has_waited && begun.elapsed() < limits::START_UNDER_WAY => {
                tokio::time::sleep(LOCK_RETRY).await;
            }
            held => return held,
        }
    }
}

async fn locked<T: Send + 'static>(
    driver: &Arc<Driver>,
    name: &'static str,
    lock: Lock<'_>,
    operation: impl FnOnce(&Arc<Driver>) -> Result<T> + Send + 'static,
) -> Result<T> {
    // Before the lock: the reverse call must find its volume unlocked while this call waits.
    let turn = driver.admission.turn(name).await?;
    let begun = Instant::now();
    let guard = match lock {
        Lock::Nothing(_) => None,
        Lock::Volume(_) | Lock::Snapshot(_) if name == UNPUBLISH => {
            Some(hold_after_start(driver, lock).await?)
        }
        Lock::Volume(_) | Lock::Snapshot(_) => Some(driver.locks.hold(lock)?),
    };
    let (driver, span, limit) = (driver.clone(), tracing::Span::current(), limits::OPERATION);
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = (guard, turn);
        span.in_scope(|| operation(&driver))
    });
    match tokio::time::timeout(limit.saturating_sub(begun.elapsed()), work).await {
        Ok(Ok(result)) => result,
        Ok(Err(_panic)) => Err(Error::Panicked { operation: name }),
        Err(_elapsed) => Err(Error::Deadline { what: name.to_owned(), limit }),
    }
}
