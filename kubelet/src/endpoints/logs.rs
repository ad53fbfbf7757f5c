//! `/containerLogs`: the log of a container, as `hawser-kubelet logs` prints it, piece by piece.
//!
//! A client that reads slowly holds one piece, and the reading of the file waits for it.

use std::time::Duration;

use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use jiff::Timestamp;
use proto::kubelet::LogsRequest;
use proto::kubelet::kubelet_server::Kubelet;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic::{Code, Request, Status};

use super::body::{Answer, text};
use super::query::{Malformed, Query};
use super::route::Container;
use crate::standalone::api::Api;

/// The request that the query describes (kubernetes, PodLogOptions).
fn request(of: &Container, query: &Query, now: Timestamp) -> Result<LogsRequest, Malformed> {
    let since_seconds = query.number("sinceSeconds", 1)?;
    let since_seconds = since_seconds.map(|seconds| now - Duration::from_secs(seconds.min(u32::MAX.into())));
    let since = match query.get("sinceTime") {
        None => since_seconds,
        Some(time) => Some(time.parse::<Timestamp>().map_err(|_| Malformed::Value {
            name: "sinceTime",
            value: time.to_owned(),
            expected: "a time of RFC 3339",
        })?),
    };
    Ok(LogsRequest {
        namespace: of.pod.namespace.clone(),
        pod: of.pod.name.clone(),
        container: of.name.clone(),
        follow: query.flag("follow")?,
        previous: query.flag("previous")?,
        tail_lines: query.number("tailLines", 0)?,
        since: since.map(|since| i64::try_from(since.as_nanosecond()).unwrap_or(0)),
        timestamps: query.flag("timestamps")?,
        limit_bytes: query.number("limitBytes", 1)?,
    })
}

pub(super) async fn logs(api: &Api, of: &Container, query: &Query) -> Response<Answer> {
    let request = match request(of, query, Timestamp::now()) {
        Ok(request) => request,
        // As kubelet answers options that are wrong.
        Err(error) => return text(StatusCode::UNPROCESSABLE_ENTITY, format!("{error}\n")),
    };
    if let Some(missing) = missing(api, of) {
        return text(StatusCode::NOT_FOUND, missing);
    }
    match api.logs(Request::new(request)).await {
        Err(status) => text(status_of(&status), format!("{}\n", status.message())),
        Ok(chunks) => {
            let (pieces, body) = mpsc::channel(1);
            tokio::spawn(pass_on(chunks.into_inner(), pieces));
            let mut response = Response::new(Answer::Pieces(body));
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
            response
        }
    }
}

/// As kubelet names what is not there.
fn missing(api: &Api, of: &Container) -> Option<String> {
    let (pod, container) = (&of.pod.name, &of.name);
    let Some(found) = api.store.pod(&of.pod.namespace, pod) else {
        return Some(format!("pod {pod:?} does not exist\n"));
    };
    let has_it = found.spec.all_containers().any(|known| known.name == *container);
    (!has_it).then(|| format!("container {container:?} not found in pod {pod:?}\n"))
}

/// Ends when the client has gone: then its body's receiver is gone too.
async fn pass_on(
    mut chunks: impl tokio_stream::Stream<Item = Result<proto::kubelet::LogsChunk, Status>> + Unpin,
    pieces: mpsc::Sender<Result<Bytes, super::body::Cut>>,
) {
    loop {
        let chunk = tokio::select! {
            chunk = chunks.next() => chunk,
            () = pieces.closed() => return,
        };
        let Some(chunk) = chunk else { return };
        let piece = chunk.map(|chunk| Bytes::from(chunk.data)).map_err(super::body::Cut::from);
        if pieces.send(piece).await.is_err() {
            return;
        }
    }
}

pub(super) fn status_of(status: &Status) -> StatusCode {
    match status.code() {
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::InvalidArgument | Code::FailedPrecondition => StatusCode::BAD_REQUEST,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::super::route::Pod;
    use super::*;

    fn parsed(query: &str) -> Result<LogsRequest, String> {
        let query = Query::of(&format!("/containerLogs?{query}").parse().unwrap()).unwrap();
        let pod = Pod { namespace: "n".to_owned(), name: "p".to_owned(), uid: None };
        let now = Timestamp::from_second(1000).unwrap();
        request(&Container { pod, name: "c".to_owned() }, &query, now).map_err(|error| error.to_string())
    }

    #[test]
    fn options_are_those_of_the_api() {
        let request = parsed("follow=true&tailLines=5&sinceSeconds=10&timestamps=1&limitBytes=7").unwrap();
        assert_eq!((request.namespace.as_str(), request.pod.as_str()), ("n", "p"));
        assert_eq!((request.follow, request.previous, request.timestamps), (true, false, true));
        assert_eq!((request.tail_lines, request.limit_bytes), (Some(5), Some(7)));
        assert_eq!(request.since, Some(990_000_000_000));
        let request = parsed("sinceTime=1970-01-01T00:00:01Z&previous").unwrap();
        assert_eq!((request.since, request.previous), (Some(1_000_000_000), true));
        assert_eq!(parsed("").unwrap().tail_lines, None);
        // More than the age of the world means everything.
        assert!(parsed("sinceSeconds=18446744073709551615").unwrap().since.is_some());
    }

    #[test]
    fn wrong_options_are_named() {
        assert_eq!(parsed("tailLines=-1").unwrap_err(), "tailLines=-1: a number is needed");
        assert_eq!(
            parsed("sinceSeconds=0").unwrap_err(),
            "sinceSeconds=0: a number greater than 0 is needed"
        );
        assert_eq!(parsed("sinceTime=now").unwrap_err(), "sinceTime=now: a time of RFC 3339 is needed");
    }
}
