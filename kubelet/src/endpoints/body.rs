//! Bodies of answers: whole, or piece by piece as they are made.

use std::pin::Pin;
use std::task::{Context, Poll};

use hyper::body::{Body, Bytes, Frame, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use tokio::sync::mpsc;

/// Ends the connection before the body's end, so that the client does not take a part for the whole.
pub(super) type Cut = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug)]
pub(super) enum Answer {
    Whole(Option<Bytes>),
    /// Ends with its sender.
    Pieces(mpsc::Receiver<Result<Bytes, Cut>>),
}

impl Answer {
    fn whole(bytes: impl Into<Bytes>) -> Self {
        Self::Whole(Some(bytes.into()).filter(|bytes| !bytes.is_empty()))
    }
}

impl Body for Answer {
    type Data = Bytes;
    type Error = Cut;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Cut>>> {
        match &mut *self {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Pieces(pieces) => {
                pieces.poll_recv(context).map(|piece| piece.map(|piece| piece.map(Frame::data)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Pieces(_) => SizeHint::default(),
        }
    }
}

/// A whole answer.
pub(super) fn answer(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Answer> {
    let mut response = Response::new(Answer::whole(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

pub(super) fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Answer> {
    answer(status, "text/plain; charset=utf-8", text)
}

pub(super) fn json(value: &serde_json::Value) -> Response<Answer> {
    answer(StatusCode::OK, "application/json", value.to_string())
}
