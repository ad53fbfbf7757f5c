//! The CRI socket: what clients send, and what they get as answers.
//!
//! `service` validates and translates each call, and gives it to a module of `calls`. `streaming`
//! serves the connections of exec, attach and port-forward, on a port of 127.0.0.1. `unimplemented`
//! answers the calls and versions that the runtime does not have.

pub(crate) mod service;
pub(crate) mod streaming;
pub(crate) mod unimplemented;
