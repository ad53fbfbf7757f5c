//! What is in the kernel after each verb.

use serde_json::{Value, json};

use crate::sandbox::{A, Attachment, B, Sandbox};

const PORTS: &str = r#"{"runtimeConfig": {"portMappings": [
    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
    {"hostPort": 53, "containerPort": 53, "protocol": "udp", "hostIP": "192.0.2.1"},
    {"hostPort": 132, "containerPort": 132, "protocol": "sctp"}
]}}"#;

#[test]
fn the_rules_are_those_of_the_reference_and_one_of_each_port_for_neighbours() {
    let sandbox = Sandbox::bare();
    let attachment = sandbox.attachment("cid", A, PORTS);
    assert_eq!(attachment.add(), attachment.conf["prevResult"]);
    let ruleset = sandbox.ruleset();
    for line in [
        "table ip cni_hostport {\n\tcomment \"CNI portmap plugin\"\n\tchain hostports {",
        "\t\ttcp dport 8080 dnat to 10.7.2.4:80 comment \"cid\"\n",
        "\t\tip daddr 192.0.2.1 udp dport 53 dnat to 10.7.2.4:53 comment \"cid\"\n",
        "\t\tsctp dport 132 dnat to 10.7.2.4:132 comment \"cid\"\n",
        "\tchain hostports_all {\n\t\tjump hostip_hostports\n\t\tjump hostports\n\t}",
        "\t\ttype nat hook prerouting priority dstnat; policy accept;\n\t\tfib daddr type local jump hostports_all\n",
        "\t\ttype nat hook output priority -100; policy accept;\n\t\tfib daddr type local jump hostports_all\n",
        "\t\ttype nat hook postrouting priority srcnat; policy accept;\n",
        "\t\tip saddr 10.7.2.4 ip daddr 10.7.2.4 masquerade comment \"cid\"\n",
        "\t\tip saddr 127.0.0.1 ip daddr 10.7.2.4 masquerade comment \"cid\"\n",
        "\t\tip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto tcp \
         ct original proto-dst 8080 ct status dnat masquerade comment \"cid\"\n",
        "\t\tip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto udp ct original ip daddr 192.0.2.1 \
         ct original proto-dst 53 ct status dnat masquerade comment \"cid\"\n",
        "\t\tip saddr 10.7.2.0/24 ip daddr 10.7.2.4 meta l4proto sctp \
         ct original proto-dst 132 ct status dnat masquerade comment \"cid\"\n",
        "\tchain localnet_guard {\n\t\ttype filter hook prerouting priority raw; policy accept;\n\
         \t\tiifname != \"lo\" ip daddr 127.0.0.0/8 fib daddr . iif type != local drop\n\
         \t\tiifname != \"lo\" ip saddr 127.0.0.0/8 fib saddr . iif type != local drop\n",
        "\t\ttcp dport 8080 dnat to [fd00:7::4]:80 comment \"cid\"\n",
        "\t\tip6 saddr fd00:7::4 ip6 daddr fd00:7::4 masquerade comment \"cid\"\n",
        "\t\tip6 saddr fd00:7::/64 ip6 daddr fd00:7::4 meta l4proto sctp \
         ct original proto-dst 132 ct status dnat masquerade comment \"cid\"\n",
    ] {
        assert!(ruleset.contains(line), "{line:?} is not in\n{ruleset}");
    }
    assert_eq!(ruleset.matches("cid").count(), 13, "{ruleset}");
}

#[test]
fn without_ports_nothing_is_touched() {
    let sandbox = Sandbox::bare();
    for conf in ["{}", r#"{"backend": "iptables", "runtimeConfig": {"portMappings": []}}"#] {
        let attachment = sandbox.attachment("cid", A, conf);
        assert_eq!(attachment.add(), attachment.conf["prevResult"]);
        attachment.succeeds("CHECK");
        attachment.del();
    }
    assert_eq!(sandbox.ruleset(), "");
}

