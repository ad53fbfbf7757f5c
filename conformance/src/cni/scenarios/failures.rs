//! What comes before any plugin's own work: environment, configuration, verbs.

use serde_json::{Value, json};

use super::super::differences::Difference;
use super::super::scenario::{Call, Scenario, Verb, add, check, del, network};
use super::expected::{self, asked_ipam, leaves_bridge, ours_has, reference_has, says, succeeds};
use super::networks::{bridge_plugin, v4};

/// The four plugins, each alone.
fn plugins() -> [(&'static str, Value); 4] {
    [
        ("bridge", bridge_plugin(&json!({ "isGateway": true }), &v4())),
        ("host-local", json!({ "type": "host-local", "ipam": v4() })),
        ("loopback", json!({ "type": "loopback" })),
        ("portmap", json!({ "type": "portmap" })),
    ]
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let mut scenarios: Vec<Scenario> =
        plugins().into_iter().flat_map(|(name, plugin)| of_plugin(name, &plugin)).collect();
    scenarios.extend(of_configuration());
    scenarios.extend(of_names());
    let with_differences = |scenario: Scenario| {
        let differences = differences(&scenario.name);
        scenario.differs(differences)
    };
    scenarios.into_iter().map(with_differences).collect()
}

/// What differs on purpose in the scenario of this name.
fn differences(name: &str) -> Vec<Difference> {
    let what = name.trim_start_matches("failure: ");
    match what.split_once(", ") {
        Some((plugin @ ("bridge" | "host-local" | "loopback" | "portmap"), what)) => {
            of_any_plugin(plugin, what)
        }
        _ => of_bridge(what),
    }
}

/// Differences that all plugins have in common, and what follows from them.
fn of_any_plugin(plugin: &str, what: &str) -> Vec<Difference> {
    let says = |step: &str, reference: &str, ours: &str| {
        let text = "6: error unmarshall network config: ";
        says(
            "own-words",
            &format!("{step}/{plugin}"),
            &format!("{text}{reference}"),
            &format!("{text}{ours}"),
        )
    };
    match what {
        "no configuration" => {
            vec![says("* c1", "unexpected end of JSON input", "EOF while parsing a value at line 1 column 0")]
        }
        "a configuration that is no JSON" => vec![
            says(
                "1 ADD c1",
                "unexpected end of JSON input",
                "EOF while parsing an object at line 1 column 1",
            ),
            says(
                "2 DEL c1",
                "invalid character 'o' in literal null (expecting 'u')",
                "expected ident at line 1 column 2",
            ),
        ],
        "a configuration of another kind" => vec![
            says(
                "1 ADD c1",
                "json: cannot unmarshal array into Go value of type *",
                "the document: expected an object, found []",
            ),
            says(
                "2 ADD c1",
                "json: cannot unmarshal string into Go value of type *",
                "the document: expected an object, found \"net\"",
            ),
        ],
        "a name of another kind" => vec![says(
            "1 ADD c1",
            "json: cannot unmarshal number into Go struct field .name of type string",
            "name: expected a string, found 7",
        )],
        "a version of another kind" => vec![expected::says(
            "own-words",
            &format!("1 ADD c1/{plugin}"),
            "*: decoding version from network config: json: cannot unmarshal number into Go struct field .cniVersion of type string",
            "*: decoding version from network config: cniVersion: expected a string, found 1",
        )],
        "a namespace that is not there" if plugin == "bridge" => vec![leaves_bridge("cni0")],
        "the host's own namespace" => own_namespace(plugin),
        _ => Vec::new(),
    }
}

/// The reference sees only after ADD that it worked on the host, and prints the
/// error behind the result.
fn own_namespace(plugin: &str) -> Vec<Difference> {
    let id = "own-namespace-first";
    let refused = "exit status: 1, error 8: plugin's netns and netns from CNI_NETNS should not be the same";
    let answer = Difference::new(id, format!("1 ADD c1/{plugin}/answer")).ours(refused);
    let lease = [
        Difference::new(id, "1 ADD c1/file/var/lib/cni/networks/net/10.1.0.2")
            .reference(r#"0600 "c1\r\neth0""#),
        Difference::new(id, "*/file/var/lib/cni/networks/net/last_reserved_ip.0")
            .reference(r#"0600 "10.1.0.2""#),
    ];
    match plugin {
        "bridge" => {
            let mut differences = vec![
                answer.reference(
                    "exit status: 1, error 0: netplugin failed but error parsing its diagnostic message *",
                ),
                Difference::new(id, "1 ADD c1/host/link/eth0").reference("veth"),
                Difference::new(id, "1 ADD c1/host/link/<a veth>").reference("veth"),
                Difference::new(id, "*/host/link/cni0").reference("bridge"),
            ];
            differences.extend(lease);
            differences
        }
        "host-local" => {
            let mut differences = vec![answer.reference("exit status: 1, no JSON: {\n*}{\n*\"code\": 8,*")];
            differences.extend(lease);
            differences
        }
        // DEL took the host's own `lo` down.
        "loopback" => vec![
            answer.reference("exit status: 1, no JSON: {\n*}{\n*\"code\": 8,*"),
            Difference::new(id, "2 DEL c1/host/link/lo/flags").reference("LOOPBACK").ours("LOOPBACK,UP"),
            ours_has(id, "2 DEL c1/host/address/lo ::1/128"),
            ours_has(id, "2 DEL c1/host/route/local * dev lo"),
        ],
        _ => vec![answer.reference("exit status: 1, error 999: must be called as chained plugin")],
    }
}

/// Configurations of `bridge`.
fn of_bridge(what: &str) -> Vec<Difference> {
    // ADD refuses in other words; DEL does not need what is wrong.
    let refused = |reference: &str, ours: &str| {
        let netconf = "999: failed to load netconf: ";
        vec![
            says(
                "own-words",
                "1 ADD c1/bridge",
                &format!("{netconf}{reference}"),
                &format!("{netconf}{ours}"),
            ),
            succeeds("del-cleans-up", "2 DEL c1/bridge", &format!("{netconf}{reference}")),
        ]
    };
    let only_at_add = |reference: &str| vec![succeeds("del-cleans-up", "2 DEL c1/bridge", reference)];
    match what {
        "a key of another kind" => refused(
            "json: cannot unmarshal string into Go struct field NetConf.isGateway of type bool",
            "isGateway: expected true or false, found \"yes\"",
        ),
        "a number of another kind" => refused(
            "json: cannot unmarshal string into Go struct field NetConf.mtu of type int",
            "mtu: expected a whole number, found \"big\"",
        ),
        "a mtu that is no integer" => refused(
            "json: cannot unmarshal number 1400.5 into Go struct field NetConf.mtu of type int",
            "mtu: expected a whole number, found 1400.5",
        ),
        "prevResult of another kind" => refused(
            "json: cannot unmarshal number into Go struct field NetConf.NetConf.prevResult of type map[string]interface {}",
            "prevResult: expected an object, found 7",
        ),
        "ipam of another kind" => vec![
            says(
                "own-words",
                "1 ADD c1/bridge",
                "999: failed to load netconf: json: cannot unmarshal string into Go struct field *",
                "999: failed to load netconf: ipam: expected an object, found \"host-local\"",
            ),
            says(
                "own-words",
                "2 DEL c1/bridge",
                "999: failed to load netconf: json: cannot unmarshal string into Go struct field *",
                "999: ipam: expected an object, found \"host-local\"",
            ),
        ],
        "text behind the configuration" => vec![says(
            "own-words",
            "* c1/bridge",
            "6: error unmarshall network config: invalid character 'a' after top-level value",
            "6: error unmarshall network config: trailing characters at line 1 column 53",
        )],
        "a mtu that is too small" => asked_ipam(),
        "vlan too big" => only_at_add("999: invalid VLAN ID 4095 (must be between 0 and 4094)"),
        "vlan negative" => only_at_add("999: invalid VLAN ID -1 (must be between 0 and 4094)"),
        "a trunk with minID alone" => {
            only_at_add("999: minID and maxID should be configured simultaneously, maxID is missing")
        }
        "a trunk with maxID alone" => {
            only_at_add("999: minID and maxID should be configured simultaneously, minID is missing")
        }
        "a trunk upside down" => only_at_add("999: minID is greater than maxID in trunk parameter"),
        "a trunk with minID too big" => only_at_add("999: incorrect trunk minID parameter"),
        "a trunk with maxID too big" => only_at_add("999: incorrect trunk maxID parameter"),
        "a trunk with id too big" => only_at_add("999: incorrect trunk id parameter"),
        "an empty trunk" => vec![says(
            "no-vlan-yet",
            "1 ADD c1/bridge",
            "999: failed to create bridge \"cni0\": could not add \"cni0\": operation not supported",
            "2: vlanTrunk: [{}] is not supported: this bridge plugin has no VLANs yet",
        )],
        "interface names" => vec![leaves_bridge("cni0")],
        "a template for a bridge name" => vec![
            says(
                "name-templates",
                "1 ADD c1/bridge",
                "999: failed to create bridge \"br%d\": could not lookup \"br%d\": Link not found",
                "999: failed to create bridge \"br%d\": could not add \"br%d\": invalid argument",
            ),
            reference_has("name-templates", "*/host/link/br0"),
        ],
        "a template for an interface name" => vec![
            says(
                "name-templates",
                "1 ADD c1/bridge",
                "999: failed to make veth pair: Link not found",
                "4: interface name contains %",
            ),
            reference_has("name-templates", "*/c1/link/eth0"),
            reference_has("name-templates", "*/host/link/<veth c1.eth0>"),
            reference_has("name-templates", "*/host/link/cni0"),
        ],
        _ => Vec::new(),
    }
}

fn of_plugin(name: &str, plugin: &Value) -> Vec<Scenario> {
    let scenario = |what: &str| Scenario::new(format!("failure: {name}, {what}"), network(plugin.clone()));
    let command = |word: Option<&str>| add("c1").environment("CNI_COMMAND", word);
    let missing = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];
    let everything = |call: Call| missing.into_iter().fold(call, |call, name| call.environment(name, None));
    vec![
        scenario("no command").call(command(None)),
        scenario("an unknown command").call(command(Some("MOD"))).call(command(Some("add"))),
        scenario("no environment")
            .call(everything(add("c1")))
            .call(everything(check("c1")))
            .call(everything(del("c1")))
            .call(everything(Call::new(Verb::Gc, "c1")))
            .call(everything(Call::new(Verb::Status, "c1")))
            .call(everything(Call::new(Verb::Version, "c1"))),
        missing
            .into_iter()
            .fold(scenario("one variable missing"), |scenario, name| {
                scenario.call(add("c1").environment(name, None))
            })
            .call(del("c1").environment("CNI_PATH", None)),
        scenario("empty variables")
            .call(add("c1").environment("CNI_CONTAINERID", Some("")).environment("CNI_IFNAME", Some(""))),
        scenario("no configuration")
            .call(add("c1").stdin(""))
            .call(del("c1").stdin(""))
            .call(Call::new(Verb::Version, "c1").stdin("")),
        scenario("a configuration that is no JSON")
            .call(add("c1").stdin("{"))
            .call(del("c1").stdin("nothing")),
        scenario("a configuration of another kind")
            .call(add("c1").stdin("[]"))
            .call(add("c1").stdin("\"net\""))
            .call(add("c1").stdin("null")),
        scenario("no name")
            .call(add("c1").stdin(r#"{"cniVersion":"1.0.0"}"#))
            .call(del("c1").stdin(r#"{"cniVersion":"1.0.0","name":""}"#)),
        scenario("a name of another kind").call(add("c1").stdin(r#"{"cniVersion":"1.0.0","name":7}"#)),
        scenario("a version of another kind").call(add("c1").stdin(r#"{"cniVersion":1,"name":"net"}"#)),
        scenario("verbs that 0.3.1 has not")
            .call(check("c1").stdin(r#"{"cniVersion":"0.3.1","name":"net"}"#))
            .call(Call::new(Verb::Gc, "c1").stdin(r#"{"cniVersion":"1.0.0","name":"net"}"#))
            .call(Call::new(Verb::Status, "c1").stdin(r#"{"cniVersion":"1.0.0","name":"net"}"#)),
        scenario("the host's own namespace")
            .call(add("c1").netns("/proc/self/ns/net"))
            .call(del("c1").netns("/proc/self/ns/net")),
        scenario("a namespace that is not there")
            .call(add("c1").netns("/run/netns/absent"))
            .call(del("c1").netns("/run/netns/absent")),
        scenario("a version unknown to everyone")
            .call(add("c1").stdin(r#"{"cniVersion":"2.0.0","name":"net"}"#)),
    ]
}

fn of_configuration() -> Vec<Scenario> {
    let raw = |name: &str, text: &str| {
        let call = |verb| Call::new(verb, "c1").stdin(text);
        Scenario::new(format!("failure: {name}"), network(bridge_plugin(&json!({}), &v4())))
            .call(call(Verb::Add))
            .call(call(Verb::Del))
    };
    let plugin = |name: &str, keys: Value| {
        Scenario::new(format!("failure: {name}"), network(bridge_plugin(&keys, &v4()))).add("c1").del("c1")
    };
    vec![
        plugin("a key of another kind", json!({ "isGateway": "yes" })),
        plugin("a number of another kind", json!({ "mtu": "big" })),
        plugin("a mtu that is no integer", json!({ "mtu": 1400.5 })),
        plugin("a negative mtu", json!({ "mtu": -1 })),
        plugin("a mtu that is too small", json!({ "mtu": 60 })),
        plugin("a bridge name that is too long", json!({ "bridge": "a-name-of-16-chr" })),
        plugin("an empty bridge name", json!({ "bridge": "" })),
        plugin("a template for a bridge name", json!({ "bridge": "br%d" })),
        plugin(
            "null everywhere",
            json!({ "bridge": null, "isGateway": null, "mtu": null, "dns": null, "args": null, "runtimeConfig": null }),
        ),
        plugin("unknown keys", json!({ "unknown": { "deep": [1] }, "capabilities": { "unknown": true } })),
        plugin("vlan too big", json!({ "vlan": 4095 })),
        plugin("vlan negative", json!({ "vlan": -1 })),
        plugin("a trunk with minID alone", json!({ "vlanTrunk": [{ "minID": 5 }] })),
        plugin("a trunk with maxID alone", json!({ "vlanTrunk": [{ "maxID": 5 }] })),
        plugin("a trunk upside down", json!({ "vlanTrunk": [{ "minID": 9, "maxID": 5 }] })),
        plugin("a trunk with minID too big", json!({ "vlanTrunk": [{ "minID": 5000, "maxID": 5001 }] })),
        plugin("a trunk with maxID too big", json!({ "vlanTrunk": [{ "minID": 5, "maxID": 5000 }] })),
        plugin("a trunk with id too big", json!({ "vlanTrunk": [{ "id": 5000 }] })),
        plugin("an empty trunk", json!({ "vlanTrunk": [{}] })),
        raw(
            "keys in other letters",
            r#"{"CNIVERSION":"1.0.0","NAME":"net","TYPE":"bridge","Bridge":"other0","ISGATEWAY":true,"Ipam":{"Type":"host-local","SUBNET":"10.1.0.0/24"}}"#,
        ),
        raw(
            "keys twice",
            r#"{"cniVersion":"1.0.0","name":"other","name":"net","type":"bridge","isGateway":true,"isGateway":false,"ipam":{"type":"host-local","subnet":"10.9.0.0/24","subnet":"10.1.0.0/24"}}"#,
        ),
        raw(
            "text behind the configuration",
            r#"{"cniVersion":"1.0.0","name":"net","type":"bridge"} and more"#,
        ),
        raw(
            "ipam of another kind",
            r#"{"cniVersion":"1.0.0","name":"net","type":"bridge","ipam":"host-local"}"#,
        ),
        raw(
            "ipam without a type",
            r#"{"cniVersion":"1.0.0","name":"net","type":"bridge","ipam":{"subnet":"10.1.0.0/24"}}"#,
        ),
        raw(
            "prevResult of another kind",
            r#"{"cniVersion":"1.0.0","name":"net","type":"bridge","prevResult":7}"#,
        ),
        raw("a network name with a slash", r#"{"cniVersion":"1.0.0","name":"a/b","type":"bridge"}"#),
        raw(
            "a network name that starts with a dot",
            r#"{"cniVersion":"1.0.0","name":".net","type":"bridge"}"#,
        ),
    ]
}

fn of_names() -> Vec<Scenario> {
    let scenario =
        |what: &str| Scenario::new(format!("failure: {what}"), network(bridge_plugin(&json!({}), &v4())));
    let id = |id| add("c1").environment("CNI_CONTAINERID", Some(id));
    vec![
        scenario("container ids").call(id("-c1")).call(id("c/1")).call(id("..")).call(id("c 1")),
        scenario("interface names")
            .call(add("c1").ifname("a-name-of-16-chr"))
            .call(add("c1").ifname(".."))
            .call(add("c1").ifname("eth/0"))
            .call(add("c1").ifname("eth:0"))
            .call(add("c1").ifname("eth 0"))
            .call(add("c1").ifname("lo")),
        scenario("a template for an interface name")
            .call(add("c1").ifname("eth%d"))
            .call(del("c1").ifname("eth%d")),
        scenario("CNI_ARGS with the name of their own kind")
            .call(add("c1").args("IgnoreUnknown=1;CommonArgs=x"))
            .call(del("c1").args("IgnoreUnknown=1;CommonArgs=x")),
        scenario("CNI_ARGS that are none")
            .call(add("c1").args("one"))
            .call(add("c1").args("a=b=c"))
            .call(add("c1").args(";")),
        scenario("CNI_ARGS with an unknown key")
            .call(add("c1").args("FOO=BAR"))
            .call(del("c1").args("FOO=BAR")),
        scenario("IgnoreUnknown of another kind")
            .call(add("c1").args("IgnoreUnknown=maybe"))
            .call(add("c1").args("IgnoreUnknown=false;FOO=BAR")),
        scenario("CNI_NETNS_OVERRIDE")
            .call(add("c1").netns("/proc/self/ns/net").environment("CNI_NETNS_OVERRIDE", Some("TRUE"))),
    ]
}
