//! The daemon's side of the client commands: gRPC on a unix socket that only
//! root can open.

mod apply;
mod delete;
mod get;
mod logs;
mod usage;
mod watching;

use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;

use proto::deadline::Deadlines;
use proto::kubelet::kubelet_server::{Kubelet, KubeletServer};
use proto::kubelet::{
    ApplyRequest, ApplyResponse, AttachRequest, AttachedAt, DeleteProgress, DeleteRequest, ExecRequest,
    GetRequest, GetResponse, LogsChunk, LogsRequest, PortForwardRequest, StopProgress, StopRequest,
    StreamsAt, UsageRequest, UsageResponse, WatchEvent,
};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use crate::config::STOP_GRACE_SECONDS;
use crate::engine::{Handle, LogPathError, StreamError};
use crate::manifest::FILE_BYTES;
use crate::node::sockets;
use crate::objects::{Kind, UnknownKind};
use crate::source::{ObjectSource, Task};
use crate::store::{self, Store};

/// What a request carries beside the documents.
const AROUND_DOCUMENTS: usize = 64 << 10;
/// Answers that may wait for a slow client.
const ANSWERS_KEPT: usize = 16;
/// Of a log: each has 32 KiB, and there may be hundreds of slow readers.
const LOG_CHUNKS_KEPT: usize = 2;

