//! ADD: makes all rules of the attachment, or none.

use cni_plugin::{CniResult, Invocation, warn};
use netfilter::nftables::is_unsupported;

use crate::config::{Backend, Config, Purpose};
use crate::error::Error;
use crate::iptables::rules::Owner as IptablesOwner;
use crate::localnet::Localnet;
use crate::nftables::Owner;
use crate::{NAME, del, flows, iptables, nftables};

/// Returns the result of the previous plugins unchanged.
pub(crate) fn add(call: &Invocation) -> Result<CniResult, Error> {
    let config = Config::read(call, Purpose::Keep).map_err(|cause| Error::Config { cause })?;
    let result = config.prev_result.clone().ok_or(Error::NotChained)?;
    // Most pods have no host ports, so nothing is opened for them.
    if config.entries.is_empty() {
        return Ok(result);
    }
    // A result that the requested version cannot express must fail before anything is done.
    result.ensure_fits(call.conf.cni_version)?;

    let localnet = Localnet::wanted(&config)?;
    add_rules(&config, call)?;
    // Last, since it is not undone: other containers may rely on it by then.
    if let Err(cause) = localnet.map_or(Ok(()), |localnet| localnet.enable()) {
        return Err(roll_back(call, &config, cause));
    }
    // Existing flows would still go to their former destination.
    if let Err(e) = flows::forget_of_host(&config) {
        warn(
            NAME,
            format_args!(
                "failed to delete stale UDP conntrack entries: {}",
                cni_plugin::CniError::chain(&e).msg
            ),
        );
    }
    Ok(result)
}

fn add_rules(config: &Config, call: &Invocation) -> Result<(), Error> {
    let by_iptables = || iptables::add(config, &IptablesOwner::of(call));
    match config.backend {
        Backend::Iptables => by_iptables(),
        Backend::Nftables => nftables::add(config, &Owner::of(call)),
        Backend::Unset => match nftables::add(config, &Owner::of(call)) {
            Err(Error::NoNftables) => by_iptables(),
            Err(Error::SetUpNftables { source }) if is_unsupported(&source) => by_iptables().map_err(|e| {
                Error::Several { first: Box::new(Error::SetUpNftables { source }), others: vec![e] }
            }),
            done => done,
        },
    }
}

fn roll_back(call: &Invocation, config: &Config, cause: Error) -> Error {
    match del::remove(call, config) {
        Ok(()) => cause,
        Err(rollback) => Error::Rollback { cause: Box::new(cause), rollback: Box::new(rollback) },
    }
}
