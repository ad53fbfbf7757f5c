//! The runtime's container events as one endless channel.

use std::collections::HashMap;
use std::time::Duration;

use proto::cri::{self, ContainerEventType};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::StreamExt;
use tonic::Code;
use tracing::warn;

use super::{Error, never_ends};
use crate::backoff::Backoff;
use crate::clients::cri::{Cri, POD_UID_LABEL};

/// The poll interval for a runtime without events (containerd before 1.7).
const RELIST_PERIOD: Duration = Duration::from_secs(1);
/// And for one with events, since it may lose some (kubelet, `eventedPlegRelistPeriod`).
const RELIST_PERIOD_BESIDE_EVENTS: Duration = Duration::from_secs(300);

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
    tokio::join!(follow(&cri, &sender), relist(&sender, RELIST_PERIOD_BESIDE_EVENTS));
}

async fn follow(cri: &Cri, sender: &mpsc::Sender<ContainerEvent>) {
    let mut backoff = Backoff::new(Duration::from_millis(10), Duration::from_secs(5));
    while !sender.is_closed() {
        match cri.container_events().await {
            Ok(mut stream) => {
                backoff.reset();
                // The lists contain what happened before the stream started.
                let _receiver_gone = sender.send(ContainerEvent::Any).await;
                let mut pods = Pods::default();
                while let Some(Ok(event)) = stream.next().await {
                    let _receiver_gone = sender.send(pods.target_of(&event)).await;
                }
                warn!("the runtime's event stream ended, reopening it");
                // A runtime in Go answers the next call with the next event.
                let _receiver_gone = sender.send(ContainerEvent::Any).await;
            }
            Err(error) if error.code == Code::Unimplemented => {
                warn!("the runtime has no container events: polling its lists every second");
                return relist(sender, RELIST_PERIOD).await;
            }
            Err(error) => warn!(%error, "cannot open the runtime's event stream"),
        }
        tokio::time::sleep(backoff.step()).await;
    }
}

async fn relist(sender: &mpsc::Sender<ContainerEvent>, period: Duration) {
    while !sender.is_closed() {
        tokio::time::sleep(period).await;
        let _receiver_gone = sender.send(ContainerEvent::Any).await;
    }
}

/// The pods of containers and sandboxes that exist, by id, as far as events have named them. The event of a
/// sandbox's removal may not (containerd), and must not make hundreds of workers look.
#[derive(Debug, Default)]
struct Pods(HashMap<String, String>);

impl Pods {
    fn target_of(&mut self, event: &cri::ContainerEventResponse) -> ContainerEvent {
        let sandbox = event.pod_sandbox_status.as_ref().and_then(|s| s.labels.get(POD_UID_LABEL));
        let container = || event.containers_statuses.iter().find_map(|c| c.labels.get(POD_UID_LABEL));
        let named = sandbox.or_else(container).cloned();
        if event.container_event_type() == ContainerEventType::ContainerDeletedEvent {
            let known = self.0.remove(&event.container_id);
            return named.or(known).map_or(ContainerEvent::Any, |uid| ContainerEvent::Pod { uid });
        }
        let Some(uid) = named else { return ContainerEvent::Any };
        self.0.insert(event.container_id.clone(), uid.clone());
        ContainerEvent::Pod { uid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(kind: ContainerEventType, pod: Option<&str>) -> cri::ContainerEventResponse {
        let status = |uid: &str| cri::PodSandboxStatus {
            labels: [(POD_UID_LABEL.to_owned(), uid.to_owned())].into(),
            ..cri::PodSandboxStatus::default()
        };
        cri::ContainerEventResponse {
            container_id: "id".to_owned(),
            container_event_type: kind.into(),
            pod_sandbox_status: pod.map(status),
            ..Default::default()
        }
    }

    /// A runtime that loses events, or answers a subscriber with the first event only (containerd).
    #[tokio::test(start_paused = true)]
    async fn all_pods_are_looked_at_now_and_then_although_the_runtime_reports_nothing() {
        let (sender, mut receiver) = mpsc::channel(1);
        let began = tokio::time::Instant::now();
        tokio::spawn(async move { relist(&sender, RELIST_PERIOD_BESIDE_EVENTS).await });
        for round in 1..=2 {
            assert_eq!(receiver.recv().await, Some(ContainerEvent::Any));
            assert_eq!(began.elapsed(), RELIST_PERIOD_BESIDE_EVENTS * round);
        }
    }

    #[test]
    fn an_event_wakes_the_pod_of_its_sandbox_or_all_pods() {
        let mut pods = Pods::default();
        let one = ContainerEvent::Pod { uid: "u1".into() };
        let mut target = |kind, pod| pods.target_of(&event(kind, pod));
        assert_eq!(target(ContainerEventType::ContainerCreatedEvent, None), ContainerEvent::Any);
        assert_eq!(target(ContainerEventType::ContainerCreatedEvent, Some("u1")), one);
        assert_eq!(target(ContainerEventType::ContainerDeletedEvent, None), one, "it was named before");
        assert_eq!(target(ContainerEventType::ContainerDeletedEvent, None), ContainerEvent::Any);
        assert_eq!(target(ContainerEventType::ContainerDeletedEvent, Some("u1")), one);
        assert!(pods.0.is_empty(), "{pods:?}");
    }
}
