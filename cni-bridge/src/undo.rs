//! What a failed ADD takes back, as data, last step first.
//!
//! A process killed half-way rolls nothing back: the runtime then calls DEL,
//! which copes with any prefix of these steps.

use cni_plugin::Invocation;
use cni_plugin::delegate::Delegate;
use ipnetwork::IpNetwork;
use linux::netlink::{DuplicateDetection, Link, Netlink};
use nix::errno::Errno;

use crate::bridge_lock::BridgeLock;
use crate::error::Error;
use crate::iptables_chain::Addresses;
use crate::rules;

/// One thing that ADD has made.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// DEL of the IPAM plugin.
    ReleaseAddresses { ipam: Delegate },
    /// The bridge, unless others have joined it meanwhile.
    DeleteBridge { index: u32 },
    /// The same, if it was made at all: one that is up is in use by others.
    DeleteUnfinishedBridge { name: String },
    /// The host's end, and with it the container's.
    DeleteVeth { name: String },
    /// The same, if it was made at all: one with an alias is an earlier ADD's.
    DeleteUnfinishedVeth { name: String },
    /// A bridge of others was brought up or made promiscuous.
    RestoreBridge { was: Link },
    /// An address of the bridge, unless containers beside ours may use it.
    BridgeAddress { bridge: u32, own_port: u32, address: IpNetwork, change: AddressChange },
    /// Masquerading of these addresses, and the spoof check.
    RemoveRules { addresses: Addresses },
}

/// What ADD did to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressChange {
    /// Containers beside ours may use it by now.
    Added,
    /// In the place of removed ones, which come back.
    AddedInstead,
    Removed,
}

#[derive(Debug, Default)]
pub(crate) struct Undo {
    steps: Vec<Step>,
}

impl Undo {
    pub(crate) fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// The IPAM plugin gave this call nothing. Its DEL would release what an earlier
    /// ADD of the same id and interface got, from another namespace, say.
    pub(crate) fn keep_addresses(&mut self) {
        self.steps.retain(|step| !matches!(step, Step::ReleaseAddresses { .. }));
    }

    /// Takes all steps back, going on after failures. `cause` comes back alone
    /// or with what could not be undone.
    pub(crate) fn roll_back(self, host: &Netlink, call: &Invocation, bridge: &str, cause: Error) -> Error {
        let mut rollback = Vec::new();
        // Ports and addresses of the bridge stay as they are while we look.
        let of_bridge = self.steps.iter().any(|step| !matches!(step, Step::ReleaseAddresses { .. }));
        let taken = of_bridge.then(|| BridgeLock::take(bridge)).transpose();
        let mut lock = taken.map_err(|e| rollback.push(e.into())).ok().flatten();
        for step in self.steps.into_iter().rev() {
            if matches!(step, Step::ReleaseAddresses { .. }) {
                // The first step of all: nobody waits for a slow IPAM plugin of ours.
                lock = None;
            }
            match take_back(step, host, call) {
                Ok(()) => {}
                // An IPAM plugin that fails without a word of its own does so twice.
                Err(Error::Protocol(again)) if matches!(&cause, Error::Protocol(first) if *first == again) => {
                }
                Err(e) => rollback.push(e),
            }
        }
        drop(lock);
        if rollback.is_empty() { cause } else { Error::Rollback { cause: Box::new(cause), rollback } }
    }
}

fn take_back(step: Step, host: &Netlink, call: &Invocation) -> Result<(), Error> {
    match step {
        Step::ReleaseAddresses { ipam } => Ok(ipam.del(call)?),
        Step::DeleteVeth { name } => match host.link_by_name(&name)? {
            Some(link) => delete(host, link.index),
            None => Ok(()),
        },
        Step::DeleteUnfinishedVeth { name } => match host.link_by_name(&name)? {
            Some(link) if link.alias.is_none() => delete(host, link.index),
            _ => Ok(()),
        },
        Step::DeleteBridge { index } => delete_bridge(host, index),
        Step::DeleteUnfinishedBridge { name } => match host.link_by_name(&name)? {
            Some(link) if link.kind.as_deref() == Some("bridge") && !link.up => {
                delete_bridge(host, link.index)
            }
            _ => Ok(()),
        },
        Step::RestoreBridge { was } => restore_bridge(host, &was),
        Step::BridgeAddress { bridge, own_port, address, change } => {
            let others = || Ok::<_, Error>(ports_of(host, bridge)?.iter().any(|port| *port != own_port));
            if change == AddressChange::Added && others()? {
                return Ok(());
            }
            let pair = (address.ip(), address.prefix());
            let outcome = match change {
                AddressChange::Added | AddressChange::AddedInstead => host.delete_address(bridge, pair),
                AddressChange::Removed => host.add_address(bridge, pair, DuplicateDetection::Off),
            };
            match outcome {
                Err(e) if !matches!(e.errno(), Errno::EADDRNOTAVAIL | Errno::EEXIST | Errno::ENODEV) => {
                    Err(e.into())
                }
                _ => Ok(()),
            }
        }
        Step::RemoveRules { addresses } => rules::remove(call, &|| addresses.clone()).map(drop),
    }
}

fn delete_bridge(host: &Netlink, index: u32) -> Result<(), Error> {
    if ports_of(host, index)?.is_empty() {
        delete(host, index)?;
    }
    Ok(())
}

/// Our own port is gone by now: it was made later.
fn restore_bridge(host: &Netlink, was: &Link) -> Result<(), Error> {
    if !ports_of(host, was.index)?.is_empty() {
        return Ok(());
    }
    if !was.promiscuous {
        host.set_promiscuous(was.index, false)?;
    }
    if !was.up {
        host.set_down(was.index)?;
    }
    Ok(())
}

/// Deletes a link; absence is a success.
pub(crate) fn delete(host: &Netlink, index: u32) -> Result<(), Error> {
    match host.delete_link(index) {
        Err(e) if e.errno() != Errno::ENODEV => Err(e.into()),
        _ => Ok(()),
    }
}

fn ports_of(host: &Netlink, bridge: u32) -> Result<Vec<u32>, Error> {
    Ok(host.ports_of(bridge)?.into_iter().map(|link| link.index).collect())
}
