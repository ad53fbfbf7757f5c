//! The iptables backend, and what it left for a DEL that does not start it.

use std::process::{Command, Stdio};

use serde_json::json;

use crate::sandbox::{A, B, HOST, HOST_V6, OUTSIDE, Sandbox, Server, assert_refused, output};

const PORTS: &str = r#"{"backend": "iptables", "runtimeConfig": {"portMappings": [
    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
    {"hostPort": 53, "containerPort": 53, "protocol": "udp", "hostIP": "192.0.2.1"}
]}}"#;

/// Chains and rules of the table nat, both IP versions.
fn saved(sandbox: &Sandbox) -> String {
    let save = |program: &str| {
        let text = sandbox.host_output(program, "-t nat -S");
        text.lines().map(|line| format!("{program} {line}\n")).collect::<String>()
    };
    save("iptables") + &save("ip6tables")
}

#[test]
fn ports_lead_to_the_pod_from_everywhere() {
    let sandbox = Sandbox::connected();
    let server = Server::start(&sandbox.pod(A), 80);
    let attachment = sandbox.attachment("cid", A, PORTS);
    attachment.add();
    let port = |ip: &str| if ip.contains(':') { format!("[{ip}]:8080") } else { format!("{ip}:8080") };
    assert_eq!(server.peer_of(&sandbox.outside, &port(HOST)).to_string(), OUTSIDE);
    server.peer_of(&sandbox.outside, &port(HOST_V6));
    server.peer_of(&sandbox.host, &port("127.0.0.1"));
    for pod in [A, B] {
        assert_eq!(server.peer_of(&sandbox.pod(pod), &port(HOST)).to_string(), "10.7.2.1");
    }
    attachment.succeeds("CHECK");
    attachment.del();
    assert_refused(&sandbox.outside, &port(HOST));
}

#[test]
fn a_second_add_doubles_nothing_and_one_with_another_address_replaces() {
    let sandbox = Sandbox::bare();
    let conditions = json!({"conditionsV4": ["-s", "10.0.0.0/8", "!", "-i", "eth9"]});
    let attachment = || sandbox.attachment("cid", A, PORTS).with(conditions.clone());
    attachment().add();
    let once = saved(&sandbox);
    assert!(once.contains("-s 10.0.0.0/8 ! -i eth9 -p tcp"), "{once}");
    attachment().add();
    assert_eq!(saved(&sandbox), once);
    attachment().succeeds("CHECK");
    let mut moved = attachment();
    moved.conf["prevResult"]["ips"][0]["address"] = json!("10.7.2.9/24");
    moved.add();
    assert_eq!(saved(&sandbox), once.replace("10.7.2.4", "10.7.2.9"));
    attachment().refused("CHECK");
}

#[test]
fn a_failed_add_leaves_nothing() {
    let sandbox = Sandbox::bare();
    // The first family goes well, the second refuses its conditions.
    let conditions = json!({"conditionsV6": ["-s", "10.0.0.0/8"]});
    saved(&sandbox);
    let before = saved(&sandbox);
    let (code, msg) = sandbox.attachment("cid", A, PORTS).with(conditions).refused("ADD");
    assert_eq!(code, 999);
    assert!(msg.starts_with("unable to setup DNAT: "), "{msg}");
    assert_eq!(saved(&sandbox), before);
}

#[test]
fn del_starts_no_program_and_needs_nothing_but_the_id() {
    let sandbox = Sandbox::bare();
    sandbox.attachment("cid2", B, PORTS).add();
    let before = saved(&sandbox);
    // The backend of the configuration at the time of DEL does not matter.
    for changes in [
        json!({}),
        json!({"backend": null}),
        json!({"backend": "nftables", "prevResult": null}),
        json!({"runtimeConfig": null, "prevResult": null}),
    ] {
        sandbox.attachment("cid", A, PORTS).add();
        assert_ne!(saved(&sandbox), before);
        let del = sandbox.attachment("cid", A, PORTS).with(changes);
        del.del();
        assert_eq!(saved(&sandbox), before, "{}", del.conf);
        del.del();
    }
    sandbox.attachment("cid2", B, PORTS).succeeds("CHECK");
}

#[test]
fn rules_of_the_iptables_backend_satisfy_a_configuration_without_backend() {
    let sandbox = Sandbox::bare();
    sandbox.attachment("cid", A, PORTS).add();
    let check = || sandbox.attachment("cid", A, PORTS).with(json!({"backend": null}));
    check().succeeds("CHECK");
    sandbox.host_output("iptables", "-t nat -F CNI-HOSTPORT-DNAT");
    let (code, msg) = check().refused("CHECK");
    assert_eq!(code, 999);
    assert!(msg.starts_with("could not check ipv4 dnat: rule "), "{msg}");
    sandbox.attachment("cid", A, PORTS).del();
    let (_, msg) = sandbox.attachment("cid", A, PORTS).refused("CHECK");
    assert!(msg.starts_with("could not check ipv4 dnat: chain CNI-DN-"), "{msg}");
}

