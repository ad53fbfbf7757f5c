//! DEL: removes everything that we or the reference made for an attachment. A missing part is a
//! success. After a failure of one part, the others are still removed.

use std::net::IpAddr;

use cni_plugin::delegate::Delegate;
use cni_plugin::{CniError, Invocation};
use linux::netlink::{Link, Netlink};
use linux::netns::NetNs;
use nix::errno::Errno;

use crate::config::Config;
use crate::error::{Error, Failures, NetnsError, is_undecodable};
use crate::iptables_chain::Addresses;
use crate::keys::KEYS;
use crate::names::{alias, format_mac, is_of_attachment, veth_name};
use crate::undo::delete;
use crate::{flows, rules};

pub(crate) fn del(call: &Invocation) -> Result<(), Error> {
    let mut failures = Failures::default();
    let ipam = failures.keep(find_ipam(call)).flatten();
    let inside = failures.keep(Inside::open(call)).flatten();

    // The rules first: the kernel frees them while it deletes the link.
    let removed = failures.keep(rules::remove(call, &|| addresses(call, inside.as_ref())));
    failures.keep(remove_link(call, inside));
    // After the link: without it, the container cannot start further flows.
    if let Some(masqueraded) = removed {
        flows::forget(&masqueraded.without_successors(remembered_if_masqueraded(call)));
    }
    // Last: once an address is free, another container may get it. After a failure it stays
    // reserved, and the runtime calls DEL again.
    if let Some(ipam) = ipam
        && failures.is_empty()
    {
        failures.keep(ipam.del(call));
    }
    failures.into_result()
}

/// A configuration that ADD refuses has made nothing, but its IPAM plugin is still called.
fn find_ipam(call: &Invocation) -> Result<Option<Delegate>, CniError> {
    let Some(ipam) = call.conf.ipam_type()? else { return Ok(None) };
    Delegate::find(&ipam, &call.path).map(Some)
}

/// The container's interface, if it still exists and can be decoded: otherwise the host's end decides.
struct Inside {
    container: Netlink,
    link: Link,
}

impl Inside {
    fn open(call: &Invocation) -> Result<Option<Self>, Error> {
        let Some(netns) = open_netns(call)? else { return Ok(None) };
        let container = netns.visit(&NetNs::current()?, Netlink::open)??;
        let link = decodable(container.link_by_name(&call.ifname))?;
        Ok(link.map(|link| Self { container, link }))
    }
}

/// `None` if the namespace is gone: an unset CNI_NETNS is legal for DEL (CNI specification, "DEL"),
/// its path may be gone, or only the file may be left.
fn open_netns(call: &Invocation) -> Result<Option<NetNs>, Error> {
    let Some(path) = &call.netns else { return Ok(None) };
    match NetNs::open(path).map_err(|e| NetnsError::of(path, e)) {
        Ok(netns) => Ok(Some(netns)),
        Err(NetnsError::Missing { .. } | NetnsError::NotANamespace { .. }) => Ok(None),
        Err(source) => Err(Error::OpenNetns { path: path.clone(), source }),
    }
}

/// The known addresses of this attachment: those of the interface, and those that the runtime
/// remembers, which are complete. They only distinguish two interfaces.
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

/// The addresses of `prevResult`: iptables may have masqueraded them, or the rules may be gone
/// already. Not the interface's addresses: a container may give itself the address of another one.
fn remembered_if_masqueraded(call: &Invocation) -> Vec<IpAddr> {
    let asked = call.conf.fields(KEYS).bool("ipMasq").unwrap_or(false);
    asked.then(|| remembered_addresses(call)).flatten().unwrap_or_default()
}

/// Removes the link. A container may rename its interface and give the name to another one, so the
/// host's veth decides: if the peer of the container's interface has our alias, deleting it removes
/// both, also if they were renamed. The interface of another attachment stays: the path of a namespace may
/// lead to another container by now (/proc/PID/ns/net), or a container may have exchanged two names.
fn remove_link(call: &Invocation, inside: Option<Inside>) -> Result<(), Error> {
    let host = Netlink::open()?;
    let Some(Inside { container, link }) = inside else { return remove_host_end(call, &host) };
    let peer = link.peer.map(|peer| decodable(host.link_by_index(peer))).transpose()?.flatten();
    match peer {
        Some(port) if port.alias.as_deref() == Some(&alias(call)) => delete(&host, port.index)?,
        Some(port) if is_of_another_attachment(&port, &link) => return remove_host_end(call, &host),
        // Made by the reference, by an ADD that was killed before it set the alias, or by the
        // container itself.
        _ => remove_host_end(call, &host)?,
    }
    match delete(&container, link.index) {
        // `lo` or hardware (`rtnl_delete_link`): the container has renamed its interface, and given the
        // name to one that `bridge` cannot have made.
        Err(Error::Kernel(e)) if e.errno() == Errno::EOPNOTSUPP => Ok(()),
        done => done,
    }
}

/// A link that cannot be decoded is none of ours, so DEL treats it as missing. Any program of the host can
/// make such a link, and a container in its namespace.
fn decodable(found: linux::Result<Option<Link>>) -> linux::Result<Option<Link>> {
    match found {
        Err(e) if is_undecodable(&e) => Ok(None),
        other => other,
    }
}

/// Indexes of another namespace alone are no proof: a container chooses them for its own links.
fn is_of_another_attachment(port: &Link, link: &Link) -> bool {
    let has_our_mark = port.alias.as_deref().is_some_and(is_of_attachment);
    has_our_mark && port.master.is_some() && port.peer == Some(link.index)
}

/// Finds and removes the host's veth without the namespace. The kernel removes it too, but only
/// once no process holds the namespace. It is found by its alias; that of a killed ADD, which has
/// none yet, by its name; the reference's by what the runtime remembers.
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
    // A configuration that ADD refuses has made nothing.
    let Ok(config) = Config::read(call) else { return Ok(None) };
    Ok(decodable(host.link_by_name(&config.bridge))?.map(|link| link.index))
}

/// Name and MAC of the host's interfaces in prevResult: no other link matches both.
fn remembered_ports(call: &Invocation) -> Vec<(String, String)> {
    let result = call.conf.prev_result().ok().flatten().unwrap_or_default();
    let of_host = result.interfaces.into_iter().filter(|interface| interface.sandbox.is_empty());
    of_host.map(|interface| (interface.name, interface.mac)).collect()
}
