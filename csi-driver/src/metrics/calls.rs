//! How many calls came, how they ended, how long they took: counted around the
//! services, so that none of them knows.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use tonic::codegen::{Service, http};
use tonic::{Code, Status};

use super::Page;

/// Upper bounds in seconds: the bars of `cargo xtask bench csi` lie among them.
const BOUNDS: [f64; 12] = [0.001, 0.002, 0.003, 0.005, 0.012, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0, 100.0];
/// Whatever is called that is none of ours has one name, so that nobody makes many.
const OTHER: &str = "other";
/// On the same server, and no call of CSI's.
const REGISTRATION: &str = "/pluginregistration.Registration/";

#[derive(Debug, Default)]
pub(crate) struct Calls {
    methods: Mutex<BTreeMap<String, Method>>,
}

#[derive(Debug, Default)]
struct Method {
    codes: BTreeMap<String, u64>,
    /// By the first bound that the call kept; the last counts those that kept none.
    took: [u64; BOUNDS.len() + 1],
    seconds: f64,
}

impl Calls {
    fn count(&self, method: &str, code: Code, took: Duration) {
        let mut methods = self.methods.lock().unwrap_or_else(PoisonError::into_inner);
        let method = methods.entry(method.to_owned()).or_default();
        *method.codes.entry(name_of(code)).or_default() += 1;
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        method.took[bucket] += 1;
        method.seconds += seconds;
    }

    pub(super) fn show(&self, page: &mut Page) {
        let methods = self.methods.lock().unwrap_or_else(PoisonError::into_inner);
        let name = "hawser_csi_calls_total";
        page.metric(name, "counter", "CSI calls answered, by gRPC code.");
        for (method, calls) in methods.iter() {
            for (code, count) in &calls.codes {
                page.sample(name, &format!("method=\"{method}\",code=\"{code}\""), count);
            }
        }
        let name = "hawser_csi_call_seconds";
        page.metric(name, "histogram", "Seconds from a CSI call to its answer.");
        for (method, calls) in methods.iter() {
            let mut kept = 0;
            for (bound, count) in BOUNDS.iter().zip(&calls.took) {
                kept += count;
                page.sample(&format!("{name}_bucket"), &format!("method=\"{method}\",le=\"{bound}\""), kept);
            }
            let all: u64 = calls.took.iter().sum();
            let label = format!("method=\"{method}\"");
            page.sample(&format!("{name}_bucket"), &format!("{label},le=\"+Inf\""), all);
            page.sample(&format!("{name}_sum"), &label, calls.seconds);
            page.sample(&format!("{name}_count"), &label, all);
        }
    }
}

/// As gRPC writes it: `DeadlineExceeded` is `DEADLINE_EXCEEDED`.
fn name_of(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() && code != Code::Ok {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

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
            // A refusal has its code in the head; a unary success ends with OK.
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
    fn calls_are_counted_by_method_code_and_time() {
        let calls = Calls::default();
        calls.count("NodeStageVolume", Code::Ok, Duration::from_millis(2));
        calls.count("NodeStageVolume", Code::DeadlineExceeded, Duration::from_secs(200));
        let mut page = Page::default();
        calls.show(&mut page);
        for line in [
            "hawser_csi_calls_total{method=\"NodeStageVolume\",code=\"DEADLINE_EXCEEDED\"} 1",
            "hawser_csi_calls_total{method=\"NodeStageVolume\",code=\"OK\"} 1",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"0.001\"} 0",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"0.002\"} 1",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"100\"} 1",
            "hawser_csi_call_seconds_bucket{method=\"NodeStageVolume\",le=\"+Inf\"} 2",
            "hawser_csi_call_seconds_sum{method=\"NodeStageVolume\"} 200.002",
            "hawser_csi_call_seconds_count{method=\"NodeStageVolume\"} 2",
        ] {
            assert!(page.0.lines().any(|l| l == line), "{line}\n{}", page.0);
        }
    }

    #[test]
    fn what_is_none_of_ours_has_one_name() {
        assert_eq!(method_of("/csi.v1.Node/NodeStageVolume"), "NodeStageVolume");
        assert_eq!(method_of("/csi.v2.Node/NodeStageVolume"), OTHER);
        assert_eq!(method_of("/"), OTHER);
    }
}
