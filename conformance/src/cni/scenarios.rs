//! The list of scenarios, and the differences that show everywhere.

mod bridge;
mod expected;
mod failures;
mod host_local;
mod loopback;
mod masquerade;
mod networks;
mod portmap;
mod shared;
mod upkeep;
mod versions;

use super::differences::Difference;
use super::scenario::Scenario;

pub(super) use shared::shared;

/// All scenarios by what they are about, or those whose name contains `only`.
pub(super) fn groups(only: Option<&str>) -> Vec<(&'static str, Vec<Scenario>)> {
    let groups = [
        ("bridge", bridge::scenarios()),
        ("masquerade", masquerade::scenarios()),
        ("host-local", host_local::scenarios()),
        ("loopback", loopback::scenarios()),
        ("portmap", portmap::scenarios()),
        ("versions", versions::scenarios()),
        ("failures", failures::scenarios()),
        ("upkeep", upkeep::scenarios()),
    ];
    let chosen = |scenario: &Scenario| only.is_none_or(|only| scenario.name.contains(only));
    groups
        .into_iter()
        .map(|(name, scenarios)| (name, scenarios.into_iter().filter(chosen).collect::<Vec<_>>()))
        .filter(|(_, scenarios)| !scenarios.is_empty())
        .collect()
}

/// What differs wherever there is a link, an address or a lease.
pub(super) fn everywhere() -> Vec<Difference> {
    vec![
        Difference::new("link-alias", "*/host/link/<*veth*>/ifalias").ours("cni:net:*"),
        Difference::new("host-veth-txqlen", "*/host/link/<*veth*>/txqlen").ours("1000"),
        Difference::new("veth-queues", "*/link/*/num_tx_queues").reference("*").ours("1"),
        Difference::new("veth-queues", "*/link/*/num_rx_queues").reference("*").ours("1"),
        Difference::new("address-nodad", "*/address/* *:*")
            .reference("scope=global")
            .ours("nodad=true scope=global"),
        Difference::new("no-routers", "*/sysctl/ipv6/conf/*/accept_ra").ours("0"),
        Difference::new("late-reports", "*/sysctl/ipv6/conf/*/mldv1_unsolicited_report_interval").ours("1000"),
        Difference::new("no-snooping", "*/host/link/*/of-kind")
            .reference("*mcast_snooping=1*")
            .ours("*mcast_snooping=0*"),
        Difference::new("bridge-mac", "*/bridge/stdout.interfaces[0].mac")
            .reference("<mac host.<*veth*>>")
            .ours("<mac host.*>"),
        Difference::new("bridge-mac", "*/host/link/*/address")
            .reference("<mac host.<*veth*>>")
            .ours("<mac host.*>"),
        Difference::new("bridge-mac", "*/host/link/*/address")
            .reference("00:00:00:00:00:00")
            .ours("<mac host.*>"),
        Difference::new("port-without-ipv6", "*/host/sysctl/ipv6/conf/<*veth*>/disable_ipv6").ours("1"),
        Difference::new("port-without-ipv6", "*/host/sysctl/ipv6/conf/<*veth*>/accept_ra").reference("0"),
        // Another container has had the address, and with it the MAC.
        Difference::new("mac-from-address", "*/bridge/stdout.interfaces[2].mac")
            .reference("<mac c*.*>")
            .ours("<mac c*.*>"),
        Difference::new("mac-from-address", "*/c*/link/*/address").reference("<mac c*.*>").ours("<mac c*.*>"),
        // DEL and CHECK of what is not there.
        Difference::new("no-empty-directories", "*/file/var/lib/cni/").reference("0755"),
        Difference::new("no-empty-directories", "*/file/var/lib/cni/networks/").reference("0755"),
        Difference::new("no-empty-directories", "*/file/var/lib/cni/networks/net/").reference("0755"),
        Difference::new("no-empty-directories", "*/file/var/lib/cni/networks/net/lock")
            .reference(r#"0750 """#),
        Difference::new("own-files", "*/file*/.hawser/").ours("07*"),
        Difference::new("own-files", "*/file*/.hawser/*").ours("0*"),
        Difference::new("portmap-hairpin", "*/nft/ip* cni_hostport/chain masquerading")
            .extra_lines("ip* saddr * ip* daddr * ct status dnat masquerade comment \"*\""),
        Difference::new("portmap-localnet-guard", "*/nft/ip cni_hostport/chain localnet_guard")
            .ours("type filter hook prerouting priority raw; policy accept;*ip daddr 127.0.0.0/8*drop*ip saddr 127.0.0.0/8*drop"),
        Difference::new("portmap-localnet-guard", "*/iptables/mangle").ours("*"),
        Difference::new("error-details", "*/stdout.details").ours("*"),
    ]
}
