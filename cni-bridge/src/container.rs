//! The container's interface: its settings, addresses and routes.

use std::net::IpAddr;
use std::time::Duration;

use cni_plugin::Invocation;
use linux::netlink::{Changes, DuplicateDetection, RouteSpec, Watch};
use linux::sysctl::Settings;
use nix::errno::Errno;

use crate::attach::{Connection, ContainerVeth, IPV6, Sockets, tolerate};
use crate::config::Config;
use crate::error::Error;
use crate::plan::Plan;
use crate::reports;

/// The reference's timeout.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

/// The container's interface before it has addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prepared {
    pub(crate) has_ipv6: bool,
    /// Whether it joins its multicast groups in MLDv1.
    pub(crate) begins_in_v1: bool,
}

impl Sockets {
    /// Settings that do not depend on the addresses, made while the IPAM plugin runs.
    pub(crate) fn prepare(
        &self,
        config: &Config,
        connection: &Connection,
        ifname: &str,
    ) -> Result<Prepared, Error> {
        let (settings, directory) = (&self.settings, format!("{IPV6}/{ifname}"));
        Ok(self.netns.visit(&self.home, || {
            let mut accept_dad = "0";
            if config.duplicate_detection == DuplicateDetection::On {
                accept_dad = "1";
                tolerate(settings.write(&format!("{directory}/enhanced_dad"), "1"));
            }
            tolerate(settings.write(&format!("{directory}/accept_dad"), accept_dad));
            // Any container of the bridge can advertise itself as a router.
            tolerate(settings.write(&format!("{directory}/accept_ra"), "0"));
            let has_ipv6 =
                settings.read(&format!("{directory}/disable_ipv6")).is_ok_and(|disabled| disabled == "0");
            let delays = config.delays_reports(&connection.bridge);
            Prepared { has_ipv6, begins_in_v1: delays && reports::begin_in_v1(settings, ifname) }
        })?)
    }

    /// Sets addresses, MAC, link up and routes, in an order that needs no waiting: IPv6 addresses after
    /// the link, which their prefix routes need.
    pub(crate) fn configure(
        &self,
        config: &Config,
        call: &Invocation,
        plan: &Plan,
        veth: ContainerVeth,
    ) -> Result<(), Error> {
        let ifname = &call.ifname;
        if plan.has_ipv6() {
            self.netns.visit(&self.home, || allow_ipv6(&self.settings, ifname))??;
        }
        self.add_addresses(config, call, plan, veth, true)?;
        let up = self.container.set_up_unannounced(veth.index, veth.mac);
        up.map_err(|source| Error::SetUp { ifname: ifname.clone(), source })?;
        self.notice_carrier(veth)?;
        self.add_addresses(config, call, plan, veth, false)?;
        let v6_gateway = plan.result.ips.iter().any(|ip| ip.gateway.is_some_and(|gateway| gateway.is_ipv6()));
        if config.duplicate_detection == DuplicateDetection::On && v6_gateway {
            self.settle(call, veth)?;
        }
        self.add_routes(call, plan, veth)
    }

    /// Broadcasts the IPv4 addresses of the container's interface. The bridge must forward its frames:
    /// it does so only some time after the link has gone up.
    pub(crate) fn announce(&self, veth: ContainerVeth) -> Result<(), Error> {
        // The kernel announces whenever a MAC is set, also the same one (`inetdev_event`, arp_notify).
        Ok(self.container.set_mac(veth.index, veth.mac)?)
    }

    /// Sets the container's interface of a layer-2 attachment up.
    pub(crate) fn set_up(&self, call: &Invocation, veth: ContainerVeth) -> Result<(), Error> {
        let failed = |source| Error::SetUp { ifname: call.ifname.clone(), source };
        self.container.set_up(veth.index).map_err(failed)
    }

    fn add_addresses(
        &self,
        config: &Config,
        call: &Invocation,
        plan: &Plan,
        veth: ContainerVeth,
        is_v4: bool,
    ) -> Result<(), Error> {
        for ip in plan.result.ips.iter().filter(|ip| ip.address.is_ipv4() == is_v4) {
            let address = (ip.address.ip(), ip.address.prefix());
            let added = self.container.add_address(veth.index, address, config.duplicate_detection);
            added.map_err(|source| Error::AddAddress {
                address: ip.address,
                ifname: call.ifname.clone(),
                source,
            })?;
        }
        Ok(())
    }

    fn add_routes(&self, call: &Invocation, plan: &Plan, veth: ContainerVeth) -> Result<(), Error> {
        for route in &plan.result.routes {
            let gateway = plan.gateway_of(route);
            let spec = RouteSpec {
                destination: (route.dst.ip(), route.dst.prefix()),
                gateway,
                link: veth.index,
                priority: route.priority,
                table: route.table,
                scope: route.scope,
                mtu: route.mtu,
                adv_mss: route.adv_mss,
            };
            self.container.add_route(&spec).map_err(|source| Error::AddRoute {
                dst: route.dst,
                gateway,
                ifname: call.ifname.clone(),
                source,
            })?;
        }
        Ok(())
    }

    /// Waits until duplicate address detection has finished for all addresses.
    fn settle(&self, call: &Invocation, veth: ContainerVeth) -> Result<(), Error> {
        let watch = || Changes::watch(None, Watch::Ipv6Addresses);
        let mut changes = self.netns.visit(&self.home, watch)??;
        let settled = changes.until(SETTLE_TIMEOUT, || {
            let addresses = self.container.addresses(veth.index)?;
            let failed: Option<IpAddr> = addresses.iter().find(|a| a.dad_failed).map(|a| a.ip);
            Ok(if failed.is_some() || !addresses.iter().any(|a| a.tentative) { Some(failed) } else { None })
        });
        let ifname = call.ifname.clone();
        match settled? {
            Some(None) => Ok(()),
            Some(Some(address)) => Err(Error::DuplicateAddress { ifname, address }),
            None => Err(Error::AddressesUnsettled { ifname, seconds: SETTLE_TIMEOUT.as_secs() }),
        }
    }
}

/// Must be called in the container's namespace.
fn allow_ipv6(settings: &Settings, ifname: &str) -> Result<(), Error> {
    for link in ["lo", ifname] {
        match settings.ensure(&format!("{IPV6}/{link}/disable_ipv6"), "0") {
            Ok(_) => {}
            // A kernel without IPv6: adding the address reports that.
            Err(e) if e.errno() == Errno::ENOENT => {}
            Err(source) => return Err(Error::EnableIpv6 { ifname: link.to_owned(), source }),
        }
    }
    let keep = settings.write(&format!("{IPV6}/{ifname}/keep_addr_on_down"), "1");
    keep.map_err(|source| Error::EnableIpv6 { ifname: ifname.to_owned(), source })
}
