//! Connections with the rewriting of `authority`.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tonic::transport::server::Connected;

use super::authority::AuthorityRewriter;

const READ_BYTES: usize = 8 * 1024;

/// A connection on which every request has an authority that h2 accepts. The server's bytes pass
/// unchanged. A malformed connection is a read error.
#[derive(Debug)]
pub(super) struct RewrittenStream {
    socket: UnixStream,
    rewriter: AuthorityRewriter,
    /// Rewritten bytes; those from `taken` on are not read yet.
    ready: Vec<u8>,
    taken: usize,
}

impl RewrittenStream {
    pub(super) fn new(socket: UnixStream) -> Self {
        Self { socket, rewriter: AuthorityRewriter::new(), ready: Vec::new(), taken: 0 }
    }
}

impl AsyncRead for RewrittenStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.taken == this.ready.len() {
            this.ready.clear();
            this.taken = 0;
            let mut chunk = [0; READ_BYTES];
            let mut received = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.socket).poll_read(cx, &mut received))?;
            if received.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.rewriter
                .feed(received.filled(), &mut this.ready)
                .map_err(|malformed| io::Error::new(io::ErrorKind::InvalidData, malformed))?;
        }
        let wanted = buf.remaining().min(this.ready.len() - this.taken);
        buf.put_slice(&this.ready[this.taken..this.taken + wanted]);
        this.taken += wanted;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for RewrittenStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

impl Connected for RewrittenStream {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}
