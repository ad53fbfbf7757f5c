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

/// Limit for an answer; a driver that does not answer may be stopped or killed.
const LIMIT: Duration = Duration::from_secs(20);

/// Asks the driver with this run directory; the request names its state directory. `None` if no
/// driver answers, if it is busy with other answers, if it is of an earlier version, or if it has
/// another state directory.
pub(crate) fn ask<T>(
    run_dir: &Path,
    state_dir: &Path,
    call: impl AsyncFnOnce(AdminClient<Channel>, String) -> Result<Response<T>, Status>,
) -> Option<Result<T, Status>> {
    ask_within(LIMIT, run_dir, state_dir, call)
}

/// As [`ask`], for a call that may take longer.
pub(crate) fn ask_within<T>(
    limit: Duration,
    run_dir: &Path,
    state_dir: &Path,
    call: impl AsyncFnOnce(AdminClient<Channel>, String) -> Result<Response<T>, Status>,
) -> Option<Result<T, Status>> {
    let state_dir = state_dir.canonicalize().ok()?.to_string_lossy().into_owned();
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
            let client = AdminClient::new(channel).max_decoding_message_size(usize::MAX);
            Some(call(client, state_dir).await)
        };
        tokio::time::timeout(limit, channel).await.ok()?
    });
    match asked? {
        Ok(answer) => Some(Ok(answer.into_inner())),
        Err(status)
            if matches!(
                status.code(),
                Code::FailedPrecondition | Code::Unavailable | Code::Unimplemented | Code::ResourceExhausted
            ) =>
        {
            None
        }
        Err(status) => Some(Err(status)),
    }
}
