//! What packets do.

use serde_json::json;

use crate::sandbox::{
    A, B, HOST, HOST_SECOND, HOST_V6, OUTSIDE, OUTSIDE_V6, Sandbox, Server, assert_refused, ip,
};

const WEB: &str = r#"{"runtimeConfig": {"portMappings": [
    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
]}}"#;

fn address(ip: &str) -> String {
    if ip.contains(':') { format!("[{ip}]:8080") } else { format!("{ip}:8080") }
}

#[test]
fn a_port_leads_from_outside_to_the_pod_which_sees_the_true_sender() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    assert_refused(&sandbox.outside, &address(HOST));
    let attachment = sandbox.attachment("cid", A, WEB);
    attachment.add();
    assert_eq!(server.peer_of(&sandbox.outside, &address(HOST)).to_string(), OUTSIDE);
    assert_eq!(server.peer_of(&sandbox.outside, &address(HOST_V6)).to_string(), OUTSIDE_V6);
    attachment.del();
    for ip in [HOST, HOST_V6] {
        assert_refused(&sandbox.outside, &address(ip));
    }
}

#[test]
fn the_host_reaches_the_pod_by_each_of_its_own_addresses() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    sandbox.attachment("cid", A, WEB).add();
    assert_eq!(server.peer_of(&sandbox.host, &address("127.0.0.1")).to_string(), "10.7.2.1");
    for ip in [HOST, HOST_SECOND, "10.7.2.1", HOST_V6, "fd00:7::1"] {
        server.peer_of(&sandbox.host, &address(ip));
    }
    let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
    let value = sandbox.host.run(|| std::fs::read_to_string(setting).unwrap()).unwrap();
    assert_eq!(value, "1\n");
}

/// Answers would go past the host, unless it masquerades.
#[test]
fn pods_reach_a_port_of_their_own_and_of_their_neighbours() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    sandbox.attachment("cid", A, WEB).add();
    for pod in [A, B] {
        for (ip, seen) in [(HOST, "10.7.2.1"), ("10.7.2.1", "10.7.2.1"), (HOST_V6, "fd00:7::1")] {
            assert_eq!(server.peer_of(&sandbox.pod(pod), &address(ip)).to_string(), seen, "{}", pod.name);
        }
    }
    // Without the port, neighbours see each other.
    assert_eq!(server.peer_of(&sandbox.pod(B), "10.7.2.4:80"), B.ip());
}

#[test]
fn without_snat_the_pods_own_port_is_out_of_its_reach_and_the_rest_works() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    sandbox.attachment("cid", A, WEB).with(json!({"snat": false})).add();
    assert_eq!(server.peer_of(&sandbox.outside, &address(HOST)).to_string(), OUTSIDE);
    assert!(!sandbox.ruleset().contains("masquerad"), "{}", sandbox.ruleset());
    let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
    assert_eq!(sandbox.host.run(|| std::fs::read_to_string(setting).unwrap()).unwrap(), "0\n");
}

#[test]
fn masq_all_hides_every_sender_of_a_mapped_port_and_no_other() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    let attachment = sandbox.attachment("cid", A, WEB).with(json!({"masqAll": true}));
    attachment.add();
    assert_eq!(server.peer_of(&sandbox.outside, &address(HOST)).to_string(), "10.7.2.1");
    assert_eq!(server.peer_of(&sandbox.outside, &address(HOST_V6)).to_string(), "fd00:7::1");
    assert_eq!(server.peer_of(&sandbox.pod(B), &address(HOST)).to_string(), "10.7.2.1");
    assert_eq!(server.peer_of(&sandbox.pod(B), "10.7.2.4:80"), B.ip());
    attachment.succeeds("CHECK");
}

