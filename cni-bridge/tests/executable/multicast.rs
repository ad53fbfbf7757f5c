//! Multicast between the containers of a bridge: neighbour discovery of IPv6 needs it.

use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto};

use crate::sandbox::{DUAL, Sandbox, run_in};

const TIMEOUT: Duration = Duration::from_secs(5);

/// `mcast_snooping` of the sandbox's bridge.
fn snooping(sandbox: &Sandbox) -> Option<u64> {
    let links = Sandbox::ip(&sandbox.host, &format!("-d link show dev {}", sandbox.bridge));
    links[0]["linkinfo"]["info_data"]["mcast_snooping"].as_u64()
}

#[test]
fn a_new_bridge_does_not_snoop_and_one_that_exists_keeps_its_setting() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let first = sandbox.attachment("c1", DUAL).added();
    assert_eq!(snooping(&sandbox), Some(0));
    run_in(&sandbox.host, &format!("ip link set {} type bridge mcast_snooping 1", sandbox.bridge));
    let second = sandbox.attachment("c2", DUAL).added();
    assert_eq!(snooping(&sandbox), Some(1), "the operator turned it on");
    first.del();
    second.del();
    sandbox.assert_detached();
}

/// The version of MLD that the container's interface is forced to, and after how many milliseconds it repeats a
/// report of MLDv1 at the latest.
fn mld(sandbox: &Sandbox, container: &str) -> (String, String) {
    let setting = |name: &str| {
        let path = format!("/proc/sys/net/ipv6/conf/eth0/{name}");
        run_in(&sandbox.netns(container), &format!("cat {path}")).trim().to_owned()
    };
    (setting("force_mld_version"), setting("mldv1_unsolicited_report_interval"))
}

/// How many reports of MLDv2 the container has received, since the rule was made.
fn reports_received(sandbox: &Sandbox, container: &str) -> u64 {
    let chain = run_in(&sandbox.netns(container), "nft -j list chain ip6 t in");
    let chain: serde_json::Value = serde_json::from_str(&chain).unwrap();
    let rules = chain["nftables"].as_array().unwrap().iter();
    let counters = rules.filter_map(|entry| entry["rule"]["expr"][1]["counter"]["packets"].as_u64());
    counters.sum()
}

#[test]
fn the_reports_of_a_new_container_of_a_gateway_are_repeated_within_a_second() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let first = sandbox.attachment("c1", DUAL).added();
    let c1 = sandbox.netns("c1");
    run_in(&c1, "nft add table ip6 t");
    run_in(&c1, "nft add chain ip6 t in { type filter hook prerouting priority 0 ; }");
    run_in(&c1, "nft add rule ip6 t in icmpv6 type mld2-listener-report counter");
    let second = sandbox.attachment("c2", DUAL).added();
    assert_eq!(mld(&sandbox, "c2"), ("0".to_owned(), "1000".to_owned()));
    let deadline = Instant::now() + TIMEOUT;
    while reports_received(&sandbox, "c1") < 2 {
        assert!(Instant::now() < deadline, "{} reports", reports_received(&sandbox, "c1"));
    }
    first.del();
    second.del();
    sandbox.assert_detached();
}

#[test]
fn reports_are_left_to_the_kernel_where_a_bridge_or_a_switch_may_need_them() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let as_always = ("0".to_owned(), "10000".to_owned());
    let layer3 = r#"{"ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}"#;
    let first = sandbox.attachment("c1", layer3).added();
    assert_eq!(mld(&sandbox, "c1"), as_always, "the network may go on beyond the host");
    run_in(&sandbox.host, &format!("ip link set {} type bridge mcast_snooping 1", sandbox.bridge));
    let second = sandbox.attachment("c2", DUAL).added();
    assert_eq!(mld(&sandbox, "c2"), as_always, "the bridge snoops");
    first.del();
    second.del();
    run_in(&sandbox.host, &format!("ip link set {} type bridge mcast_snooping 0", sandbox.bridge));
    sandbox
        .netns("c1")
        .run(|| linux::sysctl::write("net/ipv6/conf/default/force_mld_version", "2"))
        .unwrap()
        .unwrap();
    let third = sandbox.attachment("c1", DUAL).added();
    let chosen = ("2".to_owned(), "10000".to_owned());
    assert_eq!(mld(&sandbox, "c1"), chosen, "the namespace's own settings");
    third.del();
    sandbox.assert_detached();
}

/// A general query of MLD (RFC 2710, 3) from fe80::1 to all nodes, with a maximum
/// delay of 1 ms and, against that document, no router alert: hosts ignore it, a
/// bridge that snoops does not.
fn forged_query() -> Vec<u8> {
    let address = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
    // Version 6, 32 bytes, hop-by-hop options (0), hop limit 1.
    let header = [0x60, 0, 0, 0, 0, 32, 0, 1];
    // ICMPv6 (58) follows; of options, padding alone.
    let options = [58, 0, 1, 4, 0, 0, 0, 0];
    let query = [130, 0, 0x80, 0x26, 0, 1, 0, 0];
    let any_group = [0; 16];
    [&header[..], &address("fe80::1"), &address("ff02::1"), &options, &query, &any_group].concat()
}

#[test]
fn a_forged_query_ends_no_neighbour_discovery() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let (c1, c2) = (sandbox.netns("c1"), sandbox.netns("c2"));
    // A bridge that snoops knows no group of c2, as if all had expired.
    run_in(&c2, "nft add table ip6 t");
    run_in(&c2, "nft add chain ip6 t out { type filter hook output priority 0 ; }");
    run_in(&c2, "nft add rule ip6 t out icmpv6 type mld2-listener-report drop");
    let [first, second] = ["c1", "c2"].map(|id| sandbox.attachment(id, DUAL).added());

    let index = Sandbox::ip(&c1, "link show dev eth0")[0]["ifindex"].as_u64().unwrap();
    let all_nodes = SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, u32::try_from(index).unwrap());
    let send = || {
        let socket = rustix::net::socket(AddressFamily::INET6, SocketType::RAW, Some(ipproto::RAW)).unwrap();
        rustix::net::sendto(&socket, &forged_query(), SendFlags::empty(), &all_nodes).unwrap();
    };
    c1.run(send).unwrap();

    let server = c2.run(|| UdpSocket::bind("[fd00:1::3]:5000").unwrap()).unwrap();
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    let client = c1.run(|| UdpSocket::bind("[fd00:1::2]:0").unwrap()).unwrap();
    // A bridge that snoops trusts the querier some ticks of its clock later.
    for _ in 0..20 {
        run_in(&c1, "ip -6 neigh flush dev eth0");
        client.send_to(b"x", "[fd00:1::3]:5000").unwrap();
        server.recv(&mut [0]).expect("c1 finds its neighbour");
    }
    first.del();
    second.del();
    sandbox.assert_detached();
}
