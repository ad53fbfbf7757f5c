//! The first multicast reports of a container's interface (MLD): not before the next second, and two
//! instead of four.
//!
//! On a bridge that does not snoop, each report reaches every container: beside 300 of them it takes the
//! kernel 1 ms, while the new container starts. A first report of MLDv2 leaves two ticks of the kernel's
//! clock after the group was joined. One of MLDv1 leaves at once, when the port is still locked, and is
//! repeated within the given interval (net/ipv6/mcast.c, `igmp6_group_added`, `mld_send_initial_cr`). So
//! the interface joins its groups in MLDv1, and repeats the reports in MLDv2.

use linux::sysctl::Settings;

use crate::attach::{ContainerVeth, IPV6, Sockets, tolerate};
use crate::error::Error;

/// Milliseconds; as with MLDv2.
const REPEATED_WITHIN: &str = "1000";
const VERSION: &str = "force_mld_version";
/// The version that routers ask for; 2 without one.
const ANY_VERSION: &str = "0";

/// Before the link goes up, in the container's namespace.
pub(crate) fn begin_in_v1(settings: &Settings, ifname: &str) {
    tolerate(settings.write(&format!("{IPV6}/{ifname}/mldv1_unsolicited_report_interval"), REPEATED_WITHIN));
    tolerate(settings.write(&format!("{IPV6}/{ifname}/{VERSION}"), "1"));
}

impl Sockets {
    /// Makes the kernel look at the carrier of the link now, and join the groups soon: a query does that
    /// (net/core/rtnetlink.c, `linkwatch_sync_dev`). By itself it does so some time after the link has gone up.
    pub(crate) fn notice_carrier(&self, veth: ContainerVeth) -> Result<(), Error> {
        self.container.link_by_index(veth.index)?;
        Ok(())
    }

    /// After the first reports.
    pub(crate) fn repeat_in_any_version(&self, ifname: &str) -> Result<(), Error> {
        let version = format!("{IPV6}/{ifname}/{VERSION}");
        Ok(self.netns.visit(&self.home, || tolerate(self.settings.write(&version, ANY_VERSION)))?)
    }
}
