//! Counts of calls: by method, code and duration.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tonic::Code;

/// Upper bounds in seconds, chosen around the limits of `cargo xtask bench csi`.
pub(crate) const BOUNDS: [f64; 12] =
    [0.001, 0.002, 0.003, 0.005, 0.012, 0.025, 0.1, 0.5, 2.5, 10.0, 30.0, 100.0];

#[derive(Debug, Default)]
pub(crate) struct Calls {
    methods: Mutex<BTreeMap<String, Method>>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Method {
    pub codes: BTreeMap<String, u64>,
    /// Calls by the first bound that they stayed within; the last counts the slower ones.
    pub took: [u64; BOUNDS.len() + 1],
    pub seconds: f64,
}

impl Calls {
    pub(crate) fn count(&self, method: &str, code: Code, took: Duration) {
        let mut methods = self.methods.lock().unwrap_or_else(PoisonError::into_inner);
        let method = methods.entry(method.to_owned()).or_default();
        *method.codes.entry(name_of(code)).or_default() += 1;
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        method.took[bucket] += 1;
        method.seconds += seconds;
    }

    /// All calls so far.
    pub(crate) fn by_method(&self) -> BTreeMap<String, Method> {
        self.methods.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
