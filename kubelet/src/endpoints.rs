//! kubelet's HTTP endpoints: on a unix socket of root's, and over TLS on an address if the command line
//! names one.
//!
//! Clients are hostile. A connection has one request. Its head, the time for it, and the number of
//! connections are bounded; an answer waits for its reader, and a reader that stops is dropped. On the
//! address, no request is looked at before its token.

mod body;
mod counters;
mod credentials;
mod exposition;
mod listener;
mod logs;
mod metrics;
mod object;
mod query;
mod relay;
mod resource_metrics;
mod route;
mod stalled;
mod streams;
mod summary;
mod usage;
mod volumes;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use jiff::Timestamp;
use proto::kubelet::GetRequest;
use proto::kubelet::kubelet_server::Kubelet;
use rustls::ServerConfig;
use serde_json::value::RawValue;
use tokio::net::{TcpListener, UnixListener};

use self::body::{Answer, answer, json, text};
use self::counters::Counters;
use self::credentials::Token;
use self::listener::Place;
use self::route::{NoRoute, Pod, Route};
use self::streams::Refusal;
use self::summary::{Disk, Facts};
use self::usage::{Missing, NodeUsage, UsageCache};
use crate::config::TlsListener;
use crate::engine::{LogPathError, StreamError};
use crate::objects::Kind;
use crate::source::Task;
use crate::standalone::api::Api;

pub use self::credentials::Error as CredentialsError;

/// How long the engine's loop may take to answer.
const HEALTHY: Duration = Duration::from_secs(5);

/// Why the endpoints cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    #[error("--listen {address}")]
    Listen {
        address: std::net::SocketAddr,
        #[source]
        source: std::io::Error,
    },
}

/// The listener on the network, with what its clients need.
#[derive(Debug)]
struct Network {
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    token: Token,
}

/// The endpoints, ready to be served.
#[derive(Debug)]
pub struct Endpoints {
    server: Arc<Server>,
    unix: UnixListener,
    network: Option<Network>,
}

/// What all requests need.
#[derive(Debug)]
struct Server {
    api: Api,
    usage: UsageCache,
    counters: Arc<Counters>,
    root_dir: PathBuf,
}

impl Endpoints {
    /// Reads certificate, key and token, and binds the address. Nothing is answered yet.
    pub async fn new(
        api: Api,
        root_dir: PathBuf,
        unix: UnixListener,
        network: Option<TlsListener>,
    ) -> Result<Self, Error> {
        let network = match network {
            None => None,
            Some(wanted) => {
                let token = Token::read(&wanted.token)?;
                let tls = credentials::tls(&wanted)?;
                let listener = TcpListener::bind(wanted.address).await;
                let failed = |source| Error::Listen { address: wanted.address, source };
                let listener = listener.map_err(failed)?;
                tracing::info!(address = %listener.local_addr().map_err(failed)?, "serving kubelet's endpoints");
                Some(Network { listener, tls, token })
            }
        };
        let usage = UsageCache::new(api.engine.clone());
        let server = Server { api, usage, counters: Arc::default(), root_dir };
        Ok(Self { server: Arc::new(server), unix, network })
    }

