//! Bytes of an upgraded connection, from the client to the runtime's streaming server and back. The
//! kubelet does not look into them.

use std::future::pending;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::Instant;

/// Of each direction. A side that takes nothing holds no more than this.
const BUFFER_BYTES: usize = 32 << 10;

/// Copies both directions until the server ends its own, one fails, or nothing came for `idle`. The end of
/// the client's direction is passed on.
pub(super) async fn relay<A, B>(client: A, server: B, idle: Duration) -> io::Result<()>
where
    A: AsyncRead + AsyncWrite,
    B: AsyncRead + AsyncWrite,
{
    let (mut from_client, mut to_client) = tokio::io::split(client);
    let (mut from_server, mut to_server) = tokio::io::split(server);
    let last = Mutex::new(Instant::now());
    let requests = async {
        copy(&mut from_client, &mut to_server, &last).await?;
        pending::<io::Result<()>>().await
    };
    tokio::select! {
        ended = copy(&mut from_server, &mut to_client, &last) => ended,
        failed = requests => failed,
        () = quiet_for(idle, &last) => Err(io::Error::new(io::ErrorKind::TimedOut, "idle for too long")),
    }
}

async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    last: &Mutex<Instant>,
) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let length = from.read(&mut buffer).await?;
        *last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        if length == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..length]).await?;
        to.flush().await?;
    }
}

async fn quiet_for(idle: Duration, last: &Mutex<Instant>) {
    loop {
        let until = *last.lock().unwrap_or_else(PoisonError::into_inner) + idle;
        if Instant::now() >= until {
            return;
        }
        tokio::time::sleep_until(until).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    const IDLE: Duration = Duration::from_secs(100);

    #[tokio::test(start_paused = true)]
    async fn each_direction_ends_by_itself_and_idle_connections_end() {
        let ((mut client, near), (far, mut server)) = (duplex(64), duplex(64));
        let relayed = tokio::spawn(relay(near, far, IDLE));
        client.write_all(b"request").await.unwrap();
        client.shutdown().await.unwrap();
        let mut text = String::new();
        server.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "request");
        server.write_all(b"answer").await.unwrap();
        drop(server);
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "answer");
        relayed.await.unwrap().unwrap();

        let ((_client, near), (far, _server)) = (duplex(64), duplex(64));
        let began = Instant::now();
        let ended = relay(near, far, IDLE).await.unwrap_err();
        assert_eq!((ended.kind(), began.elapsed()), (io::ErrorKind::TimedOut, IDLE));
    }
}
