//! Plugin registration, without a side-car: a socket in kubelet's
//! plugins_registry that tells kubelet who is there and hears what became of it.
//!
//! kubelet does not retry a registration that failed after it was validated; it
//! looks again only when a socket appears. So a refusal is answered by taking
//! the socket away and binding it anew, later and later.

mod authority;
mod hpack;
mod huffman;
mod stream;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use proto::registration::registration_server::{Registration, RegistrationServer};
use proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::sync::{Notify, oneshot, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::config::Config;
use crate::server::{self, SocketError};
use stream::RewrittenStream;

const PLUGIN_TYPE: &str = "CSIPlugin";
/// CSI versions, of which kubelet takes the highest 1.x.
const SUPPORTED_VERSION: &str = "1.0.0";
/// As kubelet makes it.
const REGISTRY_MODE: u32 = 0o755;
const FIRST_BACK_OFF: Duration = Duration::from_millis(500);
const LONGEST_BACK_OFF: Duration = Duration::from_secs(122);
/// For the answer to leave before the connection is closed.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Offers the driver for registration until `stop` turns true.
pub(crate) async fn serve(config: &Config, stop: watch::Receiver<bool>) -> Result<(), SocketError> {
    let path = config.registration_socket();
    let mut back_off = FIRST_BACK_OFF;
    loop {
        let refused = Arc::new(Notify::new());
        let listener = server::bind(&path, REGISTRY_MODE).await?;
        let service = RegistrationService {
            name: config.driver_name.clone(),
            endpoint: config.csi_socket(),
            refused: refused.clone(),
        };
        let connections = UnixListenerStream::new(listener).map(|s| s.map(RewrittenStream::new));
        let mut stopped = stop.clone();
        let until = async move {
            tokio::select! {
                () = refused.notified() => false,
                _ = stopped.wait_for(|stop| *stop) => true,
            }
        };
        let (told, mut tell) = oneshot::channel();
        let shutdown = async move {
            let is_over = until.await;
            let _gone = told.send(is_over);
        };
        let serving = Server::builder()
            .add_service(RegistrationServer::new(service))
            .serve_with_incoming_shutdown(connections, shutdown);
        let (is_over, served) = serve_until_told(serving, &mut tell).await;
        server::remove_socket(&path);
        served.map_err(|source| SocketError::Serve { path: path.clone(), source })?;
        if is_over {
            return Ok(());
        }
        tracing::info!(seconds = back_off.as_secs_f32(), "offering the driver for registration again later");
        let mut stopped = stop.clone();
        if tokio::time::timeout(back_off, stopped.wait_for(|stop| *stop)).await.is_ok() {
            return Ok(());
        }
        back_off = (back_off * 2).min(LONGEST_BACK_OFF);
    }
}

/// Runs the server until it was told to end, and at most [`LAST_ANSWER`] longer:
/// kubelet keeps no connection open, but whoever does must not hold us up. What
/// it was told comes back with how it ended.
async fn serve_until_told(
    serving: impl Future<Output = Result<(), tonic::transport::Error>>,
    tell: &mut oneshot::Receiver<bool>,
) -> (bool, Result<(), tonic::transport::Error>) {
    tokio::pin!(serving);
    tokio::select! {
        // First: a server with no connections ends in the moment that it is told.
        biased;
        told = &mut *tell => {
            let served = tokio::time::timeout(LAST_ANSWER, serving).await;
            (told.unwrap_or(true), served.unwrap_or(Ok(())))
        }
        served = &mut serving => (tell.try_recv().unwrap_or(true), served),
    }
}

#[derive(Debug)]
struct RegistrationService {
    name: String,
    endpoint: PathBuf,
    refused: Arc<Notify>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: self.name.clone(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: vec![SUPPORTED_VERSION.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        if plugin_registered {
            tracing::info!(driver = self.name, "registered with kubelet");
        } else {
            tracing::error!(driver = self.name, error, "kubelet refused the registration");
            self.refused.notify_one();
        }
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