/// As kube-proxy does for a Service.
#[test]
fn a_client_that_comes_by_another_dnat_rule_is_seen() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    let rule = "ip daddr 10.96.0.1 tcp dport { 8080, 9000 } dnat to 10.7.2.4:80";
    let hook = "type nat hook prerouting priority -90;";
    sandbox.nft(&format!("table ip services {{\nchain prerouting {{\n{hook}\n{rule}\n}}\n}}\n"));
    // The neighbour's answers return through the host, and no redirect shortens the way.
    ip(&sandbox.pod(A), "route add 10.7.2.5/32 via 10.7.2.1");
    let settings = ["net/ipv4/conf/all/send_redirects", "net/ipv4/conf/br0/send_redirects"];
    sandbox.host.run(|| settings.map(|setting| linux::sysctl::write(setting, "0").unwrap())).unwrap();
    ip(&sandbox.outside, &format!("route add 10.96.0.1/32 via {HOST}"));
    for masq_all in [false, true] {
        let attachment = sandbox.attachment("cid", A, WEB).with(json!({"masqAll": masq_all}));
        attachment.add();
        assert_eq!(server.peer_of(&sandbox.pod(B), "10.96.0.1:9000"), B.ip(), "masqAll: {masq_all}");
        assert_eq!(server.peer_of(&sandbox.outside, "10.96.0.1:9000").to_string(), OUTSIDE);
        assert_eq!(server.peer_of(&sandbox.pod(B), &address(HOST)).to_string(), "10.7.2.1");
        attachment.del();
    }
    // With a host address, the port's number alone does not count.
    let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": HOST});
    let conf = json!({"runtimeConfig": {"portMappings": [mapping]}});
    sandbox.attachment("cid", A, "{}").with(conf).add();
    assert_eq!(server.peer_of(&sandbox.pod(B), "10.96.0.1:8080"), B.ip());
    assert_eq!(server.peer_of(&sandbox.pod(B), &address(HOST)).to_string(), "10.7.2.1");
}

#[test]
fn a_host_address_limits_the_port_to_it() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    let mapping = |host_ip: &str| {
        let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": host_ip});
        sandbox.attachment("cid", A, "{}").with(json!({"runtimeConfig": {"portMappings": [mapping]}}))
    };
    for (host_ip, open, closed) in [
        (HOST_SECOND, vec![HOST_SECOND], vec![HOST, HOST_V6]),
        (HOST_V6, vec![HOST_V6], vec![HOST]),
        ("0.0.0.0", vec![HOST, HOST_SECOND], vec![HOST_V6]),
        ("::", vec![HOST_V6], vec![HOST]),
    ] {
        let attachment = mapping(host_ip);
        attachment.add();
        for ip in open {
            server.peer_of(&sandbox.outside, &address(ip));
            let gateway = if ip.contains(':') { "fd00:7::1" } else { "10.7.2.1" };
            assert_eq!(server.peer_of(&sandbox.pod(B), &address(ip)).to_string(), gateway);
        }
        for ip in closed {
            assert_refused(&sandbox.outside, &address(ip));
        }
        attachment.succeeds("CHECK");
        attachment.del();
    }
}

#[test]
fn conditions_choose_who_may_use_the_port() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    // The last is beyond this plugin: nft compiles it.
    for conditions in [
        json!(["iifname", "ext0"]),
        json!(["ip saddr { 192.0.2.2, 198.51.100.0/24 }"]),
        json!(["iifname != \"br*\"", "ip saddr != 10.7.0.0/16"]),
        json!(["ip saddr 192.0.2.0-192.0.2.9"]),
    ] {
        let attachment = sandbox.attachment("cid", A, WEB).with(json!({"conditionsV4": conditions}));
        attachment.add();
        attachment.add();
        assert_eq!(server.peer_of(&sandbox.outside, &address(HOST)).to_string(), OUTSIDE, "{conditions}");
        assert_refused(&sandbox.pod(B), &address(HOST));
        // Those of one family are none of the other's.
        server.peer_of(&sandbox.pod(B), &address(HOST_V6));
        attachment.succeeds("CHECK");
        attachment.del();
        sandbox.assert_no_rules_of("cid");
    }
}

#[test]
fn the_first_of_two_pods_keeps_a_port_until_its_del() {
    let sandbox = Sandbox::connected();
    let servers = [A, B].map(|pod| Server::start(&sandbox.pod(pod), 80));
    let [first, second] = [("cida", A), ("cidb", B)].map(|(id, pod)| sandbox.attachment(id, pod, WEB));
    first.add();
    second.add();
    servers[0].peer_of(&sandbox.outside, &address(HOST));
    first.del();
    servers[1].peer_of(&sandbox.outside, &address(HOST));
    second.succeeds("CHECK");
    second.del();
    assert_refused(&sandbox.outside, &address(HOST));
}

#[test]
fn many_ports_lead_to_many_ports() {
    let sandbox = Sandbox::connected();
    let mappings: Vec<_> =
        (1..=40).map(|n| json!({"hostPort": 8000 + n, "containerPort": 80 + n, "protocol": "TCP"})).collect();
    let conf = json!({"runtimeConfig": {"portMappings": mappings}});
    let attachment = sandbox.attachment("cid", A, "{}").with(conf);
    attachment.add();
    attachment.succeeds("CHECK");
    for n in [1, 20, 40] {
        let server = Server::start(&sandbox.pod(A), 80 + n);
        server.peer_of(&sandbox.outside, &format!("{HOST}:{}", 8000 + n));
    }
    assert_refused(&sandbox.outside, &format!("{HOST}:8041"));
}
