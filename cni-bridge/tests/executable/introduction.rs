//! How a segment learns the MAC of a container.

use std::net::{Ipv6Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use linux::netns::NetNs;
use rustix::io::retry_on_intr;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, RecvFlags, SocketType, ipproto};
use serde_json::json;

use crate::sandbox::{Attachment, DUAL, Sandbox, run_in};

const OTHER: &str = "02:00:00:00:00:99";
const TIMEOUT: Duration = Duration::from_secs(10);

fn mac(attachment: &Attachment<'_>) -> String {
    attachment.conf["prevResult"]["interfaces"][2]["mac"].as_str().unwrap().to_owned()
}

/// The MAC that `netns` has for an address.
fn known_mac(netns: &NetNs, address: &str) -> String {
    let entries = Sandbox::ip(netns, &format!("neigh show {address}"));
    entries[0]["lladdr"].as_str().unwrap().to_owned()
}

/// Waits: on a busy machine the kernel delivers frames some time after they were sent.
fn wait_until_known(netns: &NetNs, address: &str, mac: &str) {
    let deadline = Instant::now() + TIMEOUT;
    while known_mac(netns, address) != mac {
        assert!(Instant::now() < deadline, "{address} is {}, not {mac}", known_mac(netns, address));
    }
}

fn remember(netns: &NetNs, address: &str, link: &str) {
    run_in(netns, &format!("ip neigh replace {address} lladdr {OTHER} nud stale dev {link}"));
}

fn with_two_containers() -> Sandbox {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    sandbox
}

#[test]
fn the_mac_follows_from_the_only_ipv4_address_and_the_port_is_open_afterwards() {
    let sandbox = with_two_containers();
    let first = sandbox.attachment("c1", DUAL).added();
    assert_eq!(mac(&first), "0a:58:0a:01:00:02");
    let link = Sandbox::ip(&sandbox.netns("c1"), "link show dev eth0");
    assert_eq!(link[0]["address"], "0a:58:0a:01:00:02");
    let notify = run_in(&sandbox.netns("c1"), "cat /proc/sys/net/ipv4/conf/eth0/arp_notify");
    assert_eq!(notify.trim(), "1", "later changes are announced");
    let port = Sandbox::ip(&sandbox.host, &format!("-d link show dev {}", first.host_veth()));
    assert_eq!(port[0]["linkinfo"]["info_slave_data"]["locked"], false);
    first.is_fine("CHECK");

    let given = r#"{"ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}, "args": {"cni": {"mac": "02:00:00:00:07:89"}}}"#;
    let second = sandbox.attachment("c2", given).added();
    assert_eq!(mac(&second), "02:00:00:00:07:89");
    first.del();
    second.del();
    sandbox.assert_detached();
}

#[test]
fn several_ipv4_addresses_or_none_leave_the_mac_random() {
    let sandbox = with_two_containers();
    let two = r#"{"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.2.0.0/24"}]]}}"#;
    let none = r#"{"ipam": {"type": "host-local", "subnet": "fd00:1::/64"}}"#;
    for conf in [two, none] {
        let attached = sandbox.attachment("c1", conf).added();
        assert!(!mac(&attached).starts_with("0a:58:0a:"), "{}", mac(&attached));
        attached.is_fine("CHECK");
        attached.del();
    }
    sandbox.assert_detached();
}

#[test]
fn an_address_is_announced_if_the_host_knows_another_mac_for_it() {
    let sandbox = with_two_containers();
    let neighbour = sandbox.attachment("c2", DUAL).added();
    let (host, c2) = (&sandbox.host, sandbox.netns("c2"));
    remember(&c2, "10.1.0.3", "eth0");
    remember(host, "10.1.0.3", &sandbox.bridge);
    let attached = sandbox.attachment("c1", DUAL).added();
    assert_eq!(mac(&attached), "0a:58:0a:01:00:03");
    wait_until_known(&c2, "10.1.0.3", &mac(&attached));
    wait_until_known(host, "10.1.0.3", &mac(&attached));
    attached.del();
    neighbour.del();
    sandbox.assert_detached();
}

