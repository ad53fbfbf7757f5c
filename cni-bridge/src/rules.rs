//! Masquerading and the spoof check of attachments: reads, makes and removes their rules in one
//! nf_tables transaction.

use std::collections::BTreeSet;
use std::net::IpAddr;

use cni_plugin::{Invocation, IpConfig, ValidAttachments};
use ipnetwork::IpNetwork;
use linux::netlink::{Mac, Netlink};
use netfilter::nftables::{self, Batch, Family, NfTables, Rule};

use crate::config::{Config, MasqueradeBackend};
use crate::error::{Error, is_undecodable};
use crate::iptables_chain::Addresses;
use crate::names::is_of_network;
use crate::{iptables_chain, legacy, masquerade, spoof};

/// The port and the addresses that rules are made for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port<'a> {
    pub(crate) host_veth: &'a str,
    pub(crate) container_mac: Mac,
    pub(crate) ips: &'a [IpConfig],
}

impl Port<'_> {
    /// The addresses whose rules [`remove`] removes.
    pub(crate) fn all_addresses(&self) -> Addresses {
        Addresses { known: self.ips.iter().map(|ip| ip.address.ip()).collect(), complete: true }
    }

    fn addresses(&self) -> Vec<IpNetwork> {
        self.ips.iter().map(|ip| ip.address).collect()
    }
}

/// The addresses of the rules of [`masquerade`], after a removal.
#[derive(Debug, Default)]
pub(crate) struct Masqueraded {
    removed: Vec<IpAddr>,
    kept: Vec<IpAddr>,
}

impl Masqueraded {
    /// The addresses of the removed rules and `remembered`, without those that other attachments
    /// have by now: a DEL may come twice, and the reference's frees the address before the rules.
    pub(crate) fn without_successors(self, remembered: Vec<IpAddr>) -> Vec<IpAddr> {
        let Self { removed, kept } = self;
        removed.into_iter().chain(remembered).filter(|address| !kept.contains(address)).collect()
    }
}

/// Whether the configuration requests any rules.
pub(crate) fn are_wanted(config: &Config) -> bool {
    config.masquerade.is_some() || config.spoof_check
}

/// Makes the missing rules of the configuration. After a failure, [`remove`] removes the new ones.
pub(crate) fn ensure(config: &Config, call: &Invocation, port: Port<'_>) -> Result<(), Error> {
    let addresses = port.addresses();
    match config.masquerade {
        None => ensure_nf_tables(config, call, port, &[]),
        Some(MasqueradeBackend::NfTables) => ensure_nf_tables(config, call, port, &addresses),
        Some(MasqueradeBackend::Unset) => {
            let Err(refused) = ensure_nf_tables(config, call, port, &addresses) else { return Ok(()) };
            if !cannot_masquerade(&refused)? {
                return Err(refused);
            }
            ensure_iptables(config, call, port, &addresses)
                .map_err(|e| Error::Several { failures: vec![refused, e] })
        }
        Some(MasqueradeBackend::Iptables) => ensure_iptables(config, call, port, &addresses),
    }
}

/// Whether the kernel's error shows that it can never masquerade with nf_tables. Queried only after
/// a failure, to save a request otherwise.
fn cannot_masquerade(refused: &Error) -> Result<bool, Error> {
    let unsupported = matches!(refused, Error::Rules { source } if nftables::is_unsupported(source));
    Ok(unsupported || !nftables::is_available()?)
}

