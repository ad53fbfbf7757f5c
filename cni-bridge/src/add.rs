//! ADD: makes the whole attachment, or nothing.

use std::net::Ipv4Addr;

use cni_plugin::delegate::{Delegate, PendingAdd, PreparedAdd};
use cni_plugin::{CniResult, Interface, Invocation};
use linux::interface::Interfaces;

use crate::attach::{Connection, Sockets};
use crate::config::{Config, Container};
use crate::container::Prepared;
use crate::error::Error;
use crate::introduction::{self, Introduction, Known};
use crate::names::format_mac;
use crate::plan::{Plan, host_interface};
use crate::rules::Port;
use crate::undo::{Step, Undo};
use crate::{gateway, random, rules};

pub(crate) fn add(call: &Invocation) -> Result<CniResult, Error> {
    let config = Config::read(call)?;
    let ipam = Ipam::prepare(&config, call);
    let sockets = Sockets::open(call)?;
    // Before the IPAM plugin begins: a repeated ADD must not release the first one's lease.
    sockets.refuse_existing(call, &random::veth_name()?)?;
    let mut undo = Undo::default();
    match try_add(&config, call, &sockets, ipam?, &mut undo) {
        Ok(result) => Ok(result),
        Err(cause) => Err(undo.roll_back(&sockets.host, call, &config.bridge, cause)),
    }
}

/// The IPAM plugin, waiting for its configuration.
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

    /// Records it for the roll-back first: the specification requires DEL of a delegate also after a
    /// failed ADD, and a killed one may have reserved addresses.
    fn start(self, call: &Invocation, undo: &mut Undo) -> Result<PendingAdd, Error> {
        undo.release_addresses(self.delegate);
        Ok(self.prepared.start(call)?)
    }
}

/// The links, and the IPAM plugin's result.
struct Connected {
    connection: Connection,
    /// Only with IPAM.
    prepared: Option<Prepared>,
    addresses: Option<(CniResult, PendingAdd)>,
}

fn try_add(
    config: &Config,
    call: &Invocation,
    sockets: &Sockets,
    ipam: Option<Ipam>,
    undo: &mut Undo,
) -> Result<CniResult, Error> {
    let Connected { mut connection, prepared, addresses } = connect(config, call, sockets, ipam, undo)?;

    let mut is_announced = false;
    let result = match addresses {
        Some((addresses, pending)) => {
            let plan = Plan::new(config, addresses)?;
            let Introduction { mac, announced } =
                introduction(config, sockets, &plan, &connection, prepared)?;
            (connection.container_veth.mac, is_announced) = (mac, announced);
            sockets.configure(config, call, &plan, connection.container_veth)?;
            // After a failure at this point, nothing that other containers use was touched.
            pending.confirm()?;
            gateway::ensure(sockets, config, &plan, &connection, undo)?;
            plan.result
        }
        None => layer2(config, call, sockets, &connection)?,
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
    if config.starts_locked() {
        // To the kernel's worker on this processor, which sends the first multicast reports.
        std::thread::yield_now();
        if prepared.is_some_and(|prepared| prepared.begins_in_v1) {
            sockets.repeat_in_any_version(&call.ifname)?;
        }
        sockets.unlock(&connection)?;
    }
    let interfaces = interfaces(config, call, sockets, &connection)?;
    if is_announced {
        sockets.announce(connection.container_veth)?;
    }
    let result = CniResult { interfaces, ..result };
    // A result that the requested version cannot express must fail here, where ADD is undone.
    result.ensure_fits(call.conf.cni_version)?;
    Ok(result)
}

/// Makes the links and asks the IPAM plugin. A plugin that only chooses addresses runs while the links
/// are made, and ends while they get its addresses. Any other may use the container's interface, so it
/// begins when that exists. In any case it has ended before the roll-back.
fn connect(
    config: &Config,
    call: &Invocation,
    sockets: &Sockets,
    mut ipam: Option<Ipam>,
    undo: &mut Undo,
) -> Result<Connected, Error> {
    let first = ipam.take_if(|_| config.has_plain_ipam());
    let mut pending = first.map(|ipam| ipam.start(call, undo)).transpose()?;
    let links = make_links(config, call, sockets, undo);
    if let Some(ipam) = ipam.filter(|_| links.is_ok()) {
        pending = Some(ipam.start(call, undo)?);
    }
    let addresses = pending.as_mut().map(|pending| pending.result(call)).transpose();
    if pending.as_ref().is_some_and(PendingAdd::has_refused) {
        undo.keep_addresses();
    }
    let ((connection, prepared), addresses) = (links?, addresses?);
    Ok(Connected { connection, prepared, addresses: addresses.zip(pending) })
}

/// Makes the links, and prepares the container's interface for addresses if it gets any.
fn make_links(
    config: &Config,
    call: &Invocation,
    sockets: &Sockets,
    undo: &mut Undo,
) -> Result<(Connection, Option<Prepared>), Error> {
    let connection = sockets.connect(config, call, undo)?;
    let prepare = |_ipam| sockets.prepare(config, &connection, &call.ifname);
    let prepared = config.ipam().map(prepare).transpose()?;
    Ok((connection, prepared))
}

/// The MAC and the announcement of a container with these addresses.
fn introduction(
    config: &Config,
    sockets: &Sockets,
    plan: &Plan,
    connection: &Connection,
    prepared: Option<Prepared>,
) -> Result<Introduction, Error> {
    let ips = &plan.result.ips;
    let neighbour = |ip: Ipv4Addr| sockets.host.neighbour(connection.bridge.index, ip.into());
    let known = Known {
        current: connection.container_veth.mac,
        earlier: introduction::first_ipv4(ips).map(neighbour).transpose()?.flatten(),
        has_ipv6: prepared.is_some_and(|prepared| prepared.has_ipv6) || plan.has_ipv6(),
    };
    Ok(Introduction::new(config, ips, known))
}

fn layer2(
    config: &Config,
    call: &Invocation,
    sockets: &Sockets,
    connection: &Connection,
) -> Result<CniResult, Error> {
    if config.container != Container::Disabled {
        sockets.set_up(call, connection.container_veth)?;
    }
    Ok(CniResult { dns: config.dns.clone().unwrap_or_default(), ..CniResult::default() })
}

/// Bridge, host veth, container, read at the end: udev may have changed the veth's MAC, and the
/// first port the MAC of a bridge that another program made.
fn interfaces(
    config: &Config,
    call: &Invocation,
    sockets: &Sockets,
    connection: &Connection,
) -> Result<Vec<Interface>, Error> {
    let host_veth = match config.container {
        Container::Disabled => sockets.link(&connection.host_veth)?,
        Container::Layer2 | Container::Layer3 { .. } => sockets.port_when_up(&connection.host_veth)?,
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