    /// Answers clients until `ended`; then their connections end too.
    pub fn serve(self, ended: Task<'static>) -> Task<'static> {
        let Self { server, unix, network } = self;
        Box::pin(async move {
            let network = network.map(|Network { listener, tls, token }| {
                listener::serve_network(listener, tls.into(), token, Arc::clone(&server))
            });
            tokio::select! {
                () = ended => {}
                () = listener::serve_unix(unix, Arc::clone(&server)) => {}
                () = async {
                    match network {
                        Some(network) => network.await,
                        None => std::future::pending().await,
                    }
                } => {}
            }
        })
    }
}

impl Server {
    /// Answers an authorised request. `place`: the client's, for as long as it has streams.
    async fn answer(&self, request: Request<Incoming>, place: Place) -> Response<Answer> {
        let method = request.method().clone();
        let route = match Route::of(&method, request.uri()) {
            Ok(route) => route,
            Err(error) => {
                let answer = no_route(&error);
                self.counters.answered("other", &method, answer.status().as_u16());
                return answer;
            }
        };
        let label = route.label();
        let mut answer = self.dispatch(route, request, place).await;
        // Logs and listings are no pages.
        answer
            .headers_mut()
            .insert(HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff"));
        self.counters.answered(label, &method, answer.status().as_u16());
        answer
    }

    async fn dispatch(&self, route: Route, request: Request<Incoming>, place: Place) -> Response<Answer> {
        match route {
            Route::Healthz => self.healthz().await,
            Route::Pods => self.pods().await,
            Route::Metrics => self.metrics().await,
            Route::ResourceMetrics => self.resource_metrics().await,
            Route::Summary => self.summary().await,
            Route::ContainerLogs(of, query) => logs::logs(&self.api, &of, &query).await,
            streams @ (Route::Exec(..) | Route::Attach(..) | Route::PortForward(..)) => {
                let answer = self.streams(streams, request, place).await;
                answer
                    .unwrap_or_else(|refusal| text(refusal.status(), format!("{}\n", linux::chain(&refusal))))
            }
        }
    }

    async fn streams(
        &self,
        route: Route,
        request: Request<Incoming>,
        place: Place,
    ) -> Result<Response<Answer>, Refusal> {
        if !streams::is_upgrade(request.headers()) {
            return Err(Refusal::NoUpgrade);
        }
        let engine = &self.api.engine;
        let url = match &route {
            Route::Exec(of, query) => {
                self.require_uid(&of.pod)?;
                streams::exec(engine, of, query).await?
            }
            Route::Attach(of, query) => {
                self.require_uid(&of.pod)?;
                streams::attach(engine, of, query).await?
            }
            Route::PortForward(of, query) => {
                self.require_uid(of)?;
                streams::port_forward(engine, of, query).await?
            }
            _ => return Err(Refusal::NoUpgrade),
        };
        streams::proxy(request, &url, (place, self.counters.open_streams())).await
    }

    /// A path with a uid is for the pod with this uid alone.
    fn require_uid(&self, of: &Pod) -> Result<(), StreamError> {
        let Some(uid) = &of.uid else { return Ok(()) };
        let pod = self.api.store.pod(&of.namespace, &of.name);
        if pod.is_some_and(|pod| pod.metadata.uid == *uid) {
            return Ok(());
        }
        let missing = LogPathError::NoPod { namespace: of.namespace.clone(), pod: of.name.clone() };
        Err(StreamError::Container(missing))
    }

    async fn healthz(&self) -> Response<Answer> {
        match tokio::time::timeout(HEALTHY, self.api.engine.runtime()).await {
            Ok(Ok(_runtime)) => text(StatusCode::OK, "ok"),
            Ok(Err(error)) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{}\n", linux::chain(&error))),
            Err(_elapsed) => text(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("the kubelet's loop has not answered for {} s\n", HEALTHY.as_secs()),
            ),
        }
    }

    /// A PodList, with the fields that the kubelet does not act on.
    async fn pods(&self) -> Response<Answer> {
        let all = GetRequest { kind: Kind::Pod.to_string(), whole: true, ..GetRequest::default() };
        let objects = match self.api.get(tonic::Request::new(all)).await {
            Ok(found) => found.into_inner().objects,
            Err(status) => return text(logs::status_of(&status), format!("{}\n", status.message())),
        };
        let items: Result<Vec<Box<RawValue>>, _> =
            objects.iter().map(|object| serde_json::from_slice(object)).collect();
        let list = items.and_then(|items| serde_json::to_vec(&PodList::new(items)));
        match list {
            Ok(list) => answer(StatusCode::OK, "application/json", list),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    }

    async fn metrics(&self) -> Response<Answer> {
        let (store, counters) = (self.api.store.clone(), Arc::clone(&self.counters));
        let volumes = self.api.engine.volumes().figures();
        let made = tokio::task::spawn_blocking(move || {
            metrics::text(store.node_name(), &store.pods(), &volumes, &counters)
        });
        exposition(made.await.map_err(|error| error.to_string()))
    }

    async fn resource_metrics(&self) -> Response<Answer> {
        let usage = self.usage.get().await.inspect_err(|error| warn_of("/metrics/resource", error)).ok();
        let pods = self.api.store.pods();
        let made = tokio::task::spawn_blocking(move || {
            let now = i64::try_from(Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX);
            resource_metrics::text(&pods, usage.as_deref(), NodeUsage::read().ok(), now)
        });
        exposition(made.await.map_err(|error| error.to_string()))
    }

    async fn summary(&self) -> Response<Answer> {
        let failed = |error: String| text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"));
        let usage = match self.usage.get().await {
            Ok(usage) => usage,
            Err(error) => return failed(linux::chain(&*error)),
        };
        let images = match self.api.engine.runtime().await {
            // Not every runtime counts them.
            Ok(runtime) => runtime.image_file_systems().await.unwrap_or_default().into_iter().next(),
            Err(error) => return failed(linux::chain(&error)),
        };
        let (store, root_dir) = (self.api.store.clone(), self.root_dir.clone());
        let volumes = self.api.engine.volumes().figures();
        let made = tokio::task::spawn_blocking(move || {
            let image_dir = images.as_ref().and_then(|images| images.fs_id.as_ref());
            let facts = Facts {
                node_name: store.node_name(),
                node: NodeUsage::read()?,
                disk: Disk::of(&root_dir),
                image_disk: image_dir.and_then(|dir| Disk::of(dir.mountpoint.as_ref())),
                images: images.as_ref(),
                usage: &usage,
                volumes: &volumes,
                now: Timestamp::now(),
            };
            Ok::<_, std::io::Error>(summary::summary(&store.pods(), &facts))
        });
        match made.await {
            Ok(Ok(summary)) => json(&summary),
            Ok(Err(error)) => failed(format!("read /proc: {error}")),
            Err(error) => failed(error.to_string()),
        }
    }
}

/// `kubectl`'s and kubelet's list of pods.
#[derive(serde::Serialize)]
struct PodList {
    kind: &'static str,
    #[serde(rename = "apiVersion")]
    api_version: &'static str,
    metadata: serde_json::Map<String, serde_json::Value>,
    items: Vec<Box<RawValue>>,
}

impl PodList {
    fn new(items: Vec<Box<RawValue>>) -> Self {
        Self { kind: "PodList", api_version: "v1", metadata: serde_json::Map::new(), items }
    }
}

fn exposition(made: Result<String, String>) -> Response<Answer> {
    match made {
        Ok(text) => answer(StatusCode::OK, exposition::CONTENT_TYPE, text),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
    }
}

fn no_route(error: &NoRoute) -> Response<Answer> {
    let status = match error {
        NoRoute::NotFound => StatusCode::NOT_FOUND,
        NoRoute::Method => StatusCode::METHOD_NOT_ALLOWED,
        NoRoute::Malformed(_) => StatusCode::BAD_REQUEST,
    };
    text(status, format!("{error}\n"))
}

fn warn_of(path: &'static str, error: &Missing) {
    tracing::warn!(path, error = linux::chain(error), "the runtime's figures are missing");
}
