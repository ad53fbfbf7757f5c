//! Whether the container runtime answers, for the node's condition Ready (kubelet, updateRuntimeUp and
//! runtimeState). The pods' conditions do not depend on it: kubelet leaves them too, to a cluster's controllers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::clients::cri::Cri;

/// kubelet's.
const PERIOD: Duration = Duration::from_secs(5);
/// kubelet's maxWaitForContainerRuntime.
const LONGEST_SILENCE: Duration = Duration::from_secs(30);

/// Clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuntimeHealth {
    last_answer: Arc<Mutex<Option<Instant>>>,
}

impl RuntimeHealth {
    /// Never ends.
    pub(crate) async fn watch(self, cri: Cri) {
        let mut ticks = interval(PERIOD);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            if let Ok(Ok(_version)) = timeout(LONGEST_SILENCE, cri.version()).await {
                self.has_answered();
            }
        }
    }

    pub(crate) fn has_answered(&self) {
        *self.last_answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// The node's condition Ready.
    pub(crate) fn condition(&self) -> Value {
        let last = *self.last_answer.lock().unwrap_or_else(PoisonError::into_inner);
        match last.map(|answered| answered.elapsed()) {
            Some(silence) if silence <= LONGEST_SILENCE => {
                json!({"type": "Ready", "status": "True", "reason": "KubeletReady"})
            }
            Some(_) => not_ready("container runtime is down"),
            None => not_ready("container runtime status check may not have completed yet"),
        }
    }
}

fn not_ready(message: &str) -> Value {
    json!({"type": "Ready", "status": "False", "reason": "KubeletNotReady", "message": message})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_is_ready_while_its_runtime_has_answered_lately() {
        let health = RuntimeHealth::default();
        assert_eq!(health.condition()["status"], "False");
        health.has_answered();
        tokio::time::advance(LONGEST_SILENCE).await;
        assert_eq!(health.condition()["status"], "True");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!(health.condition()["message"], "container runtime is down");
        health.has_answered();
        assert_eq!(health.condition()["reason"], "KubeletReady");
    }
}