#[test]
fn a_second_add_doubles_nothing_and_one_with_another_address_replaces() {
    let sandbox = Sandbox::bare();
    sandbox.attachment("other", B, PORTS).add();
    sandbox.attachment("cid", A, PORTS).add();
    let once = sandbox.ruleset();
    sandbox.attachment("cid", A, PORTS).add();
    assert_eq!(sandbox.ruleset(), once);
    let mut moved = sandbox.attachment("cid", A, PORTS);
    moved.conf["prevResult"]["ips"][0]["address"] = json!("10.7.2.9/24");
    moved.add();
    let ruleset = sandbox.ruleset();
    assert!(!ruleset.contains("10.7.2.4") && ruleset.contains("dnat to 10.7.2.9:80"), "{ruleset}");
    assert_eq!(ruleset.lines().count(), once.lines().count());
}

#[test]
fn a_failed_add_leaves_nothing() {
    let sandbox = Sandbox::connected();
    // A chain of another kind is in the way of the second family.
    sandbox.host_output("nft", "add table ip6 cni_hostport");
    let chain = "add chain ip6 cni_hostport prerouting { type filter hook prerouting priority 0 ; }";
    sandbox.host_output("nft", chain);
    let before = sandbox.ruleset();
    let (code, msg) = sandbox.attachment("cid", A, PORTS).refused("ADD");
    assert_eq!(code, 999);
    assert!(msg.starts_with("unable to set up nftables rules for port mappings: "), "{msg}");
    assert_eq!(sandbox.ruleset(), before);
    let setting = "/proc/sys/net/ipv4/conf/br0/route_localnet";
    assert_eq!(sandbox.host.run(|| std::fs::read_to_string(setting).unwrap()).unwrap(), "0\n");
    sandbox.host_output("nft", "delete table ip6 cni_hostport");
    sandbox.attachment("cid", A, PORTS).add();
}

/// The chain anew, with the same rules, in another place.
fn put_elsewhere(sandbox: &Sandbox, chain: &str, hook: &str) {
    let listed = sandbox.host_output("nft", &format!("--stateless list chain ip cni_hostport {chain}"));
    let is_rule = |line: &&str| line.starts_with("\t\t") && !line.starts_with("\t\ttype ");
    let rules = listed.lines().filter(is_rule);
    let rules: String = rules.map(|rule| format!("{rule}\n")).collect();
    sandbox.host_output("nft", &format!("flush chain ip cni_hostport {chain}"));
    sandbox.host_output("nft", &format!("delete chain ip cni_hostport {chain}"));
    sandbox.nft(&format!("table ip cni_hostport {{\nchain {chain} {{\n{hook}\n{rules}}}\n}}\n"));
}

#[test]
fn base_chains_that_hook_in_elsewhere_are_named_and_left_alone() {
    for (chain, hook, found, needed) in [
        ("prerouting", "", "in no hook", "type nat hook prerouting priority -100"),
        (
            "output",
            "type nat hook output priority 0;",
            "\"type nat hook output priority 0\"",
            "type nat hook output priority -100",
        ),
        ("masquerading", "", "in no hook", "type nat hook postrouting priority 100"),
        (
            "localnet_guard",
            "type filter hook prerouting priority 0;",
            "\"type filter hook prerouting priority 0\"",
            "type filter hook prerouting priority -300",
        ),
    ] {
        let sandbox = Sandbox::bare();
        let (first, second) = (sandbox.attachment("cid", A, PORTS), sandbox.attachment("cid2", B, PORTS));
        first.add();
        put_elsewhere(&sandbox, chain, hook);
        let before = sandbox.ruleset();
        let wrong = format!("chain ip cni_hostport {chain} is {found} and must be \"{needed}\"");
        let complaint = format!("no packets reach the hostport rules: {wrong}");
        assert_eq!(first.refused("CHECK"), (999, complaint));
        // The second ones' conditions go by the host's nft.
        let only_nfts = json!({"conditionsV4": ["ip saddr { 192.0.2.2, 192.0.2.3 }"]});
        for second in [second, sandbox.attachment("cid2", B, PORTS).with(only_nfts)] {
            let (code, msg) = second.refused("ADD");
            assert_eq!(code, 999);
            assert!(msg.starts_with("unable to set up nftables rules for port mappings: "), "{msg}");
            assert!(msg.ends_with(&wrong), "{msg}");
        }
        assert_eq!(sandbox.ruleset(), before);
        first.del();
        first.del();
        sandbox.assert_no_rules_of("cid");
        sandbox.host_output("nft", &format!("flush chain ip cni_hostport {chain}"));
        sandbox.host_output("nft", &format!("delete chain ip cni_hostport {chain}"));
        first.add();
        first.succeeds("CHECK");
        put_elsewhere(&sandbox, chain, hook);
        gc_of(&sandbox, "net", json!([]));
        assert!(!sandbox.ruleset().contains("dnat to"));
    }
}

