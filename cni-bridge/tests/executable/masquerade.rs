//! ipMasq: what the far end sees, and which rules make it so.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, SocketAddrV6, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use linux::netns::NetNs;
use serde_json::json;

use crate::sandbox::{Attachment, DUAL, Sandbox, run_in};

const TIMEOUT: Duration = Duration::from_secs(5);
const RESEND_AFTER: Duration = Duration::from_millis(250);

fn masqueraded<'a>(sandbox: &'a Sandbox, id: &str) -> Attachment<'a> {
    let mut attachment = sandbox.attachment(id, DUAL);
    attachment.conf["ipMasq"] = json!(true);
    attachment
}

/// The address that a server in `server` sees of a client in `client`.
fn seen_by(server: &NetNs, client: &NetNs, address: &str) -> IpAddr {
    let address: SocketAddr = address.parse().unwrap();
    let listener = server.run(|| TcpListener::bind(address).unwrap()).unwrap();
    let stream = client.run(|| TcpStream::connect_timeout(&address, TIMEOUT).unwrap()).unwrap();
    drop(stream);
    listener.accept().unwrap().1.ip()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

const WORLD: [&str; 2] = ["198.51.100.2:80", "[2001:db8::2]:80"];
const HOST: [&str; 2] = ["198.51.100.1", "2001:db8::1"];

#[test]
fn the_world_sees_the_host_and_a_neighbour_sees_the_container() {
    for backend in ["", "nftables", "iptables"] {
        let mut sandbox = Sandbox::new().with_host_local().with_world();
        sandbox.add_container("c2");
        let mut first = masqueraded(&sandbox, "c1");
        let mut second = masqueraded(&sandbox, "c2");
        first.conf["ipMasqBackend"] = json!(backend);
        second.conf["ipMasqBackend"] = json!(backend);
        let (first, second) = (first.added(), second.added());
        let (c1, c2, world) = (sandbox.netns("c1"), sandbox.netns("c2"), sandbox.netns("world"));
        for (address, host) in WORLD.iter().zip(HOST) {
            assert_eq!(seen_by(&world, &c1, address), ip(host), "{backend}");
        }
        assert_eq!(seen_by(&c2, &c1, "10.1.0.3:80"), ip("10.1.0.2"), "{backend}");
        assert_eq!(seen_by(&c2, &c1, "[fd00:1::3]:80"), ip("fd00:1::2"), "{backend}");
        first.is_fine("CHECK");
        first.del();
        second.is_fine("CHECK");
        assert_eq!(seen_by(&world, &c2, WORLD[0]), ip(HOST[0]), "the other one's rules stay");
        second.del();
        sandbox.assert_detached();
    }
}

/// Begins a UDP flow from `address` of `container` to `far` in the world. Returns the
/// container's socket, the world's, and where the world sends its answers.
fn begin_flow(
    sandbox: &Sandbox,
    container: &str,
    address: &str,
    far: &str,
) -> (UdpSocket, UdpSocket, SocketAddr) {
    let bind = |netns: &str, address: SocketAddr| {
        let socket = sandbox.netns(netns).run(|| UdpSocket::bind(address).unwrap()).unwrap();
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        socket
    };
    let far: SocketAddr = far.parse().unwrap();
    let (near, world) = (bind(container, SocketAddr::new(ip(address), 45000)), bind("world", far));
    near.send_to(b"question", far).unwrap();
    let (_, host) = world.recv_from(&mut [0; 16]).unwrap();
    (near, world, host)
}

#[test]
fn a_container_gets_no_answer_to_the_one_that_had_its_address_before() {
    const ADDRESSES: [&str; 2] = ["10.1.0.2", "fd00:1::2"];
    let ends: [fn(Attachment<'_>); 3] = [
        |mut of_rules| {
            of_rules.conf["prevResult"] = json!(null);
            of_rules.netns = String::new();
            of_rules.del();
        },
        |of_result| {
            run_in(&of_result.sandbox.host, "nft flush ruleset");
            of_result.del();
        },
        |collected| collected.collect(&[]),
    ];
    for end in ends {
        let mut sandbox = Sandbox::new().with_host_local().with_world();
        sandbox.add_container("c2");
        let first = masqueraded(&sandbox, "c1").added();
        for address in WORLD {
            seen_by(&sandbox.netns("world"), &sandbox.netns("c1"), address);
        }
        let far = ["198.51.100.2:6000", "[2001:db8::2]:6000"];
        let before = [0, 1].map(|at| begin_flow(&sandbox, "c1", ADDRESSES[at], far[at]));
        end(first);

        let mut second = masqueraded(&sandbox, "c2");
        second.conf["args"] = json!({"cni": {"ips": ADDRESSES}});
        let second = second.added();
        let far = ["198.51.100.2:6001", "[2001:db8::2]:6001"];
        for (at, (_, world, host)) in before.iter().enumerate() {
            let (near, other, same_host) = begin_flow(&sandbox, "c2", ADDRESSES[at], far[at]);
            world.send_to(b"to the first", host).unwrap();
            other.send_to(b"to the second", same_host).unwrap();
            let mut answer = [0; 16];
            let length = near.recv(&mut answer).unwrap();
            assert_eq!(String::from_utf8_lossy(&answer[..length]), "to the second");
        }
        second.del();
        sandbox.assert_detached();
    }
}

#[test]
fn a_late_end_leaves_the_flows_of_the_next_container_with_the_address() {
    const ADDRESS: &str = "10.1.0.2";
    // What a killed DEL of the reference leaves: it frees the address first.
    const LEFT: &str = r#"add rule inet cni_plugins_masquerade masq_checks ip saddr 10.1.0.2 ip daddr != 10.1.0.0/24 masquerade comment "a4861f4ae9f7d238-f4d01f2ef4b92245, net: net, if: eth0, id: c1""#;
    let mut sandbox = Sandbox::new().with_host_local().with_world();
    sandbox.add_container("c2");
    let first = masqueraded(&sandbox, "c1").added();
    first.del();
    let mut second = masqueraded(&sandbox, "c2");
    second.conf["args"] = json!({"cni": {"ips": [ADDRESS, "fd00:1::2"]}});
    let second = second.added();
    seen_by(&sandbox.netns("world"), &sandbox.netns("c2"), WORLD[0]);
    let (near, world, host) = begin_flow(&sandbox, "c2", ADDRESS, "198.51.100.2:6000");
    let is_answered = |answer: &[u8]| {
        world.send_to(answer, host).unwrap();
        let mut received = [0; 16];
        let length = near.recv(&mut received).unwrap();
        assert_eq!(&received[..length], answer);
    };
    first.del();
    is_answered(b"after DEL");
    sandbox.nft(LEFT);
    first.del();
    is_answered(b"after the rule");
    sandbox.nft(LEFT);
    second.collect(&[("c2", "eth0")]);
    assert_eq!(sandbox.rules_with("id: c1").len(), 0);
    is_answered(b"after GC");
    second.del();
    sandbox.assert_detached();
}

/// IPv6: a kernel may be built without multicast of IPv4.
#[test]
fn multicast_keeps_its_source() {
    let sandbox = Sandbox::new().with_host_local().with_world();
    let attachment = masqueraded(&sandbox, "c1").added();
    // The host speaks with the container's address: bridges do not route multicast.
    run_in(&sandbox.netns("c1"), "ip link del eth0");
    run_in(&sandbox.host, "ip addr add fd00:1::2/128 dev up0 nodad");
    let index = |netns: &NetNs, name: &str| {
        let link = &Sandbox::ip(netns, &format!("link show dev {name}"))[0];
        u32::try_from(link["ifindex"].as_u64().unwrap()).unwrap()
    };
    let group = "ff0e::1234".parse().unwrap();
    let (up0, up1) = (index(&sandbox.host, "up0"), index(&sandbox.netns("world"), "up1"));
    let world = sandbox.netns("world").run(|| {
        let socket = UdpSocket::bind("[::]:5000").unwrap();
        socket.join_multicast_v6(&group, up1).unwrap();
        socket.set_read_timeout(Some(RESEND_AFTER)).unwrap();
        socket
    });
    let world = world.unwrap();
    let host = sandbox.host.run(|| UdpSocket::bind("[fd00:1::2]:0").unwrap()).unwrap();
    let began = std::time::Instant::now();
    let far = "2001:db8::2".parse().unwrap();
    for (destination, source) in [(group, "fd00:1::2"), (far, HOST[1])] {
        // The kernel drops what is sent before it has noticed the carrier of `up0`.
        let (_, from) = loop {
            host.send_to(b"ahoy", SocketAddrV6::new(destination, 5000, 0, up0)).unwrap();
            match world.recv_from(&mut [0; 8]) {
                Err(e) if e.kind() == ErrorKind::WouldBlock && began.elapsed() < TIMEOUT => {}
                received => break received.unwrap(),
            }
        };
        assert_eq!(from.ip(), ip(source), "{destination}");
    }
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn the_rules_are_the_references_and_a_second_attachment_adds_only_its_own() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    masqueraded(&sandbox, "c1").add();
    let expected = r#"table inet cni_plugins_masquerade {
comment "Masquerading for plugins from github.com/containernetworking/plugins"
chain masq_checks {
comment "Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet"
ip saddr 10.1.0.2 ip daddr != 10.1.0.0/24 masquerade comment "a4861f4ae9f7d238-f4d01f2ef4b92245, net: net, if: eth0, id: c1"
ip6 saddr fd00:1::2 ip6 daddr != fd00:1::/64 masquerade comment "a4861f4ae9f7d238-f4d01f2ef4b92245, net: net, if: eth0, id: c1"
}
chain postrouting {
type nat hook postrouting priority srcnat; policy accept;
ip daddr 224.0.0.0/4 return
ip6 daddr ff00::/8 return
goto masq_checks
}
}"#;
    let expected: Vec<&str> = expected.lines().collect();
    assert_eq!(sandbox.rules(), expected);
    masqueraded(&sandbox, "c2").add();
    let rules = sandbox.rules();
    assert_eq!(rules.iter().filter(|line| !line.contains("id: c2")).collect::<Vec<_>>(), expected);
    assert_eq!(rules.len(), expected.len() + 2);
    for id in ["c1", "c2"] {
        masqueraded(&sandbox, id).del();
    }
    sandbox.assert_detached();
    assert_eq!(sandbox.rules().len(), expected.len() - 2, "the table stays for the next one");
}

#[test]
fn stale_rules_of_the_same_attachment_are_replaced_and_foreign_ones_stay() {
    let sandbox = Sandbox::new().with_host_local();
    sandbox.nft(
        r#"table inet cni_plugins_masquerade {
            chain masq_checks {
                ip saddr 10.9.9.9 ip daddr != 10.9.9.0/24 masquerade comment "a4861f4ae9f7d238-f4d01f2ef4b92245, net: net, if: eth0, id: c1"
                ip saddr 10.9.9.8 ip daddr != 10.9.9.0/24 masquerade comment "a4861f4ae9f7d238-0000000000000000, net: net, if: eth0, id: other"
            }
            chain postrouting {
                type nat hook postrouting priority srcnat; policy accept;
                ip daddr 203.0.113.1 return comment "by the administrator"
            }
        }"#,
    );
    let attachment = masqueraded(&sandbox, "c1");
    attachment.add();
    let rules = sandbox.rules();
    let has = |part: &str| rules.iter().any(|line| line.contains(part));
    assert!(!has("10.9.9.9") && has("10.9.9.8") && has("by the administrator"), "{rules:#?}");
    assert!(has("ip saddr 10.1.0.2 ") && has("goto masq_checks"), "{rules:#?}");
    attachment.del();
    assert_eq!(sandbox.rules_with("masquerade comment").len(), 1);
}

