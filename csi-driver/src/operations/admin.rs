//! The admin service of a running driver: what `hawser-csi volumes`, `snapshots`, `mounts` and
//! `doctor` print. Its socket is root's alone.

pub(super) mod client;

use std::path::Path;
use std::sync::Arc;

use proto::admin::admin_server::{Admin, AdminServer};
use proto::admin::{
    DiagnoseRequest, DiagnoseResponse, ListMountsRequest, ListMountsResponse, ListSnapshotsRequest,
    ListSnapshotsResponse, ListVolumesRequest, ListVolumesResponse,
};
use tokio::sync::{mpsc, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::engine::driver::Driver;
use crate::error::{Result, chain};
use crate::journal::Journal;
use crate::kernel::socket::Socket;
use crate::operations::doctor;
use crate::operations::views::{self, Copies};

/// Accepted, and not yet looked at by the server.
const BACKLOG: usize = 4;
/// Of one connection at the same time; each may keep a thread for some seconds.
const CALLS_AT_ONCE: usize = 4;

/// Answers until `stopped` is true, then removes the socket.
pub(crate) async fn serve(driver: Arc<Driver>, socket: Socket, mut stopped: watch::Receiver<bool>) {
    let (connections, accepted) = mpsc::channel(BACKLOG);
    let server = Server::builder()
        .concurrency_limit_per_connection(CALLS_AT_ONCE)
        .add_service(AdminServer::new(AdminService(driver)));
    let accepted = ReceiverStream::new(accepted).map(Ok::<_, std::io::Error>);
    tokio::select! {
        // An error is the sender's end, which is a stop too.
        _ = stopped.wait_for(|stop| *stop) => {}
        () = socket.keep(connections) => {}
        served = server.serve_with_incoming(accepted) => {
            if let Err(error) = served {
                tracing::warn!(%error, "the admin service ended");
            }
        }
    }
}

#[derive(Debug)]
struct AdminService(Arc<Driver>);

impl AdminService {
    /// On a thread of its own: daemons and disks are looked at.
    async fn look<T: Send + 'static>(
        &self,
        state_dir: &str,
        look: impl FnOnce(&Driver) -> Result<T> + Send + 'static,
    ) -> std::result::Result<Response<T>, Status> {
        let driver = self.0.clone();
        let own = resolved(&driver.config.state_dir);
        if own != state_dir {
            return Err(Status::failed_precondition(format!("this driver's state directory is {own}")));
        }
        match tokio::task::spawn_blocking(move || look(&driver)).await {
            Ok(Ok(found)) => Ok(Response::new(found)),
            Ok(Err(error)) => Err(Status::internal(chain(&error))),
            Err(ended) => Err(Status::internal(ended.to_string())),
        }
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
            Ok(ListMountsResponse { mounts: views::mounts(&journal(driver)?, &driver.config.run_dir)? })
        })
        .await
    }

    async fn diagnose(
        &self,
        request: Request<DiagnoseRequest>,
    ) -> std::result::Result<Response<DiagnoseResponse>, Status> {
        self.look(&request.get_ref().state_dir, |driver| {
            Ok(DiagnoseResponse { findings: doctor::of_running(&driver.config)? })
        })
        .await
    }
}

/// As it is on disk, entries included that the driver cannot read.
fn journal(driver: &Driver) -> Result<Journal> {
    Journal::look(&driver.config.state_dir)
}

/// As the client gives it.
fn resolved(dir: &Path) -> String {
    dir.canonicalize().unwrap_or_else(|_| dir.to_owned()).to_string_lossy().into_owned()
}

fn copies(driver: &Driver) -> Copies {
    driver.jobs.list().into_iter().collect()
}
