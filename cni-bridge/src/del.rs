//! DEL: removes whatever is left of an attachment, made by us or by the
//! reference; what is gone already is a success.

use cni_plugin::Invocation;
use cni_plugin::delegate::Delegate;
use linux::netlink::Netlink;
use linux::netns::NetNs;

use crate::attach::alias;
use crate::error::{Error, NetnsError};
use crate::undo::delete;

pub(crate) fn del(call: &Invocation) -> Result<(), Error> {
    let ipam = call.conf.ipam_type()?;
    remove_link(call)?;
    // Only now: an address may be given to the next container once it is free.
    if let Some(ipam) = ipam {
        Delegate::find(&ipam, &call.path)?.del(call)?;
    }
    Ok(())
}

fn remove_link(call: &Invocation) -> Result<(), Error> {
    if let Some(netns) = open(call)? {
        let container = Netlink::open_in(&netns)?;
        if let Some(link) = container.link_by_name(&call.ifname)? {
            return delete(&container, link.index);
        }
    }
    remove_by_alias(call)
}

/// `None` when there is none any more: an unset CNI_NETNS is legal for DEL
/// (CNI specification, "DEL"), its path may be gone, or only its file be left.
fn open(call: &Invocation) -> Result<Option<NetNs>, Error> {
    let Some(path) = &call.netns else { return Ok(None) };
    match NetNs::open(path).map_err(|e| NetnsError::of(path, e)) {
        Ok(netns) => Ok(Some(netns)),
        Err(NetnsError::Missing { .. } | NetnsError::NotANamespace { .. }) => Ok(None),
        Err(cause) => Err(Error::OpenNetns { path: path.clone(), cause }),
    }
}

/// Without the namespace the kernel removes the veth, but only once nothing
/// holds the namespace: the host's end is found by its alias.
fn remove_by_alias(call: &Invocation) -> Result<(), Error> {
    let Some(alias) = alias(call) else { return Ok(()) };
    let host = Netlink::open()?;
    for link in host.links()? {
        if link.alias.as_deref() == Some(&alias) {
            delete(&host, link.index)?;
        }
    }
    Ok(())
}