#[test]
fn a_dormant_table_is_named_until_it_is_woken() {
    let dormant = |family: &str| {
        let table = format!("{family} cni_hostport");
        format!("table {table} is dormant, its chains do nothing: wake it with `nft add table {table}`")
    };
    let sandbox = Sandbox::bare();
    let (first, second) = (sandbox.attachment("cid", A, PORTS), sandbox.attachment("cid2", B, PORTS));
    let only_nfts = json!({"conditionsV4": ["ip saddr { 192.0.2.2, 192.0.2.3 }"]});
    let scripted = sandbox.attachment("cid2", B, PORTS).with(only_nfts);
    let refused = |attachments: &[&Attachment<'_>], family: &str| {
        let before = sandbox.ruleset();
        for attachment in attachments {
            let msg = "unable to set up nftables rules for port mappings: ";
            let (code, found) = attachment.refused("ADD");
            assert_eq!(code, 999);
            assert!(found.starts_with(msg) && found.ends_with(&dormant(family)), "{found}");
        }
        assert_eq!(sandbox.ruleset(), before);
    };
    for family in ["ip", "ip6"] {
        sandbox.nft(&format!("add table {family} cni_hostport {{ flags dormant; }}"));
        refused(&[&first], family);
        sandbox.nft(&format!("add table {family} cni_hostport"));
        first.add();
        sandbox.nft(&format!("add table {family} cni_hostport {{ flags dormant; }}"));
        let complaint = format!("no packets reach the hostport rules: {}", dormant(family));
        assert_eq!(first.refused("CHECK"), (999, complaint));
        refused(&[&second, &scripted], family);
        sandbox.nft(&format!("add table {family} cni_hostport"));
        first.succeeds("CHECK");
        sandbox.nft(&format!("add table {family} cni_hostport {{ flags dormant; }}"));
        first.del();
        sandbox.assert_no_rules_of("cid");
        sandbox.nft(&format!("add table {family} cni_hostport"));
    }
}

/// A chain that nothing wanted leads through may be anything.
#[test]
fn without_masquerading_its_chain_and_the_guards_are_not_looked_at() {
    let sandbox = Sandbox::bare();
    sandbox
        .nft("table ip cni_hostport { chain masquerading { counter; }; chain localnet_guard { counter; }; }");
    let attachment = sandbox.attachment("cid", A, PORTS).with(json!({"snat": false}));
    attachment.add();
    attachment.succeeds("CHECK");
}

#[test]
fn a_ruleset_restored_by_nft_is_checked_and_deleted_but_tells_gc_no_network() {
    let sandbox = Sandbox::bare();
    let attachment = sandbox.attachment("cid", A, PORTS);
    attachment.add();
    let saved = sandbox.ruleset();
    sandbox.nft(&format!("flush ruleset\n{saved}"));
    assert_eq!(sandbox.ruleset(), saved);
    attachment.succeeds("CHECK");
    attachment.add();
    assert_eq!(sandbox.ruleset(), saved);
    gc_of(&sandbox, "net", json!([]));
    assert_eq!(sandbox.ruleset(), saved);
    attachment.del();
    sandbox.assert_no_rules_of("cid");
}

#[test]
fn del_needs_nothing_but_the_id_and_may_be_repeated() {
    let sandbox = Sandbox::bare();
    let keeps = sandbox.attachment("cid2", B, PORTS);
    keeps.add();
    let before = sandbox.ruleset();
    let attachment = || sandbox.attachment("cid", A, PORTS);
    let without = |key: &str| attachment().with(json!({ key: null }));
    let (mut no_netns, mut gone) = (attachment(), attachment());
    no_netns.netns = String::new();
    gone.netns = "/nowhere/at/all".to_owned();
    let mut broken = attachment();
    broken.conf["prevResult"] = json!({"ips": [{"address": "nonsense"}]});
    let nothing = without("prevResult").with(json!({"runtimeConfig": null}));
    for del in
        [attachment(), without("prevResult"), without("runtimeConfig"), nothing, no_netns, gone, broken]
    {
        attachment().add();
        del.del();
        assert_eq!(sandbox.ruleset(), before, "{} {:?}", del.conf, del.netns);
        del.del();
    }
    keeps.succeeds("CHECK");
}

