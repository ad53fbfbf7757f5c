//! One check of a container: what is asked, and what the answer means.

use std::time::Duration;

use super::answer::Answer;
use super::dial::dial;
use super::exec::Exec;
use super::grpc::Grpc;
use super::http::Get;
use crate::clients::cri::Cri;
use crate::objects::{Container, Handler, Port, Probe};

/// kubelet's name, as far as servers see it.
const USER_AGENT: &str = "kube-probe/1.36";

/// A probe's check, with the addresses of its pod.
#[derive(Debug)]
pub(super) struct Check {
    container_id: String,
    target: Target,
}

#[derive(Debug)]
enum Target {
    Exec(Exec),
    Http(Get),
    Tcp {
        host: String,
        port: u16,
    },
    Grpc(Grpc),
    /// The check cannot be made, for this reason.
    Impossible(String),
}

impl Check {
    /// `None` if the probe has no action.
    pub(super) fn new(probe: &Probe, container: &Container, id: &str, pod_ip: &str) -> Option<Self> {
        let with_port = |port: &Port, target: &dyn Fn(u16) -> Target| match port_number(container, port) {
            Some(number) => target(number),
            None => Target::Impossible(format!("the container has no port with the name \"{port}\"")),
        };
        let host_of = |host: &str| if host.is_empty() { pod_ip.to_owned() } else { host.to_owned() };
        let target = match probe.handler()? {
            Handler::Exec(action) => {
                Exec::new(action, container).map_or_else(Target::Impossible, Target::Exec)
            }
            Handler::HttpGet(action) => {
                with_port(&action.port, &|port| Target::Http(Get::new(action, port, pod_ip, USER_AGENT)))
            }
            Handler::TcpSocket(action) => {
                with_port(&action.port, &|port| Target::Tcp { host: host_of(&action.host), port })
            }
            Handler::Grpc(action) => {
                Target::Grpc(Grpc::new(pod_ip, action.port, &action.service, USER_AGENT))
            }
            Handler::Sleep(_) => return None,
        };
        Some(Self { container_id: id.to_owned(), target })
    }

    pub(super) fn container_id(&self) -> &str {
        &self.container_id
    }

    /// Takes not much longer than `timeout`. The error says why the check could not be made.
    pub(super) async fn ask(&self, cri: &Cri, timeout: Duration) -> Result<Answer, String> {
        let answer = async {
            match &self.target {
                Target::Exec(exec) => exec.ask(cri, &self.container_id, timeout).await,
                Target::Http(get) => Ok(get.ask().await),
                Target::Tcp { host, port } => Ok(connect(host, *port).await),
                Target::Grpc(grpc) => Ok(grpc.ask().await),
                Target::Impossible(why) => Err(why.clone()),
            }
        };
        if matches!(self.target, Target::Exec(_)) {
            // The runtime ends the program.
            return answer.await;
        }
        let late = || Answer::Failure(format!("{self} did not answer within {} s", timeout.as_secs()));
        tokio::time::timeout(timeout, answer).await.unwrap_or_else(|_elapsed| Ok(late()))
    }
}

impl std::fmt::Display for Check {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.target {
            Target::Exec(_) => f.write_str("the command"),
            Target::Http(get) => write!(f, "Get \"{get}\":"),
            Target::Tcp { host, port } => write!(f, "dial tcp {host}:{port}:"),
            Target::Grpc(grpc) => write!(f, "health rpc of {grpc}"),
            Target::Impossible(_) => Ok(()),
        }
    }
}

/// A name is one of the container's ports.
pub(crate) fn port_number(container: &Container, port: &Port) -> Option<u16> {
    match port {
        Port::Number(number) => Some(*number),
        Port::Name(name) => {
            let named = container.ports.iter().find(|port| port.name.as_ref() == Some(name));
            named.map(|port| port.container_port)
        }
    }
}

async fn connect(host: &str, port: u16) -> Answer {
    match dial(host, port).await {
        Ok(_connected) => Answer::Success,
        Err(error) => Answer::Failure(format!("dial tcp {host}:{port}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container() -> Container {
        let ports = serde_json::json!([{"name": "web", "containerPort": 8080}]);
        serde_json::from_value(serde_json::json!({"name": "c", "ports": ports})).unwrap()
    }

    fn check(probe: serde_json::Value) -> Check {
        Check::new(&serde_json::from_value(probe).unwrap(), &container(), "id", "127.0.0.1").unwrap()
    }

    async fn ask_within(check: &Check, timeout: Duration) -> Result<Answer, String> {
        check.ask(&Cri::new(std::path::Path::new("/none")), timeout).await
    }

    async fn ask(check: &Check) -> Result<Answer, String> {
        ask_within(check, Duration::from_secs(20)).await
    }

    #[tokio::test]
    async fn a_port_that_opens_is_success() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let open = check(serde_json::json!({"tcpSocket": {"port": port}}));
        assert_eq!(ask(&open).await, Ok(Answer::Success));
        drop(listener);
        let Ok(Answer::Failure(output)) = ask(&open).await else { panic!("nothing listens") };
        assert!(output.starts_with(&format!("dial tcp 127.0.0.1:{port}: ")), "{output}");
    }

    #[tokio::test]
    async fn a_port_by_name_is_the_containers() {
        assert_eq!(port_number(&container(), &Port::Name("web".to_owned())), Some(8080));
        let unknown = check(serde_json::json!({"tcpSocket": {"port": "db"}}));
        assert_eq!(ask(&unknown).await, Err("the container has no port with the name \"db\"".to_owned()));
    }

    #[tokio::test]
    async fn a_server_that_accepts_and_says_nothing_costs_the_timeout() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let begun = std::time::Instant::now();
        for probe in
            [serde_json::json!({"httpGet": {"port": port}}), serde_json::json!({"grpc": {"port": port}})]
        {
            let asked = ask_within(&check(probe), Duration::from_secs(1)).await;
            let Ok(Answer::Failure(output)) = asked else { panic!("an answer came: {asked:?}") };
            assert!(output.contains("did not answer within 1 s"), "{output}");
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }
}
