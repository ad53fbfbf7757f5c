//! The driver as a process on the real kernel: real FUSE mounts, the real
//! `hawser-volume` behind them, gRPC over its socket as kubelet speaks it.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]

mod boot;
mod child_processes;
mod doctor;
mod kills;
mod lifecycle;
mod manifests;
mod mode;
mod refusals;
mod registration;
mod restart;
mod silent;
mod sockets;
mod start;
mod views;
