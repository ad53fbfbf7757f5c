//! The real binary against the real kernel: each test has a keeper of its own.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod backings;
mod fixture;
mod fuse;
mod hostile;
mod memory;
mod removed;
mod roles;
mod standby;
mod start;
mod stored;
