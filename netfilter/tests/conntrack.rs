//! Connection tracking against the kernel: real UDP flows, translated, within
//! a network namespace of each test's own.
#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use linux::netlink::{DuplicateDetection, Netlink};
use linux::netns::{self, NetNs};
use netfilter::conntrack::{Flows, delete};
use netfilter::nftables::{
    BaseChain, Batch, ChainKind, Family, Hook, Is, NfTables, Policy, Protocol, RuleBody,
};

/// Two containers and an address that is only an address, of each family.
const V4: [&str; 3] = ["10.9.0.2", "10.9.0.3", "10.9.0.9"];
const V6: [&str; 3] = ["fd00::2", "fd00::3", "fd00::9"];

const OUTPUT: BaseChain =
    BaseChain { kind: ChainKind::Nat, hook: Hook::Output, priority: -100, policy: Policy::Accept };

struct Namespace {
    dir: tempfile::TempDir,
    netns: NetNs,
}

impl Namespace {
    /// All addresses are its own.
    fn new() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let netns = netns::create_persistent(&dir.path().join("ns")).unwrap();
        let netlink = Netlink::open_in(&netns).unwrap();
        let lo = netlink.link_by_name("lo").unwrap().unwrap().index;
        netlink.set_up(lo).unwrap();
        for address in V4.iter().chain(&V6).map(|address| ip(address)) {
            let prefix = if address.is_ipv4() { 32 } else { 128 };
            netlink.add_address(lo, (address, prefix), DuplicateDetection::Off).unwrap();
        }
        netns.run(|| V6.iter().for_each(|address| wait_for_route_to(address))).unwrap();
        Self { dir, netns }
    }

    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        self.netns.run(work).unwrap()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        netns::remove_persistent(&self.dir.path().join("ns")).unwrap();
    }
}

