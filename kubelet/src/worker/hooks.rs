//! Hooks of containers: postStart and preStop (kubelet, lifecycle/handlers.go).

use crate::clients::cri::Cri;
use crate::objects::{Container, Handler, Hook};
use crate::worker::probes::exec::Exec;
use crate::worker::probes::http::Get;
use crate::worker::probes::port_number;

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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::path::Path;

    use serde_json::{from_value, json};

    use super::*;

    #[tokio::test]
    async fn a_hook_sends_a_request_to_the_pod() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let call = |hook: serde_json::Value| Call {
            cri: Cri::new(Path::new("/nonexistent/cri.sock")),
            hook: from_value(hook).unwrap(),
            container: from_value(json!({"name": "c", "ports": [{"name": "web", "containerPort": port}]}))
                .unwrap(),
            id: "1".to_owned(),
            pod_ip: "127.0.0.1".to_owned(),
        };
        let server = std::thread::spawn(move || {
            ["200 OK", "500 Oops"].map(|status| {
                let (mut connection, _client) = listener.accept().unwrap();
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") && connection.read(&mut byte).is_ok_and(|n| n == 1) {
                    head.push(byte[0]);
                }
                write!(connection, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").unwrap();
                String::from_utf8(head).unwrap().to_lowercase()
            })
        });
        let headers = json!([{"name": "X-Hook", "value": "1"}]);
        let stop = json!({"httpGet": {"path": "/stop", "port": "web", "httpHeaders": headers}});
        call(stop.clone()).run().await.unwrap();
        // Any answer will do.
        call(stop.clone()).run().await.unwrap();
        let [head, _again] = server.join().unwrap();
        call(stop).run().await.expect_err("no server listens");
        assert!(head.starts_with("get /stop http/1.1\r\n") && head.contains("x-hook: 1\r\n"), "{head}");
        assert!(head.contains("user-agent: kube-lifecycle/"), "{head}");
        let error = call(json!({"httpGet": {"port": "other"}})).run().await.unwrap_err();
        assert!(error.contains("no port with the name \"other\""), "{error}");
    }
}
