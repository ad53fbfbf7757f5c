//! gRPC on unix sockets: the services of CSI, and how each server stops.
//!
//! Many clients send the path of a unix socket as the authority, which h2 refuses: it is rewritten
//! in between (docs/decisions/0001-registration-listener.md).

mod authority;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod hpack;
mod huffman;
mod stream;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proto::csi::controller_server::ControllerServer;
use proto::csi::identity_server::IdentityServer;
use proto::csi::node_server::NodeServer;
use proto::deadline::Deadlines;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, watch as channel};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tower::layer::util::{Identity, Stack};

use crate::engine::driver::Driver;
use crate::kernel::socket::{Socket, SocketError};
use crate::model::calls::Calls;
use crate::model::limits::LAST_CALLS;
use crate::wire::controller::ControllerService;
use crate::wire::counted::CountCalls;
use crate::wire::identity::IdentityService;
use crate::wire::node::NodeService;
use stream::RewrittenStream;

/// Connections that wait to be accepted by the server.
pub(crate) const BACKLOG: usize = 16;

/// A server whose calls are counted.
type Counting = Router<Stack<Deadlines, Stack<CountCalls, Identity>>>;

/// A router without services.
pub(crate) fn router(calls: Arc<Calls>) -> Counting {
    Server::builder().layer(CountCalls(calls)).layer(Deadlines).add_routes(Routes::default())
}

/// Adds the CSI services that the driver offers.
pub(crate) fn with_csi(router: Counting, driver: Arc<Driver>) -> Counting {
    let mode = driver.config.mode;
    let controller = mode.has_controller().then(|| ControllerServer::new(ControllerService(driver.clone())));
    let node = mode.has_node().then(|| NodeServer::new(NodeService(driver.clone())));
    router
        .add_service(IdentityServer::new(IdentityService(driver)))
        .add_optional_service(controller)
        .add_optional_service(node)
}

/// Serves CSI on `socket` until `stopped` is true, then removes the socket.
pub(crate) async fn serve_csi(
    driver: Arc<Driver>,
    calls: Arc<Calls>,
    socket: Socket,
    stopped: channel::Receiver<bool>,
) -> Result<(), SocketError> {
    let router = with_csi(router(calls), driver);
    let path = socket.path().to_owned();
    let (connections, accepted) = mpsc::channel(BACKLOG);
    let connections = socket.keep(connections);
    let serving = serve(router, accepted, LAST_CALLS, &path, stopped.clone());
    let ((), served) = tokio::join!(until_stopped(connections, stopped), serving);
    served
}

/// Runs `keeping` and drops it when `stopped` turns true: its socket disappears at once, while open
/// connections are still answered.
pub(crate) async fn until_stopped(keeping: impl Future<Output = ()>, mut stopped: channel::Receiver<bool>) {
    tokio::select! {
        () = keeping => {}
        // An error means that the sender is gone, which also means stop.
        _ = stopped.wait_for(|stop| *stop) => {}
    }
}

/// Serves `connections` until `stopped` is true, then finishes the calls under way, for at most
/// `last_calls`. `path` is for errors.
pub(crate) async fn serve(
    router: Counting,
    connections: mpsc::Receiver<UnixStream>,
    last_calls: Duration,
    path: &Path,
    stopped: channel::Receiver<bool>,
) -> Result<(), SocketError> {
    let when_stopped = |mut stopped: channel::Receiver<bool>| async move {
        // An error means that the sender is gone, which also means stop.
        let _sender_gone = stopped.wait_for(|stop| *stop).await;
    };
    let rewritten = |socket| Ok::<_, std::io::Error>(RewrittenStream::new(socket));
    let connections = ReceiverStream::new(connections).map(rewritten);
    let serving = router.serve_with_incoming_shutdown(connections, when_stopped(stopped.clone()));
    let served = tokio::select! {
        served = serving => served,
        () = async { when_stopped(stopped).await; tokio::time::sleep(last_calls).await } => {
            tracing::warn!("ending with connections open: a call is under way, or a client does not answer");
            Ok(())
        }
    };
    served.map_err(|source| SocketError::Serve { path: path.to_owned(), source })
}