/// The kernel makes the route of a new IPv6 address in its own time.
fn wait_for_route_to(address: &str) {
    let IpAddr::V6(address) = ip(address) else { panic!("{address} is of IPv6") };
    let hex = format!("{:032x} 80 ", address.to_bits());
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let routes = std::fs::read_to_string("/proc/thread-self/net/ipv6_route").unwrap();
        // The last but one column: RTF_LOCAL is the highest bit of the flags.
        let is_local = |line: &str| {
            let flags = line.split_whitespace().rev().nth(1).unwrap();
            u32::from_str_radix(flags, 16).unwrap() >> 31 == 1
        };
        if routes.lines().any(|line| line.starts_with(&hex) && is_local(line)) {
            return;
        }
        assert!(Instant::now() < deadline, "no route to {address}: {routes}");
        std::thread::yield_now();
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Replaces the rules: what goes to the address and port goes to the other.
fn translate(rules: &[(&str, u16, SocketAddr)]) {
    NfTables::open()
        .unwrap()
        .update(|nf| {
            let mut batch = Batch::new();
            for family in [Family::Ipv4, Family::Ipv6] {
                if nf.has_table(family, "t")? {
                    batch.delete_table(family, "t");
                }
                batch.add_table(family, "t", None).add_chain(family, "t", "out", Some(&OUTPUT), None);
            }
            for (address, port, target) in rules {
                let (address, prefix, family) = match ip(address) {
                    v4 @ IpAddr::V4(_) => (v4, 32, Family::Ipv4),
                    v6 @ IpAddr::V6(_) => (v6, 128, Family::Ipv6),
                };
                let body = RuleBody::new(family)
                    .daddr(Is::Equal, address, prefix)
                    .dport(Protocol::Udp, Is::Equal, *port)
                    .dnat(*target);
                batch.append_rule(family, "t", "out", &body.build(), None);
            }
            linux::Result::Ok((batch, ()))
        })
        .unwrap();
}

fn server(address: &str) -> UdpSocket {
    let socket = UdpSocket::bind((ip(address), 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket
}

fn client(address: &str) -> UdpSocket {
    UdpSocket::bind((ip(address), 0)).unwrap()
}

fn send(from: &UdpSocket, address: &str, port: u16, to: &UdpSocket) {
    from.send_to(b"x", (ip(address), port)).unwrap();
    let mut buffer = [0; 8];
    assert_eq!(to.recv(&mut buffer).unwrap(), 1);
}

fn flows(port: u16, destination: Option<&str>, reply_source: Option<&str>) -> Flows {
    Flows {
        udp_port: Some(port),
        destination: destination.map(ip),
        reply_source: reply_source.map(ip),
        ..Flows::default()
    }
}

fn only_the_flows_that_are_meant_go([one, two, other]: [&str; 3]) {
    let (first, second) = (server(one), server(two));
    let (to_first, to_second) = (first.local_addr().unwrap(), second.local_addr().unwrap());
    translate(&[(one, 7000, to_first), (other, 7000, to_second), (one, 7001, to_first)]);
    let client = client(two);
    let start_all = || {
        send(&client, one, 7000, &first);
        send(&client, other, 7000, &second);
        send(&client, one, 7001, &first);
    };

    start_all();
    assert_eq!(delete(&[flows(7000, None, Some(one))]).unwrap(), 1);
    assert_eq!(delete(&[flows(7000, None, Some(one))]).unwrap(), 0);
    assert_eq!(delete(&[flows(7000, None, None)]).unwrap(), 1, "the other of this port was left");
    assert_eq!(delete(&[flows(7001, None, None)]).unwrap(), 1, "and that of the other port");

    start_all();
    assert_eq!(delete(&[flows(7000, Some(other), None)]).unwrap(), 1);
    assert_eq!(delete(&[flows(7000, Some(other), Some(one))]).unwrap(), 0);
    assert_eq!(delete(&[flows(7000, Some(one), Some(one)), flows(7001, None, None)]).unwrap(), 2);

    start_all();
    assert_eq!(delete(&[]).unwrap(), 0);
    assert_eq!(delete(&[flows(7002, None, None), flows(7000, None, None)]).unwrap(), 2);
    assert_eq!(delete(&[flows(7001, None, Some(one)), flows(7000, None, Some(one))]).unwrap(), 1);

    start_all();
    let listener = TcpListener::bind((ip(two), 0)).unwrap();
    drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
    let begun_by = |addresses: &[&str]| addresses.iter().map(|a| Flows::begun_by(ip(a))).collect::<Vec<_>>();
    assert_eq!(delete(&begun_by(&[one])).unwrap(), 0, "it only answered");
    assert_eq!(delete(&begun_by(&[two])).unwrap(), 4, "those of UDP, and the one of TCP");
    start_all();
    assert_eq!(delete(&begun_by(&[one, two])).unwrap(), 3);
}

#[test]
fn only_the_flows_that_are_meant_go_v4() {
    Namespace::new().run(|| only_the_flows_that_are_meant_go(V4));
}

#[test]
fn only_the_flows_that_are_meant_go_v6() {
    Namespace::new().run(|| only_the_flows_that_are_meant_go(V6));
}

#[test]
fn a_flow_without_its_entry_follows_the_rules_of_its_next_packet() {
    Namespace::new().run(|| {
        let (first, second) = (server(V4[0]), server(V4[1]));
        let client = client(V4[2]);
        translate(&[(V4[2], 7000, first.local_addr().unwrap())]);
        send(&client, V4[2], 7000, &first);
        translate(&[(V4[2], 7000, second.local_addr().unwrap())]);
        send(&client, V4[2], 7000, &first);
        assert_eq!(delete(&[flows(7000, None, Some(V4[0]))]).unwrap(), 1);
        send(&client, V4[2], 7000, &second);
    });
}

#[test]
fn both_families_are_meant_where_no_address_says_which() {
    Namespace::new().run(|| {
        let (first, second) = (server(V4[0]), server(V6[0]));
        translate(&[(V4[2], 7000, first.local_addr().unwrap()), (V6[2], 7000, second.local_addr().unwrap())]);
        send(&client(V4[1]), V4[2], 7000, &first);
        send(&client(V6[1]), V6[2], 7000, &second);
        assert_eq!(delete(&[flows(7000, None, None)]).unwrap(), 2);
    });
}

/// More than one dump shows of both families.
#[test]
fn of_many_entries_those_of_both_families_go() {
    Namespace::new().run(|| {
        let (first, second) = (server(V4[0]), server(V6[0]));
        translate(&[(V4[2], 7000, first.local_addr().unwrap()), (V6[2], 7000, second.local_addr().unwrap())]);
        let (of_v4, of_v6) = (client(V4[1]), client(V6[1]));
        send(&of_v4, V4[2], 7000, &first);
        send(&of_v6, V6[2], 7000, &second);
        let ports = 10_000..15_000;
        for port in ports.clone() {
            // ECONNREFUSED of an earlier one, perhaps: no socket has these ports.
            let _sent_or_refused = of_v4.send_to(b"x", (ip(V4[2]), port));
        }
        let begun_by = [V4[1], V6[1]].map(|address| Flows::begun_by(ip(address)));
        assert_eq!(delete(&[flows(7000, None, None)]).unwrap(), 2);
        assert_eq!(delete(&begun_by).unwrap(), ports.len());
        assert_eq!(delete(&begun_by).unwrap(), 0);
    });
}
