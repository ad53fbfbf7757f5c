//! Hooks of containers: postStart and preStop (kubelet, lifecycle/handlers.go).

use crate::cri::Cri;
use crate::objects::{Container, Handler, Hook};
use crate::probes::exec::Exec;
use crate::probes::http::Get;
use crate::probes::port_number;

const USER_AGENT: &str = "kube-lifecycle/1.36";

/// A hook of a running container.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) cri: Cri,
    pub(super) hook: Hook,
    pub(super) container: Container,
    pub(super) id: String,
    pub(super) pod_ip: String,
}

impl Call {
    /// Has no time limit of its own. The error is for the event.
    pub(super) async fn run(&self) -> Result<(), String> {
        match self.hook.handler() {
            Some(Handler::Exec(action)) => Exec::new(action, &self.container)?.run(&self.cri, &self.id).await,
            Some(Handler::HttpGet(action)) => {
                let port = port_number(&self.container, &action.port)
                    .ok_or_else(|| format!("the container has no port with the name \"{}\"", action.port))?;
                Get::new(action, port, &self.pod_ip, USER_AGENT).run().await
            }
            Some(Handler::Sleep(action)) => {
                tokio::time::sleep(std::time::Duration::from_secs(action.seconds)).await;
                Ok(())
            }
            Some(Handler::TcpSocket(_) | Handler::Grpc(_)) | None => Ok(()),
        }
    }
}
