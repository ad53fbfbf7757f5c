//! The errors, with the reference's messages and its CNI codes.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use cni_plugin::CniError;
use ipnetwork::IpNetwork;
use linux::netlink::{Mac, OperState};
use linux::netns::filesystem_magic;
use netfilter::nftables;
use nix::errno::Errno;

use crate::names::format_mac;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("failed to open netns {path:?}")]
    OpenNetns {
        path: PathBuf,
        #[source]
        source: NetnsError,
    },
    #[error("failed to create bridge {name:?}")]
    EnsureBridge {
        name: String,
        #[source]
        source: linux::Error,
    },
    #[error("failed to create bridge {name:?}: could not add {name:?}")]
    CreateBridge {
        name: String,
        mtu: Option<u32>,
        #[source]
        source: linux::Error,
    },
    #[error("failed to create bridge {name:?}: {name:?} already exists but is not a bridge")]
    NotABridge { name: String },
    /// Callers match `already exists`.
    #[error("container veth name ({ifname:?}) peer provided ({peer:?}) already exists")]
    ContainerLinkExists { ifname: String, peer: String },
    #[error("failed to make veth pair")]
    CreateVeth {
        mtu: Option<u32>,
        /// The configured MAC of the container's veth, if any.
        mac: Option<Mac>,
        #[source]
        source: linux::Error,
    },
    #[error("failed to find a unique veth name")]
    NoVethName,
    #[error("failed to lookup {name:?}: Link not found")]
    LinkVanished { name: String },
    #[error("failed to connect {veth:?} to bridge {bridge}")]
    ConnectPort {
        veth: String,
        bridge: String,
        #[source]
        source: linux::Error,
    },
    #[error("IPAM plugin returned missing IP config")]
    NoAddresses,
    #[error("failed to enable IPv6 for interface {ifname:?}")]
    EnableIpv6 {
        ifname: String,
        #[source]
        source: linux::Error,
    },
    #[error("failed to add IP addr {address} to {ifname:?}")]
    AddAddress {
        address: IpNetwork,
        ifname: String,
        #[source]
        source: linux::Error,
    },
    #[error("failed to set {ifname:?} UP")]
    SetUp {
        ifname: String,
        #[source]
        source: linux::Error,
    },
    #[error(
        "failed to settle addresses for {ifname:?}: link {ifname} has address {address} in DADFAILED state"
    )]
    DuplicateAddress { ifname: String, address: IpAddr },
    #[error(
        "failed to settle addresses for {ifname:?}: link {ifname} still has tentative addresses after {seconds} seconds"
    )]
    AddressesUnsettled { ifname: String, seconds: u64 },
    #[error("failed to add route '{dst} via {} dev {ifname}'", gateway.map_or("<nil>".to_owned(), |ip| ip.to_string()))]
    AddRoute {
        dst: IpNetwork,
        gateway: Option<IpAddr>,
        ifname: String,
        #[source]
        source: linux::Error,
    },
    /// Callers match `already has an IP address different from`.
    #[error("failed to set bridge addr: {bridge:?} already has an IP address different from {wanted}")]
    BridgeHasOtherAddress { bridge: String, wanted: IpNetwork, found: IpNetwork },
    #[error("failed to set bridge addr: could not add IP address {address} to {bridge:?}")]
    BridgeAddress {
        bridge: String,
        address: IpNetwork,
        #[source]
        source: linux::Error,
    },
    #[error("could not set bridge's mac")]
    PinMac {
        #[source]
        source: linux::Error,
    },
    #[error("failed to enable forwarding")]
    Forwarding {
        #[source]
        source: linux::Error,
    },
    #[error("bridge port in error state: {state}")]
    PortNotUp { state: OperState },
    #[error("failed to change the rules of nf_tables")]
    Rules {
        #[source]
        source: linux::Error,
    },
    /// CHECK found another state than ADD left; with the reference's message, or ours for a check
    /// that the reference does not make.
    #[error("{0}")]
    Differs(String),
    #[error("Required prevResult missing")]
    NoPrevResult,
    /// Several failures: parts that DEL or GC could not remove, or backends that cannot be used.
    /// The answer is the first one.
    #[error("{}", failures.first().map(ToString::to_string).unwrap_or_default())]
    Several { failures: Vec<Error> },
    #[error(transparent)]
    Iptables(#[from] netfilter::iptables::Error),
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    /// From the configuration or the IPAM plugin: passed on unchanged.
    #[error(transparent)]
    Protocol(#[from] CniError),
    #[error("{cause}")]
    Rollback { cause: Box<Error>, rollback: Vec<Error> },
}

/// Why a namespace could not be opened, with the reference's message.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetnsError {
    /// Callers match `no such file or directory`.
    #[error("failed to Statfs {path:?}: no such file or directory")]
    Missing { path: PathBuf },
    #[error("unknown FS magic on {path:?}: {magic:x}")]
    NotANamespace { path: PathBuf, magic: i64 },
    #[error("failed to Statfs {path:?}: {}", cause.reason())]
    Refused { path: PathBuf, cause: linux::Error },
}

