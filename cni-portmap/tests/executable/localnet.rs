//! 127.0.0.1 of the host: its own processes reach mapped ports by it, and no pod
//! reaches it, though `route_localnet` is set on the bridge.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use linux::netns::NetNs;
use serde_json::json;

use crate::sandbox::{A, Attachment, HOST, Sandbox, Server, connect, ip, udp};

const PORTS: &str = r#"{"runtimeConfig": {"portMappings": [
    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
    {"hostPort": 8053, "containerPort": 53, "protocol": "udp"}
]}}"#;

/// A service of the host on 127.0.0.1, and one on all of its addresses.
const SERVICE: &str = "127.0.0.1:7777";
const EVERY_ADDRESS: &str = "0.0.0.0:7778";
const LOOPBACK: &str = "127.0.0.1:7778";
const BRIDGE: &str = "10.7.2.1:7778";

const EVERYTHING: [&str; 4] =
    ["TCP to 127.0.0.1", "UDP to 127.0.0.1", "UDP from 127.0.0.2", "UDP from 127.0.0.2 to 127.0.0.1"];
const NOTHING: [&str; 0] = [];

/// For what must not arrive. All is one machine: what is not there after this
/// was dropped.
const SILENCE: Duration = Duration::from_millis(300);

#[derive(Clone, Copy, Debug)]
enum Backend {
    Nftables,
    /// `nftables` with conditions that only the program nft understands.
    Script,
    Iptables,
    LegacyIptables,
}

impl Backend {
    const ALL: [Self; 4] = [Self::Nftables, Self::Script, Self::Iptables, Self::LegacyIptables];

    fn attachment(self, sandbox: &Sandbox) -> Attachment<'_> {
        let attachment = sandbox.attachment("cid", A, PORTS);
        match self {
            Self::Nftables => attachment,
            Self::Script => {
                attachment.with(json!({"conditionsV4": ["ip saddr != { 192.0.2.3, 192.0.2.4 }"]}))
            }
            Self::Iptables => attachment.with(json!({"backend": "iptables"})),
            Self::LegacyIptables => attachment.with(json!({"backend": "iptables"})).legacy_iptables(),
        }
    }

    /// Commands for the host that make the guard do nothing, one by one.
    fn without_guard(self) -> Vec<(&'static str, &'static str)> {
        let (program, flush, leave) = match self {
            Self::Nftables | Self::Script => {
                return vec![("nft", "flush chain ip cni_hostport localnet_guard")];
            }
            Self::Iptables => ("iptables", "-t mangle -F CNI-HOSTPORT-GUARD", "-t mangle -F PREROUTING"),
            Self::LegacyIptables => {
                ("iptables-legacy", "-t mangle -F CNI-HOSTPORT-GUARD", "-t mangle -F PREROUTING")
            }
        };
        vec![(program, flush), (program, leave)]
    }

    /// A rule before the guard's, as an administrator adds one, and how to list it.
    fn exception(self) -> [(&'static str, &'static str); 2] {
        match self {
            Self::Nftables | Self::Script => [
                ("nft", "insert rule ip cni_hostport localnet_guard iifname br0 accept"),
                ("nft", "list chain ip cni_hostport localnet_guard"),
            ],
            Self::Iptables => [
                ("iptables", "-t mangle -I CNI-HOSTPORT-GUARD -i br0 -j RETURN"),
                ("iptables", "-t mangle -S"),
            ],
            Self::LegacyIptables => [
                ("iptables-legacy", "-t mangle -I CNI-HOSTPORT-GUARD -i br0 -j RETURN"),
                ("iptables-legacy", "-t mangle -S"),
            ],
        }
    }
}

/// A pod that sends to 127.0.0.1 and from 127.0.0.0/8 by its link.
struct Attacker {
    pod: NetNs,
    service: TcpListener,
    datagrams: UdpSocket,
}

impl Attacker {
    fn new(sandbox: &Sandbox) -> Self {
        let pod = sandbox.pod(A);
        pod.run(|| linux::sysctl::write("net/ipv4/conf/all/route_localnet", "1").unwrap()).unwrap();
        ip(&pod, "addr del 127.0.0.1/8 dev lo");
        ip(&pod, "route add 127.0.0.1/32 via 10.7.2.1");
        ip(&pod, "addr add 127.0.0.2/32 dev eth0");
        // As it is where the administrator has not set it: a strict filter drops false sources itself.
        let lax = || {
            for link in ["all", "br0"] {
                linux::sysctl::write(&format!("net/ipv4/conf/{link}/rp_filter"), "0").unwrap();
            }
        };
        sandbox.host.run(lax).unwrap();
        let service = sandbox.host.run(|| TcpListener::bind(SERVICE).unwrap()).unwrap();
        let datagrams = udp(&sandbox.host, EVERY_ADDRESS);
        Self { pod, service, datagrams }
    }

