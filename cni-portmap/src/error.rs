//! The errors, with the reference's messages and its CNI codes.

use cni_plugin::{CniError, code};
use netfilter::nftables::{self, Unreached};

use crate::family::Family;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// For ADD and DEL; CHECK returns only the cause.
    #[error("failed to parse config: {}", cause.msg)]
    Config { cause: CniError },
    #[error("must be called as chained plugin")]
    NotChained,
    #[error("Required prevResult missing")]
    NoPrevResult,
    #[error("protocol {name:?} has no ports to map")]
    UnknownProtocol { name: String },
    #[error("hostIP {text:?} is no IP address")]
    HostIp { text: String },
    #[error("unable to set up nftables rules for port mappings")]
    SetUpNftables {
        #[source]
        source: linux::Error,
    },
    #[error("unable to set up nftables rules for port mappings: the kernel has no nf_tables")]
    NoNftables,
    #[error("unable to set up nftables rules for port mappings: {words}")]
    NftRefused { words: String },
    #[error("could not list rules in table {table}")]
    ListNftables {
        table: &'static str,
        #[source]
        source: linux::Error,
    },
    #[error("error deleting nftables rules")]
    DeleteNftables {
        #[source]
        source: linux::Error,
    },
    #[error("missing hostport rules in {chain:?} chain")]
    MissingRules { chain: &'static str, missing: String },
    /// From CHECK: rules exist, but no packet reaches them.
    #[error("no packets reach the hostport rules: {0}")]
    Unreached(Unreached),
    #[error("failed to open iptables")]
    OpenIptables {
        #[source]
        source: netfilter::iptables::Error,
    },
    #[error("unable to setup DNAT")]
    SetUpIptables {
        #[source]
        source: netfilter::iptables::Error,
    },
    #[error("could not teardown {family} dnat")]
    TearDownIptables {
        family: Family,
        #[source]
        source: netfilter::iptables::Error,
    },
    #[error("could not check {family} dnat: chain {chain} not found in iptables table nat")]
    MissingChain { family: Family, chain: String },
    #[error("could not check {family} dnat: rule {rule} in chain {chain} not found in table {table}")]
    MissingRule { family: Family, table: &'static str, chain: String, rule: String },
    #[error("could not check {family} dnat")]
    CheckIptables {
        family: Family,
        #[source]
        source: netfilter::iptables::Error,
    },
    #[error("unable to enable route_localnet")]
    RouteLocalnet {
        #[source]
        source: linux::Error,
    },
    /// From STATUS.
    #[error("neither nf_tables nor iptables can be used")]
    NoBackend { details: String },
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    /// Passed on unchanged.
    #[error(transparent)]
    Protocol(#[from] CniError),
    #[error("{cause}")]
    Rollback { cause: Box<Error>, rollback: Box<Error> },
    /// From a removal, which continues after a failure; the answer is the first one.
    #[error("{first}")]
    Several { first: Box<Error>, others: Vec<Error> },
}

impl Error {
    /// `Ok` if there are none.
    pub(crate) fn all(errors: Vec<Error>) -> Result<(), Error> {
        let mut errors = errors.into_iter();
        let Some(first) = errors.next() else { return Ok(()) };
        let others: Vec<Error> = errors.collect();
        Err(if others.is_empty() { first } else { Error::Several { first: Box::new(first), others } })
    }
}

impl From<Error> for CniError {
    fn from(error: Error) -> Self {
        match error {
            Error::Protocol(inner) => inner,
            Error::Config { ref cause } => Self::chain(&error).with_details(&cause.details),
            Error::Rollback { cause, rollback } => {
                let left = Self::from(*rollback).msg;
                Self::from(*cause).with_details(format_args!("not rolled back: {left}"))
            }
            Error::Several { first, others } => {
                let others: Vec<String> = others.into_iter().map(|e| Self::from(e).msg).collect();
                Self::from(*first).with_details(others.join("; "))
            }
            Error::MissingRules { ref missing, .. } => {
                let details = format!("no rule for {missing}");
                Self::chain(&error).with_details(details)
            }
            Error::SetUpNftables { ref source } if nftables::is_unsupported(source) => {
                Self::chain(&error).with_details("set \"backend\": \"iptables\"")
            }
            Error::SetUpNftables { ref source } if nftables::is_wrong_hook(source) => {
                Self::chain(&error).with_details("delete the chain: the next ADD makes it as it must be")
            }
            Error::NoBackend { ref details } => {
                Self { code: code::PLUGIN_NOT_AVAILABLE, ..Self::chain(&error) }.with_details(details)
            }
            Error::NotChained
            | Error::NoPrevResult
            | Error::UnknownProtocol { .. }
            | Error::HostIp { .. }
            | Error::SetUpNftables { .. }
            | Error::NoNftables
            | Error::NftRefused { .. }
            | Error::ListNftables { .. }
            | Error::Unreached(_)
            | Error::DeleteNftables { .. }
            | Error::OpenIptables { .. }
            | Error::SetUpIptables { .. }
            | Error::TearDownIptables { .. }
            | Error::MissingChain { .. }
            | Error::MissingRule { .. }
            | Error::CheckIptables { .. }
            | Error::RouteLocalnet { .. }
            | Error::Kernel(_) => Self::chain(&error),
        }
    }
}