impl NetnsError {
    pub(crate) fn of(path: &Path, error: linux::Error) -> Self {
        match error.errno() {
            Errno::ENOENT => Self::Missing { path: path.to_owned() },
            Errno::EINVAL => Self::NotANamespace {
                path: path.to_owned(),
                magic: filesystem_magic(path).unwrap_or_default(),
            },
            _ => Self::Refused { path: path.to_owned(), cause: error },
        }
    }
}

/// Failures collected while the remaining work was done.
#[derive(Debug, Default)]
pub(crate) struct Failures(Vec<Error>);

impl Failures {
    /// Returns the value, or records the failure.
    pub(crate) fn keep<T, E: Into<Error>>(&mut self, outcome: Result<T, E>) -> Option<T> {
        outcome.map_err(|e| self.0.push(e.into())).ok()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn into_result(self) -> Result<(), Error> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::Several { failures: self.0 }) }
    }
}

impl From<Error> for CniError {
    fn from(error: Error) -> Self {
        match error {
            Error::Protocol(inner) => inner,
            Error::Rollback { cause, rollback } => {
                let left: Vec<String> = rollback.into_iter().map(|e| CniError::from(e).msg).collect();
                CniError::from(*cause).with_details(format_args!("not rolled back: {}", left.join("; ")))
            }
            Error::BridgeHasOtherAddress { ref bridge, found, .. } => {
                let details = format!("{bridge} has {found}; remove it or set \"forceAddress\": true");
                CniError::chain(&error).with_details(details)
            }
            Error::Several { failures } => {
                let mut failures = failures.into_iter().map(CniError::from);
                let first = failures.next().unwrap_or_else(|| CniError::internal("unknown failure"));
                failures.fold(first, |first, next| first.with_details(next.msg))
            }
            Error::CreateBridge { mtu, ref source, .. } => {
                refused(&error, source).with_details(wrong_mtu(mtu, source))
            }
            Error::CreateVeth { mtu, mac, ref source } => refused(&error, source)
                .with_details(wrong_mtu(mtu, source))
                .with_details(wrong_mac(mac, source)),
            Error::ContainerLinkExists { ref ifname, .. } => {
                let details = format!(
                    "CNI_IFNAME: the container has {ifname:?} already; call DEL for the earlier ADD first"
                );
                CniError::chain(&error).with_details(details)
            }
            Error::EnsureBridge { ref source, .. }
            | Error::ConnectPort { ref source, .. }
            | Error::EnableIpv6 { ref source, .. }
            | Error::AddAddress { ref source, .. }
            | Error::SetUp { ref source, .. }
            | Error::AddRoute { ref source, .. }
            | Error::BridgeAddress { ref source, .. }
            | Error::PinMac { ref source }
            | Error::Forwarding { ref source }
            | Error::Rules { ref source } => refused(&error, source),
            Error::OpenNetns { .. }
            | Error::NotABridge { .. }
            | Error::NoVethName
            | Error::LinkVanished { .. }
            | Error::NoAddresses
            | Error::DuplicateAddress { .. }
            | Error::AddressesUnsettled { .. }
            | Error::PortNotUp { .. }
            | Error::Differs(_)
            | Error::NoPrevResult
            | Error::Iptables(_)
            | Error::Kernel(_) => CniError::chain(&error),
        }
    }
}

/// Whether a link cannot be decoded, since its name is not UTF-8 (the kernel accepts any bytes). `bridge` gives
/// its links no such name.
pub(crate) fn is_undecodable(error: &linux::Error) -> bool {
    error.source.kind() == std::io::ErrorKind::InvalidData
}

/// The MTU range of bridges and veth pairs (`ETH_MIN_MTU`, `ETH_MAX_MTU`).
const MTU: RangeInclusive<u32> = 68..=65535;

/// Empty if the kernel refused for another reason.
fn wrong_mtu(mtu: Option<u32>, source: &linux::Error) -> String {
    match mtu.filter(|mtu| source.errno() == Errno::EINVAL && !MTU.contains(mtu)) {
        Some(mtu) => format!(
            "mtu: expected {} to {}, or 0 for the kernel's default, found {mtu}",
            MTU.start(),
            MTU.end()
        ),
        None => String::new(),
    }
}

/// Empty if the kernel refused for another reason (`is_valid_ether_addr`).
fn wrong_mac(mac: Option<Mac>, source: &linux::Error) -> String {
    match mac.filter(|_| source.errno() == Errno::EADDRNOTAVAIL) {
        Some(mac) => {
            format!(
                "mac: expected that of one interface, not a group's and not zero, found {}",
                format_mac(Some(mac))
            )
        }
        None => String::new(),
    }
}

/// The message and the kernel's reason, in the format of the reference's runtime. The details name
/// the call and what to do.
fn refused(error: &Error, source: &linux::Error) -> CniError {
    let refused = CniError::internal(format_args!("{error}: {}", source.reason())).with_details(source);
    if nftables::is_unsupported(source) {
        return refused.with_details("where ipMasq needs it, set \"ipMasqBackend\": \"iptables\"");
    }
    if nftables::is_wrong_hook(source) {
        return refused.with_details("delete the chain: the next ADD makes it as it must be");
    }
    refused
}