    fn connects(&self) -> bool {
        let address: SocketAddr = SERVICE.parse().unwrap();
        match self.pod.run(|| TcpStream::connect_timeout(&address, SILENCE)).unwrap() {
            Ok(_) => {
                self.service.accept().unwrap();
                true
            }
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::TimedOut, "{e}");
                false
            }
        }
    }

    /// Which datagrams arrive: all ways to misuse 127.0.0.0/8, and last one that
    /// is in order, behind which no other comes.
    fn datagrams_that_arrive(&self) -> Vec<String> {
        const IN_ORDER: &str = "in order";
        for (from, to, text) in [
            ("10.7.2.4", LOOPBACK, EVERYTHING[1]),
            ("127.0.0.2", BRIDGE, EVERYTHING[2]),
            ("127.0.0.2", LOOPBACK, EVERYTHING[3]),
            ("10.7.2.4", BRIDGE, IN_ORDER),
        ] {
            udp(&self.pod, &format!("{from}:0")).send_to(text.as_bytes(), to).unwrap();
        }
        let mut texts = Vec::new();
        loop {
            let mut buffer = [0; 64];
            let (length, _) = self.datagrams.recv_from(&mut buffer).unwrap();
            match String::from_utf8_lossy(&buffer[..length]).into_owned() {
                text if text == IN_ORDER => return texts,
                text => texts.push(text),
            }
        }
    }

    fn reaches(&self) -> Vec<String> {
        let by_tcp = self.connects().then(|| EVERYTHING[0].to_owned());
        by_tcp.into_iter().chain(self.datagrams_that_arrive()).collect()
    }
}

fn run(sandbox: &Sandbox, (program, words): (&str, &str)) -> String {
    sandbox.host_output(program, words)
}

#[test]
fn a_pod_reaches_no_service_of_the_host_on_127_0_0_1_nor_comes_from_there() {
    for backend in Backend::ALL {
        let sandbox = Sandbox::connected();
        let attachment = backend.attachment(&sandbox);
        attachment.add();
        let attacker = Attacker::new(&sandbox);
        assert_eq!(attacker.reaches(), NOTHING, "{backend:?}");
        // DEL takes neither the setting nor the guard away.
        attachment.del();
        assert_eq!(attacker.reaches(), NOTHING, "{backend:?}");
        for command in backend.without_guard() {
            run(&sandbox, command);
        }
        assert_eq!(attacker.reaches(), EVERYTHING, "{backend:?}: without the guard, all of it arrives");
    }
}

#[test]
fn the_host_reaches_mapped_ports_by_127_0_0_1() {
    for backend in Backend::ALL {
        let sandbox = Sandbox::connected();
        backend.attachment(&sandbox).add();
        let server = Server::start(&sandbox.pod(A), 80);
        assert_eq!(server.peer_of(&sandbox.host, "127.0.0.1:8080").to_string(), "10.7.2.1", "{backend:?}");
        let (pod, client) = (udp(&sandbox.pod(A), "0.0.0.0:53"), udp(&sandbox.host, "127.0.0.1:0"));
        client.connect("127.0.0.1:8053").unwrap();
        client.send(b"question").unwrap();
        let mut buffer = [0; 16];
        let (_, sender) = pod.recv_from(&mut buffer).unwrap();
        assert_eq!(sender.ip().to_string(), "10.7.2.1", "{backend:?}");
        pod.send_to(b"answer", sender).unwrap();
        let length = client.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..length], b"answer", "{backend:?}");
    }
}

#[test]
fn check_misses_the_guard_and_add_repairs_it() {
    for backend in Backend::ALL {
        let sandbox = Sandbox::connected();
        let attachment = backend.attachment(&sandbox);
        attachment.add();
        attachment.succeeds("CHECK");
        for command in backend.without_guard() {
            run(&sandbox, command);
            let (code, msg) = attachment.refused("CHECK");
            assert_eq!(code, 999, "{backend:?}");
            assert!(msg.contains("localnet_guard") || msg.contains("table mangle"), "{msg}");
            attachment.add();
            attachment.succeeds("CHECK");
        }
        let attacker = Attacker::new(&sandbox);
        assert_eq!(attacker.reaches(), NOTHING, "{backend:?}");
    }
}

