//! The errors, with the reference's messages. All have its code 999, except that of STATUS.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use cni_plugin::{CniError, code};
use ipnetwork::IpNetwork;

use crate::RangeSet;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("IPAM config missing 'ipam' key")]
    NoIpam,
    #[error("no IP ranges specified")]
    NoRanges,
    #[error("invalid range set {index}")]
    InvalidRangeSet {
        index: usize,
        #[source]
        source: RangeError,
    },
    #[error("CNI version {version} does not support more than 1 address per family")]
    TooManyForVersion { version: cni_plugin::Version },
    #[error("range set {first} overlaps with {second}")]
    RangeSetsOverlap { first: usize, second: usize },
    #[error("failed to allocate for range {index}")]
    Allocate {
        index: usize,
        #[source]
        source: Box<Error>,
    },
    #[error("requested ip {ip} is subnet's gateway")]
    RequestedGateway { ip: IpAddr },
    #[error("requested IP address {ip} is not available in range set {set}")]
    RequestedTaken { ip: IpAddr, set: RangeSet },
    #[error("{ip} has been allocated to {container_id}, duplicate allocation is not allowed")]
    Duplicate { ip: IpAddr, container_id: String },
    #[error("no IP addresses available in range set: {set}")]
    Exhausted { set: RangeSet },
    #[error("failed to allocate all requested IPs: {}", separated(ips, " "))]
    RequestsLeft { ips: Vec<IpAddr> },
    #[error("host-local: Failed to find address added by container {container_id}")]
    NothingHeld { container_id: String },
    #[error("cannot understand ip: IP <nil> not v4 nor v6")]
    NoRequestedIp,
    #[error("invalid IP address {text}")]
    InvalidRequestedIp { text: String },
    /// STATUS.
    #[error("no IP addresses available in range set: {set}")]
    NoRoom { set: RangeSet },
    #[error("{op} {}: {}", path.display(), linux::reason(cause))]
    Disk {
        op: &'static str,
        path: PathBuf,
        /// Shown in the message, with text that callers of the reference match.
        cause: io::Error,
    },
    #[error("{cause}; and undoing it: {}", separated(rollback, "; "))]
    Rollback { cause: Box<Error>, rollback: Vec<Error> },
}

/// Why a range set is invalid.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RangeError {
    #[error("empty range set")]
    Empty,
    #[error("IP <nil> not v4 nor v6")]
    NoSubnet,
    #[error("Network {network} too small to allocate from")]
    TooSmall { network: IpNetwork },
    #[error("IPNet IP and Mask version mismatch")]
    MaskOfOtherFamily,
    #[error(
        "Network has host bits set. For a subnet mask of length {length} the network address is {network}"
    )]
    HostBits { length: u8, network: IpAddr },
    #[error("{bound} {ip} not in network {network}")]
    Outside { bound: &'static str, ip: IpAddr, network: IpNetwork },
    #[error("mixed address families")]
    MixedFamilies,
    #[error("subnets {first} and {second} overlap")]
    Overlap { first: String, second: String },
}

impl Error {
    pub(crate) fn disk(op: &'static str, path: &Path, cause: impl Into<io::Error>) -> Self {
        Self::Disk { op, path: path.to_owned(), cause: cause.into() }
    }
}

impl From<Error> for CniError {
    fn from(error: Error) -> Self {
        let shown = CniError::chain(&error);
        match error {
            Error::NoRoom { .. } => CniError::new(code::PLUGIN_NOT_AVAILABLE, shown.msg),
            _ => shown,
        }
    }
}

fn separated<T: std::fmt::Display>(items: &[T], separator: &str) -> String {
    items.iter().map(T::to_string).collect::<Vec<_>>().join(separator)
}