#[test]
fn a_mac_of_the_caller_and_a_container_without_ipv6_are_announced() {
    let sandbox = with_two_containers();
    let neighbour = sandbox.attachment("c2", DUAL).added();
    let (c1, c2) = (sandbox.netns("c1"), sandbox.netns("c2"));
    let with_mac =
        Attachment { args: "IgnoreUnknown=1;MAC=02:00:00:00:07:89", ..sandbox.attachment("c1", DUAL) };
    remember(&c2, "10.1.0.3", "eth0");
    let attached = with_mac.added();
    wait_until_known(&c2, "10.1.0.3", "02:00:00:00:07:89");
    attached.del();

    run_in(&c1, "sysctl -qw net.ipv6.conf.default.disable_ipv6=1");
    let v4 = r#"{"isGateway": true, "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}"#;
    remember(&c2, "10.1.0.4", "eth0");
    let attached = sandbox.attachment("c1", v4).added();
    assert_eq!(mac(&attached), "0a:58:0a:01:00:04");
    wait_until_known(&c2, "10.1.0.4", &mac(&attached));
    attached.del();
    neighbour.del();
    sandbox.assert_detached();
}

/// The host has no neighbour table for a bridge on which it has no address.
#[test]
fn every_address_is_announced_on_a_bridge_without_an_address_of_the_host() {
    let sandbox = with_two_containers();
    let switch = r#"{"ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}"#;
    let neighbour = sandbox.attachment("c2", switch).added();
    let c2 = sandbox.netns("c2");
    remember(&c2, "10.1.0.3", "eth0");
    let attached = sandbox.attachment("c1", switch).added();
    assert_eq!(mac(&attached), "0a:58:0a:01:00:03");
    wait_until_known(&c2, "10.1.0.3", &mac(&attached));
    attached.del();
    neighbour.del();
    sandbox.assert_detached();
}

/// Each broadcast would be handled by every container.
#[test]
fn nothing_is_announced_if_no_host_can_know_another_mac() {
    let sandbox = with_two_containers();
    let neighbour = sandbox.attachment("c2", DUAL).added();
    let c2 = sandbox.netns("c2");
    remember(&c2, "10.1.0.3", "eth0");
    let attached = sandbox.attachment("c1", DUAL).added();
    // Frames of c1 arrive in order: an announcement would have come before this one, which needs no ARP.
    let server = c2.run(|| UdpSocket::bind("[fd00:1::2]:5000").unwrap()).unwrap();
    server.set_read_timeout(Some(TIMEOUT)).unwrap();
    let client = sandbox.netns("c1").run(|| UdpSocket::bind("[fd00:1::3]:0").unwrap()).unwrap();
    client.send_to(b"x", "[fd00:1::2]:5000").unwrap();
    server.recv(&mut [0]).unwrap();
    assert_eq!(known_mac(&c2, "10.1.0.3"), OTHER);
    attached.del();
    neighbour.del();
    sandbox.assert_detached();
}

/// `dhcp` gets a lease for the MAC, and sends frames.
#[test]
fn an_ipam_plugin_that_may_use_the_link_keeps_its_mac() {
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24"}]});
    let sandbox = Sandbox::new().with_scripted_ipam(&result);
    let attached = sandbox.attachment("c1", r#"{"ipam": {"type": "scripted-ipam"}}"#).added();
    assert_ne!(mac(&attached), "0a:58:0a:01:00:09");
    attached.del();
    sandbox.assert_detached();
}

/// A switch that knew the MAC at another port learns the new one, although the container's
/// programs send nothing.
#[test]
fn a_container_that_is_not_announced_is_heard_by_all_the_same() {
    let sandbox = with_two_containers();
    let neighbour = sandbox.attachment("c2", DUAL).added();
    let c2 = sandbox.netns("c2");
    let index = Sandbox::ip(&c2, "link show dev eth0")[0]["ifindex"].as_u64().unwrap();
    let all_routers: Ipv6Addr = "ff02::16".parse().unwrap();
    let socket = c2
        .run(|| {
            let socket =
                rustix::net::socket(AddressFamily::INET6, SocketType::RAW, Some(ipproto::ICMPV6)).unwrap();
            sockopt::set_ipv6_add_membership(&socket, &all_routers, u32::try_from(index).unwrap()).unwrap();
            sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(TIMEOUT)).unwrap();
            socket
        })
        .unwrap();
    let attached = sandbox.attachment("c1", DUAL).added();
    // fe80::/64 and the MAC 0a:58:0a:01:00:03 (RFC 4291, appendix A).
    let wanted: Ipv6Addr = "fe80::858:aff:fe01:3".parse().unwrap();
    loop {
        let mut packet = [0; 2048];
        // A socket with a time-out is not read again by the kernel after a signal (signal(7)).
        let received = retry_on_intr(|| rustix::net::recvfrom(&socket, &mut packet[..], RecvFlags::empty()));
        let (_, _, sender) = received.expect("no report of c1 arrived");
        let sender = SocketAddr::try_from(sender.unwrap()).unwrap();
        if sender.ip() == wanted {
            break;
        }
    }
    attached.del();
    neighbour.del();
    sandbox.assert_detached();
}
