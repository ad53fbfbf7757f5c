//! The executable against the kernel: every test has network namespaces of its
//! own, for the host, its pods and the world outside.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod iptables;
mod localnet;
mod packets;
mod rules;
mod sandbox;
mod udp;