/// A chain `postrouting` where packets do not come by as they have to, in
/// nft's words, and in the error's.
const ELSEWHERE: [(&str, &str); 4] = [
    ("", "in no hook"),
    ("type nat hook postrouting priority 0;", "\"type nat hook postrouting priority 0\""),
    ("type nat hook input priority 100;", "\"type nat hook input priority 100\""),
    ("type filter hook output priority 100;", "\"type filter hook output priority 100\""),
];

fn wrong_hook(found: &str) -> String {
    format!(
        "chain inet cni_plugins_masquerade postrouting is {found} and must be \"type nat hook postrouting priority 100\""
    )
}

/// The rules are there, and packets do not come by.
fn put_elsewhere(sandbox: &Sandbox, hook: &str) {
    sandbox.nft(&format!(
        "add table inet cni_plugins_masquerade
        add chain inet cni_plugins_masquerade masq_checks
        add chain inet cni_plugins_masquerade postrouting
        flush chain inet cni_plugins_masquerade postrouting
        delete chain inet cni_plugins_masquerade postrouting
        table inet cni_plugins_masquerade {{
            chain postrouting {{
                {hook}
                ip daddr 224.0.0.0/4 return
                ip6 daddr ff00::/8 return
                goto masq_checks
            }}
        }}"
    ));
}

