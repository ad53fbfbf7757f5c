//! The connection to the daemon.

use std::io::ErrorKind;

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::{GetRequest, ObjectKey};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tonic::transport::Channel;

use super::Error;
use crate::clients::unix_channel;
use crate::config::{RootDir, Scope, Selection};
use crate::objects::Kind;

/// Connects a client. A reply may contain all objects of the manifest directory.
pub(super) async fn connect(root: &RootDir) -> Result<KubeletClient<Channel>, Error> {
    let socket = root.socket();
    match unix_channel::connect(&socket).await {
        Ok(channel) => Ok(KubeletClient::new(channel).max_decoding_message_size(usize::MAX)),
        Err(source) => Err(match source.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Error::NoKubelet { socket },
            ErrorKind::PermissionDenied => Error::NotAllowed { socket },
            _ => Error::Connect { socket, source },
        }),
    }
}

/// Gets the objects of a kind; an empty `name` means all.
pub(super) async fn get<T: DeserializeOwned>(
    client: &mut KubeletClient<Channel>,
    kind: Kind,
    namespace: &str,
    name: &str,
) -> Result<Vec<T>, Error> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    ask(client, GetRequest { kind: kind.to_string(), namespace, name, whole: false }).await
}

/// Like [`get`], with the manifest fields that the kubelet ignores.
pub(super) async fn get_whole(
    client: &mut KubeletClient<Channel>,
    kind: Kind,
    namespace: &str,
    name: &str,
) -> Result<Vec<Value>, Error> {
    let (namespace, name) = (namespace.to_owned(), name.to_owned());
    ask(client, GetRequest { kind: kind.to_string(), namespace, name, whole: true }).await
}

/// The objects of a kind that are selected, without the manifest fields that the kubelet ignores.
pub(super) async fn select(
    client: &mut KubeletClient<Channel>,
    kind: Kind,
    scope: &Scope,
    selection: &Selection,
) -> Result<Vec<Value>, Error> {
    check(selection, kind)?;
    let mut objects = get::<Value>(client, kind, scope.wanted(), "").await?;
    objects.retain(|object| selection.matches(object));
    Ok(objects)
}

/// Whether objects of the kind are selected by these fields.
pub(super) fn check(selection: &Selection, kind: Kind) -> Result<(), Error> {
    let fields = selection.field_selector.as_ref();
    fields.map_or(Ok(()), |fields| fields.check(kind).map_err(Error::Selector))
}

async fn ask<T: DeserializeOwned>(
    client: &mut KubeletClient<Channel>,
    request: GetRequest,
) -> Result<Vec<T>, Error> {
    let objects = client.get(request).await?.into_inner().objects;
    objects.iter().map(|object| serde_json::from_slice(object).map_err(Error::Answer)).collect()
}

/// `pod/web`, as `apply`, `delete` and `-o name` print it.
pub(super) fn title(key: &ObjectKey) -> String {
    let kind = key.kind.parse::<Kind>().map_or_else(|_| key.kind.to_lowercase(), super::kinds::resource);
    format!("{kind}/{}", key.name)
}
