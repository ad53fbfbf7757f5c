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

const INTERVAL: &str = "mldv1_unsolicited_report_interval";
/// Milliseconds, the kernel's default.
const ANY_INTERVAL: &str = "10000";
/// Milliseconds, as with MLDv2.
const REPEATED_WITHIN: &str = "1000";
const VERSION: &str = "force_mld_version";
/// The version that routers ask for; 2 without one.
const ANY_VERSION: &str = "0";

/// Before the link goes up, in the container's namespace. Returns false, and sets nothing, if the
/// namespace gives its interfaces other settings than the kernel does, or none.
pub(crate) fn begin_in_v1(settings: &Settings, ifname: &str) -> bool {
    let setting = |name: &str| format!("{IPV6}/{ifname}/{name}");
    let is = |name, value| settings.read(&setting(name)).is_ok_and(|found| found == value);
    let begins = is(VERSION, ANY_VERSION) && is(INTERVAL, ANY_INTERVAL);
    if begins {
        tolerate(settings.write(&setting(INTERVAL), REPEATED_WITHIN));
        tolerate(settings.write(&setting(VERSION), "1"));
    }
    begins
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
