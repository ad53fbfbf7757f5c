//! The real `hawser-runtime` through its CRI socket, on the real kernel, in
//! namespaces of each test's own.

#![expect(clippy::unwrap_used, reason = "a test ends at its first surprise and says so")]

#[path = "cri/attach.rs"]
mod attach;
#[path = "cri/containers.rs"]
mod containers;
#[path = "cri/devices.rs"]
mod devices;
#[path = "cri/exec.rs"]
mod exec;
#[path = "cri/exec_limits.rs"]
mod exec_limits;
#[path = "cri/held_outputs.rs"]
mod held_outputs;
#[path = "cri/hostile_mounts.rs"]
mod hostile_mounts;
#[path = "cri/hung_volumes.rs"]
mod hung_volumes;
#[path = "cri/image_imports.rs"]
mod image_imports;
#[path = "cri/image_limits.rs"]
mod image_limits;
#[path = "cri/image_store.rs"]
mod image_store;
#[path = "cri/keyrings.rs"]
mod keyrings;
#[path = "cri/namespaces.rs"]
mod namespaces;
#[path = "cri/native.rs"]
mod native;
#[path = "cri/network.rs"]
mod network;
#[path = "cri/propagation.rs"]
mod propagation;
#[path = "cri/registries.rs"]
mod registries;
#[path = "cri/registry_faults.rs"]
mod registry_faults;
#[path = "cri/registry_proxies.rs"]
mod registry_proxies;
#[path = "cri/registry_server.rs"]
mod registry_server;
#[path = "cri/restart.rs"]
mod restart;
#[path = "cri/sandboxes.rs"]
mod sandboxes;
#[path = "cri/seccomp.rs"]
mod seccomp;
#[path = "cri/shim_protocol.rs"]
mod shim_protocol;
#[path = "cri/silent_shims.rs"]
mod silent_shims;
#[path = "cri/spdy_client.rs"]
mod spdy_client;
#[path = "cri/stats.rs"]
mod stats;
#[path = "cri/stream_limits.rs"]
mod stream_limits;
#[path = "cri/streams.rs"]
mod streams;
#[path = "cri/tunnel.rs"]
mod tunnel;
#[path = "cri/update.rs"]
mod update;
