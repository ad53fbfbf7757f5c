//! gRPC over a unix socket. The authority is `localhost`, as kubelet's own
//! clients set it: a socket path is no valid HTTP/2 authority.

use std::io;
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

const AUTHORITY: &str = "http://localhost";

/// A connection made now; the error is the socket's own.
pub(crate) async fn connect(socket: &Path) -> io::Result<Channel> {
    // The first stream is opened here and not inside tonic, whose transport
    // error would hide the errno; later ones only replace a lost connection.
    let mut first = Some(UnixStream::connect(socket).await?);
    let socket = socket.to_owned();
    let connector = service_fn(move |_: Uri| {
        let ready = first.take();
        let socket = socket.clone();
        async move { stream(ready, socket).await }
    });
    Endpoint::from_static(AUTHORITY).connect_with_connector(connector).await.map_err(io::Error::other)
}

/// A channel that connects at its first call and again after a loss.
pub(crate) fn connect_lazily(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = service_fn(move |_: Uri| stream(None, socket.clone()));
    Endpoint::from_static(AUTHORITY).connect_with_connector_lazy(connector)
}

async fn stream(ready: Option<UnixStream>, socket: PathBuf) -> io::Result<TokioIo<UnixStream>> {
    let stream = match ready {
        Some(stream) => stream,
        None => UnixStream::connect(&socket).await?,
    };
    Ok(TokioIo::new(stream))
}

/// What a status says, with the cause that tonic hides behind "transport error".
pub(crate) fn text(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let words = error.to_string();
        if !text.contains(&words) {
            if !text.is_empty() {
                text.push_str(": ");
            }
            text.push_str(&words);
        }
        cause = error.source();
    }
    text
}