/// Why a client's call is refused; its words are what the client prints.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("serve clients on {}", socket.display())]
    Serve {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{}", mistakes.join("\n"))]
    Invalid { mistakes: Vec<String> },
    #[error("{plural} \"{name}\" not found")]
    NotFound { plural: String, name: String },
    #[error("{kind} {name:?} is described by {}, which would bring it back: remove it there", file.display())]
    DescribedByFile { kind: Kind, name: String, file: PathBuf },
    #[error(transparent)]
    Kind(#[from] UnknownKind),
    #[error("{kind} objects are not deleted by clients")]
    NotDeletable { kind: Kind },
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error(transparent)]
    Log(#[from] LogPathError),
    #[error("read {}", path.display())]
    ReadLog {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Streams(StreamError),
    #[error("read {path}")]
    ReadUsage {
        path: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("stop pods")]
    Stop(#[source] crate::engine::Error),
}

/// The one table from our errors to gRPC's codes.
impl From<Error> for Status {
    fn from(error: Error) -> Self {
        let text = linux::chain(&error);
        match error {
            Error::Invalid { .. } | Error::Kind(_) | Error::NotDeletable { .. } => {
                Self::invalid_argument(text)
            }
            Error::NotFound { .. } => Self::not_found(text),
            Error::DescribedByFile { .. } => Self::failed_precondition(text),
            Error::Store(error) => match error {
                store::Error::OtherSource { .. }
                | store::Error::Immutable { .. }
                | store::Error::RunningPod { .. }
                | store::Error::NoRoom { .. }
                | store::Error::Terminating { .. } => Self::failed_precondition(text),
                store::Error::Keep { .. }
                | store::Error::Read { .. }
                | store::Error::Corrupt { .. }
                | store::Error::Uid(_) => Self::internal(text),
            },
            Error::Log(error) | Error::Streams(StreamError::Container(error)) => match error {
                LogPathError::NoPod { .. } => Self::not_found(text),
                LogPathError::NoContainer { .. }
                | LogPathError::Ambiguous { .. }
                | LogPathError::NotStarted { .. }
                | LogPathError::NoPrevious { .. } => Self::invalid_argument(text),
            },
            Error::Streams(
                StreamError::NotRunning { .. }
                | StreamError::PodNotRunning { .. }
                | StreamError::NoSandbox { .. },
            ) => Self::failed_precondition(text),
            Error::Streams(StreamError::Runtime(_) | StreamError::Ending) => Self::unavailable(text),
            Error::Serve { .. } | Error::ReadLog { .. } | Error::ReadUsage { .. } | Error::Stop(_) => {
                Self::internal(text)
            }
        }
    }
}

/// How a client's `stop` reaches the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stopping {
    No,
    /// Pods are being taken down; nothing new starts.
    Pods,
    /// End the process.
    Now,
}

/// What the calls work on.
#[derive(Debug, Clone)]
pub struct Api {
    pub store: Store,
    pub engine: Handle,
    pub stopping: watch::Sender<Stopping>,
}

/// Takes the socket's place: an old one is left by a kubelet that was killed,
/// since the root directory's lock is ours. Returns where the socket is.
pub fn listen(socket: &Path) -> Result<(UnixListener, PathBuf), Error> {
    sockets::bind(socket).map_err(|source| Error::Serve { socket: socket.to_owned(), source })
}

/// The clients' socket: the source of what `hawser-kubelet apply` describes.
#[derive(Debug)]
pub struct ClientSocket {
    api: Api,
    listener: UnixListener,
}

impl ClientSocket {
    pub fn new(api: Api, listener: UnixListener) -> Self {
        Self { api, listener }
    }
}

impl ObjectSource for ClientSocket {
    /// What clients have applied is in the store already.
    fn report_all(&mut self) -> Task<'_> {
        Box::pin(std::future::ready(()))
    }

    /// Answers clients until `ended`, then ends once the last answer is out.
    fn follow(self: Box<Self>, ended: Task<'static>) -> Task<'static> {
        let service = KubeletServer::new(self.api).max_decoding_message_size(FILE_BYTES + AROUND_DOCUMENTS);
        let incoming = UnixListenerStream::new(self.listener);
        Box::pin(async move {
            let server = tonic::transport::Server::builder().layer(Deadlines).add_service(service);
            if let Err(error) = server.serve_with_incoming_shutdown(incoming, ended).await {
                tracing::error!(error = linux::chain(&error), "clients get no more answers");
            }
        })
    }
}

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Kubelet for Api {
    async fn apply(&self, request: Request<ApplyRequest>) -> Result<Response<ApplyResponse>, Status> {
        let store = self.store.clone();
        // Applied objects are on disk before the answer.
        let applied = tokio::task::spawn_blocking(move || apply::apply(&store, &request.into_inner())).await;
        Ok(Response::new(applied.map_err(|error| Status::internal(error.to_string()))??))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<GetResponse>, Status> {
        Ok(Response::new(get::get(&self.store, &self.engine, &request.into_inner())?))
    }

    async fn watch(&self, request: Request<GetRequest>) -> Result<Response<Answers<WatchEvent>>, Status> {
        let watch = watching::Watch::begin(self, request.into_inner())?;
        let (answers, stream) = mpsc::channel(ANSWERS_KEPT);
        tokio::spawn(watch.send(answers));
        Ok(Response::new(as_answers(stream)))
    }

    async fn usage(&self, _request: Request<UsageRequest>) -> Result<Response<UsageResponse>, Status> {
        Ok(Response::new(usage::usage(&self.engine).await?))
    }

    async fn logs(&self, request: Request<LogsRequest>) -> Result<Response<Answers<LogsChunk>>, Status> {
        let request = request.into_inner();
        let tail = logs::Tail::open(&self.store, &self.engine, &request)?;
        let (answers, stream) = mpsc::channel(LOG_CHUNKS_KEPT);
        tokio::spawn(tail.send(answers));
        Ok(Response::new(as_answers(stream)))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Result<Response<StreamsAt>, Status> {
        let url = self.engine.exec(request.into_inner()).await.map_err(Error::Streams)?;
        Ok(Response::new(StreamsAt { url }))
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Result<Response<AttachedAt>, Status> {
        Ok(Response::new(self.engine.attach(request.into_inner()).await.map_err(Error::Streams)?))
    }

    async fn port_forward(
        &self,
        request: Request<PortForwardRequest>,
    ) -> Result<Response<StreamsAt>, Status> {
        let url = self.engine.port_forward(request.into_inner()).await.map_err(Error::Streams)?;
        Ok(Response::new(StreamsAt { url }))
    }

    async fn delete(
        &self,
        request: Request<DeleteRequest>,
    ) -> Result<Response<Answers<DeleteProgress>>, Status> {
        let deletion = delete::Deletion::begin(&self.store, &self.engine, request.into_inner())?;
        let (answers, stream) = mpsc::channel(ANSWERS_KEPT);
        tokio::spawn(deletion.finish(answers));
        Ok(Response::new(as_answers(stream)))
    }

    async fn stop(&self, request: Request<StopRequest>) -> Result<Response<Answers<StopProgress>>, Status> {
        let (answers, stream) = mpsc::unbounded_channel();
        tokio::spawn(self.clone().stop_all(request.into_inner(), answers));
        let stream = tokio_stream::wrappers::UnboundedReceiverStream::new(stream);
        Ok(Response::new(Box::pin(stream)))
    }
}

impl Api {
    /// Goes on when the client has gone.
    async fn stop_all(
        self,
        request: StopRequest,
        answers: mpsc::UnboundedSender<Result<StopProgress, Status>>,
    ) {
        if request.pods {
            self.stopping.send_replace(Stopping::Pods);
            self.store.take_no_more_pods();
            let longest_grace = request.grace_seconds.unwrap_or(STOP_GRACE_SECONDS);
            let progress = |message| {
                let _receiver_gone = answers.send(Ok(StopProgress { message }));
            };
            if let Err(error) = self.engine.stop_pods(longest_grace, progress).await {
                let _receiver_gone = answers.send(Err(Error::Stop(error).into()));
            }
        }
        drop(answers);
        self.stopping.send_replace(Stopping::Now);
    }
}

fn as_answers<T: Send + 'static>(receiver: mpsc::Receiver<Result<T, Error>>) -> Answers<T> {
    Box::pin(ReceiverStream::new(receiver).map(|answer| answer.map_err(Status::from)))
}
