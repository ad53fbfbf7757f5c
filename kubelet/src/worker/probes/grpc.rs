//! gRPC probes: `grpc.health.v1.Health/Check` (kubelet, pkg/probe/grpc).

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use proto::health::HealthCheckRequest;
use proto::health::health_check_response::ServingStatus;
use proto::health::health_client::HealthClient;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::{Endpoint, Uri};
use tower::service_fn;

use super::answer::Answer;
use super::dial::dial;

/// An answer is a few bytes.
const MOST_ANSWER_BYTES: usize = 16 << 10;
const MOST_HEADER_BYTES: u32 = 16 << 10;

#[derive(Debug)]
pub(super) struct Grpc {
    host: String,
    port: u16,
    service: String,
    user_agent: &'static str,
}

impl fmt::Display for Grpc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Grpc {
    pub(super) fn new(host: &str, port: u16, service: &str, user_agent: &'static str) -> Self {
        Self { host: host.to_owned(), port, service: service.to_owned(), user_agent }
    }

    pub(super) async fn ask(&self) -> Answer {
        let (host, port) = (self.host.clone(), self.port);
        let connector = service_fn(move |_: Uri| {
            let host = host.clone();
            async move { dial(&host, port).await.map(TokioIo::new) }
        });
        let tasks = Tasks::default();
        let _ended_with_the_probe = AbortAtEnd(&tasks);
        // The authority is of no concern to a health service, and an IPv6 address would need brackets.
        let endpoint = Endpoint::from_static("http://localhost")
            .http2_max_header_list_size(MOST_HEADER_BYTES)
            .executor(tasks.clone())
            .user_agent(self.user_agent);
        let channel = match endpoint {
            Ok(endpoint) => endpoint.connect_with_connector(connector).await,
            Err(error) => Err(error),
        };
        let channel = match channel {
            Ok(channel) => channel,
            Err(error) => {
                let why = linux::chain(&error);
                return Answer::Failure(format!("error: failed to connect service \"{self}\": {why}"));
            }
        };
        let mut client = HealthClient::new(channel).max_decoding_message_size(MOST_ANSWER_BYTES);
        match client.check(HealthCheckRequest { service: self.service.clone() }).await {
            Ok(answer) => match answer.into_inner().status() {
                ServingStatus::Serving => Answer::Success,
                other => {
                    let status = other.as_str_name();
                    Answer::Failure(format!("service unhealthy (responded with \"{status}\")"))
                }
            },
            Err(status) if status.code() == Code::Unimplemented => Answer::Failure(
                "error: this server does not implement the grpc health protocol (grpc.health.v1.Health)"
                    .to_owned(),
            ),
            Err(status) => {
                let message = status.message();
                Answer::Failure(format!("error: health rpc probe failed: {:?}: {message}", status.code()))
            }
        }
    }
}

/// The tasks of a probe's connection. By itself, such a task waits until the server has read all that the
/// client owes it, answers to pings for example. A hostile server never reads.
#[derive(Debug, Clone)]
struct Tasks(Arc<Mutex<Option<JoinSet<()>>>>);

impl Default for Tasks {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Some(JoinSet::new()))))
    }
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        if let Some(tasks) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            tasks.spawn(task);
        }
    }
}

struct AbortAtEnd<'a>(&'a Tasks);

impl Drop for AbortAtEnd<'_> {
    fn drop(&mut self) {
        // Dropped without the lock: a task has a copy of it.
        let tasks = self.0.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(tasks);
    }
}

#[cfg(test)]
mod tests {
    use proto::health::HealthCheckResponse;
    use proto::health::health_server::{Health, HealthServer};
    use tokio_stream::wrappers::TcpListenerStream;
    use tonic::{Request, Response, Status};

    use super::*;

    struct Server;

    #[tonic::async_trait]
    impl Health for Server {
        async fn check(
            &self,
            request: Request<HealthCheckRequest>,
        ) -> Result<Response<HealthCheckResponse>, Status> {
            let status = match request.into_inner().service.as_str() {
                "" => ServingStatus::Serving,
                "slow" => ServingStatus::NotServing,
                unknown => return Err(Status::not_found(unknown)),
            };
            Ok(Response::new(HealthCheckResponse { status: status.into() }))
        }
    }

    #[tokio::test]
    async fn only_a_serving_service_is_healthy() {
        let listener = tokio::net::TcpListener::bind("[::1]:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = tonic::transport::Server::builder().add_service(HealthServer::new(Server));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let ask = async |service| Grpc::new("::1", port, service, "test").ask().await;
        assert_eq!(ask("").await, Answer::Success);
        let failure = |text: &str| Answer::Failure(text.to_owned());
        assert_eq!(ask("slow").await, failure("service unhealthy (responded with \"NOT_SERVING\")"));
        assert_eq!(ask("other").await, failure("error: health rpc probe failed: NotFound: other"));
    }

    /// It sends pings, each of which is to be answered, and reads nothing.
    #[tokio::test]
    async fn a_connection_ends_with_its_probe_though_the_server_never_reads() {
        use tokio::io::AsyncWriteExt;
        const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
        const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(1).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let probe = Grpc::new("127.0.0.1", listener.local_addr().unwrap().port(), "", "kube-probe");
        let server = tokio::spawn(async move {
            let (mut client, _) = listener.accept().await.unwrap();
            client.write_all(&SETTINGS).await.unwrap();
            let pings = PING.repeat(1000);
            while client.write_all(&pings).await.is_ok() {}
        });
        let second = std::time::Duration::from_secs(1);
        let _elapsed = tokio::time::timeout(second, probe.ask()).await.unwrap_err();
        tokio::time::timeout(10 * second, server).await.expect("the connection has ended").unwrap();
    }
}
