//! macspoofchk: frames with a foreign source address do not pass.

use std::net::UdpSocket;
use std::time::Duration;

use serde_json::json;

use crate::sandbox::{Attachment, DUAL, Sandbox, run_in};

fn with_two_containers() -> Sandbox {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    sandbox
}

fn checked<'a>(sandbox: &'a Sandbox, id: &str) -> Attachment<'a> {
    let mut attachment = sandbox.attachment(id, DUAL);
    attachment.conf["macspoofchk"] = json!(true);
    attachment
}

/// That of its eth0, which ADD returned.
fn mac<'a>(added: &'a Attachment<'_>) -> &'a str {
    added.conf["prevResult"]["interfaces"][2]["mac"].as_str().expect("a MAC address")
}

#[test]
fn a_container_that_changes_its_mac_is_not_heard_until_it_is_itself_again() {
    let sandbox = with_two_containers();
    let (first, second) = (checked(&sandbox, "c1").added(), checked(&sandbox, "c2").added());
    let (c1, c2) = (sandbox.netns("c1"), sandbox.netns("c2"));
    let own = mac(&first);
    let other = mac(&second);
    // No address resolution: its frames would be dropped just as well.
    run_in(&c1, &format!("ip neigh add 10.1.0.3 lladdr {other} dev eth0"));
    let server = c2.run(|| UdpSocket::bind("10.1.0.3:5000").unwrap()).unwrap();
    server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let send = |text: &[u8]| {
        let client = c1.run(|| UdpSocket::bind("10.1.0.2:0").unwrap()).unwrap();
        client.send_to(text, "10.1.0.3:5000").unwrap();
    };
    run_in(&c1, "ip link set eth0 address 02:66:66:66:66:66");
    run_in(&c1, &format!("ip neigh replace 10.1.0.3 lladdr {other} dev eth0"));
    send(b"spoofed");
    run_in(&c1, &format!("ip link set eth0 address {own}"));
    run_in(&c1, &format!("ip neigh replace 10.1.0.3 lladdr {other} dev eth0"));
    send(b"honest");
    let mut bytes = [0; 16];
    let (length, _) = server.recv_from(&mut bytes).unwrap();
    assert_eq!(&bytes[..length], b"honest", "the first that arrives");
    first.del();
    second.is_fine("CHECK");
    second.del();
    sandbox.assert_detached();
}

/// Frames to a link-local group address pass no rule, and the bridge learns from them.
#[test]
fn a_container_takes_no_other_ones_frames_by_link_local_frames_either() {
    let sandbox = with_two_containers();
    let (first, second) = (checked(&sandbox, "c1").added(), checked(&sandbox, "c2").added());
    let (c1, c2) = (sandbox.netns("c1"), sandbox.netns("c2"));
    let other = mac(&second);
    let knows = |veth: String| {
        let known = run_in(&sandbox.host, "bridge fdb show dynamic");
        known.lines().any(|line| line.starts_with(other) && line.contains(&veth))
    };
    let send_from = |netns: &linux::netns::NetNs, address: &str| {
        netns.run(|| UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"x", address).unwrap()).unwrap();
    };
    send_from(&c2, "10.1.0.1:5000");
    assert!(knows(second.host_veth()), "it is known where the other one is");
    run_in(&c1, &format!("ip link set eth0 address {other}"));
    run_in(&c1, "ip neigh add 10.1.0.9 lladdr 01:80:c2:00:00:0e dev eth0");
    send_from(&c1, "10.1.0.9:5000");
    assert!(!knows(first.host_veth()), "the bridge did not learn");
    assert!(knows(second.host_veth()));
    first.del();
    second.del();
    sandbox.assert_detached();
}

#[test]
fn the_rules_are_the_references_and_layer_2_has_them_too() {
    let sandbox = Sandbox::new();
    let attachment = sandbox.attachment("c1", r#"{"macspoofchk": true}"#).added();
    let (veth, mac) = (attachment.host_veth(), mac(&attachment));
    let expected = format!(
        r#"table bridge nat {{
chain PREROUTING {{
type filter hook prerouting priority dstnat; policy accept;
iifname "{veth}" jump cni-br-iface-c1-eth0 comment "macspoofchk-c1-eth0"
}}
chain cni-br-iface-c1-eth0 {{
jump cni-br-iface-c1-eth0-mac comment "macspoofchk-c1-eth0"
}}
chain cni-br-iface-c1-eth0-mac {{
ether saddr {mac} return comment "macspoofchk-c1-eth0"
drop comment "macspoofchk-c1-eth0"
}}
}}"#
    );
    assert_eq!(sandbox.rules(), expected.lines().collect::<Vec<_>>());
    attachment.is_fine("CHECK");
    attachment.del();
    assert_eq!(sandbox.rules().len(), 5, "the empty base chain stays");
    sandbox.assert_detached();
}

