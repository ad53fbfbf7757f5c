//! Unix sockets, and the services of CSI on them.

use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::csi::controller_server::ControllerServer;
use proto::csi::identity_server::IdentityServer;
use proto::csi::node_server::NodeServer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch as channel;
use tokio_stream::Stream;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::{Connected, Router};
use tower::layer::util::{Identity, Stack};

use crate::controller::ControllerService;
use crate::driver::Driver;
use crate::identity::IdentityService;
use crate::limits::LAST_CALLS;
use crate::metrics::CountCalls;
use crate::node::NodeService;
use crate::{LOOK_AGAIN, PREDECESSORS_END};

#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("{}: another process answers there: is the driver running already?", path.display())]
    Live { path: PathBuf },
    #[error("{}: not a socket", path.display())]
    NotASocket { path: PathBuf },
    #[error("{op} {}", path.display())]
    Io {
        op: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("serve {}", path.display())]
    Serve {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
}

/// Binds `path`, mode 0600, in the place of a socket that nobody serves any more.
/// One that answers is refused. The directory is made, with `dir_mode`, if it is missing.
pub(crate) async fn bind(path: &Path, dir_mode: u32) -> Result<UnixListener, SocketError> {
    let io = |op| {
        let path = path.to_owned();
        move |source| SocketError::Io { op, path, source }
    };
    let dir = path.parent().unwrap_or(Path::new("/"));
    if !dir.is_dir() {
        std::fs::create_dir_all(dir).map_err(io("create directory of"))?;
        let mode = std::fs::Permissions::from_mode(dir_mode);
        std::fs::set_permissions(dir, mode).map_err(io("set mode of directory of"))?;
    }
    match connect_to_old(path).await {
        Ok(_) => return Err(SocketError::Live { path: path.to_owned() }),
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) if e.kind() == ErrorKind::ConnectionRefused => {
            let found = std::fs::symlink_metadata(path).map_err(io("look at"))?;
            if !std::os::unix::fs::FileTypeExt::is_socket(&found.file_type()) {
                return Err(SocketError::NotASocket { path: path.to_owned() });
            }
            std::fs::remove_file(path).map_err(io("remove stale"))?;
        }
        Err(e) => return Err(io("connect")(e)),
    }
    // Never open to others, not even for a moment: the process's umask is 0077.
    UnixListener::bind(path).map_err(io("bind"))
}

/// Connects unless nobody listens, or whoever does is about to end.
async fn connect_to_old(path: &Path) -> std::io::Result<UnixStream> {
    let deadline = Instant::now() + PREDECESSORS_END;
    loop {
        match UnixStream::connect(path).await {
            Ok(_) if Instant::now() < deadline => tokio::time::sleep(LOOK_AGAIN).await,
            result => return result,
        }
    }
}

/// A server whose calls are counted.
type Counting = Router<Stack<CountCalls, Identity>>;

/// Without services.
pub(crate) fn router(driver: &Driver) -> Counting {
    Server::builder().layer(CountCalls(driver.calls.clone())).add_routes(Routes::default())
}

/// The three services of CSI beside what the server has.
pub(crate) fn with_csi(router: Counting, driver: Arc<Driver>) -> Counting {
    router
        .add_service(IdentityServer::new(IdentityService(driver.clone())))
        .add_service(ControllerServer::new(ControllerService(driver.clone())))
        .add_service(NodeServer::new(NodeService(driver)))
}

/// CSI on `listener` until `stopped` is true; then the socket is removed.
pub(crate) async fn serve_csi(
    driver: Arc<Driver>,
    listener: UnixListener,
    path: &Path,
    stopped: channel::Receiver<bool>,
) -> Result<(), SocketError> {
    let router = with_csi(router(&driver), driver);
    let served = serve(router, UnixListenerStream::new(listener), LAST_CALLS, path, stopped).await;
    remove_socket(path);
    served
}

/// Serves `connections` until `stopped` is true, then finishes what is under way,
/// for `last_calls` at most. `path` is what an error names.
pub(crate) async fn serve<C>(
    router: Counting,
    connections: impl Stream<Item = std::io::Result<C>>,
    last_calls: Duration,
    path: &Path,
    stopped: channel::Receiver<bool>,
) -> Result<(), SocketError>
where
    C: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    let told = |mut stopped: channel::Receiver<bool>| async move {
        // An error is the sender's end, which is a stop too.
        let _sender_gone = stopped.wait_for(|stop| *stop).await;
    };
    let serving = router.serve_with_incoming_shutdown(connections, told(stopped.clone()));
    let served = tokio::select! {
        served = serving => served,
        () = async { told(stopped).await; tokio::time::sleep(last_calls).await } => {
            tracing::warn!("ending with connections open: a call is under way, or a client does not answer");
            Ok(())
        }
    };
    served.map_err(|source| SocketError::Serve { path: path.to_owned(), source })
}

pub(crate) fn remove_socket(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "remove socket");
    }
}