#[test]
fn add_refuses_a_base_chain_that_hooks_in_elsewhere_and_leaves_it_alone() {
    let sandbox = Sandbox::new().with_host_local();
    for (hook, found) in ELSEWHERE {
        for with_rules in [true, false] {
            put_elsewhere(&sandbox, hook);
            if !with_rules {
                run_in(&sandbox.host, "nft flush chain inet cni_plugins_masquerade postrouting");
            }
            let before = sandbox.rules();
            let attachment = masqueraded(&sandbox, "c1");
            let refusal = format!("failed to change the rules of nf_tables: {}", wrong_hook(found));
            assert_eq!(attachment.refused(), (999, refusal));
            assert_eq!(sandbox.rules(), before);
            sandbox.assert_untouched();
        }
    }
    run_in(&sandbox.host, "nft flush chain inet cni_plugins_masquerade postrouting");
    run_in(&sandbox.host, "nft delete chain inet cni_plugins_masquerade postrouting");
    let attachment = masqueraded(&sandbox, "c1").added();
    attachment.is_fine("CHECK");
    attachment.del();
}

#[test]
fn check_names_a_base_chain_that_hooks_in_elsewhere_and_del_and_gc_do_not_care() {
    // The kernel lets no other of the chains lead to masquerading.
    for (hook, found) in ELSEWHERE.into_iter().take(2) {
        let mut sandbox = Sandbox::new().with_host_local();
        sandbox.add_container("c2");
        let first = masqueraded(&sandbox, "c1").added();
        let second = masqueraded(&sandbox, "c2").added();
        put_elsewhere(&sandbox, hook);
        let rules = "Failed to find masquerade rules for 10.1.0.2/24, fd00:1::2/64";
        assert_eq!(first.complaint(), format!("{rules}: {}", wrong_hook(found)));
        run_in(&sandbox.host, "nft flush chain inet cni_plugins_masquerade postrouting");
        assert_eq!(first.complaint(), format!("{rules}: {}", wrong_hook(found)), "without the rules, too");
        second.del();
        assert_eq!(sandbox.rules_with("masquerade comment").len(), 2);
        // The remedy of docs/CNI.md.
        run_in(&sandbox.host, "nft flush chain inet cni_plugins_masquerade postrouting");
        run_in(&sandbox.host, "nft delete chain inet cni_plugins_masquerade postrouting");
        let second = masqueraded(&sandbox, "c2").added();
        first.is_fine("CHECK");
        put_elsewhere(&sandbox, hook);
        first.del();
        assert_eq!(sandbox.rules_with("masquerade comment").len(), 2);
        second.collect(&[]);
        assert_eq!(sandbox.rules_with("masquerade comment").len(), 0);
        second.del();
        sandbox.assert_detached();
    }
}