#[test]
fn leftovers_under_the_same_names_are_replaced() {
    let sandbox = Sandbox::new();
    sandbox.nft(
        r#"table bridge nat {
            chain cni-br-iface-c1-eth0-mac { ether saddr 02:00:00:00:00:07 return; drop; }
            chain cni-br-iface-c1-eth0 { jump cni-br-iface-c1-eth0-mac; }
            chain PREROUTING {
                type filter hook prerouting priority -300;
                iifname "vethgone" jump cni-br-iface-c1-eth0 comment "macspoofchk-c1-eth0"
                iifname "foreign" accept
            }
        }"#,
    );
    let attachment = sandbox.attachment("c1", r#"{"macspoofchk": true}"#).added();
    attachment.is_fine("CHECK");
    assert_eq!(sandbox.rules_with("vethgone"), [""; 0]);
    assert_eq!(sandbox.rules_with("02:00:00:00:00:07"), [""; 0]);
    attachment.del();
    assert_eq!(sandbox.rules_with("foreign").len(), 1);
    sandbox.assert_detached();
}

#[test]
fn a_base_chain_that_hooks_in_elsewhere_is_named() {
    let sandbox = Sandbox::new();
    let attachment = || sandbox.attachment("c1", r#"{"macspoofchk": true}"#);
    let wrong = r#"chain bridge nat PREROUTING is in no hook and must be "type filter hook prerouting priority -300""#;
    run_in(&sandbox.host, "nft add table bridge nat");
    run_in(&sandbox.host, "nft add chain bridge nat PREROUTING");
    let refusal = format!("failed to change the rules of nf_tables: {wrong}");
    assert_eq!(attachment().refused(), (999, refusal));
    sandbox.assert_untouched();
    run_in(&sandbox.host, "nft delete chain bridge nat PREROUTING");

    let added = attachment().added();
    let veth = added.host_veth();
    sandbox.nft(&format!(
        "flush chain bridge nat PREROUTING
        delete chain bridge nat PREROUTING
        add chain bridge nat PREROUTING
        add rule bridge nat PREROUTING iifname \"{veth}\" jump cni-br-iface-c1-eth0 comment \"macspoofchk-c1-eth0\""
    ));
    let rules = format!("Failed to find MAC spoof check rules for interface {veth}");
    assert_eq!(added.complaint(), format!("{rules}: {wrong}"));
    run_in(&sandbox.host, "nft flush chain bridge nat PREROUTING");
    assert_eq!(added.complaint(), format!("{rules}: {wrong}"), "without the rules, too");
    added.del();
    sandbox.assert_detached();
}

#[test]
fn a_dormant_table_is_named_until_it_is_woken() {
    let dormant =
        "table bridge nat is dormant, its chains do nothing: wake it with `nft add table bridge nat`";
    let refusal = format!("failed to change the rules of nf_tables: {dormant}");
    let mut sandbox = Sandbox::new();
    sandbox.add_container("c2");
    let attachment = |id| sandbox.attachment(id, r#"{"macspoofchk": true}"#);
    sandbox.nft("add table bridge nat { flags dormant; }");
    assert_eq!(attachment("c1").refused(), (999, refusal.clone()), "without its base chain");
    sandbox.assert_untouched();
    run_in(&sandbox.host, "nft add table bridge nat");

    let added = attachment("c1").added();
    sandbox.nft("add table bridge nat { flags dormant; }");
    let rules = format!("Failed to find MAC spoof check rules for interface {}", added.host_veth());
    assert_eq!(added.complaint(), format!("{rules}: {dormant}"));
    assert_eq!(attachment("c2").refused(), (999, refusal));
    run_in(&sandbox.host, "nft add table bridge nat");
    added.is_fine("CHECK");
    sandbox.nft("add table bridge nat { flags dormant; }");
    added.del();
    sandbox.assert_detached();
}
