//! The controller service of the driver as a process, over its socket: lists,
//! capacity, expansion, attachments, and the limits of what a request may say.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod attachment;
mod capacity;
mod documents;
mod expansion;
mod limits;
mod listing;
mod settings;
mod validation;

use tonic::{Code, Status};

#[track_caller]
fn assert_refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, words: &str) {
    let status = result.unwrap_err();
    assert_eq!(status.code(), code, "{status:?}");
    assert!(status.message().contains(words), "{words:?} in {:?}", status.message());
}
