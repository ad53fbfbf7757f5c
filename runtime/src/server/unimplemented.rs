//! Answers of `Unimplemented` that name the call and the reason: a client sees no more than a code
//! otherwise, and cannot know which of its calls it was.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;
use tonic::{Code, Status};

/// What tonic's generated default answers say.
const SAYS_NOTHING: &[&str] = &["", "Not yet implemented"];
/// Reasons by the beginning of a call's name.
const REASONS: &[(&str, &str)] = &[
    ("Checkpoint", "the runtime does not save processes"),
    ("RestorePod", "the runtime does not save processes"),
    ("ListMetricDescriptors", "the runtime has no metrics beside the figures of ListPodSandboxStats"),
    ("ListPodSandboxMetrics", "the runtime has no metrics beside the figures of ListPodSandboxStats"),
    ("Stream", "use the List call of the same objects"),
];
const UNKNOWN: &str = "this version of the runtime does not know the call";

/// A service whose answers say more.
#[derive(Debug, Clone)]
pub(crate) struct Explained<S>(pub(crate) S);

impl<S: NamedService> NamedService for Explained<S> {
    const NAME: &'static str = S::NAME;
}

type Answering = Pin<Box<dyn Future<Output = Result<http::Response<Body>, Infallible>> + Send>>;

impl<S> Service<http::Request<Body>> for Explained<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answering;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Answering {
        let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let answer = self.0.call(request);
        Box::pin(async move { Ok(explained(answer.await?, &call)) })
    }
}

/// Of an answer that has a body, the status comes after it and is not changed.
fn explained(answer: http::Response<Body>, call: &str) -> http::Response<Body> {
    match Status::from_header_map(answer.headers()) {
        Some(status) if status.code() == Code::Unimplemented => {
            Status::unimplemented(message(call, status.message())).into_http()
        }
        _ => answer,
    }
}

fn message(call: &str, said: &str) -> String {
    let known = REASONS.iter().find(|(beginning, _)| call.starts_with(beginning));
    let reason =
        if SAYS_NOTHING.contains(&said) { known.map_or(UNKNOWN, |(_, reason)| reason) } else { said };
    format!("{call}: {reason}")
}

/// A service of the version before v1, which clients may ask first: that of images, or the other.
#[derive(Debug, Clone)]
pub(crate) struct Former<const IMAGES: bool>;

impl<const IMAGES: bool> NamedService for Former<IMAGES> {
    const NAME: &'static str =
        if IMAGES { "runtime.v1alpha2.ImageService" } else { "runtime.v1alpha2.RuntimeService" };
}

impl<const IMAGES: bool> Service<http::Request<Body>> for Former<IMAGES> {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<http::Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let call = request.uri().path().trim_start_matches('/').to_owned();
        let text = format!("{call}: the runtime has version v1 of the interface, not v1alpha2");
        std::future::ready(Ok(Status::unimplemented(text).into_http()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_names_call_and_reason() {
        assert_eq!(message("CheckpointPod", ""), "CheckpointPod: the runtime does not save processes");
        assert_eq!(message("Brew", "Not yet implemented"), format!("Brew: {UNKNOWN}"));
        assert_eq!(message("CreateContainer", "tty: true"), "CreateContainer: tty: true");
    }

    #[test]
    fn other_answers_are_left_alone() {
        let refused = || Status::not_found("x").into_http();
        let status = |answer: http::Response<Body>| Status::from_header_map(answer.headers()).unwrap();
        assert_eq!(status(explained(refused(), "Exec")).message(), "x");
        let empty = Status::unimplemented("").into_http();
        let found = status(explained(empty, "StreamContainers"));
        assert_eq!(found.code(), Code::Unimplemented);
        assert_eq!(found.message(), "StreamContainers: use the List call of the same objects");
    }
}
