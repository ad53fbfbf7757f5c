//! GC: removes the rules of this network's attachments that are no longer in use, and nothing else.

use cni_plugin::{Invocation, ValidAttachments};
use netfilter::nftables::{Batch, NfTables};

use crate::config::{Config, Purpose};
use crate::error::Error;
use crate::nftables::Effect;
use crate::{flows, iptables, nftables};

pub(crate) fn gc(call: &Invocation) -> Result<(), Error> {
    let config = Config::read(call, Purpose::Remove)?;
    let valid = ValidAttachments::read(&call.conf)?;
    let network = call.conf.name.as_str();
    let mut errors = Vec::new();
    let effects = remove_visible(network, &valid).unwrap_or_else(|source| {
        errors.push(Error::DeleteNftables { source });
        Vec::new()
    });
    let is_valid = |container_id: &str| valid.contains_container(container_id);
    errors.extend(iptables::legacy::remove_stale(network, is_valid).err());
    flows::forget_of_container(&config, &effects);
    Error::all(errors)
}

fn remove_visible(network: &str, valid: &ValidAttachments) -> Result<Vec<Effect>, linux::Error> {
    let Some(mut kernel) = NfTables::open_if_available()? else { return Ok(Vec::new()) };
    kernel.update(|kernel| {
        let mut batch = Batch::new();
        let is_valid = |container_id: &str, ifname: &str| valid.contains(container_id, ifname);
        let mut effects = nftables::remove_stale(kernel, &mut batch, network, is_valid)?;
        // Their rules do not contain the interface.
        let is_valid = |container_id: &str| valid.contains_container(container_id);
        effects.extend(iptables::visible::remove_stale(kernel, &mut batch, network, is_valid)?);
        Ok((batch, effects))
    })
}
