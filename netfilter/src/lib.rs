//! The packet filter of a network namespace: nf_tables and connection tracking by netlink, without
//! any process; and the host's iptables programs.
//!
//! Invariant: this crate does not know CNI and has no `unsafe`. `nftables` and `conntrack` both use
//! `socket` and `attributes`, but not each other.

mod attributes;
pub mod conntrack;
pub mod iptables;
pub mod nftables;
mod socket;
