//! The node's calls on the real kernel: what is undone, what is bounded, what a
//! publish promises, and what a daemon that serves is told.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod access;
mod astray;
mod bare;
mod displaced;
mod graces;
mod group;
mod hung;
mod images;
mod keepers;
mod killed;
mod metrics;
mod parking;
mod passthrough;
mod paths;
mod size;
mod standby;
mod succession;
mod swapped;
mod takeover;
mod unanswered;
mod undo;
mod upgrade;
mod warm;
