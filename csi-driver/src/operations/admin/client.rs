//! Asks a running driver, if there is one.

use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::admin::admin_client::AdminClient;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};
use tower::service_fn;

use crate::config;

/// For an answer; a driver that does not give one may be stopped or killed.
const LIMIT: Duration = Duration::from_secs(20);

/// The driver's answer. `None` where no driver answers, or one of an earlier version.
pub(crate) fn ask<T>(
    run_dir: &Path,
    call: impl AsyncFnOnce(AdminClient<Channel>) -> Result<Response<T>, Status>,
) -> Option<Result<T, Status>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let asked = runtime.block_on(async {
        let stream = UnixStream::connect(config::admin_socket(run_dir)).await.ok()?;
        let mut stream = Some(TokioIo::new(stream));
        let connect = service_fn(move |_| {
            let stream = stream.take().ok_or_else(|| std::io::Error::other("the connection is lost"));
            std::future::ready(stream)
        });
        let channel = async {
            let channel =
                Endpoint::from_static("http://localhost").connect_with_connector(connect).await.ok()?;
            Some(call(AdminClient::new(channel)).await)
        };
        tokio::time::timeout(LIMIT, channel).await.ok()?
    });
    match asked? {
        Ok(answer) => Some(Ok(answer.into_inner())),
        Err(status) if matches!(status.code(), Code::Unavailable | Code::Unimplemented) => None,
        Err(status) => Some(Err(status)),
    }
}