#[test]
fn del_of_one_attachment_leaves_the_containers_others() {
    let sandbox = Sandbox::bare();
    let first = sandbox.attachment("cid", A, PORTS);
    first.add();
    let once = sandbox.ruleset();
    let second = |name: &str, ifname: &str| {
        let mut second = sandbox.attachment("cid", B, PORTS).with(json!({"name": name}));
        second.ifname = ifname.to_owned();
        second.conf["prevResult"]["interfaces"][1]["name"] = json!(ifname);
        second
    };
    for (name, ifname) in [("other", "eth0"), ("net", "eth1")] {
        let second = second(name, ifname);
        second.add();
        assert_ne!(sandbox.ruleset(), once);
        // Even if it is told nothing about addresses.
        second.with(json!({"prevResult": null})).del();
        assert_eq!(sandbox.ruleset(), once);
    }
    first.succeeds("CHECK");
}

#[test]
fn many_calls_at_once_leave_what_was_there() {
    let sandbox = Sandbox::bare();
    let keeps = sandbox.attachment("keeps", A, PORTS);
    keeps.add();
    let before = sandbox.ruleset();
    let ids: Vec<String> = (0..20).map(|n| format!("cid{n}")).collect();
    for (command, wanted) in [("ADD", 21), ("DEL", 1)] {
        let attachments = ids.iter().map(|id| sandbox.attachment(id, B, PORTS));
        // Each twice.
        let calls: Vec<_> = attachments
            .flat_map(|attachment| [attachment.spawn(command), attachment.spawn(command)])
            .collect();
        for call in calls {
            let output = call.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
        let rules = sandbox.ruleset().matches("tcp dport 8080 dnat to 10.7.2.").count();
        assert_eq!(rules, wanted, "{command}");
    }
    assert_eq!(sandbox.ruleset(), before);
}

#[test]
fn check_misses_every_rule_that_is_taken_away() {
    let sandbox = Sandbox::bare();
    let attachment = sandbox.attachment("cid", A, PORTS);
    attachment.add();
    attachment.succeeds("CHECK");
    let listed = sandbox.host_output("nft", "--handle --stateless list table ip cni_hostport");
    let mut chain = String::new();
    let mut taken = 0;
    for line in listed.lines() {
        if let Some(name) = line.trim().strip_prefix("chain ") {
            chain = name.split(' ').next().unwrap().to_owned();
        }
        // Those that only serve neighbours, or old versions, are not insisted on.
        let rule = line.starts_with("\t\t") && line.contains("# handle");
        if !rule || line.contains("ct status") || line.contains("jump hostip_hostports") {
            continue;
        }
        let handle = line.rsplit(' ').next().unwrap();
        sandbox.host_output("nft", &format!("delete rule ip cni_hostport {chain} handle {handle}"));
        let (code, msg) = attachment.refused("CHECK");
        assert_eq!(code, 999, "{line}");
        assert_eq!(msg, format!("missing hostport rules in {chain:?} chain"), "{line}");
        taken += 1;
        sandbox.host_output("nft", "delete table ip cni_hostport");
        attachment.add();
        // Handles start again with the table.
        attachment.succeeds("CHECK");
    }
    assert_eq!(taken, 10);
    sandbox.attachment("cid", B, PORTS).refused("CHECK");
    let none = sandbox.attachment("cid", A, PORTS).with(json!({"prevResult": null}));
    assert_eq!(none.refused("CHECK").1, "Required prevResult missing");
}

/// The reference's v1.6.1 to v1.8.0: the hooks lead to both chains directly, and rules with a host
/// address are in a chain of their own.
#[test]
fn rules_of_old_versions_of_the_reference_are_accepted_by_check() {
    let sandbox = Sandbox::bare();
    let rules = |family: &str, with_host_ip: &str, ip: &str| {
        let hostport = |port: u16, protocol: &str| {
            format!(
                "{protocol} dport {port} dnat to {ip}:{} comment \"cid\"",
                if port == 8080 { 80 } else { port }
            )
        };
        let bare = ip.trim_matches(['[', ']']);
        let (tcp, udp, sctp) = (hostport(8080, "tcp"), hostport(53, "udp"), hostport(132, "sctp"));
        let with_host_ip = with_host_ip.replace("UDP", &udp);
        let masquerade =
            |from: &str| format!("{family} saddr {from} {family} daddr {bare} masquerade comment \"cid\"");
        let localhost = if family == "ip" { masquerade("127.0.0.1") } else { String::new() };
        let own = masquerade(bare);
        format!(
            "table {family} cni_hostport {{
                chain hostports {{ {tcp}; {sctp}; }}
                chain hostip_hostports {{ {with_host_ip}; }}
                chain prerouting {{
                    type nat hook prerouting priority -100;
                    jump hostip_hostports; jump hostports;
                }}
                chain output {{
                    type nat hook output priority -100;
                    jump hostip_hostports; fib daddr type local jump hostports;
                }}
                chain masquerading {{ type nat hook postrouting priority 100; {own}; {localhost}; }}
            }}\n"
        )
    };
    let both = rules("ip", "ip daddr 192.0.2.1 UDP", "10.7.2.4") + &rules("ip6", "", "[fd00:7::4]");
    sandbox.nft(&both);
    let attachment = sandbox.attachment("cid", A, PORTS);
    attachment.succeeds("CHECK");
    for (chain, hook) in [("hostip_hostports", "prerouting"), ("hostports", "output")] {
        sandbox.host_output("nft", "delete table ip cni_hostport");
        sandbox.host_output("nft", "delete table ip6 cni_hostport");
        sandbox.nft(&both);
        let listed = sandbox.host_output("nft", &format!("--handle list chain ip cni_hostport {hook}"));
        let line = listed.lines().find(|line| line.contains(&format!("jump {chain} "))).unwrap();
        let handle = line.rsplit(' ').next().unwrap();
        sandbox.host_output("nft", &format!("delete rule ip cni_hostport {hook} handle {handle}"));
        assert_eq!(attachment.refused("CHECK").1, format!("missing hostport rules in {hook:?} chain"));
    }
    attachment.del();
    sandbox.assert_no_rules_of("cid");
}

