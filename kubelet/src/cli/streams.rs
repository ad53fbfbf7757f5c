//! Connections to the runtime's streaming server: WebSocket, of which the first byte of each message names a
//! channel (k8s.io/apimachinery, remotecommand and portforward).

use std::io;

use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
pub(super) use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::http::HeaderValue;
use tokio_tungstenite::tungstenite::http::header::SEC_WEBSOCKET_PROTOCOL;

use super::Error;

pub(super) type Socket = WebSocketStream<TcpStream>;

/// Connects to `url`, whose streams speak `protocol`.
pub(super) async fn connect(url: &str, protocol: &'static str) -> Result<Socket, Error> {
    let failed = |source: io::Error| Error::Streams { url: url.to_owned(), source };
    let rest = url.strip_prefix("http://").ok_or_else(|| failed(io::ErrorKind::Unsupported.into()))?;
    let address = rest.split('/').next().unwrap_or_default();
    let mut request =
        format!("ws://{rest}").into_client_request().map_err(|e| failed(io::Error::other(e)))?;
    request.headers_mut().insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocol));
    let stream = TcpStream::connect(address).await.map_err(failed)?;
    let _nodelay_is_only_faster = stream.set_nodelay(true);
    let connected = tokio_tungstenite::client_async(request, stream).await;
    connected.map(|(socket, _answer)| socket).map_err(|e| failed(io::Error::other(e)))
}

pub(super) fn message(channel: u8, bytes: &[u8]) -> Message {
    Message::binary([&[channel], bytes].concat())
}

/// The channel of a binary message, and the rest; `None` for messages of the connection itself.
pub(super) fn channel(message: &Message) -> Option<(u8, &[u8])> {
    match message {
        Message::Binary(bytes) => bytes.split_first().map(|(channel, rest)| (*channel, rest)),
        _ => None,
    }
}
