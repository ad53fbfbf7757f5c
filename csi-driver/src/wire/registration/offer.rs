//! The registration socket as kubelet's plugin watcher sees it: present, and new whenever kubelet
//! must look again.
//!
//! kubelet does not retry a registration that failed after validation; it looks again only when a
//! socket appears. So after a refusal the driver removes the socket and binds it again, with
//! growing pauses, until kubelet has registered the driver.

use tokio::net::UnixStream;
use tokio::sync::mpsc;

use crate::kernel::socket::{BackOff, End, Socket};

/// kubelet's verdict on the registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Registered,
    Refused,
}

/// Forwards connections and keeps the socket bound; binds it again after each refusal. Ends when
/// the receiver is dropped.
pub(super) async fn keep(
    mut socket: Socket,
    connections: mpsc::Sender<UnixStream>,
    mut verdicts: mpsc::UnboundedReceiver<Verdict>,
) {
    let mut back_off = BackOff::default();
    let mut is_bound = true;
    loop {
        tokio::select! {
            end = socket.accept(&connections) => match end {
                End::NotWanted => return,
                End::Lost if is_bound => socket.say_lost(&back_off),
                End::Lost => {}
            },
            () = refused(&mut verdicts, &mut back_off) => {
                let seconds = back_off.seconds();
                tracing::info!(seconds, "offering the driver for registration again later");
            }
        }
        is_bound = socket.bind_again(&mut back_off).await;
    }
}

async fn refused(verdicts: &mut mpsc::UnboundedReceiver<Verdict>, back_off: &mut BackOff) {
    loop {
        match verdicts.recv().await {
            Some(Verdict::Registered) => *back_off = BackOff::default(),
            Some(Verdict::Refused) => return,
            // The server has ended; `accept` notices that too.
            None => std::future::pending().await,
        }
    }
}
