//! Whether a client is still there that is not read from.

use std::io;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc};

/// Between two questions.
const PAUSE: Duration = Duration::from_secs(10);

/// A connection that is written to.
pub(super) trait Probe: Send {
    /// Sends something that a client answers or passes over. An error, once the client has gone.
    fn probe(&mut self) -> impl Future<Output = io::Result<()>> + Send;
}

/// Waits until the receiver takes the bytes. Meanwhile nothing else is read from the client.
pub(super) async fn give(
    receiver: &mpsc::Sender<Vec<u8>>,
    bytes: Vec<u8>,
    client: &Mutex<impl Probe>,
) -> io::Result<()> {
    loop {
        tokio::select! {
            place = receiver.reserve() => {
                if let Ok(place) = place {
                    place.send(bytes);
                }
                return Ok(());
            }
            () = tokio::time::sleep(PAUSE) => client.lock().await.probe().await?,
        }
    }
}