#[test]
fn an_administrators_exception_stays_and_nothing_is_doubled() {
    for backend in Backend::ALL {
        let sandbox = Sandbox::connected();
        let attachment = backend.attachment(&sandbox);
        attachment.add();
        let [make, list] = backend.exception();
        run(&sandbox, make);
        let before = run(&sandbox, list);
        attachment.add();
        attachment.succeeds("CHECK");
        assert_eq!(run(&sandbox, list), before);
        let attacker = Attacker::new(&sandbox);
        assert_eq!(attacker.reaches(), EVERYTHING, "{backend:?}");
    }
}

/// As a VRF device has one; and rules that lead to 127.0.0.1.
#[test]
fn what_an_administrator_lets_in_by_another_link_is_still_reached() {
    for backend in Backend::ALL {
        let sandbox = Sandbox::connected();
        backend.attachment(&sandbox).add();
        for netns in [&sandbox.host, &sandbox.outside] {
            netns.run(|| linux::sysctl::write("net/ipv4/conf/all/route_localnet", "1").unwrap()).unwrap();
        }
        ip(&sandbox.host, "addr add 127.5.0.1/32 dev ext0");
        ip(&sandbox.outside, "addr del 127.0.0.1/8 dev lo");
        for address in ["127.5.0.1/32", SERVICE.split_once(':').unwrap().0] {
            ip(&sandbox.outside, &format!("route add {address} dev eth0"));
        }
        let service = sandbox.host.run(|| TcpListener::bind("127.5.0.1:7000").unwrap()).unwrap();
        connect(&sandbox.outside, "127.5.0.1:7000").unwrap();
        service.accept().unwrap();
        let attacker = Attacker::new(&sandbox);
        let rewrite = "iifname ext0 tcp dport 9000 dnat to 127.0.0.1:7777";
        let hook = "type nat hook prerouting priority dstnat;";
        sandbox.nft(&format!("table ip own {{ chain prerouting {{ {hook} {rewrite}; }}; }}"));
        connect(&sandbox.outside, &format!("{HOST}:9000")).unwrap();
        attacker.service.accept().unwrap();
        ip(&attacker.pod, "route add 127.5.0.1/32 via 10.7.2.1");
        for (client, address) in [(&attacker.pod, "127.5.0.1:7000"), (&sandbox.outside, SERVICE)] {
            let address: SocketAddr = address.parse().unwrap();
            let error = client.run(|| TcpStream::connect_timeout(&address, SILENCE)).unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{backend:?} {address}: {error}");
        }
    }
}

#[test]
fn where_the_guard_cannot_be_made_the_setting_stays_off() {
    let sandbox = Sandbox::connected();
    sandbox.nft("table ip cni_hostport { chain localnet_guard { type filter hook input priority 0; }; }");
    let (code, msg) = sandbox.attachment("cid", A, PORTS).refused("ADD");
    assert_eq!(code, 999);
    assert!(msg.ends_with("and must be \"type filter hook prerouting priority -300\""), "{msg}");
    // iptables refuses what it cannot match.
    sandbox.nft("table ip mangle { chain PREROUTING { type nat hook prerouting priority -100; }; }");
    let (code, msg) = sandbox.attachment("cid", A, PORTS).with(json!({"backend": "iptables"})).refused("ADD");
    assert_eq!(code, 999);
    assert!(msg.starts_with("unable to setup DNAT: ") && msg.contains("chain PREROUTING"), "{msg}");
    let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
    assert_eq!(sandbox.host.run(|| std::fs::read_to_string(setting).unwrap()).unwrap(), "0\n");
}

#[test]
fn without_snat_there_is_no_guard() {
    for backend in Backend::ALL {
        let sandbox = Sandbox::connected();
        let attachment = backend.attachment(&sandbox).with(json!({"snat": false}));
        attachment.add();
        attachment.succeeds("CHECK");
        assert!(!sandbox.ruleset().contains("guard"), "{}", sandbox.ruleset());
        let tables = run(&sandbox, ("cat", "/proc/thread-self/net/ip_tables_names"));
        assert!(!tables.contains("mangle"), "{backend:?}: {tables}");
    }
}
