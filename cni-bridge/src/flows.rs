//! Flows of masqueraded containers. Connection tracking keeps them after the rules are gone:
//! answers to one container would reach the next one with its address.

use std::net::IpAddr;

use netfilter::conntrack::{self, Flows};

/// Deletes the entries of all flows that `addresses` started. A failure is only a warning: DEL
/// succeeds on a kernel without connection tracking.
pub(crate) fn forget(addresses: &[IpAddr]) {
    let flows: Vec<Flows> = addresses.iter().copied().map(Flows::begun_by).collect();
    if let Err(e) = conntrack::delete(&flows) {
        let failed = "failed to delete conntrack entries of the container";
        cni_plugin::warn("bridge", format_args!("{failed}: {e}: {}", e.reason()));
    }
}
