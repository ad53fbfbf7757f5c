//! The runtime's container events as one endless channel.

use std::time::Duration;

use proto::cri;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tonic::Code;
use tracing::warn;

use super::{Error, never_ends};
use crate::backoff::Backoff;
use crate::cri::{Cri, POD_UID_LABEL};

/// The poll interval for a runtime without events (containerd before 1.7).
const RELIST_PERIOD: Duration = Duration::from_secs(1);

/// Which workers must check their pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ContainerEvent {
    Pod {
        uid: String,
    },
    /// The stream began (again), or an event named no pod.
    Any,
}

pub(super) fn subscribe(cri: Cri, background: &mut JoinSet<Error>) -> mpsc::Receiver<ContainerEvent> {
    let (sender, receiver) = mpsc::channel(256);
    background.spawn(never_ends(forward(cri, sender)));
    receiver
}

/// Ends when the receiver is dropped.
async fn forward(cri: Cri, sender: mpsc::Sender<ContainerEvent>) {
    let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(5));
    while !sender.is_closed() {
        match cri.container_events().await {
            Ok(mut stream) => {
                backoff.reset();
                // The lists contain what happened before the stream started.
                let _receiver_gone = sender.send(ContainerEvent::Any).await;
                while let Some(Ok(event)) = stream.next().await {
                    let _receiver_gone = sender.send(target_of(&event)).await;
                }
                warn!("the runtime's event stream ended, reopening it");
            }
            Err(error) if error.code == Code::Unimplemented => {
                warn!("the runtime has no container events: polling its lists every second");
                loop {
                    tokio::time::sleep(RELIST_PERIOD).await;
                    let _receiver_gone = sender.send(ContainerEvent::Any).await;
                }
            }
            Err(error) => warn!(%error, "cannot open the runtime's event stream"),
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

fn target_of(event: &cri::ContainerEventResponse) -> ContainerEvent {
    let sandbox = event.pod_sandbox_status.as_ref().and_then(|s| s.labels.get(POD_UID_LABEL));
    let container = || event.containers_statuses.iter().find_map(|c| c.labels.get(POD_UID_LABEL));
    match sandbox.or_else(container) {
        Some(uid) => ContainerEvent::Pod { uid: uid.clone() },
        None => ContainerEvent::Any,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_wakes_the_pod_of_its_sandbox_or_all_pods() {
        let labels = [(POD_UID_LABEL.to_owned(), "u1".to_owned())].into();
        let sandbox = cri::PodSandboxStatus { labels, ..cri::PodSandboxStatus::default() };
        let event = cri::ContainerEventResponse { pod_sandbox_status: Some(sandbox), ..Default::default() };
        assert_eq!(target_of(&event), ContainerEvent::Pod { uid: "u1".into() });
        assert_eq!(target_of(&cri::ContainerEventResponse::default()), ContainerEvent::Any);
    }
}
