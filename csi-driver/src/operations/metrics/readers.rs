//! Serves the metrics over HTTP/1.0: one page for each connection, several at the same time.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, watch as channel};

use crate::engine::driver::Driver;
use crate::kernel::socket::Socket;
use crate::model::calls::Calls;
use crate::model::limits;

const MAX_REQUEST_BYTES: usize = 4096;
/// Served at the same time; a further reader waits until the first ends.
const MAX_READERS: usize = 16;

/// Serves until `stopped` is true, then removes the socket.
pub(crate) async fn serve(
    driver: Arc<Driver>,
    calls: Arc<Calls>,
    socket: Socket,
    mut stopped: channel::Receiver<bool>,
) {
    let (connections, mut accepted) = mpsc::channel(1);
    let readers = Arc::new(Semaphore::new(MAX_READERS));
    let answering = async {
        while let Some(stream) = accepted.recv().await {
            let Ok(turn) = readers.clone().acquire_owned().await else { return };
            let (driver, calls) = (driver.clone(), calls.clone());
            tokio::spawn(async move {
                let _until_answered = turn;
                match tokio::time::timeout(limits::SCRAPE, answer(&driver, &calls, stream)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(%error, "a reader of metrics went away"),
                    Err(_elapsed) => tracing::debug!("a reader of metrics took too long"),
                }
            });
        }
    };
    tokio::select! {
        // An error means that the sender is gone, which also means stop.
        _ = stopped.wait_for(|stop| *stop) => {}
        () = socket.keep(connections) => {}
        () = answering => {}
    }
}

/// Answers any GET, then closes the connection.
async fn answer(driver: &Arc<Driver>, calls: &Arc<Calls>, mut stream: UnixStream) -> std::io::Result<()> {
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut piece = [0; 512];
        let length = stream.read(&mut piece).await?;
        request.extend_from_slice(&piece[..length]);
        if length == 0 || request.len() > MAX_REQUEST_BYTES {
            break;
        }
    }
    let (status, body) = if request.starts_with(b"GET ") {
        let (driver, calls) = (driver.clone(), calls.clone());
        match tokio::task::spawn_blocking(move || driver.metrics(&calls)).await {
            Ok(page) => ("200 OK", page),
            Err(_panicked) => ("500 Internal Server Error", String::new()),
        }
    } else {
        ("405 Method Not Allowed", "GET is answered, and nothing else\n".to_owned())
    };
    let head = format!(
        "HTTP/1.0 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await?;
    stream.shutdown().await
}
