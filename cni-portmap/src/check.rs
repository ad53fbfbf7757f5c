//! CHECK: whether every rule of ADD exists, in any backend and from either implementation.

use cni_plugin::Invocation;

use crate::config::{Backend, Config, Purpose};
use crate::error::Error;
use crate::iptables::rules::Owner as IptablesOwner;
use crate::nftables::Owner;
use crate::{iptables, nftables};

pub(crate) fn check(call: &Invocation) -> Result<(), Error> {
    let config = Config::read(call, Purpose::Keep)?;
    if config.prev_result.is_none() {
        return Err(Error::NoPrevResult);
    }
    if config.entries.is_empty() {
        return Ok(());
    }
    let by_iptables = || iptables::check(&config, &IptablesOwner::of(call));
    let missing = match config.backend {
        Backend::Iptables => return by_iptables(),
        Backend::Nftables => nftables::missing(&config, &Owner::of(call))?,
        // The reference chooses iptables by default; its rules are accepted too.
        Backend::Unset if !netfilter::nftables::is_available()? => return by_iptables(),
        Backend::Unset => match nftables::missing(&config, &Owner::of(call))? {
            Some(missing) if iptables::visible::has_chain(&IptablesOwner::of(call))? => {
                return by_iptables().map_err(|by_iptables| Error::Several {
                    first: Box::new(by_iptables),
                    others: vec![missing],
                });
            }
            // The rules may be in tables that nf_tables does not show.
            Some(_) if iptables::legacy::is_in_use() && by_iptables().is_ok() => None,
            missing => missing,
        },
    };
    missing.map_or(Ok(()), Err)
}
