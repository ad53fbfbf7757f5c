//! The admin service of a running driver: the data for `hawser-csi volumes`, `snapshots`, `mounts`
//! and `doctor`, and the work of `hawser-csi upgrade`. Only root may use its socket.

pub(super) mod client;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::admin::admin_server::{Admin, AdminServer};
use proto::admin::{
    DiagnoseRequest, DiagnoseResponse, ListMountsRequest, ListMountsResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse, UpgradeRequest, UpgradeResponse,
};
use proto::deadline::Deadlines;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::engine::driver::Driver;
use crate::engine::locks::Lock;
use crate::engine::upgrade::{Outcome, Upgrade};
use crate::error::{Error, Result, chain};
use crate::journal::Journal;
use crate::kernel::socket::Socket;
use crate::model::ids::VolumeId;
use crate::model::limits;
use crate::operations::doctor;
use crate::operations::views::{self, Copies};

/// Connections that wait to be accepted by the server.
const BACKLOG: usize = 4;
/// Limit for one connection.
const CALLS_AT_ONCE: usize = 4;
/// Limit for all connections: a look at a disk that does not answer keeps its thread, and one at
/// many daemons takes a descriptor for each. Refused clients look for themselves.
const LOOKS_AT_ONCE: usize = 1;
const LOOK_BEGINS_WITHIN: Duration = Duration::from_secs(5);
/// Retry interval while another operation holds a volume's lock.
const LOCK_RETRY: Duration = Duration::from_millis(20);

/// Answers until `stopped` is true, then removes the socket.
pub(crate) async fn serve(driver: Arc<Driver>, socket: Socket, mut stopped: watch::Receiver<bool>) {
    let (connections, accepted) = mpsc::channel(BACKLOG);
    let state_dir = resolved(&driver.config.state_dir);
    let service = AdminService { driver, state_dir, looks: Looks::default() };
    let server = Server::builder()
        .concurrency_limit_per_connection(CALLS_AT_ONCE)
        .layer(Deadlines)
        .add_service(AdminServer::new(service));
    let accepted = ReceiverStream::new(accepted).map(Ok::<_, std::io::Error>);
    tokio::select! {
        // An error means that the sender is gone, which also means stop.
        _ = stopped.wait_for(|stop| *stop) => {}
        () = socket.keep(connections) => {}
        served = server.serve_with_incoming(accepted) => {
            if let Err(error) = served {
                tracing::warn!(error = chain(&error), "the admin service ended");
            }
        }
    }
}

#[derive(Debug)]
struct AdminService {
    driver: Arc<Driver>,
    /// Its links are resolved.
    state_dir: String,
    looks: Looks,
}

#[derive(Debug)]
struct Looks(Arc<Semaphore>);

impl Default for Looks {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LOOKS_AT_ONCE)))
    }
}

impl Looks {
    /// Does `look` on a separate thread, after the one before has returned.
    async fn take<T: Send + 'static>(
        &self,
        begins_within: Duration,
        look: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> std::result::Result<Response<T>, Status> {
        let turn = tokio::time::timeout(begins_within, self.0.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(Status::resource_exhausted("another look at the state has not ended"));
        };
        let look = move || {
            let _until_it_returns = turn;
            look()
        };
        match tokio::task::spawn_blocking(look).await {
            Ok(Ok(found)) => Ok(Response::new(found)),
            Ok(Err(error)) => Err(Status::internal(chain(&error))),
            Err(ended) => Err(Status::internal(ended.to_string())),
        }
    }
}

impl AdminService {
    /// For looks at daemons and disks.
    async fn look<T: Send + 'static>(
        &self,
        state_dir: &str,
        look: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> std::result::Result<Response<T>, Status> {
        self.check(state_dir)?;
        let driver = self.driver.clone();
        self.looks.take(LOOK_BEGINS_WITHIN, move || look(&driver)).await
    }

    fn check(&self, state_dir: &str) -> std::result::Result<(), Status> {
        let own = &self.state_dir;
        match own == state_dir {
            true => Ok(()),
            false => Err(Status::failed_precondition(format!("this driver's state directory is {own}"))),
        }
    }
}

/// To its end, even if the caller goes away.
async fn upgrade(driver: &Arc<Driver>, volume: &str, force: bool) -> Result<Upgrade> {
    let unknown =
        || Error::invalid("volume", volume, "not the id of a volume: `hawser-csi volumes` lists them");
    let volume_id = VolumeId::parse(volume).ok_or_else(unknown)?;
    let begun = Instant::now();
    let guard = loop {
        match driver.locks.hold(Lock::Volume(volume_id.as_str())) {
            Err(Error::Pending { .. }) if begun.elapsed() < limits::TURN => {
                tokio::time::sleep(LOCK_RETRY).await;
            }
            held => break held?,
        }
    };
    let driver = driver.clone();
    let work = tokio::task::spawn_blocking(move || {
        let _until_done = guard;
        driver.stages.upgrade(&volume_id, force)
    });
    work.await.map_err(|_panic| Error::Panicked { operation: "upgrade" })
}

