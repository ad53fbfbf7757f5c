//! `logs`.

use std::io::Write;

use proto::kubelet::LogsRequest;

use super::{Error, client};
use crate::config::LogsArgs;

pub(super) async fn logs(args: &LogsArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let request = LogsRequest {
        namespace: args.namespace.clone(),
        pod: args.pod.strip_prefix("pod/").unwrap_or(&args.pod).to_owned(),
        container: args.container.clone(),
        follow: args.follow,
        previous: args.previous,
    };
    let mut chunks = kubelet.logs(request).await?.into_inner();
    while let Some(chunk) = chunks.message().await? {
        out.write_all(&chunk.data).and_then(|()| out.flush()).map_err(Error::Output)?;
    }
    Ok(())
}
