//! ADD: all of it, or nothing.

use cni_plugin::delegate::{Delegate, PendingAdd, PreparedAdd};
use cni_plugin::{CniResult, Interface, Invocation};
use linux::interface::Interfaces;

use crate::attach::{Connection, Ends};
use crate::config::{Config, Container};
use crate::error::Error;
use crate::names::format_mac;
use crate::plan::{Plan, host_interface};
use crate::rules::Port;
use crate::undo::{Step, Undo};
use crate::{gateway, random, rules};

pub(crate) fn add(call: &Invocation) -> Result<CniResult, Error> {
    let config = Config::read(call)?;
    let ipam = Ipam::prepare(&config, call);
    let ends = Ends::open(call)?;
    // Before the IPAM plugin begins: a repeated ADD must not cost the first its lease.
    ends.refuse_existing(call, &random::veth_name()?)?;
    let mut undo = Undo::default();
    match try_add(&config, call, &ends, ipam?, &mut undo) {
        Ok(result) => Ok(result),
        Err(cause) => Err(undo.roll_back(&ends.host, call, &config.bridge, cause)),
    }
}

/// The IPAM plugin that waits for its configuration.
struct Ipam {
    delegate: Delegate,
    prepared: PreparedAdd,
}

impl Ipam {
    /// `None` without IPAM.
    fn prepare(config: &Config, call: &Invocation) -> Result<Option<Self>, Error> {
        let Some(ipam) = config.ipam() else { return Ok(None) };
        let delegate = Delegate::find(ipam, &call.path)?;
        let prepared = delegate.prepare_add()?;
        Ok(Some(Self { delegate, prepared }))
    }

    /// The specification wants DEL of a delegate also when its ADD fails, and one that
    /// was killed may have taken addresses: the step is recorded first.
    fn start(self, call: &Invocation, undo: &mut Undo) -> Result<PendingAdd, Error> {
        undo.push(Step::ReleaseAddresses { ipam: self.delegate });
        Ok(self.prepared.start(call)?)
    }
}

fn try_add(
    config: &Config,
    call: &Invocation,
    ends: &Ends,
    ipam: Option<Ipam>,
    undo: &mut Undo,
) -> Result<CniResult, Error> {
    // The IPAM plugin runs while the links are made, and ends while they get its
    // addresses; it has ended, one way or the other, before anything is rolled back.
    let mut pending = ipam.map(|ipam| ipam.start(call, undo)).transpose()?;
    let connected = connect(config, call, ends, undo);
    let addresses = pending.as_mut().map(|pending| pending.result(call)).transpose();
    if pending.as_ref().is_some_and(PendingAdd::has_refused) {
        undo.keep_addresses();
    }
    let (connection, addresses) = (connected?, addresses?);

    let result = match addresses {
        Some(addresses) => {
            let plan = Plan::new(config, addresses)?;
            ends.configure(config, call, &plan, connection.container_veth)?;
            // Whoever fails now must not have touched what other containers use.
            pending.map_or(Ok(()), PendingAdd::confirm)?;
            gateway::ensure(&ends.host, config, &plan, &connection, undo)?;
            plan.result
        }
        None => layer2(config, call, ends, &connection)?,
    };
    let port = Port {
        host_veth: &connection.host_veth.name,
        container_mac: connection.container_veth.mac,
        ips: &result.ips,
    };
    if rules::are_wanted(config) {
        undo.push(Step::RemoveRules { addresses: port.all_addresses() });
        rules::ensure(config, call, port)?;
    }
    let interfaces = interfaces(config, call, ends, &connection)?;
    let result = CniResult { interfaces, ..result };
    // What the asked version cannot express must fail here, where it is undone.
    result.ensure_fits(call.conf.cni_version)?;
    Ok(result)
}

fn connect(config: &Config, call: &Invocation, ends: &Ends, undo: &mut Undo) -> Result<Connection, Error> {
    let connection = ends.connect(config, call, undo)?;
    if config.ipam().is_some() {
        ends.prepare(config, &call.ifname)?;
    }
    Ok(connection)
}

fn layer2(
    config: &Config,
    call: &Invocation,
    ends: &Ends,
    connection: &Connection,
) -> Result<CniResult, Error> {
    if config.container != Container::Disabled {
        ends.set_up(call, connection.container_veth)?;
    }
    Ok(CniResult { dns: config.dns.clone().unwrap_or_default(), ..CniResult::default() })
}

/// Bridge, host veth, container, as they are at the end: udev may have changed
/// the veth's MAC, the first port the MAC of a bridge that others made.
fn interfaces(
    config: &Config,
    call: &Invocation,
    ends: &Ends,
    connection: &Connection,
) -> Result<Vec<Interface>, Error> {
    let host_veth = match config.container {
        Container::Disabled => ends.link(&connection.host_veth)?,
        Container::Layer2 | Container::Layer3 { .. } => ends.port_when_up(&connection.host_veth)?,
    };
    let bridge = &connection.bridge.name;
    let bridge_mac = Interfaces::open()?.mac(bridge)?;
    let sandbox = call.netns.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let mac = format_mac(Some(connection.container_veth.mac));
    Ok(vec![
        host_interface(bridge, Some(bridge_mac)),
        host_interface(&host_veth.name, host_veth.mac),
        Interface { name: call.ifname.clone(), mac, sandbox, ..Interface::default() },
    ])
}
