//! gRPC probes: `grpc.health.v1.Health/Check` (kubelet, pkg/probe/grpc).

use std::fmt;

use hyper_util::rt::TokioIo;
use proto::health::HealthCheckRequest;
use proto::health::health_check_response::ServingStatus;
use proto::health::health_client::HealthClient;
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
        // The authority is of no concern to a health service, and an IPv6 address would need brackets.
        let endpoint = Endpoint::from_static("http://localhost")
            .http2_max_header_list_size(MOST_HEADER_BYTES)
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
}
