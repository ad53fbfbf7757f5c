//! Multicast between the containers of a bridge: neighbour discovery of IPv6 needs it.

use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::time::Duration;

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