#[test]
fn gc_removes_chains_of_this_network_that_are_in_no_list() {
    let sandbox = Sandbox::bare();
    sandbox.attachment("keeps", A, PORTS).add();
    sandbox.attachment("cid", B, PORTS).with(json!({"name": "other"})).add();
    let wanted = saved(&sandbox);
    sandbox.attachment("stale", B, PORTS).add();
    let valid = json!([{"containerID": "keeps", "ifname": "eth0"}]);
    let gc = json!({"backend": null, "prevResult": null, "cni.dev/valid-attachments": valid});
    sandbox.attachment("unused", A, "{}").with(gc).succeeds("GC");
    assert_eq!(saved(&sandbox), wanted);
}

#[test]
fn calls_at_once_share_the_shared_rules() {
    let sandbox = Sandbox::bare();
    let ids: Vec<String> = (0..6).map(|n| format!("cid{n}")).collect();
    let calls: Vec<_> = ids.iter().map(|id| sandbox.attachment(id, A, PORTS).spawn("ADD")).collect();
    for call in calls {
        let output = call.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let saved = saved(&sandbox);
    assert_eq!(saved.matches("-A PREROUTING").count(), 2, "{saved}");
    assert_eq!(saved.matches("-A POSTROUTING").count(), 2, "{saved}");
}

/// Written as the reference does it, with the program that only sees its own tables.
#[test]
fn del_cleans_legacy_tables_where_there_are_any() {
    let sandbox = Sandbox::bare();
    let chain = chain_of("net", "cid");
    let legacy = |words: &str| sandbox.host_output("iptables-legacy", words);
    let tables = || output(&sandbox.host, "cat", "/proc/thread-self/net/ip_tables_names");
    sandbox.attachment("cid", A, PORTS).with(json!({"backend": null})).del();
    assert_eq!(tables(), "", "a look would have made the table");
    for words in ["-N CNI-HOSTPORT-DNAT", &format!("-N {chain}")] {
        legacy(&format!("-t nat {words}"));
    }
    let entry = format!("-A CNI-HOSTPORT-DNAT -p tcp -m multiport --dports 8080 -j {chain}");
    legacy(&format!("-t nat {entry}"));
    legacy(&format!("-t nat -A {chain} -p tcp --dport 8080 -j DNAT --to-destination 10.7.2.4:80"));
    sandbox.attachment("cid", A, PORTS).with(json!({"backend": null})).del();
    let left = legacy("-t nat -S");
    assert!(!left.contains("CNI-DN-") && left.contains("-N CNI-HOSTPORT-DNAT"), "{left}");
}

#[test]
fn gc_cleans_legacy_tables_where_there_are_any() {
    let sandbox = Sandbox::bare();
    let legacy = |arguments: &[&str]| {
        let run = || Command::new("iptables-legacy").args(["-t", "nat"]).args(arguments).status().unwrap();
        assert!(sandbox.host.run(run).unwrap().success(), "{arguments:?}");
    };
    legacy(&["-N", "CNI-HOSTPORT-DNAT"]);
    for id in ["keeps", "stale"] {
        let (chain, comment) = (chain_of("net", id), format!("dnat name: \"net\" id: \"{id}\""));
        legacy(&["-N", &chain]);
        legacy(&["-A", "CNI-HOSTPORT-DNAT", "-m", "comment", "--comment", &comment, "-j", &chain]);
    }
    let valid = json!([{"containerID": "keeps", "ifname": "eth0"}]);
    let gc = json!({"prevResult": null, "cni.dev/valid-attachments": valid});
    sandbox.attachment("unused", A, "{}").with(gc).succeeds("GC");
    let left = sandbox.host_output("iptables-legacy", "-t nat -S");
    let chains = ["keeps", "stale"].map(|id| left.contains(&chain_of("net", id)));
    assert_eq!(chains, [true, false], "{left}");
}

/// The name that the kernel's tools would compute, too.
fn chain_of(network: &str, id: &str) -> String {
    let mut sha = Command::new("sha512sum").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut sha.stdin.take().unwrap(), format!("{network}{id}").as_bytes()).unwrap();
    let digest = String::from_utf8(sha.wait_with_output().unwrap().stdout).unwrap();
    format!("CNI-DN-{}", &digest[..21])
}
