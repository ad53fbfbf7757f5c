//! Masquerading and the spoof check of attachments, read, made and removed:
//! one nf_tables transaction for all of it.

use std::net::IpAddr;

use cni_plugin::{Invocation, IpConfig, ValidAttachments};
use ipnetwork::IpNetwork;
use linux::netlink::{Mac, Netlink};
use linux::nftables::{self, Batch, Family, NfTables, Rule};

use crate::attach::is_of_network;
use crate::config::{Config, MasqueradeBackend};
use crate::error::Error;
use crate::undo::{Step, Undo};
use crate::{iptables_chain, legacy, masquerade, spoof};

/// What rules are made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port<'a> {
    pub(crate) host_veth: &'a str,
    pub(crate) container_mac: Mac,
    pub(crate) ips: &'a [IpConfig],
}

impl Port<'_> {
    fn addresses(&self) -> Vec<IpNetwork> {
        self.ips.iter().map(|ip| ip.address).collect()
    }
}

/// Makes what the configuration asks for; what is there already stays.
pub(crate) fn ensure(
    config: &Config,
    call: &Invocation,
    port: Port<'_>,
    undo: &mut Undo,
) -> Result<(), Error> {
    if config.masquerade.is_none() && !config.spoof_check {
        return Ok(());
    }
    let addresses = port.addresses();
    undo.push(Step::RemoveRules { addresses: addresses.iter().map(IpNetwork::ip).collect() });
    match config.masquerade {
        None => ensure_nf_tables(config, call, port, &[]),
        Some(MasqueradeBackend::NfTables) => ensure_nf_tables(config, call, port, &addresses),
        Some(MasqueradeBackend::Unset) => match ensure_nf_tables(config, call, port, &addresses) {
            // Asked only after a failure: that is a question less elsewhere.
            Err(_) if !config.spoof_check && !nftables::is_available()? => legacy::ensure(call, &addresses),
            outcome => outcome,
        },
        Some(MasqueradeBackend::Iptables) => {
            if config.spoof_check {
                ensure_nf_tables(config, call, port, &[])?;
            }
            legacy::ensure(call, &addresses)
        }
    }
}

/// `addresses`: those to masquerade.
fn ensure_nf_tables(
    config: &Config,
    call: &Invocation,
    port: Port<'_>,
    addresses: &[IpNetwork],
) -> Result<(), Error> {
    let concerns = masquerade::concerns(call);
    let names = spoof::Names::of(call);
    let plan = |nf: &mut NfTables| {
        let mut batch = Batch::new();
        if !addresses.is_empty() {
            let found = nf.rules_where(masquerade::FAMILY, masquerade::TABLE, None, &concerns)?;
            masquerade::plan(call, addresses, &found, &mut batch);
        }
        if config.spoof_check {
            let found = nf.rules_where(spoof::FAMILY, spoof::TABLE, None, |rule| names.own(rule))?;
            spoof::plan(&names, port.host_veth, port.container_mac, &found, &mut batch);
        }
        Ok::<_, linux::Error>((batch, ()))
    };
    let planned = NfTables::open().and_then(|mut nf| nf.update(plan));
    planned.map_err(|source| Error::Rules { source })
}

/// Removes the attachment's rules, whoever made them: ours, the reference's,
/// of any backend. `addresses` tells which of a container's are of this
/// interface, where the rules do not say; none of them known means all.
pub(crate) fn remove(call: &Invocation, addresses: &dyn Fn() -> Vec<IpAddr>) -> Result<(), Error> {
    let chain = iptables_chain::chain_name(&call.conf.name, &call.container_id);
    change(|nf, tables, batch| {
        if tables.contains(&(masquerade::FAMILY, masquerade::TABLE.to_owned())) {
            let owner = masquerade::Owner::of(call);
            remove_masquerade(nf, |rule| owner.owns(rule), batch)?;
        }
        if tables.contains(&(spoof::FAMILY, spoof::TABLE.to_owned())) {
            remove_spoof_check(nf, &spoof::Names::of(call), batch)?;
        }
        for family in iptables_chain::FAMILIES {
            if tables.contains(&(family, iptables_chain::TABLE.to_owned())) {
                remove_iptables_chain(nf, family, &chain, addresses, batch)?;
            }
        }
        Ok(())
    })?;
    legacy::remove(call, addresses)
}

/// Removes the rules of attachments of this network that are not valid.
pub(crate) fn collect(call: &Invocation, valid: &ValidAttachments, host: &Netlink) -> Result<(), Error> {
    let network = &call.conf.name;
    change(|nf, tables, batch| {
        if tables.contains(&(masquerade::FAMILY, masquerade::TABLE.to_owned())) {
            remove_masquerade(nf, masquerade::is_stale(network, valid), batch)?;
        }
        if tables.contains(&(spoof::FAMILY, spoof::TABLE.to_owned())) {
            let rules = nf.rules(spoof::FAMILY, spoof::TABLE, None)?;
            for checked in spoof::checked_but_not(valid, &rules) {
                let mut ours = true;
                for host_veth in &checked.host_veths {
                    ours &= is_of_network_or_nobody(host, host_veth, network)?;
                }
                if ours {
                    remove_spoof_check(nf, &checked.names, batch)?;
                }
            }
        }
        for family in iptables_chain::FAMILIES {
            if tables.contains(&(family, iptables_chain::TABLE.to_owned())) {
                let rules = nf.rules(family, iptables_chain::TABLE, None)?;
                for chain in iptables_chain::stale_chains(network, valid, &rules) {
                    remove_iptables_chain(nf, family, &chain, &Vec::new, batch)?;
                }
            }
        }
        Ok(())
    })?;
    legacy::collect(call, valid)
}

