//! The undo steps of a failed ADD, as data; the last step is undone first, and the IPAM plugin releases
//! the addresses at the end.
//!
//! If the process is killed, nothing is rolled back: the runtime then calls DEL, which handles any
//! prefix of these steps.

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
    /// Deletes the bridge, unless other ports have joined it.
    DeleteBridge { index: u32 },
    /// [`Self::DeleteBridge`] if it was made at all: a bridge that is up is used by others.
    DeleteUnfinishedBridge { name: String },
    /// Deletes the host's veth, and with it the container's.
    DeleteVeth { name: String },
    /// [`Self::DeleteVeth`] if it was made at all: a veth with an alias belongs to an earlier ADD.
    DeleteUnfinishedVeth { name: String },
    /// Restores a bridge of another program that was brought up or made promiscuous.
    RestoreBridge { was: Link },
    /// Restores an address of the bridge, unless other containers may use it.
    BridgeAddress { bridge: u32, own_port: u32, address: IpNetwork, change: AddressChange },
    /// Removes the masquerading of these addresses, and the spoof check.
    RemoveRules { addresses: Addresses },
}

/// How ADD changed an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressChange {
    /// Other containers may use it meanwhile.
    Added,
    /// It replaced others, which are restored.
    AddedInstead,
    Removed,
}

#[derive(Debug, Default)]
pub(crate) struct Undo {
    steps: Vec<Step>,
    /// The IPAM plugin whose DEL releases the addresses.
    ipam: Option<Delegate>,
}

impl Undo {
    pub(crate) fn push(&mut self, step: Step) {
        self.steps.push(step);
    }

    /// DEL of this IPAM plugin is necessary. It comes last, whenever its ADD began: once an address is
    /// free, another container may get it.
    pub(crate) fn release_addresses(&mut self, ipam: Delegate) {
        self.ipam = Some(ipam);
    }

    /// The IPAM plugin gave this call nothing. Its DEL would release the addresses of an earlier
    /// ADD with the same id and interface, for example from another namespace.
    pub(crate) fn keep_addresses(&mut self) {
        self.ipam = None;
    }

    /// Undoes all steps, also after failures. Returns `cause`, alone or with the failures.
    pub(crate) fn roll_back(self, host: &Netlink, call: &Invocation, bridge: &str, cause: Error) -> Error {
        let mut rollback = Vec::new();
        // The bridge's ports and addresses must not change while they are read.
        let taken = (!self.steps.is_empty()).then(|| BridgeLock::take(bridge)).transpose();
        let lock = taken.map_err(|e| rollback.push(e.into())).ok().flatten();
        for step in self.steps.into_iter().rev() {
            rollback.extend(undo_step(step, host, call).err());
        }
        // Other calls need not wait for our slow IPAM plugin.
        drop(lock);
        match self.ipam.map_or(Ok(()), |ipam| ipam.del(call)) {
            Ok(()) => {}
            // An IPAM plugin that fails without its own message fails twice in the same way.
            Err(again) if matches!(&cause, Error::Protocol(first) if *first == again) => {}
            Err(e) => rollback.push(e.into()),
        }
        if rollback.is_empty() { cause } else { Error::Rollback { cause: Box::new(cause), rollback } }
    }
}

fn undo_step(step: Step, host: &Netlink, call: &Invocation) -> Result<(), Error> {
    match step {
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

/// Our own port was made later, so it is gone already.
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

/// Deletes a link; a missing one is a success.
pub(crate) fn delete(host: &Netlink, index: u32) -> Result<(), Error> {
    match host.delete_link(index) {
        Err(e) if e.errno() != Errno::ENODEV => Err(e.into()),
        _ => Ok(()),
    }
}

fn ports_of(host: &Netlink, bridge: u32) -> Result<Vec<u32>, Error> {
    Ok(host.ports_of(bridge)?.into_iter().map(|link| link.index).collect())
}
