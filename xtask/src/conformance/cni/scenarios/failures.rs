//! What comes before any plugin's own work: environment, configuration, verbs.

use serde_json::{Value, json};

use super::super::scenario::{Call, Scenario, Verb, add, check, del, network};
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
    scenarios
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
            .call(call(Verb::Add).netns("/run/netns/c1"))
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
