//! The objects of a kind, and then their changes.

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::watch_event::Type;
use proto::kubelet::{GetRequest, WatchEvent};
use serde_json::Value;
use tonic::Streaming;
use tonic::transport::Channel;

use super::Error;
use crate::objects::Kind;

#[derive(Debug)]
pub(super) struct Watch {
    events: Streaming<WatchEvent>,
}

impl Watch {
    /// An empty name means every object.
    pub(super) async fn open(
        client: &mut KubeletClient<Channel>,
        kind: Kind,
        namespace: &str,
        name: &str,
        whole: bool,
    ) -> Result<Self, Error> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        let request = GetRequest { kind: kind.to_string(), namespace, name, whole };
        Ok(Self { events: client.watch(request).await?.into_inner() })
    }

    /// `None` when the kubelet ends.
    pub(super) async fn next(&mut self) -> Result<Option<(Type, Value)>, Error> {
        let Some(event) = self.events.message().await? else { return Ok(None) };
        match event.r#type() {
            Type::Bookmark => Ok(Some((Type::Bookmark, Value::Null))),
            other => Ok(Some((other, serde_json::from_slice(&event.object).map_err(Error::Answer)?))),
        }
    }
}

/// Namespace and name.
pub(super) fn key(object: &Value) -> (String, String) {
    let text = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    (text("namespace"), text("name"))
}
