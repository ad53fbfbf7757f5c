//! The packet filter of a network namespace: nf_tables and connection tracking by netlink,
//! without any process, and which iptables the host has.
//!
//! Invariant: nothing here knows CNI, and there is no `unsafe`. `nftables` and `conntrack`
//! stand beside each other on `socket` and `attributes`.

mod attributes;
pub mod conntrack;
pub mod iptables;
pub mod nftables;
mod socket;
