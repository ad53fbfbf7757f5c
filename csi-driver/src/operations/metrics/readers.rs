//! Serves the metrics over HTTP: one page for each connection, several at the same time.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use prometheus_client::encoding::prometheus_text;
use prometheus_client::registry::Registry;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc, watch as channel};
use tonic::codegen::http;

use crate::engine::driver::Driver;
use crate::error::chain;
use crate::kernel::socket::Socket;
use crate::model::calls::Calls;
use crate::model::limits;

/// Of a request's head. hyper takes no lower limit.
const MAX_REQUEST_BYTES: usize = 8192;
/// Served at the same time; a further reader waits until the first ends.
const MAX_READERS: usize = 16;

/// Serves until `stopped` is true, then removes the socket.
pub(crate) async fn serve(
    driver: Arc<Driver>,
    calls: Arc<Calls>,
    socket: Socket,
    mut stopped: channel::Receiver<bool>,
) {
    let (connections, mut accepted) = mpsc::channel(1);
    let readers = Arc::new(Semaphore::new(MAX_READERS));
    let registry = Arc::new(super::registry(&driver, &calls));
    let answering = async {
        while let Some(stream) = accepted.recv().await {
            let Ok(turn) = readers.clone().acquire_owned().await else { return };
            let registry = registry.clone();
            tokio::spawn(async move {
                let _until_answered = turn;
                match tokio::time::timeout(limits::SCRAPE, serve_one(registry, stream)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::debug!(error = chain(&error), "a reader of metrics went away"),
                    Err(_elapsed) => tracing::debug!("a reader of metrics took too long"),
                }
            });
        }
    };
    tokio::select! {
        // An error means that the sender is gone, which also means stop.
        _ = stopped.wait_for(|stop| *stop) => {}
        () = socket.keep(connections) => {}
        () = answering => {}
    }
}

/// Answers one request. The caller limits the time: hyper's own timeout covers only the head.
async fn serve_one(registry: Arc<Registry>, stream: UnixStream) -> hyper::Result<()> {
    let service = service_fn(|request| answer(registry.clone(), request));
    http1::Builder::new()
        .keep_alive(false)
        // A reader may close its side once it has asked.
        .half_close(true)
        .max_buf_size(MAX_REQUEST_BYTES)
        .header_read_timeout(None)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// The page, for any GET.
async fn answer(registry: Arc<Registry>, request: Request<Incoming>) -> http::Result<Response<String>> {
    let answer = Response::builder();
    if request.method() != Method::GET {
        let text = "GET is answered, and nothing else\n".to_owned();
        return answer.status(StatusCode::METHOD_NOT_ALLOWED).header(ALLOW, "GET").body(text);
    }
    let encoding = tokio::task::spawn_blocking(move || {
        let mut page = String::new();
        prometheus_text::encode(&mut page, &registry).map(|()| page)
    });
    match encoding.await {
        Ok(Ok(page)) => answer.header(CONTENT_TYPE, prometheus_text::CONTENT_TYPE).body(page),
        Ok(Err(_)) | Err(_) => answer.status(StatusCode::INTERNAL_SERVER_ERROR).body(String::new()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tonic::Code;

    use super::*;

    async fn ask(request: &str) -> String {
        let (mut registry, calls) = (Registry::default(), Calls::default());
        (0..20).for_each(|n| calls.count(&format!("method-{n}"), Code::Ok, Duration::ZERO));
        calls.register(&mut registry);
        let (mut reader, stream) = UnixStream::pair().unwrap();
        let served = tokio::spawn(serve_one(Arc::new(registry), stream));
        reader.write_all(request.as_bytes()).await.unwrap();
        reader.shutdown().await.unwrap();
        let mut answer = Vec::new();
        // The connection of a request that was not read to its end is reset after the answer.
        let _end_or_reset = reader.read_to_end(&mut answer).await;
        let _refused_or_not = served.await.unwrap();
        String::from_utf8(answer).unwrap()
    }

    #[tokio::test]
    async fn get_is_answered_in_the_version_of_the_request() {
        for version in ["HTTP/1.0", "HTTP/1.1"] {
            let answer = ask(&format!("GET /metrics {version}\r\nHost: localhost\r\n\r\n")).await;
            assert!(answer.starts_with(&format!("{version} 200 OK\r\n")), "{answer}");
            assert!(answer.contains("\r\ncontent-type: text/plain; version=0.0.4"), "{answer}");
            let (_head, page) = answer.split_once("\r\n\r\n").unwrap();
            assert!(
                page.len() > MAX_REQUEST_BYTES && page.ends_with('\n'),
                "an answer may be longer: {page}"
            );
        }
    }

    #[tokio::test]
    async fn one_connection_answers_one_request() {
        let answer = ask(&"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(2)).await;
        assert_eq!(answer.matches("HTTP/1.1 200 OK\r\n").count(), 1, "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }

    #[tokio::test]
    async fn other_methods_and_long_requests_are_refused() {
        for method in ["POST", "HEAD"] {
            let answer = ask(&format!("{method} / HTTP/1.0\r\n\r\n")).await;
            assert!(answer.starts_with("HTTP/1.0 405 "), "{answer}");
        }
        let answer = ask(&format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(2 * MAX_REQUEST_BYTES))).await;
        assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    }
}
