//! `route_localnet` of the host's link towards the container: without it the
//! kernel drops packets that come from 127.0.0.1 and leave the host.
//!
//! With it, the kernel also takes packets to 127.0.0.0/8 from that link. The
//! guard among the rules of each backend drops them: it must be there before the
//! setting is changed.

use std::net::IpAddr;

use linux::netlink::Netlink;
use linux::sysctl;

use crate::config::Config;
use crate::error::Error;

/// A setting that is to be 1 and is not yet.
#[derive(Debug)]
pub(crate) struct Localnet {
    setting: String,
}

impl Localnet {
    /// `None`: nothing has to be set. As in the reference, a container that no
    /// route leads to is none of this plugin's business.
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
