//! gRPC over a unix socket. The authority is `localhost`, as in kubelet's own clients: a socket
//! path is not a valid HTTP/2 authority.
//!
//! Invariant: a call ends soon after its server process is killed. While a thread of that process
//! waits for a volume's daemon, the process and its sockets remain: they accept connections and
//! calls, but answer none.

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

const AUTHORITY: &str = "http://localhost";
/// The interval between checks of the server process while a connection waits.
const CHECK_PERIOD: Duration = Duration::from_millis(500);

/// Connects now; the error is the socket's own.
pub(crate) async fn connect(socket: &Path) -> io::Result<Channel> {
    // Open the first stream here: tonic's transport error would hide the errno. Later streams
    // replace a lost connection.
    let mut first = Some(UnixStream::connect(socket).await?);
    let socket = socket.to_owned();
    let connector = service_fn(move |_: Uri| {
        let ready = first.take();
        let socket = socket.clone();
        async move { stream(ready, socket).await }
    });
    Endpoint::from_static(AUTHORITY).connect_with_connector(connector).await.map_err(io::Error::other)
}

/// A channel that connects at its first call and again after a disconnect.
pub(crate) fn connect_lazily(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = service_fn(move |_: Uri| stream(None, socket.clone()));
    Endpoint::from_static(AUTHORITY).connect_with_connector_lazy(connector)
}

async fn stream(ready: Option<UnixStream>, socket: PathBuf) -> io::Result<TokioIo<Watched>> {
    let stream = match ready {
        Some(stream) => stream,
        None => UnixStream::connect(&socket).await?,
    };
    Ok(TokioIo::new(Watched::new(stream)?))
}

/// A connection that ends when the server process is killed.
struct Watched {
    stream: UnixStream,
    /// `None` once the server was killed.
    end: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
}

impl Watched {
    fn new(stream: UnixStream) -> io::Result<Self> {
        let pid = stream.peer_cred()?.pid();
        Ok(Self { stream, end: Some(Box::pin(killed(pid))) })
    }
}

/// Waits until the listening process (unix(7), SO_PEERCRED) is killed. A process in another pid
/// namespace has no pid here.
async fn killed(pid: Option<i32>) {
    let Some(pid) = pid.filter(|pid| *pid > 0) else { return std::future::pending().await };
    loop {
        tokio::time::sleep(CHECK_PERIOD).await;
        if linux::process::is_killed(pid) {
            return;
        }
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            return Poll::Ready(read);
        }
        let Some(end) = &mut self.end else { return Poll::Ready(Ok(())) };
        std::task::ready!(end.as_mut().poll(context));
        self.end = None;
        // Report end of file, as if the server had closed the connection.
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// A status's message, with the cause that tonic hides behind "transport error".
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