#[test]
fn a_dormant_table_is_named_until_it_is_woken() {
    const DORMANT: &str = "table inet cni_plugins_masquerade is dormant, its chains do nothing: wake it with `nft add table inet cni_plugins_masquerade`";
    let refusal = format!("failed to change the rules of nf_tables: {DORMANT}");
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let (sleep, wake) =
        ("add table inet cni_plugins_masquerade { flags dormant; }", "add table inet cni_plugins_masquerade");
    sandbox.nft(sleep);
    assert_eq!(masqueraded(&sandbox, "c1").refused(), (999, refusal.clone()), "without its base chain");
    sandbox.assert_untouched();
    sandbox.nft(wake);

    let first = masqueraded(&sandbox, "c1").added();
    sandbox.nft(sleep);
    // The refused one had the first addresses.
    let rules = "Failed to find masquerade rules for 10.1.0.3/24, fd00:1::3/64";
    assert_eq!(first.complaint(), format!("{rules}: {DORMANT}"));
    assert_eq!(masqueraded(&sandbox, "c2").refused(), (999, refusal));
    sandbox.nft(wake);
    first.is_fine("CHECK");
    sandbox.nft(sleep);
    first.del();
    sandbox.assert_detached();
}

#[test]
fn a_base_chain_in_a_regular_ones_place_is_named() {
    let sandbox = Sandbox::new().with_host_local();
    sandbox.nft(
        "table inet cni_plugins_masquerade {
            chain masq_checks {
                type nat hook postrouting priority 90;
            }
        }",
    );
    let wrong = "chain inet cni_plugins_masquerade masq_checks is \"type nat hook postrouting priority 90\" and must be in no hook";
    let refusal = format!("failed to change the rules of nf_tables: {wrong}");
    assert_eq!(masqueraded(&sandbox, "c1").refused(), (999, refusal));
    sandbox.assert_untouched();
}

