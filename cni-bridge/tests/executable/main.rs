//! The executable against the kernel, one file a topic: every test has fresh
//! network namespaces, one in the host's place, one for each container.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

mod check;
mod collection;
mod configuration;
mod deletion;
mod introduction;
mod links;
mod lock;
mod masquerade;
mod multicast;
mod rollback;
mod routers;
mod sandbox;
mod spoof;
