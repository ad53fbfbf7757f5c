//! DEL: removes whatever is left of an attachment, made by us or by the
//! reference; what is gone already is a success. A part that fails does not
//! keep the others from being done.

use std::net::IpAddr;

use cni_plugin::delegate::Delegate;
use cni_plugin::{CniError, Invocation};
use linux::netlink::{Link, Netlink};
use linux::netns::NetNs;

use crate::config::Config;
use crate::error::{Error, Failures, NetnsError};
use crate::iptables_chain::Addresses;
use crate::keys::KEYS;
use crate::names::{alias, format_mac, veth_name};
use crate::undo::delete;
use crate::{flows, rules};

pub(crate) fn del(call: &Invocation) -> Result<(), Error> {
    let mut failures = Failures::default();
    let ipam = failures.keep(find_ipam(call)).flatten();
    let inside = failures.keep(Inside::open(call)).flatten();

    // The rules first: the kernel frees them while it deletes the link.
    let removed = failures.keep(rules::remove(call, &|| addresses(call, inside.as_ref())));
    failures.keep(remove_link(call, inside));
    // After the link: without one, the container begins no other flow.
    flows::forget(&masqueraded(call, removed.unwrap_or_default()));
    // Only now: an address may be given to the next container once it is free.
    // After a failure it stays taken, and the runtime calls DEL again.
    if let Some(ipam) = ipam
        && failures.is_empty()
    {
        failures.keep(ipam.del(call));
    }
    failures.into_result()
}

/// A configuration that no ADD accepts has made nothing, but its IPAM plugin is
/// still asked.
fn find_ipam(call: &Invocation) -> Result<Option<Delegate>, CniError> {
    let Some(ipam) = call.conf.ipam_type()? else { return Ok(None) };
    Delegate::find(&ipam, &call.path).map(Some)
}

/// The container's interface, as long as there is one.
struct Inside {
    container: Netlink,
    link: Link,
}

impl Inside {
    fn open(call: &Invocation) -> Result<Option<Self>, Error> {
        let Some(netns) = open_netns(call)? else { return Ok(None) };
        let container = netns.visit(&NetNs::current()?, Netlink::open)??;
        let link = container.link_by_name(&call.ifname)?;
        Ok(link.map(|link| Self { container, link }))
    }
}

/// `None` when there is none any more: an unset CNI_NETNS is legal for DEL
/// (CNI specification, "DEL"), its path may be gone, or only its file be left.
fn open_netns(call: &Invocation) -> Result<Option<NetNs>, Error> {
    let Some(path) = &call.netns else { return Ok(None) };
    match NetNs::open(path).map_err(|e| NetnsError::of(path, e)) {
        Ok(netns) => Ok(Some(netns)),
        Err(NetnsError::Missing { .. } | NetnsError::NotANamespace { .. }) => Ok(None),
        Err(cause) => Err(Error::OpenNetns { path: path.clone(), cause }),
    }
}

/// Of this attachment, as far as they can be known: those the interface has,
/// those the runtime remembers, which are all. They only tell two interfaces apart.
fn addresses(call: &Invocation, inside: Option<&Inside>) -> Addresses {
    let has = inside.and_then(|inside| inside.container.addresses(inside.link.index).ok());
    let of_link = has.into_iter().flatten().map(|address| address.ip);
    let remembered = remembered_addresses(call);
    let complete = remembered.is_some();
    let all = of_link.chain(remembered.into_iter().flatten());
    let known = all.filter(|ip| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())).collect();
    Addresses { known, complete }
}

fn remembered_addresses(call: &Invocation) -> Option<Vec<IpAddr>> {
    let result = call.conf.prev_result().ok().flatten()?;
    Some(result.ips.iter().map(|ip| ip.address.ip()).collect())
}

/// The addresses of the removed rules, and those of `prevResult`: iptables may have
/// masqueraded them, or the rules be gone already. Not those of the interface: a
/// container may give itself the address of another one.
fn masqueraded(call: &Invocation, of_rules: Vec<IpAddr>) -> Vec<IpAddr> {
    let asked = call.conf.fields(KEYS).bool("ipMasq").unwrap_or(false);
    let remembered = asked.then(|| remembered_addresses(call)).flatten();
    of_rules.into_iter().chain(remembered.into_iter().flatten()).collect()
}

/// A container may rename its interface and give the name to another one. So
/// the host's end is what counts: where the peer of the container's interface
/// carries our alias, deleting that removes both, whatever they are called.
fn remove_link(call: &Invocation, inside: Option<Inside>) -> Result<(), Error> {
    let host = Netlink::open()?;
    let Some(Inside { container, link }) = inside else { return remove_host_end(call, &host) };
    let peer = link.peer.map(|peer| host.link_by_index(peer)).transpose()?.flatten();
    match peer.filter(|peer| peer.alias.as_deref() == Some(&alias(call))) {
        Some(port) => delete(&host, port.index)?,
        // Made by the reference, by an ADD killed before the alias, or by the container itself.
        None => remove_host_end(call, &host)?,
    }
    delete(&container, link.index)
}

/// Without the namespace the kernel removes the veth, but only once nothing
/// holds the namespace: the host's end is found by its alias; that of a killed
/// ADD, which has none yet, by its name; the reference's by what the runtime
/// remembers of it.
fn remove_host_end(call: &Invocation, host: &Netlink) -> Result<(), Error> {
    let (alias, unfinished) = (alias(call), veth_name(call));
    let remembered = remembered_ports(call);
    let bridge = bridge(call, host)?;
    let is_ours = |link: &Link| match &link.alias {
        Some(found) => *found == alias,
        None => {
            let found = (link.name.clone(), format_mac(link.mac));
            let is_port = link.kind.as_deref() == Some("veth") && link.master.is_some();
            let is_unfinished = link.name == unfinished && link.master == bridge;
            is_port && (is_unfinished || remembered.contains(&found))
        }
    };
    for link in host.links()?.iter().filter(|link| is_ours(link)) {
        delete(host, link.index)?;
    }
    Ok(())
}

/// The index of the configuration's bridge, if there is one.
fn bridge(call: &Invocation, host: &Netlink) -> Result<Option<u32>, Error> {
    // A configuration that no ADD accepts has made nothing.
    let Ok(config) = Config::read(call) else { return Ok(None) };
    Ok(host.link_by_name(&config.bridge)?.map(|link| link.index))
}

/// Name and MAC of the host's interfaces in prevResult: no other link has both.
fn remembered_ports(call: &Invocation) -> Vec<(String, String)> {
    let result = call.conf.prev_result().ok().flatten().unwrap_or_default();
    let of_host = result.interfaces.into_iter().filter(|interface| interface.sandbox.is_empty());
    of_host.map(|interface| (interface.name, interface.mac)).collect()
}
