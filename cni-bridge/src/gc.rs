//! GC: removes what is left of this network's unused attachments: our own, and the reference's as
//! far as they can be attributed.

use cni_plugin::delegate::Delegate;
use cni_plugin::{Invocation, ValidAttachments};
use linux::netlink::Netlink;

use crate::error::{Error, Failures};
use crate::names::{alias_of, is_of_network};
use crate::undo::delete;
use crate::{flows, rules};

pub(crate) fn gc(call: &Invocation) -> Result<(), Error> {
    let valid = ValidAttachments::read(&call.conf)?;
    let host = Netlink::open()?;
    let mut failures = Failures::default();
    // In the order of DEL, for the same reasons.
    let removed = failures.keep(rules::collect(call, &valid, &host));
    failures.keep(delete_stale_links(&host, &call.conf.name, &valid));
    if let Some(masqueraded) = removed {
        flows::forget(&masqueraded.without_successors(Vec::new()));
    }
    if let Some(ipam) = failures.keep(call.conf.ipam_type()).flatten()
        && failures.is_empty()
    {
        let forwarded = Delegate::find(&ipam, &call.path).and_then(|ipam| ipam.gc(call));
        failures.keep(forwarded);
    }
    failures.into_result()
}

/// Deletes ports with our alias; the container's veth is deleted with its port.
fn delete_stale_links(host: &Netlink, network: &str, valid: &ValidAttachments) -> Result<(), Error> {
    let in_use: Vec<String> = valid.iter().map(|(id, ifname)| alias_of(network, id, ifname)).collect();
    let mut failures = Failures::default();
    for link in host.links()? {
        let stale = |alias: &String| is_of_network(alias, network) && !in_use.contains(alias);
        if link.alias.as_ref().is_some_and(stale) {
            failures.keep(delete(host, link.index));
        }
    }
    failures.into_result()
}
