//! CHECK: silent after ADD, and it names each thing that is not as ADD left it.

use serde_json::{Value, json};

use crate::sandbox::{Attachment, DUAL, Sandbox, run_in};

const ALL: &str = r#"{
    "isDefaultGateway": true, "ipMasq": true, "macspoofchk": true, "hairpinMode": true, "portIsolation": true,
    "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]],
        "routes": [{"dst": "10.8.0.0/16", "gw": "10.1.0.9"}, {"dst": "fd08::/64"}]
    }
}"#;

/// CHECK's complaint after `command` in the namespace of `place`.
fn complaint_after(place: &str, command: &str) -> String {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", ALL).added();
    attachment.is_fine("CHECK");
    let command = command.replace("VETH", &attachment.host_veth()).replace("BR", &sandbox.bridge);
    let netns = if place == "host" { &sandbox.host } else { &sandbox.netns("c1") };
    run_in(netns, &command);
    let complaint = attachment.complaint();
    attachment.del();
    sandbox.assert_detached();
    complaint.replace(&attachment.host_veth(), "VETH").replace(&sandbox.bridge, "BR")
}

#[test]
fn a_changed_link_is_named() {
    let differs = "doesn't match current state:";
    for (place, command, complaint) in [
        ("host", "ip link set VETH nomaster", "CNI veth created for bridge BR was not found".to_owned()),
        ("host", "ip link set VETH down", "Interface VETH is down".to_owned()),
        ("host", "ip link set BR down", "Bridge interface BR is down".to_owned()),
        (
            "host",
            "ip link set BR promisc on",
            format!("Bridge interface BR configured Promisc Mode false {differs} true "),
        ),
        (
            "host",
            "ip link set VETH type bridge_slave hairpin off",
            format!("Interface VETH configured Hairpin Mode true {differs} false"),
        ),
        (
            "host",
            "ip link set VETH type bridge_slave isolated off",
            format!("Interface VETH configured Port Isolation true {differs} false"),
        ),
        ("container", "ip link del eth0", "Interface name eth0 not found".to_owned()),
    ] {
        assert_eq!(complaint_after(place, command), complaint, "{command}");
    }
}

#[test]
fn a_missing_address_or_route_is_named() {
    let addr = "Failed to match addr 10.1.0.2/24 on interface eth0";
    assert_eq!(complaint_after("container", "ip addr del 10.1.0.2/24 dev eth0"), addr);
    let addr = "Failed to match addr fd00:1::2/64 on interface eth0";
    assert_eq!(complaint_after("container", "ip addr del fd00:1::2/64 dev eth0"), addr);
    let route = "Expected Route {Dst:{IP:10.8.0.0 Mask:ffff0000} GW:10.1.0.9 MTU:0 AdvMSS:0 Priority:0 \
                 Table:<nil> Scope:<nil>} not found in routing table";
    assert_eq!(complaint_after("container", "ip route del 10.8.0.0/16"), route);
    let route = "Expected Route {Dst:{IP:0.0.0.0 Mask:00000000} GW:10.1.0.1 MTU:0 AdvMSS:0 Priority:0 \
                 Table:<nil> Scope:<nil>} not found in routing table";
    assert_eq!(complaint_after("container", "ip route del default"), route);
    let gateway = "Failed to find Gateway 10.1.0.1 for interface eth0";
    assert_eq!(complaint_after("container", "ip route del 10.1.0.0/24"), gateway);
    let complaint = complaint_after("container", "ip -6 route del fd08::/64");
    assert!(complaint.contains("{Dst:{IP:fd08:: Mask:ffffffffffffffff0000000000000000}"), "{complaint}");
}

#[test]
fn a_missing_rule_is_named() {
    let masquerade = "Failed to find masquerade rules for 10.1.0.2/24, fd00:1::2/64";
    for command in [
        "nft flush chain inet cni_plugins_masquerade postrouting",
        "nft flush chain inet cni_plugins_masquerade masq_checks",
        "nft delete table inet cni_plugins_masquerade",
    ] {
        assert_eq!(complaint_after("host", command), masquerade, "{command}");
    }
    let spoof = "Failed to find MAC spoof check rules for interface VETH";
    for command in
        ["nft flush chain bridge nat PREROUTING", "nft flush chain bridge nat cni-br-iface-c1-eth0-mac"]
    {
        assert_eq!(complaint_after("host", command), spoof, "{command}");
    }
}

/// What the result says against what is there, in the reference's words.
#[test]
fn a_result_that_is_not_this_attachments_is_refused() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", DUAL).added();
    let complaint = |change: fn(&mut Value)| {
        let mut changed = attachment.clone();
        change(&mut changed.conf["prevResult"]);
        changed.complaint().replace(&attachment.netns, "NETNS").replace(&sandbox.bridge, "BR")
    };
    let mut without = attachment.clone();
    without.conf["prevResult"] = Value::Null;
    assert_eq!(without.complaint(), "Required prevResult missing");
    for (found, expected) in [
        (complaint(|r| r["interfaces"][0]["name"] = json!("x")), "Interface name missing "),
        (complaint(|r| r["interfaces"][0]["sandbox"] = json!("/x")), "Interface BR should not be in sandbox"),
        (
            complaint(|r| r["interfaces"][0]["mac"] = json!("02:00:00:00:00:01")),
            "Bridge interface BR Mac doesn't match: 02:00:00:00:00:01",
        ),
        (
            complaint(|r| r["interfaces"][2]["sandbox"] = json!("/x")),
            "Sandbox in prevResult /x doesn't match configured netns: NETNS",
        ),
        (complaint(|r| r["interfaces"][1]["name"] = json!("nope")), "Interface name nope not found"),
        (
            complaint(|r| drop(r["interfaces"].as_array_mut().unwrap().remove(1))),
            "CNI veth created for bridge BR was not found",
        ),
    ] {
        assert_eq!(found, expected);
    }
    assert!(
        complaint(|r| r["interfaces"][2]["mac"] = json!("02:00:00:00:00:01"))
            .starts_with("Interface eth0 Mac 02:00:00:00:00:01 doesn't match container Mac: ")
    );
    attachment.is_fine("CHECK");
    attachment.del();
    assert_eq!(
        attachment.complaint().split(':').next(),
        Some("host-local"),
        "the IPAM plugin is asked first"
    );
    sandbox.assert_detached();
}

#[test]
fn layer_2_is_checked_without_ipam() {
    let sandbox = Sandbox::new();
    let attachment = sandbox.attachment("c1", "{}").added();
    attachment.is_fine("CHECK");
    run_in(&sandbox.netns("c1"), "ip link set eth0 down");
    assert_eq!(attachment.complaint(), "Interface eth0 is down");
    attachment.del();

    let disabled = sandbox.attachment("c1", r#"{"disableContainerInterface": true}"#).added();
    disabled.is_fine("CHECK");
    disabled.del();
    sandbox.assert_detached();
}

#[test]
fn older_versions_are_checked_since_0_4_0() {
    let sandbox = Sandbox::new().with_host_local();
    let add = |version: &str| -> Attachment<'_> {
        let mut attachment = sandbox.attachment("c1", ALL);
        attachment.conf["cniVersion"] = json!(version);
        attachment.added()
    };
    for version in ["0.4.0", "1.0.0", "1.1.0"] {
        let attachment = add(version);
        attachment.is_fine("CHECK");
        attachment.del();
    }
    let old = add("0.3.1");
    assert_eq!(old.fails("CHECK"), (1, "config version does not allow CHECK".to_owned()));
    old.del();
    sandbox.assert_detached();
}