/// Rules of a port name no network. A port that is gone has no use for them,
/// whose ever it was; one without our alias may be anybody's.
fn is_of_network_or_nobody(host: &Netlink, host_veth: &str, network: &str) -> Result<bool, linux::Error> {
    // Asked after the rules were read: a port is made before its rules.
    let Some(link) = host.link_by_name(host_veth)? else { return Ok(true) };
    Ok(link.alias.is_some_and(|alias| is_of_network(&alias, network)))
}

/// What of the attachment's rules is missing, as a sentence; `None` when
/// nothing is.
pub(crate) fn missing(config: &Config, call: &Invocation, port: Port<'_>) -> Result<Option<String>, Error> {
    let addresses = port.addresses();
    if config.masquerade.is_some() && !is_masqueraded(call, &addresses)? {
        let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        return Ok(Some(format!("Failed to find masquerade rules for {}", list.join(", "))));
    }
    if config.spoof_check {
        let names = spoof::Names::of(call);
        let mut nf = NfTables::open()?;
        let found = nf.rules_where(spoof::FAMILY, spoof::TABLE, None, |rule| names.own(rule))?;
        if !spoof::is_complete(&names, port.host_veth, port.container_mac, &found) {
            return Ok(Some(format!(
                "Failed to find MAC spoof check rules for interface {}",
                port.host_veth
            )));
        }
    }
    Ok(None)
}

/// By any backend: what ADD chose may not be what is configured now.
fn is_masqueraded(call: &Invocation, addresses: &[IpNetwork]) -> Result<bool, Error> {
    if nftables::is_available()? {
        let mut nf = NfTables::open()?;
        let found =
            nf.rules_where(masquerade::FAMILY, masquerade::TABLE, None, masquerade::concerns(call))?;
        if masquerade::is_complete(addresses, &found) {
            return Ok(true);
        }
        let chain = iptables_chain::chain_name(&call.conf.name, &call.container_id);
        let mut complete = true;
        for family in iptables_chain::FAMILIES {
            let of_family = |address: &&IpNetwork| address.is_ipv4() == (family == Family::Ipv4);
            let addresses: Vec<IpNetwork> = addresses.iter().filter(of_family).copied().collect();
            let rules = rules_of_chain(&mut nf, family, &chain)?;
            complete &= addresses.is_empty() || iptables_chain::is_complete(&chain, &addresses, &rules);
        }
        if complete {
            return Ok(true);
        }
    }
    legacy::is_complete(call, addresses)
}

/// Commits what `plan` puts into the batch, given the tables there are. A
/// kernel without nf_tables has no rules.
fn change(
    mut plan: impl FnMut(&mut NfTables, &[(Family, String)], &mut Batch) -> Result<(), linux::Error>,
) -> Result<(), Error> {
    let plan = |nf: &mut NfTables| {
        let mut batch = Batch::new();
        let tables = nf.tables()?;
        plan(nf, &tables, &mut batch)?;
        Ok::<_, linux::Error>((batch, ()))
    };
    match NfTables::open().and_then(|mut nf| nf.update(plan)) {
        Err(_) if !nftables::is_available()? => Ok(()),
        outcome => outcome.map_err(|source| Error::Rules { source }),
    }
}

fn remove_masquerade(
    nf: &mut NfTables,
    is_theirs: impl FnMut(&Rule) -> bool,
    batch: &mut Batch,
) -> Result<(), linux::Error> {
    let rules = nf.rules_where(masquerade::FAMILY, masquerade::TABLE, Some(masquerade::CHECKS), is_theirs)?;
    for rule in rules {
        batch.delete_rule(masquerade::FAMILY, masquerade::TABLE, &rule.chain, rule.handle);
    }
    Ok(())
}

fn remove_spoof_check(
    nf: &mut NfTables,
    names: &spoof::Names,
    batch: &mut Batch,
) -> Result<(), linux::Error> {
    let rules = nf.rules_where(spoof::FAMILY, spoof::TABLE, None, |rule| names.own(rule))?;
    let mut chains = Vec::new();
    // The one that leads to the other first.
    for name in [&names.interface, &names.mac] {
        if nf.chain(spoof::FAMILY, spoof::TABLE, name)?.is_some() {
            chains.push(name.as_str());
        }
    }
    spoof::plan_removal(&rules, &chains, batch);
    Ok(())
}

fn remove_iptables_chain(
    nf: &mut NfTables,
    family: Family,
    chain: &str,
    addresses: &dyn Fn() -> Vec<IpAddr>,
    batch: &mut Batch,
) -> Result<(), linux::Error> {
    if nf.chain(family, iptables_chain::TABLE, chain)?.is_some() {
        let rules = rules_of_chain(nf, family, chain)?;
        iptables_chain::plan_removal(family, chain, &addresses(), &rules, batch);
    }
    Ok(())
}

/// Those in it, and those that lead to it.
fn rules_of_chain(nf: &mut NfTables, family: Family, chain: &str) -> Result<Vec<Rule>, linux::Error> {
    let concerns = |rule: &Rule| rule.chain == chain || rule.target_chain() == Some(chain);
    nf.rules_where(family, iptables_chain::TABLE, None, concerns)
}
