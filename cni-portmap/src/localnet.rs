//! `route_localnet` of the host's link towards the container: without it, the kernel drops packets
//! from 127.0.0.1 that leave the host.
//!
//! With it, the kernel also accepts packets to 127.0.0.0/8 from that link. Each backend's guard
//! drops them, and must exist before the setting is changed.

use std::net::IpAddr;

use linux::netlink::Netlink;
use linux::sysctl;

use crate::config::Config;
use crate::error::Error;

/// A setting that must be changed to 1.
#[derive(Debug)]
pub(crate) struct Localnet {
    setting: String,
}

impl Localnet {
    /// `None`: no change is needed. As in the reference, a container without a route to it is
    /// ignored.
    pub(crate) fn wanted(config: &Config) -> Result<Option<Self>, Error> {
        let (true, Some(container)) = (config.snat, config.container.v4) else { return Ok(None) };
        let netlink = Netlink::open()?;
        let link = netlink.link_towards(IpAddr::V4(container.ip()))?;
        let link = link.map(|index| netlink.link_by_index(index)).transpose()?.flatten();
        let Some(link) = link else { return Ok(None) };
        let setting = format!("net/ipv4/conf/{}/route_localnet", link.name);
        let value = sysctl::read(&setting).map_err(|source| Error::RouteLocalnet { source })?;
        Ok((value != "1").then_some(Self { setting }))
    }

    pub(crate) fn enable(&self) -> Result<(), Error> {
        sysctl::write(&self.setting, "1").map_err(|source| Error::RouteLocalnet { source })
    }
}
