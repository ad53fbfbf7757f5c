//! Plugin registration without a side-car: a socket in kubelet's plugins_registry, by which kubelet
//! learns the driver's name and reports the result.
//!
//! One server answers on it as long as the driver runs, whichever listener accepted a connection:
//! `offer` binds the socket, and binds it again.

mod offer;

use std::sync::Arc;
use std::time::Duration;

use proto::registration::registration_server::{Registration, RegistrationServer};
use proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tokio::sync::{mpsc, watch};
use tonic::{Request, Response, Status};

use crate::config::RegistrationEndpoint;
use crate::engine::driver::Driver;
use crate::kernel::socket::{Socket, SocketError};
use crate::model::calls::Calls;
use crate::model::limits;
use crate::wire::server::{self, BACKLOG};
use offer::Verdict;

const PLUGIN_TYPE: &str = "CSIPlugin";
/// The CSI versions; kubelet takes the highest 1.x.
const SUPPORTED_VERSION: &str = "1.0.0";
/// The mode that kubelet gives this directory.
const REGISTRY_MODE: u32 = 0o755;
/// Time for the answer to leave before the connection is closed.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Offers the driver for registration until `stop` turns true. With
/// [`RegistrationEndpoint::Shared`] the socket serves CSI too.
pub(crate) async fn serve(
    driver: Arc<Driver>,
    calls: Arc<Calls>,
    stop: watch::Receiver<bool>,
) -> Result<(), SocketError> {
    let path = driver.config.registration_socket();
    let socket = Socket::bind(&path, REGISTRY_MODE).await?;
    let (verdicts, heard) = mpsc::unbounded_channel();
    let endpoint = driver.config.registration_endpoint;
    let service = RegistrationService {
        name: driver.config.driver_name.clone(),
        endpoint: match endpoint {
            RegistrationEndpoint::Own => driver.config.csi_socket().to_string_lossy().into_owned(),
            RegistrationEndpoint::Shared => String::new(),
        },
        verdicts,
    };
    let router = server::router(calls).add_service(RegistrationServer::new(service));
    let (router, last_calls) = match endpoint {
        RegistrationEndpoint::Own => (router, LAST_ANSWER),
        RegistrationEndpoint::Shared => (server::with_csi(router, driver), limits::LAST_CALLS),
    };
    let (connections, accepted) = mpsc::channel(BACKLOG);
    let keeping = offer::keep(socket, connections, heard);
    let serving = server::serve(router, accepted, last_calls, &path, stop.clone());
    let ((), served) = tokio::join!(server::until_stopped(keeping, stop), serving);
    served
}

#[derive(Debug)]
struct RegistrationService {
    name: String,
    /// Empty: the registration socket itself.
    endpoint: String,
    verdicts: mpsc::UnboundedSender<Verdict>,
}

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn get_info(&self, _request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: self.name.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec![SUPPORTED_VERSION.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        let verdict = if plugin_registered {
            tracing::info!(driver = self.name, "registered with kubelet");
            Verdict::Registered
        } else {
            tracing::error!(driver = self.name, error, "kubelet refused the registration");
            Verdict::Refused
        };
        // Fails while the driver ends, since the receiver is gone.
        let _ending = self.verdicts.send(verdict);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
