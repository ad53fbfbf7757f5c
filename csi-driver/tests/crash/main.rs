//! As kubelet calls: the driver as a process, with a fault at every step of every call.
//! It is killed before and after each, each fails with the errors that it may
//! have, and at each the caller gives up: after the next retry all is as it was
//! asked for, and after the last deletion nothing is left.
//!
//! A finding names the step (`renameat2($/a -> $/b) no. 0`, see
//! [`tests::trace_steps`]), the fault, and what was not as it should be.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod errors;
mod give_up;
mod injections;
mod kills;
mod repairs;
mod tree;
mod world;
