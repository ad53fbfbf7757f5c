//! Tracked UDP flows: while packets keep coming, they go to the same destination as before a change
//! of rules.

use std::net::IpAddr;

use cni_plugin::{CniError, warn};
use linux::netlink::Netlink;
use netfilter::conntrack::{Flows, delete};

use crate::NAME;
use crate::config::Config;
use crate::error::Error;
use crate::mapping::{Mapping, Protocol, in_family};
use crate::nftables::Effect;

/// ADD: forgets flows to the mapped ports of this host, whatever their destination. Flows to the
/// same port of other hosts, which this host only forwards, continue.
pub(crate) fn forget_of_host(config: &Config) -> Result<(), Error> {
    let mappings = udp_mappings(config)?;
    if mappings.is_empty() {
        return Ok(());
    }
    let local = Netlink::open()?.local_addresses()?;
    let mut flows = Vec::new();
    for (mapping, container) in &mappings {
        let of_family = |ip: &IpAddr| ip.is_ipv4() == container.is_ipv4();
        let destinations: Vec<IpAddr> =
            mapping.host_ip.map_or_else(|| local.iter().copied().filter(of_family).collect(), |ip| vec![ip]);
        flows.extend(destinations.into_iter().map(|destination| Flows {
            udp_port: Some(mapping.host_port),
            destination: Some(destination),
            ..Flows::default()
        }));
    }
    delete(&flows)?;
    Ok(())
}

/// DEL and GC: forgets flows that the container answers through its ports: those of the removed rules
/// (`effects`), and those of the configuration. A failure is only a warning: the rules are
/// removed, and a repeated GC would not find the flows without them.
pub(crate) fn forget_of_container(config: &Config, effects: &[Effect]) {
    if let Err(e) = try_forget_of_container(config, effects) {
        let words = CniError::chain(&e).msg;
        warn(NAME, format_args!("failed to delete UDP conntrack entries of the container: {words}"));
    }
}

fn try_forget_of_container(config: &Config, effects: &[Effect]) -> Result<(), Error> {
    let of_rules = effects.iter().filter_map(|effect| match effect {
        Effect::Forward { protocol: Protocol::Udp, host_ip, host_port, to } => {
            Some(answered(*host_port, *host_ip, to.ip()))
        }
        Effect::Forward { .. } | Effect::Masquerade { .. } => None,
    });
    let mut flows: Vec<Flows> = of_rules.collect();
    // A mapping that cannot be parsed was never active.
    for (mapping, container) in udp_mappings(config).unwrap_or_default() {
        let flow = answered(mapping.host_port, mapping.host_ip, container);
        if !flows.contains(&flow) {
            flows.push(flow);
        }
    }
    if !flows.is_empty() {
        delete(&flows)?;
    }
    Ok(())
}

/// The flows to a port of the host that `container` answers.
fn answered(host_port: u16, host_ip: Option<IpAddr>, container: IpAddr) -> Flows {
    Flows {
        udp_port: Some(host_port),
        destination: host_ip,
        reply_source: Some(container),
        ..Flows::default()
    }
}

/// The UDP mappings, each with the container's address of its family.
fn udp_mappings(config: &Config) -> Result<Vec<(Mapping, IpAddr)>, Error> {
    let mut found = Vec::new();
    for (family, container) in config.container.each() {
        let mappings = in_family(&config.entries, family)?;
        let udp = mappings.into_iter().filter(|mapping| mapping.protocol == Protocol::Udp);
        found.extend(udp.map(|mapping| (mapping, container.ip())));
    }
    Ok(found)
}