/// nft shows the rule as it shows its own, so the bytecode is the same or means the same.
#[test]
fn conditions_are_compiled_as_nft_does() {
    let sandbox = Sandbox::bare();
    let hook = "{ type nat hook prerouting priority -100 ; }";
    for (family, key, condition) in [
        ("ip", "conditionsV4", "ip saddr 192.0.2.2"),
        ("ip", "conditionsV4", "ip saddr != 192.168.0.0/20 iifname \"eth0\""),
        ("ip", "conditionsV4", "ip daddr 10.0.0.0/8 oifname != \"veth*\""),
        ("ip", "conditionsV4", "ip daddr 10.128.0.0/9"),
        ("ip", "conditionsV4", "tcp dport 80 tcp sport != 1024"),
        ("ip", "conditionsV4", "meta l4proto udp"),
        ("ip", "conditionsV4", "udp dport != 53"),
        ("ip", "conditionsV4", "meta mark 0x10"),
        ("ip", "conditionsV4", "mark != 7 sctp dport 5"),
        ("ip6", "conditionsV6", "ip6 saddr fd00::/8 ip6 daddr != fd00:1::/61"),
        ("ip6", "conditionsV6", "ip6 saddr fd00::1 meta l4proto != tcp"),
    ] {
        let attachment = sandbox.attachment("cid", A, PORTS).with(json!({ key: [condition] }));
        attachment.add();
        let list = format!("--stateless list chain {family} cni_hostport");
        let ours = sandbox.host_output("nft", &format!("{list} prerouting"));
        sandbox.host_output("nft", &format!("add chain {family} cni_hostport nfts {hook}"));
        let rule = format!("{condition} fib daddr type local jump hostports_all");
        sandbox.host_output("nft", &format!("add rule {family} cni_hostport nfts {rule}"));
        let nfts = sandbox.host_output("nft", &format!("{list} nfts"));
        assert_eq!(ours.replace("chain prerouting", "chain nfts"), nfts, "{condition}");
        sandbox.host_output("nft", "flush ruleset");
    }
}

fn gc_of(sandbox: &Sandbox, network: &str, valid: Value) {
    let conf = json!({"name": network, "prevResult": null, "cni.dev/valid-attachments": valid});
    sandbox.attachment("unused", A, "{}").with(conf).succeeds("GC");
}