#[test]
fn comments_are_cut_and_their_rules_still_found() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = masqueraded(&sandbox, "c1");
    attachment.id = "c".repeat(200);
    attachment.conf["name"] = json!("n".repeat(60));
    let attachment = attachment.added();
    let rules = sandbox.rules_with("masquerade comment");
    let comments: Vec<&str> = rules.iter().filter_map(|line| line.split('"').nth(1)).collect();
    assert_eq!(comments.iter().map(|comment| comment.len()).collect::<Vec<_>>(), [128, 128]);
    attachment.is_fine("CHECK");
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn parallel_adds_and_dels_keep_one_set_of_rules() {
    let mut sandbox = Sandbox::new().with_host_local();
    ["c2", "c3", "c4", "c5", "c6"].into_iter().for_each(|id| sandbox.add_container(id));
    let each = |verb: fn(&Attachment<'_>)| {
        std::thread::scope(|scope| {
            for id in &sandbox.containers {
                let mut attachment = masqueraded(&sandbox, id);
                attachment.conf["macspoofchk"] = json!(true);
                scope.spawn(move || verb(&attachment));
            }
        });
    };
    each(|attachment| drop(attachment.add()));
    assert_eq!(sandbox.rules_with("goto masq_checks").len(), 1);
    assert_eq!(sandbox.rules_with("masquerade comment").len(), 12);
    each(|attachment| attachment.del());
    sandbox.assert_detached();
}

#[test]
fn the_iptables_backend_makes_the_references_rules_once() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = masqueraded(&sandbox, "c1");
    attachment.conf["ipMasqBackend"] = json!("iptables");
    let attachment = attachment.added();
    let saved = run_in(&sandbox.host, "iptables -t nat -S");
    let lines: Vec<&str> = saved.lines().filter(|line| line.contains("CNI-")).collect();
    let chain = lines[0].strip_prefix("-N ").unwrap();
    assert_eq!(chain.len(), 28);
    let comment = r#"-m comment --comment "name: \"net\" id: \"c1\"""#;
    let expected = [
        format!("-N {chain}"),
        format!("-A POSTROUTING -s 10.1.0.2/32 {comment} -j {chain}"),
        format!("-A {chain} -d 10.1.0.0/24 {comment} -j ACCEPT"),
        format!("-A {chain} ! -d 224.0.0.0/4 {comment} -j MASQUERADE"),
    ];
    assert_eq!(lines, expected);
    attachment.is_fine("CHECK");
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn a_container_reads_what_it_asked_for_over_a_masqueraded_connection() {
    let sandbox = Sandbox::new().with_host_local().with_world();
    let attachment = masqueraded(&sandbox, "c1");
    attachment.add();
    let address: SocketAddr = WORLD[0].parse().unwrap();
    let listener = sandbox.netns("world").run(|| TcpListener::bind(address).unwrap()).unwrap();
    let connect = || TcpStream::connect_timeout(&address, TIMEOUT).unwrap();
    let mut client = sandbox.netns("c1").run(connect).unwrap();
    client.write_all(b"ship").unwrap();
    client.shutdown(std::net::Shutdown::Write).unwrap();
    let mut server = listener.accept().unwrap().0;
    std::io::copy(&mut server.try_clone().unwrap(), &mut server).unwrap();
    drop(server);
    let mut echo = String::new();
    client.read_to_string(&mut echo).unwrap();
    assert_eq!(echo, "ship");
    drop((client, listener));
    attachment.del();
    sandbox.assert_detached();
}
