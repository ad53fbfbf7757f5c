//! WebSocket (RFC 6455), as Kubernetes uses it: the first byte of a binary message names a channel.

use hyper::header::{HeaderMap, HeaderValue, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION};
use tokio::io::{AsyncRead, AsyncWrite};
pub(super) use tokio_tungstenite::WebSocketStream;
pub(super) use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::Utf8Bytes;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};

/// Of a message; kubectl's have 32 KiB.
const MOST_BYTES: usize = 1 << 20;
const BUFFER_BYTES: usize = 16 << 10;

#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error("a text message, where only binary ones are known")]
    Text,
    #[error("a message without a channel")]
    NoChannel,
}

/// The answer's `Sec-WebSocket-Accept`; `None`: the request has no key of version 13.
pub(super) fn accept_key(headers: &HeaderMap) -> Option<HeaderValue> {
    let key = headers.get(SEC_WEBSOCKET_KEY)?;
    let is_known = headers.get(SEC_WEBSOCKET_VERSION).is_some_and(|version| version == "13");
    is_known.then(|| HeaderValue::try_from(derive_accept_key(key.as_bytes())).ok()).flatten()
}

/// After the answer to the upgrade.
pub(super) async fn server<IO: AsyncRead + AsyncWrite + Unpin>(io: IO) -> WebSocketStream<IO> {
    let config = WebSocketConfig::default()
        .read_buffer_size(BUFFER_BYTES)
        .write_buffer_size(0)
        .max_write_buffer_size(2 * MOST_BYTES)
        .max_message_size(Some(MOST_BYTES))
        .max_frame_size(Some(MOST_BYTES));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// The channel of a binary message, and the rest; `None` for messages of the connection itself.
pub(super) fn channel(message: &Message) -> Result<Option<(u8, &[u8])>, Problem> {
    match message {
        Message::Binary(bytes) => match bytes.split_first() {
            Some((channel, rest)) => Ok(Some((*channel, rest))),
            None => Err(Problem::NoChannel),
        },
        Message::Text(_) => Err(Problem::Text),
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) | Message::Frame(_) => Ok(None),
    }
}

pub(super) fn message(channel: u8, bytes: &[u8]) -> Message {
    Message::binary([&[channel], bytes].concat())
}

/// The end, as clients of Kubernetes need it: without the code, they take it for a failure.
pub(super) fn close() -> Message {
    let (code, reason) = (CloseCode::Normal, Utf8Bytes::from_static(""));
    Message::Close(Some(CloseFrame { code, reason }))
}

pub(super) fn ping() -> Message {
    Message::Ping(tokio_tungstenite::tungstenite::Bytes::new())
}
