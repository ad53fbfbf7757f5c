//! What a client sends to one connection of a pod, until the pod reads it.
//!
//! SPDY has one connection for all of a client's streams, and its clients do not announce windows. So a stream that
//! the pod does not read gets no more than [`MOST_WAITING`]: then the client's other streams wait for it, as long as
//! the pod takes [`LEAST_BYTES`] in [`PACE`], and no longer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

const MOST_WAITING: usize = 256 << 10;
/// Of memory, for each piece: a client may send single bytes.
pub(super) const PIECE_COST: usize = 128;
const LEAST_BYTES: usize = 64 << 10;
/// How long a pod may take for [`LEAST_BYTES`]; by WebSocket, for anything at all.
pub(super) const PACE: Duration = Duration::from_secs(5);

/// Bytes that were given, with [`PIECE_COST`] for each piece, and of them those that the pod took. Both only grow.
#[derive(Debug, Default)]
struct Counts {
    given: AtomicUsize,
    taken: AtomicUsize,
    changed: Notify,
}

/// The client's side.
#[derive(Debug)]
pub(super) struct Inlet {
    pieces: mpsc::UnboundedSender<Vec<u8>>,
    counts: Arc<Counts>,
}

/// The pod's side.
#[derive(Debug)]
pub(super) struct Outlet {
    pieces: mpsc::UnboundedReceiver<Vec<u8>>,
    counts: Arc<Counts>,
}

/// The pod reads too little.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("it does not read what it was sent")]
pub(super) struct Stalled;

pub(super) fn inlet() -> (Inlet, Outlet) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let counts = Arc::new(Counts::default());
    (Inlet { pieces: sender, counts: Arc::clone(&counts) }, Outlet { pieces: receiver, counts })
}

impl Inlet {
    /// Waits for room. What a connection that has ended gets is dropped.
    pub(super) async fn give(&self, bytes: Vec<u8>) -> Result<(), Stalled> {
        let (mut until, mut before) = (Instant::now() + PACE, self.taken());
        while !self.has_room() && !self.pieces.is_closed() {
            let changed = self.counts.changed.notified();
            // It may have changed before this was made.
            if self.has_room() {
                break;
            }
            tokio::select! {
                () = changed => {}
                () = self.pieces.closed() => break,
                () = tokio::time::sleep_until(until) => {
                    let taken = self.taken();
                    if taken - before < LEAST_BYTES {
                        return Err(Stalled);
                    }
                    (until, before) = (Instant::now() + PACE, taken);
                }
            }
        }
        self.counts.given.fetch_add(bytes.len() + PIECE_COST, Ordering::AcqRel);
        let _connection_has_ended = self.pieces.send(bytes);
        Ok(())
    }

    fn taken(&self) -> usize {
        self.counts.taken.load(Ordering::Acquire)
    }

    fn has_room(&self) -> bool {
        self.counts.given.load(Ordering::Acquire) - self.taken() < MOST_WAITING
    }
}

impl Outlet {
    /// `None`: the client has sent all.
    pub(super) async fn next(&mut self) -> Option<Vec<u8>> {
        self.pieces.recv().await
    }

    /// The pod has read so many bytes more, or [`PIECE_COST`] with a whole piece.
    pub(super) fn took(&self, length: usize) {
        self.counts.taken.fetch_add(length, Ordering::AcqRel);
        // The client waits alone: a permit stays for it.
        self.counts.changed.notify_one();
    }

    /// What comes is dropped.
    pub(super) fn close(&mut self) {
        self.pieces.close();
        while self.pieces.try_recv().is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: usize = 32 << 10;

    /// As much as there is room for.
    async fn fill(inlet: &Inlet) {
        for _ in 0..MOST_WAITING / PIECE {
            inlet.give(vec![0; PIECE]).await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_is_not_read_is_given_up_after_its_time() {
        let (inlet, _outlet) = inlet();
        fill(&inlet).await;
        let begun = Instant::now();
        assert_eq!(inlet.give(vec![0]).await, Err(Stalled));
        assert_eq!(begun.elapsed().as_secs(), PACE.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn single_bytes_fill_it_too() {
        let (inlet, _outlet) = inlet();
        let mut given = 0;
        while inlet.give(vec![0]).await.is_ok() {
            given += 1;
        }
        assert_eq!(given, MOST_WAITING.div_ceil(1 + PIECE_COST));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_connection_is_waited_for_and_a_dripping_one_is_not() {
        for (most, wanted) in [(PIECE, Ok(())), (1, Err(Stalled))] {
            let (inlet, mut outlet) = inlet();
            fill(&inlet).await;
            let reading = tokio::spawn(async move {
                while let Some(piece) = outlet.next().await {
                    tokio::time::sleep(PACE / 4).await;
                    outlet.took(piece.len().min(most));
                }
            });
            let mut given = Ok(());
            for _ in 0..20 {
                given = given.and(inlet.give(vec![0; PIECE]).await);
            }
            assert_eq!(given, wanted);
            reading.abort();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_an_ended_connection_gets_is_dropped_at_once() {
        let (inlet, mut outlet) = inlet();
        fill(&inlet).await;
        outlet.close();
        assert_eq!(inlet.give(vec![0; PIECE]).await, Ok(()));
        drop(outlet);
        assert_eq!(inlet.give(vec![0; PIECE]).await, Ok(()));
    }
}
