//! The container's interface: its settings, addresses and routes.

use std::net::IpAddr;
use std::time::Duration;

use cni_plugin::Invocation;
use linux::netlink::{Changes, DuplicateDetection, RouteSpec, Watch};
use linux::sysctl::{self, Directory};
use nix::errno::Errno;

use crate::attach::{ContainerVeth, Sockets, tolerate};
use crate::config::Config;
use crate::error::Error;
use crate::plan::Plan;

/// The reference's timeout.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(5);

impl Sockets {
    /// Settings that do not depend on the addresses, made while the IPAM plugin runs.
    pub(crate) fn prepare(&self, config: &Config, ifname: &str) -> Result<(), Error> {
        let ipv6 = &self.container_ipv6;
        Ok(self.netns.visit(&self.home, || {
            let mut accept_dad = "0";
            if config.duplicate_detection == DuplicateDetection::On {
                accept_dad = "1";
                tolerate(ipv6.write(&format!("{ifname}/enhanced_dad"), "1"));
            }
            tolerate(ipv6.write(&format!("{ifname}/accept_dad"), accept_dad));
            // Any container of the bridge can advertise itself as a router.
            tolerate(ipv6.write(&format!("{ifname}/accept_ra"), "0"));
            tolerate(sysctl::write(&format!("net/ipv4/conf/{ifname}/arp_notify"), "1"));
        })?)
    }

    /// Sets addresses, link up and routes, in an order that needs no waiting: IPv4 addresses first,
    /// so that the link announces them when it goes up (arp_notify); IPv6 ones later, since their
    /// prefix routes need the link.
    pub(crate) fn configure(
        &self,
        config: &Config,
        call: &Invocation,
        plan: &Plan,
        veth: ContainerVeth,
    ) -> Result<(), Error> {
        if plan.has_ipv6() {
            self.netns.visit(&self.home, || allow_ipv6(&self.container_ipv6, &call.ifname))??;
        }
        self.add_addresses(config, call, plan, veth, true)?;
        self.set_up(call, veth)?;
        self.add_addresses(config, call, plan, veth, false)?;
        let v6_gateway = plan.result.ips.iter().any(|ip| ip.gateway.is_some_and(|gateway| gateway.is_ipv6()));
        if config.duplicate_detection == DuplicateDetection::On && v6_gateway {
            self.settle(call, veth)?;
        }
        self.add_routes(call, plan, veth)
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
fn allow_ipv6(settings: &Directory, ifname: &str) -> Result<(), Error> {
    for link in ["lo", ifname] {
        match settings.ensure(&format!("{link}/disable_ipv6"), "0") {
            Ok(_) => {}
            // A kernel without IPv6: adding the address reports that.
            Err(e) if e.errno() == Errno::ENOENT => {}
            Err(source) => return Err(Error::EnableIpv6 { ifname: link.to_owned(), source }),
        }
    }
    let keep = settings.write(&format!("{ifname}/keep_addr_on_down"), "1");
    keep.map_err(|source| Error::EnableIpv6 { ifname: ifname.to_owned(), source })
}
