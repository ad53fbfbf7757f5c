//! Counts of calls: by method, code and duration.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tonic::Code;

/// Upper bounds in seconds, chosen around the limits of `cargo xtask bench csi`.
const BOUNDS: [f64; 12] = [0.001, 0.002, 0.003, 0.005, 0.012, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0, 100.0];

#[derive(Debug)]
pub(crate) struct Calls {
    answers: Family<Answer, Counter>,
    seconds: Family<Method, Histogram>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answer {
    method: String,
    code: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Method {
    method: String,
}

impl Default for Calls {
    fn default() -> Self {
        let seconds = Family::new_with_constructor((|| Histogram::new(BOUNDS)) as fn() -> Histogram);
        Self { answers: Family::default(), seconds }
    }
}

impl Calls {
    pub(crate) fn count(&self, method: &str, code: Code, took: Duration) {
        let method = method.to_owned();
        self.answers.get_or_create(&Answer { method: method.clone(), code: name_of(code) }).inc();
        self.seconds.get_or_create(&Method { method }).observe(took.as_secs_f64());
    }

    pub(crate) fn register(&self, registry: &mut Registry) {
        registry.register("calls", "CSI calls answered, by gRPC code", self.answers.clone());
        registry.register("call_seconds", "Seconds from a CSI call to its answer", self.seconds.clone());
    }
}

/// The code as gRPC writes it: `DeadlineExceeded` is `DEADLINE_EXCEEDED`.
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
