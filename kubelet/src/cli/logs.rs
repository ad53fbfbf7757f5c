//! `logs`.

use std::io::Write;

use proto::kubelet::LogsRequest;

use super::{Error, client};
use crate::config::{ContainerArgs, LogsArgs};

pub(super) async fn logs(args: &LogsArgs, out: &mut dyn Write) -> Result<(), Error> {
    let ContainerArgs { pod, container } = &args.of;
    let mut kubelet = client::connect(&pod.root).await?;
    let request = LogsRequest {
        namespace: pod.namespace.clone(),
        pod: pod.name().to_owned(),
        container: container.clone(),
        follow: args.follow,
        previous: args.previous,
        ..LogsRequest::default()
    };
    let mut chunks = kubelet.logs(request).await?.into_inner();
    while let Some(chunk) = chunks.message().await? {
        out.write_all(&chunk.data).and_then(|()| out.flush()).map_err(Error::Output)?;
    }
    Ok(())
}
