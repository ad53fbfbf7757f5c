//! SPDY/3.1 in the binary messages of a WebSocket (KEP-4006; k8s.io/client-go, tools/portforward): what kubectl
//! prefers since Kubernetes 1.31. The bounds of messages mean nothing.

use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream};

use super::{READ_BYTES, Target, by_spdy};
use crate::server::streaming::websocket::{Message, WebSocketStream, close};

pub(in crate::server::streaming) const PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";

/// For what is on its way to the client when the pod ends.
const LAST_BYTES: Duration = Duration::from_secs(5);

/// Serves until the client goes, or the pod ends.
pub(in crate::server::streaming) async fn serve<IO>(target: Target, socket: WebSocketStream<IO>)
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let (inner, outer) = tokio::io::duplex(READ_BYTES);
    let (served, carried) = (by_spdy::serve(target, inner), carry(socket, outer));
    tokio::pin!(served, carried);
    tokio::select! {
        // The client may read nothing more.
        () = &mut served => drop(tokio::time::timeout(LAST_BYTES, carried).await),
        () = &mut carried => served.await,
    }
}

/// Until the server of SPDY ends, which it does after the client.
async fn carry<IO>(socket: WebSocketStream<IO>, server: DuplexStream)
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let (mut to_client, mut from_client) = socket.split();
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let receiving = async {
        while let Some(Ok(message)) = from_client.next().await {
            let bytes = match message {
                Message::Binary(bytes) => bytes,
                Message::Ping(_) | Message::Pong(_) => continue,
                Message::Text(_) | Message::Close(_) | Message::Frame(_) => break,
            };
            if to_server.write_all(&bytes).await.is_err() {
                break;
            }
        }
        let _the_server_has_ended = to_server.shutdown().await;
    };
    let sending = async {
        let mut buffer = vec![0; READ_BYTES];
        while let Ok(length @ 1..) = from_server.read(&mut buffer).await {
            if to_client.send(Message::binary(buffer[..length].to_vec())).await.is_err() {
                return;
            }
        }
        let _the_client_has_gone = to_client.send(close()).await;
    };
    tokio::pin!(sending);
    tokio::select! {
        () = &mut sending => {}
        () = receiving => sending.await,
    }
}
