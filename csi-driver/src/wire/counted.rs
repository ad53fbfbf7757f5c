//! Counts all calls in a layer around the services.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use tonic::codegen::{Service, http};
use tonic::{Code, Status};

use crate::model::calls::Calls;

/// Unknown methods count under one name, so that a caller cannot create many.
const OTHER: &str = "other";
/// Served by the same server, but not a CSI call.
const REGISTRATION: &str = "/pluginregistration.Registration/";

/// `NodeStageVolume` of `/csi.v1.Node/NodeStageVolume`.
fn method_of(path: &str) -> &str {
    let ours = ["/csi.v1.Identity/", "/csi.v1.Controller/", "/csi.v1.Node/"];
    ours.iter().find_map(|service| path.strip_prefix(service)).unwrap_or(OTHER)
}

/// The layer around all services.
#[derive(Debug, Clone)]
pub(crate) struct CountCalls(pub(crate) Arc<Calls>);

impl<S> tower::Layer<S> for CountCalls {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, calls: self.0.clone() }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Counted<S> {
    inner: S,
    calls: Arc<Calls>,
}

impl<S, B, R> Service<http::Request<B>> for Counted<S>
where
    S: Service<http::Request<B>, Response = http::Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let begun = Instant::now();
        let path = request.uri().path();
        let is_csi = !path.starts_with(REGISTRATION);
        let method = method_of(path).to_owned();
        let (calls, answer) = (self.calls.clone(), self.inner.call(request));
        Box::pin(async move {
            let answer = answer.await?;
            // A refusal has its code in the headers; a successful unary call ends with OK.
            let code = Status::from_header_map(answer.headers()).map_or(Code::Ok, |status| status.code());
            let method = if code == Code::Unimplemented { OTHER } else { &method };
            if is_csi {
                calls.count(method, code, begun.elapsed());
            }
            Ok(answer)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_none_of_ours_has_one_name() {
        assert_eq!(method_of("/csi.v1.Node/NodeStageVolume"), "NodeStageVolume");
        assert_eq!(method_of("/csi.v2.Node/NodeStageVolume"), OTHER);
        assert_eq!(method_of("/"), OTHER);
    }
}
