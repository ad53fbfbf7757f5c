//! `v4.channel.k8s.io` over WebSocket: one connection to one port. The first channel has its data, the
//! second one gets a text if there is no connection; both begin with the port's number.

use std::sync::Arc;

use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

use super::inlet::{PACE, Stalled};
use super::{READ_BYTES, Target, connect};
use crate::error::chain;
use crate::server::streaming::BoxedError;
use crate::server::streaming::idle::Activity;
use crate::server::streaming::websocket::{WebSocketStream, channel, close, message};

pub(in crate::server::streaming) const PROTOCOL: &str = "v4.channel.k8s.io";

const DATA: u8 = 0;
const ERROR: u8 = 1;

/// Serves until one side ends.
pub(in crate::server::streaming) async fn serve<IO>(target: Target, mut socket: WebSocketStream<IO>)
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let target = Arc::new(target);
    let served = async {
        let [port] = target.ports[..] else {
            let text =
                format!("port-forward over WebSocket: the URL has {} ports, not one", target.ports.len());
            return refuse(&mut socket, &text).await;
        };
        for name in [DATA, ERROR] {
            socket.send(message(name, &port.to_le_bytes())).await?;
        }
        match connect(Arc::clone(&target), port).await {
            Ok((stream, _place)) => match forward(stream, &mut socket).await {
                Err(error) if error.is::<Stalled>() => {
                    refuse(&mut socket, &format!("port {port} of the pod: {error}")).await
                }
                ended => ended,
            },
            Err(error) => refuse(&mut socket, &format!("port {port} of the pod: {}", chain(&error))).await,
        }
    };
    tokio::select! {
        ended = served => {
            if let Err(error) = ended {
                tracing::debug!(error = %chain(&*error), "port-forward");
            }
        }
        () = target.sandbox.runs_no_more() => {}
    }
}

async fn refuse<IO>(socket: &mut WebSocketStream<IO>, text: &str) -> Result<(), BoxedError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let refused = async {
        socket.send(message(ERROR, text.as_bytes())).await?;
        socket.send(close()).await?;
        // Bytes of the client that are not read would make the end a reset, and the client could lose the text.
        while let Some(Ok(_discarded)) = socket.next().await {}
        Ok(())
    };
    tokio::time::timeout(PACE, refused).await?
}

async fn forward<IO>(stream: TcpStream, socket: &mut WebSocketStream<IO>) -> Result<(), BoxedError>
where
    IO: AsyncRead + AsyncWrite + Unpin,
{
    let (mut from_pod, mut to_pod) = stream.into_split();
    let (mut to_client, mut from_client) = socket.split();
    let activity = Activity::begins();
    let sending = async {
        loop {
            let Some(received) = activity.wait_for(from_client.next()).await else { return Ok(()) };
            let Some(received) = received.transpose()? else { return Ok::<_, BoxedError>(()) };
            let Some((DATA, mut bytes)) = channel(&received)? else { continue };
            while !bytes.is_empty() {
                // Meanwhile, the end of the client is not noticed.
                match tokio::time::timeout(PACE, to_pod.write(bytes)).await {
                    Ok(written) => bytes = &bytes[written?..],
                    Err(_elapsed) => return Err(Stalled.into()),
                }
            }
        }
    };
    let receiving = async {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            // A reset by the pod is an end, too.
            let length = from_pod.read(&mut buffer).await.unwrap_or(0);
            if length == 0 {
                return Ok(to_client.send(close()).await?);
            }
            to_client.send(message(DATA, &buffer[..length])).await?;
            activity.note();
        }
    };
    tokio::select! {
        sent = sending => sent,
        received = receiving => received,
    }
}