#[test]
fn gc_removes_what_is_in_no_list_and_nothing_of_other_networks() {
    let sandbox = Sandbox::bare();
    let mut second = sandbox.attachment("keeps", B, PORTS);
    second.ifname = "eth1".to_owned();
    second.conf["prevResult"]["interfaces"][1]["name"] = json!("eth1");
    let valid = json!([{"containerID": "keeps", "ifname": "eth0"}]);

    sandbox.attachment("keeps", A, PORTS).add();
    sandbox.attachment("cid", B, PORTS).with(json!({"name": "other"})).add();
    // What the reference makes does not tell its network.
    sandbox.host_output(
        "nft",
        "add rule ip cni_hostport hostports tcp dport 9 dnat to 10.0.0.9:9 comment \"cid3\"",
    );
    let wanted = sandbox.ruleset();
    sandbox.attachment("stale", B, PORTS).add();
    second.add();
    assert_ne!(sandbox.ruleset(), wanted);
    gc_of(&sandbox, "net", valid.clone());
    assert_eq!(sandbox.ruleset(), wanted);
    gc_of(&sandbox, "net", valid);
    gc_of(&sandbox, "third", json!([]));
    assert_eq!(sandbox.ruleset(), wanted);
    gc_of(&sandbox, "net", json!([]));
    sandbox.assert_no_rules_of("keeps");

    let without_list = sandbox.attachment("x", A, "{}").refused("GC");
    assert_eq!(without_list.0, 7);
}

#[test]
fn status_tells_whether_a_backend_can_be_used() {
    let sandbox = Sandbox::bare();
    for conf in ["{}", r#"{"backend": "nftables"}"#, r#"{"backend": "iptables"}"#] {
        sandbox.attachment("x", A, conf).with(json!({"prevResult": null})).succeeds("STATUS");
    }
    assert_eq!(sandbox.ruleset(), "", "and touches nothing");
}

#[test]
fn refusals_have_the_references_words() {
    let sandbox = Sandbox::bare();
    let refused =
        |command: &str, conf: Value| sandbox.attachment("cid", A, PORTS).with(conf).refused(command);
    let parse = |msg: &str| (999, format!("failed to parse config: {msg}"));
    let no_result = json!({"prevResult": null});
    assert_eq!(refused("ADD", no_result), (999, "must be called as chained plugin".to_owned()));
    let port = |host: i64| {
        let mapping = json!({"hostPort": host, "containerPort": 80, "protocol": "tcp"});
        json!({"runtimeConfig": {"portMappings": [mapping]}})
    };
    for command in ["ADD", "DEL"] {
        assert_eq!(refused(command, port(0)), parse("Invalid host port number: 0"));
        assert_eq!(refused(command, json!({"backend": "pf"})), parse("unrecognized backend \"pf\""));
        assert_eq!(
            refused(command, json!({"backend": "nftables", "conditionsV4": ["-s", "10.0.0.0/8"]})),
            parse(
                "nftables backend was requested but configuration contains iptables-specific options [conditionsV4]"
            )
        );
    }
    assert_eq!(refused("CHECK", port(-1)), (999, "Invalid host port number: -1".to_owned()));
    let mapping = |protocol: &str, host_ip: &str| {
        let mapping = json!({"hostPort": 1, "containerPort": 1, "protocol": protocol, "hostIP": host_ip});
        json!({"runtimeConfig": {"portMappings": [mapping]}})
    };
    assert_eq!(refused("ADD", mapping("icmp", "")).1, "protocol \"icmp\" has no ports to map");
    assert_eq!(refused("ADD", mapping("tcp", "localhost")).1, "hostIP \"localhost\" is no IP address");
    assert_eq!(sandbox.ruleset(), "");
    sandbox.attachment("cid", A, PORTS).with(mapping("icmp", "")).del();
}

#[test]
fn a_version_that_cannot_say_the_result_is_refused_before_any_rule() {
    let sandbox = Sandbox::bare();
    let attachment = sandbox.attachment("cid", A, PORTS).with(json!({
        "cniVersion": "0.2.0", "prevResult": {"cniVersion": "0.2.0"}
    }));
    let (code, _) = attachment.refused("ADD");
    assert_eq!((code, sandbox.ruleset().as_str()), (999, ""));
}