/// The answer, also for a volume that no upgrade began for.
fn upgrade_row(volume: &str, upgraded: Result<Upgrade>) -> proto::admin::Upgrade {
    let refused = |cause| Upgrade { from: None, to: None, outcome: Outcome::Refused { cause } };
    let Upgrade { from, to, outcome } = upgraded.unwrap_or_else(refused);
    let (result, pause, cause) = match outcome {
        Outcome::Current => ("current", None, None),
        Outcome::Upgraded { pause } => ("upgraded", Some(pause), None),
        Outcome::Refused { cause } => ("refused", None, Some(cause)),
        Outcome::RolledBack { pause, cause } => ("rolled-back", Some(pause), Some(cause)),
        Outcome::Failed { cause } => ("failed", None, Some(cause)),
    };
    proto::admin::Upgrade {
        volume: volume.to_owned(),
        result: result.to_owned(),
        from,
        to,
        pause_us: pause.map(|pause| u64::try_from(pause.as_micros()).unwrap_or(u64::MAX)),
        reason: cause.map(|cause| chain(&cause)),
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn list_volumes(
        &self,
        request: Request<ListVolumesRequest>,
    ) -> std::result::Result<Response<ListVolumesResponse>, Status> {
        self.look(&request.get_ref().state_dir, |driver| {
            let volumes = views::volumes(&journal(driver)?, &driver.config.run_dir, &copies(driver));
            Ok(ListVolumesResponse { volumes })
        })
        .await
    }

    async fn list_snapshots(
        &self,
        request: Request<ListSnapshotsRequest>,
    ) -> std::result::Result<Response<ListSnapshotsResponse>, Status> {
        self.look(&request.get_ref().state_dir, |driver| {
            Ok(ListSnapshotsResponse { snapshots: views::snapshots(&journal(driver)?, &copies(driver)) })
        })
        .await
    }

    async fn list_mounts(
        &self,
        request: Request<ListMountsRequest>,
    ) -> std::result::Result<Response<ListMountsResponse>, Status> {
        self.look(&request.get_ref().state_dir, |driver| {
            Ok(ListMountsResponse {
                mounts: views::mounts(
                    &journal(driver)?,
                    &driver.config.run_dir,
                    &driver.daemons.keeper.holders(),
                )?,
            })
        })
        .await
    }

    async fn diagnose(
        &self,
        request: Request<DiagnoseRequest>,
    ) -> std::result::Result<Response<DiagnoseResponse>, Status> {
        self.look(&request.get_ref().state_dir, |driver| {
            Ok(DiagnoseResponse {
                findings: doctor::of_running(&driver.config, &*driver.backend, &|| {
                    driver.daemons.keeper.holders()
                })?,
                limits: driver.backend.about_limits(),
            })
        })
        .await
    }

    async fn upgrade(
        &self,
        request: Request<UpgradeRequest>,
    ) -> std::result::Result<Response<UpgradeResponse>, Status> {
        let UpgradeRequest { state_dir, volume, force } = request.into_inner();
        self.check(&state_dir)?;
        let upgraded = upgrade(&self.driver, &volume, force).await;
        Ok(Response::new(UpgradeResponse { upgrade: Some(upgrade_row(&volume, upgraded)) }))
    }
}

/// The journal on disk, with entries that the driver cannot read.
fn journal(driver: &Driver) -> Result<Journal> {
    Journal::look(&driver.config.state_dir)
}

/// The form in which the client sends it.
fn resolved(dir: &Path) -> String {
    dir.canonicalize().unwrap_or_else(|_| dir.to_owned()).to_string_lossy().into_owned()
}

fn copies(driver: &Driver) -> Copies {
    driver.jobs.list().into_iter().collect()
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[tokio::test]
    async fn a_look_that_does_not_return_keeps_one_thread_whoever_asks() {
        let looks = Looks::default();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let stuck = looks.take(LOOK_BEGINS_WITHIN, move || {
            begun.send(()).unwrap();
            Ok(released.recv().is_err())
        });
        let others = async {
            has_begun.await.unwrap();
            for _ in 0..3 {
                let refused = looks.take(Duration::from_millis(5), || Ok(())).await.unwrap_err();
                assert_eq!(refused.code(), Code::ResourceExhausted);
            }
            drop(release);
            looks.take(LOOK_BEGINS_WITHIN, || Ok(())).await.unwrap();
        };
        let (stuck, ()) = tokio::join!(stuck, others);
        assert!(stuck.unwrap().into_inner());
    }
}