/// `addresses`: those to masquerade.
fn ensure_iptables(
    config: &Config,
    call: &Invocation,
    port: Port<'_>,
    addresses: &[IpNetwork],
) -> Result<(), Error> {
    // iptables does not see a bridge's frames.
    if config.spoof_check {
        ensure_nf_tables(config, call, port, &[])?;
    }
    legacy::ensure(call, addresses)
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

/// Removes the attachment's rules: ours and the reference's, with any backend. `addresses`
/// distinguishes a container's interfaces if the rules do not; if none is known, all rules are
/// removed.
pub(crate) fn remove(call: &Invocation, addresses: &dyn Fn() -> Addresses) -> Result<Masqueraded, Error> {
    let chain = iptables_chain::chain_name(&call.conf.name, &call.container_id);
    let masqueraded = change(|nf, tables, batch| {
        let owner = masquerade::Owner::of(call);
        let masqueraded = remove_masquerade(nf, tables, |rule| owner.owns(rule), batch)?;
        if tables.contains(&(spoof::FAMILY, spoof::TABLE.to_owned())) {
            remove_spoof_check(nf, &spoof::Names::of(call), batch)?;
        }
        remove_iptables_chain(nf, tables, &chain, addresses, batch)?;
        Ok(masqueraded)
    })?;
    legacy::remove(call, addresses)?;
    Ok(masqueraded)
}

/// Removes the rules of this network's attachments that are not valid.
pub(crate) fn collect(
    call: &Invocation,
    valid: &ValidAttachments,
    host: &Netlink,
) -> Result<Masqueraded, Error> {
    let network = &call.conf.name;
    let masqueraded = change(|nf, tables, batch| {
        let masqueraded = remove_masquerade(nf, tables, masquerade::is_stale(network, valid), batch)?;
        if tables.contains(&(spoof::FAMILY, spoof::TABLE.to_owned())) {
            let rules = nf.rules(spoof::FAMILY, spoof::TABLE, None)?;
            for checked in spoof::checked_but_not(valid, &rules) {
                let mut ours = true;
                for host_veth in &checked.host_veths {
                    ours &= is_of_network_or_gone(host, host_veth, network)?;
                }
                if ours {
                    remove_spoof_check(nf, &checked.names, batch)?;
                }
            }
        }
        let mut chains = BTreeSet::new();
        for family in iptables_chain::FAMILIES {
            if tables.contains(&(family, iptables_chain::TABLE.to_owned())) {
                let rules = nf.rules(family, iptables_chain::TABLE, None)?;
                chains.extend(iptables_chain::stale_chains(network, valid, &rules));
            }
        }
        for chain in &chains {
            remove_iptables_chain(nf, tables, chain, &Addresses::default, batch)?;
        }
        Ok(masqueraded)
    })?;
    legacy::collect(call, valid)?;
    Ok(masqueraded)
}

/// Whether a port belongs to the network, or is gone. Rules of a port do not name a network. Rules
/// of a missing port are useless, whatever made them; a port without our alias may belong to any
/// program.
fn is_of_network_or_gone(host: &Netlink, host_veth: &str, network: &str) -> Result<bool, linux::Error> {
    // Checked after the rules were read, since a port is made before its rules.
    match host.link_by_name(host_veth) {
        Ok(None) => Ok(true),
        Ok(Some(link)) => Ok(link.alias.is_some_and(|alias| is_of_network(&alias, network))),
        Err(e) if is_undecodable(&e) => Ok(false),
        Err(e) => Err(e),
    }
}

/// A message about the attachment's missing rules; `None` if all are there.
pub(crate) fn missing(config: &Config, call: &Invocation, port: Port<'_>) -> Result<Option<String>, Error> {
    if config.masquerade.is_some()
        && let Some(sentence) = missing_masquerade(call, &port.addresses())?
    {
        return Ok(Some(sentence));
    }
    if config.spoof_check {
        return missing_spoof_check(call, port);
    }
    Ok(None)
}

fn missing_spoof_check(call: &Invocation, port: Port<'_>) -> Result<Option<String>, Error> {
    let names = spoof::Names::of(call);
    let mut nf = NfTables::open()?;
    let sentence = format!("Failed to find MAC spoof check rules for interface {}", port.host_veth);
    let unreached = nf.unreached(spoof::FAMILY, spoof::TABLE, spoof::PREROUTING, &spoof::BASE)?;
    if let Some(unreached) = unreached {
        return Ok(Some(format!("{sentence}: {unreached}")));
    }
    let found = nf.rules_where(spoof::FAMILY, spoof::TABLE, None, |rule| names.own(rule))?;
    let is_complete = spoof::is_complete(&names, port.host_veth, port.container_mac, &found);
    Ok((!is_complete).then_some(sentence))
}

/// Checks all backends: ADD may have chosen another one than is configured now.
fn missing_masquerade(call: &Invocation, addresses: &[IpNetwork]) -> Result<Option<String>, Error> {
    let list: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let mut sentence = format!("Failed to find masquerade rules for {}", list.join(", "));
    if nftables::is_available()? {
        let mut nf = NfTables::open()?;
        let (chain, base) = (masquerade::POSTROUTING, &masquerade::BASE);
        if let Some(unreached) = nf.unreached(masquerade::FAMILY, masquerade::TABLE, chain, base)? {
            sentence = format!("{sentence}: {unreached}");
        } else {
            let concerns = masquerade::concerns(call);
            let found = nf.rules_where(masquerade::FAMILY, masquerade::TABLE, None, concerns)?;
            if masquerade::is_complete(addresses, &found) {
                return Ok(None);
            }
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
            return Ok(None);
        }
    }
    Ok((!legacy::is_complete(call, addresses)?).then_some(sentence))
}

/// Commits the batch that `plan` fills for the existing tables, and returns the result of `plan`. A
/// kernel without nf_tables has no rules.
fn change<T: Default>(
    mut plan: impl FnMut(&mut NfTables, &[(Family, String)], &mut Batch) -> Result<T, linux::Error>,
) -> Result<T, Error> {
    let plan = |nf: &mut NfTables| {
        let mut batch = Batch::new();
        let tables = nf.tables()?;
        let planned = plan(nf, &tables, &mut batch)?;
        Ok::<_, linux::Error>((batch, planned))
    };
    match NfTables::open().and_then(|mut nf| nf.update(plan)) {
        Err(_) if !nftables::is_available()? => Ok(T::default()),
        outcome => outcome.map_err(|source| Error::Rules { source }),
    }
}

fn remove_masquerade(
    nf: &mut NfTables,
    tables: &[(Family, String)],
    is_theirs: impl Fn(&Rule) -> bool,
    batch: &mut Batch,
) -> Result<Masqueraded, linux::Error> {
    if !tables.contains(&(masquerade::FAMILY, masquerade::TABLE.to_owned())) {
        return Ok(Masqueraded::default());
    }
    let mut kept = Vec::new();
    let is_removed = |rule: &Rule| {
        let removed = is_theirs(rule);
        kept.extend((!removed).then(|| masquerade::source_of(rule)).flatten());
        removed
    };
    let rules =
        nf.rules_where(masquerade::FAMILY, masquerade::TABLE, Some(masquerade::CHECKS), is_removed)?;
    for rule in &rules {
        batch.delete_rule(masquerade::FAMILY, masquerade::TABLE, &rule.chain, rule.handle);
    }
    Ok(Masqueraded { removed: rules.iter().filter_map(masquerade::source_of).collect(), kept })
}

fn remove_spoof_check(
    nf: &mut NfTables,
    names: &spoof::Names,
    batch: &mut Batch,
) -> Result<(), linux::Error> {
    let rules = nf.rules_where(spoof::FAMILY, spoof::TABLE, None, |rule| names.own(rule))?;
    let mut chains = Vec::new();
    // The chain that leads to the other one is first.
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
    tables: &[(Family, String)],
    chain: &str,
    addresses: &dyn Fn() -> Addresses,
    batch: &mut Batch,
) -> Result<(), linux::Error> {
    let mut found = [None, None];
    for (family, rules) in iptables_chain::FAMILIES.into_iter().zip(&mut found) {
        let has_table = tables.contains(&(family, iptables_chain::TABLE.to_owned()));
        if has_table && nf.chain(family, iptables_chain::TABLE, chain)?.is_some() {
            *rules = Some(rules_of_chain(nf, family, chain)?);
        }
    }
    if found.iter().any(Option::is_some) {
        iptables_chain::plan_removal(chain, &addresses(), &found, batch);
    }
    Ok(())
}

/// The rules in the chain, and those that lead to it.
fn rules_of_chain(nf: &mut NfTables, family: Family, chain: &str) -> Result<Vec<Rule>, linux::Error> {
    let concerns = |rule: &Rule| rule.chain == chain || rule.target_chain() == Some(chain);
    nf.rules_where(family, iptables_chain::TABLE, None, concerns)
}
