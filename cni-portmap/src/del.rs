//! DEL: removes the attachment's rules of either backend and either implementation. Needs no
//! namespace, result or mappings.

use cni_plugin::Invocation;
use netfilter::nftables::{Batch, NfTables};

use crate::config::{Config, Purpose};
use crate::error::Error;
use crate::iptables::rules::Owner as IptablesOwner;
use crate::nftables::{Effect, Owner};
use crate::{flows, iptables, nftables};

pub(crate) fn del(call: &Invocation) -> Result<(), Error> {
    let config = Config::read(call, Purpose::Remove).map_err(|cause| Error::Config { cause })?;
    remove(call, &config)
}

/// Continues after a failure, and reports all failures.
pub(crate) fn remove(call: &Invocation, config: &Config) -> Result<(), Error> {
    let mut errors = Vec::new();
    let effects = remove_visible(call, config).unwrap_or_else(|source| {
        errors.push(Error::DeleteNftables { source });
        Vec::new()
    });
    // A program is run only for pods with host ports.
    if !config.entries.is_empty() {
        errors.extend(iptables::legacy::remove(&IptablesOwner::of(call)).err());
    }
    flows::forget_of_container(config, &effects);
    Error::all(errors)
}

/// Removes the rules of both backends that nf_tables shows, in one transaction. Returns their
/// effects.
fn remove_visible(call: &Invocation, config: &Config) -> Result<Vec<Effect>, linux::Error> {
    let Some(mut kernel) = NfTables::open_if_available()? else { return Ok(Vec::new()) };
    let (owner, known) = (Owner::of(call), config.known_addresses());
    kernel.update(|kernel| {
        let mut batch = Batch::new();
        let mut effects = nftables::remove(kernel, &mut batch, &owner, &known)?;
        effects.extend(iptables::visible::remove(kernel, &mut batch, &IptablesOwner::of(call))?);
        Ok((batch, effects))
    })
}
