//! Containers that advertise themselves as IPv6 routers (RFC 4861, 4.2), or claim addresses
//! (RFC 4862, 5.4).

use std::net::{Ipv6Addr, SocketAddrV6, UdpSocket};
use std::time::Duration;

use linux::netns::NetNs;
use rustix::net::{AddressFamily, SendFlags, SocketType, ipproto, sockopt};
use serde_json::Value;

use crate::sandbox::{DUAL, Sandbox, run_in};

/// To all nodes: hop limit 64, preference high, half an hour as a router; and prefix
/// 2001:db8:99::/64 on the link, with addresses to be made of it (4.6.2).
fn advertise(netns: &NetNs) {
    let mut message = vec![134, 0, 0, 0, 64, 0x08, 0x07, 0x08, 0, 0, 0, 0, 0, 0, 0, 0];
    message.extend([3, 4, 64, 0xc0, 0, 0, 0x07, 0x08, 0, 0, 0x07, 0x08, 0, 0, 0, 0]);
    message.extend("2001:db8:99::".parse::<Ipv6Addr>().unwrap().octets());
    let index = Sandbox::ip(netns, "link show eth0")[0]["ifindex"].as_u64().unwrap();
    let index = u32::try_from(index).unwrap();
    let send = || {
        let protocol = Some(ipproto::ICMPV6);
        let socket = rustix::net::socket(AddressFamily::INET6, SocketType::RAW, protocol).unwrap();
        sockopt::set_ipv6_multicast_hops(&socket, 255).unwrap();
        let all_nodes = SocketAddrV6::new("ff02::1".parse().unwrap(), 0, 0, index);
        rustix::net::sendto(&socket, &message, SendFlags::empty(), &all_nodes).unwrap();
    };
    netns.run(send).unwrap();
}

#[test]
fn no_container_becomes_the_router_of_another_one() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let [first, second] = ["c1", "c2"].map(|id| sandbox.attachment(id, DUAL).added());
    let (c1, c2) = (sandbox.netns("c1"), sandbox.netns("c2"));
    let before = run_in(&c2, "ip -6 route show");
    let server = c2.run(|| UdpSocket::bind("10.1.0.3:5000").unwrap()).unwrap();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    advertise(&c1);
    // What was sent before it has arrived when it has.
    c1.run(|| UdpSocket::bind("10.1.0.2:0").unwrap().send_to(b"x", "10.1.0.3:5000").unwrap()).unwrap();
    server.recv(&mut [0]).unwrap();
    assert_eq!(run_in(&c2, "ip -6 route show"), before);
    first.del();
    second.del();
    sandbox.assert_detached();
}

/// While the kernel looks for duplicates of an address, any answer takes it away.
#[test]
fn no_container_can_claim_the_link_local_address_of_a_new_bridge() {
    let sandbox = Sandbox::new().with_host_local();
    let added = sandbox.attachment("c1", DUAL).added();
    let addresses = Sandbox::ip(&sandbox.host, &format!("-6 addr show dev {} scope link", sandbox.bridge));
    let addresses = addresses[0]["addr_info"].as_array().unwrap();
    let address = addresses.iter().find(|address| address["family"] == "inet6").expect("IPv6 is on");
    assert_eq!((&address["tentative"], &address["dadfailed"]), (&Value::Null, &Value::Null), "{address}");
    let accept = format!("cat /proc/sys/net/ipv6/conf/{}/accept_dad", sandbox.bridge);
    assert_eq!(run_in(&sandbox.host, &accept).trim(), "0");
    added.del();
    sandbox.assert_detached();
}
