//! STATUS, GC and CHECK of what the reference's plugins do not look after.

use serde_json::{Value, json};

use super::super::differences::Difference;
use super::super::scenario::{Call, Scenario, Step, Verb, add};
use super::expected::learns_no_link_local;
use super::host_local::capable;
use super::networks::{at_version, bridge, host_local, v4};

fn newest(network: &Value) -> Value {
    at_version(network, "1.1.0")
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let status = || Call::new(Verb::Status, "c1");
    let gc = |valid: Value| Call::new(Verb::Gc, "c1").valid(valid);
    let first_only = || json!([{ "containerID": "c1", "ifname": "eth0" }]);
    let small = json!({ "type": "host-local", "subnet": "10.1.0.0/30" });
    let of_runtime = newest(&capable(json!({}), "ipRanges"));
    let ranges = json!({ "ipRanges": [[{ "subnet": "10.1.0.0/24" }]] });
    let masquerading = json!({ "isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": "nftables" });
    let scenarios = vec![
        Scenario::new("upkeep: STATUS of an exhausted pool", newest(&bridge(&json!({}), &small)))
            .call(status())
            .add("c1")
            .call(status())
            .del("c1")
            .call(status()),
        Scenario::new("upkeep: STATUS of host-local without ranges", newest(&host_local(&json!({}))))
            .call(status()),
        Scenario::new("upkeep: STATUS where all ranges are the runtime's", of_runtime.clone()).call(status()),
        Scenario::new("upkeep: GC where all ranges are the runtime's", of_runtime)
            .call(add("c1").runtime(ranges))
            .call(gc(json!([]))),
        Scenario::new("upkeep: GC of leases", newest(&host_local(&v4())))
            .add("c1")
            .add("c2")
            .call(gc(first_only()))
            .check("c1")
            .call(gc(json!([]))),
        Scenario::new("upkeep: GC of links and rules", newest(&bridge(&masquerading, &v4())))
            .add("c1")
            .add("c2")
            .call(gc(first_only()))
            .check("c1")
            .call(gc(json!([]))),
        Scenario::new("upkeep: GC without a list", newest(&bridge(&json!({}), &v4())))
            .add("c1")
            .call(Call::new(Verb::Gc, "c1"))
            .check("c1")
            .del("c1"),
        Scenario::new("upkeep: CHECK without masquerading", newest(&bridge(&masquerading, &v4())))
            .add("c1")
            .step(Step::Filter("nft flush chain inet cni_plugins_masquerade masq_checks".to_owned()))
            .check("c1")
            .del("c1"),
        Scenario::new(
            "upkeep: CHECK without the rules of macspoofchk",
            newest(&bridge(&json!({ "macspoofchk": true, "isGateway": true }), &v4())),
        )
        .add("c1")
        .step(Step::Filter("nft flush chain bridge nat PREROUTING".to_owned()))
        .check("c1")
        .del("c1"),
        Scenario::new(
            "upkeep: CHECK with another port state",
            newest(&bridge(&json!({ "portIsolation": true, "isGateway": true }), &v4())),
        )
        .add("c1")
        .ip("host", "link set <veth c1.eth0> type bridge_slave isolated off")
        .check("c1")
        .del("c1"),
    ];
    let with_differences = |scenario: Scenario| {
        let differences = differences(&scenario.name);
        scenario.differs(differences)
    };
    scenarios.into_iter().map(with_differences).collect()
}

/// What differs on purpose in the scenario of this name.
fn differences(name: &str) -> Vec<Difference> {
    let refused = |id, at: &str, error: &str| {
        let silent = Difference::new(id, format!("{at}/answer")).reference("exit status: 0, nothing");
        vec![silent.ours(format!("exit status: 1, error {error}"))]
    };
    let check = |error: &str| refused("check-complete", "3 CHECK c1/bridge", &format!("999: {error}"));
    match name {
        "upkeep: STATUS of an exhausted pool" => refused(
            "status",
            "3 STATUS c1/bridge",
            "50: no IP addresses available in range set: 10.1.0.1-10.1.0.2",
        ),
        "upkeep: STATUS of host-local without ranges" => {
            refused("status", "1 STATUS c1/host-local", "999: no IP ranges specified")
        }
        "upkeep: GC of leases" => collected("c1", "10.1.0.2", "5 GC c1")
            .into_iter()
            .chain(collected("c2", "10.1.0.3", "* c1"))
            .filter(|difference| difference.at.contains("/file/"))
            .collect(),
        "upkeep: GC where all ranges are the runtime's" => collected("c1", "10.1.0.2", "2 GC c1")
            .into_iter()
            .filter(|difference| difference.at.contains("/file/"))
            .collect(),
        "upkeep: GC of links and rules" => collected("c1", "10.1.0.2", "5 GC c1")
            .into_iter()
            .chain(collected("c2", "10.1.0.3", "* c1"))
            .chain([
                Difference::new("gc", format!("5 GC c1/{MASQUERADE}"))
                    .reference(format!("{HEAD}\n{}\n{}", rule("c1", "10.1.0.2"), rule("c2", "10.1.0.3")))
                    .ours(HEAD),
                Difference::new("gc", format!("* c1/{MASQUERADE}"))
                    .reference(format!("{HEAD}\n{}\n{}", rule("c1", "10.1.0.2"), rule("c2", "10.1.0.3")))
                    .ours(format!("{HEAD}\n{}", rule("c1", "10.1.0.2"))),
            ])
            .collect(),
        "upkeep: GC without a list" => {
            let list = r#"a list of {"containerID", "ifname"}, [] if there are none"#;
            let words = format!("GC removes nothing: pass the attachments in use as {list}");
            refused("gc", "2 GC c1/bridge", &format!("7: cni.dev/valid-attachments: missing; {words}"))
        }
        "upkeep: CHECK without masquerading" => check("Failed to find masquerade rules for 10.1.0.2/24"),
        "upkeep: CHECK without the rules of macspoofchk" => {
            let mut differences = check("Failed to find MAC spoof check rules for interface <veth c1.eth0>");
            differences.push(learns_no_link_local());
            differences
        }
        "upkeep: CHECK with another port state" => check(
            "Interface <veth c1.eth0> configured Port Isolation true doesn't match current state: false",
        ),
        _ => Vec::new(),
    }
}

const MASQUERADE: &str = "nft/inet cni_plugins_masquerade/chain masq_checks";
const HEAD: &str =
    "comment \"Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet\"";

fn rule(container: &str, address: &str) -> String {
    format!(
        "ip saddr {address} ip daddr != 10.1.0.0/24 masquerade comment \"*-*, net: net, if: eth0, id: {container}\""
    )
}

/// From `step` on ours has neither the link nor the lease of `container`.
fn collected(container: &str, address: &str, step: &str) -> Vec<Difference> {
    let at = |place: &str| Difference::new("gc", format!("{step}/{place}"));
    vec![
        at(&format!("{container}/link/eth0")).reference("veth"),
        at(&format!("host/link/<veth {container}.eth0>")).reference("veth"),
        at(&format!("file/var/lib/cni/networks/net/{address}"))
            .reference(format!(r#"0600 "{container}\r\neth0""#)),
    ]
}
