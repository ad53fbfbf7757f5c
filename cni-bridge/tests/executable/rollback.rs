//! A refused ADD leaves the node as it was, and a retry works.

use std::process::{Child, Command, Stdio};

use serde_json::json;

use crate::sandbox::{DUAL, Sandbox};

#[test]
fn a_full_pool_leaves_nothing_and_heals() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let conf = r#"{"isGateway": true, "ipam": {"type": "host-local", "subnet": "10.67.0.0/30"}}"#;
    let (first, second) = (sandbox.attachment("c1", conf), sandbox.attachment("c2", conf));
    first.add();
    let full = "failed to allocate for range 0: no IP addresses available in range set: 10.67.0.1-10.67.0.2";
    assert_eq!(second.refused(), (999, full.to_owned()));
    assert_eq!(Sandbox::links(&sandbox.netns("c2")), ["lo"]);
    assert_eq!(Sandbox::links(&sandbox.host).len(), 3, "lo, the bridge and the first one's port");
    assert_eq!(Sandbox::addresses(&sandbox.host, &sandbox.bridge), ["10.67.0.1/30"]);
    first.del();
    second.add();
    second.del();
    sandbox.assert_detached();
}

#[test]
fn a_bridge_address_in_the_way_is_refused_and_replaced_by_force() {
    let sandbox = Sandbox::new().with_host_local();
    Sandbox::ip(&sandbox.host, &format!("link add {} type bridge", sandbox.bridge));
    Sandbox::ip(&sandbox.host, &format!("addr add 10.9.0.1/24 dev {}", sandbox.bridge));
    let mut attachment = sandbox.attachment("c1", DUAL);
    let (code, error) = attachment.call("ADD");
    assert_eq!((code, &error["code"]), (Some(1), &json!(999)));
    let name = &sandbox.bridge;
    assert_eq!(
        error["msg"],
        json!(format!(
            "failed to set bridge addr: {name:?} already has an IP address different from 10.1.0.1/24"
        ))
    );
    assert_eq!(
        error["details"],
        json!(format!("{name} has 10.9.0.1/24; remove it or set \"forceAddress\": true"))
    );
    sandbox.assert_detached();
    assert_eq!(
        Sandbox::addresses(&sandbox.host, name),
        ["10.9.0.1/24"],
        "a bridge of others stays as it was"
    );

    attachment.conf["forceAddress"] = json!(true);
    attachment.add();
    assert_eq!(Sandbox::addresses(&sandbox.host, name), ["10.1.0.1/24", "fd00:1::1/64"]);
    let pinned = Sandbox::ip(&sandbox.host, &format!("link show dev {name}"))[0]["address"].clone();
    attachment.del();
    assert_eq!(Sandbox::ip(&sandbox.host, &format!("link show dev {name}"))[0]["address"], pinned);
    sandbox.assert_detached();
}

#[test]
fn an_ipam_plugin_that_fails_after_its_result_leaves_the_gateway_of_others() {
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.99.0.5/24"}]});
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let first = sandbox.attachment("c1", DUAL).added();
    let before = Sandbox::addresses(&sandbox.host, &sandbox.bridge);
    let program = format!("#!/bin/sh\n[ $CNI_COMMAND = ADD ] || exit 0\necho '{result}'\nexit 1\n");
    sandbox.add_plugin("fails-late", &program);
    let second = sandbox
        .attachment("c2", r#"{"isGateway": true, "forceAddress": true, "ipam": {"type": "fails-late"}}"#);
    let (code, msg) = second.refused();
    assert_eq!((code, msg.as_str()), (999, "netplugin failed with no error message: exit status: 1"));
    assert_eq!(Sandbox::addresses(&sandbox.host, &sandbox.bridge), before);
    first.is_fine("CHECK");
    first.del();
    sandbox.assert_detached();
}

#[test]
fn a_late_failure_takes_everything_back_and_a_retry_works() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["ipam"]["routes"] = json!([{"dst": "192.168.0.0/16", "gw": "172.31.0.1"}]);
    let (code, msg) = attachment.refused();
    assert_eq!(code, 999);
    assert!(msg.starts_with("failed to add route '192.168.0.0/16 via 172.31.0.1 dev eth0'"), "{msg}");
    sandbox.assert_untouched();
    attachment.conf["ipam"]["routes"] = json!([]);
    attachment.add();
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn a_gateway_that_cannot_be_set_takes_the_first_ones_address_back() {
    // The second IPv4 gateway contradicts the first, which this ADD has set.
    let result = json!({"cniVersion": "1.0.0", "ips": [
        {"address": "10.1.0.2/24", "gateway": "10.1.0.1"}, {"address": "10.2.0.2/24", "gateway": "10.2.0.1"}]});
    let sandbox = Sandbox::new().with_scripted_ipam(&result);
    Sandbox::ip(&sandbox.host, &format!("link add {} type bridge", sandbox.bridge));
    let attachment = sandbox.attachment("c1", r#"{"isGateway": true, "ipam": {"type": "scripted-ipam"}}"#);
    assert!(attachment.refused().1.ends_with("already has an IP address different from 10.2.0.1/24"));
    sandbox.assert_detached();
    assert_eq!(Sandbox::addresses(&sandbox.host, &sandbox.bridge), [""; 0]);
    assert_eq!(sandbox.ipam_calls(), ["ADD", "DEL"]);
}

#[test]
fn a_repeated_add_is_refused_and_costs_the_first_nothing() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", DUAL);
    attachment.add();
    let (code, msg) = attachment.refused();
    assert_eq!(code, 999);
    assert!(msg.starts_with(r#"container veth name ("eth0") peer provided ("veth"#), "{msg}");
    assert!(msg.ends_with(r#"already exists"#), "{msg}");
    let details = r#"CNI_IFNAME: the container has "eth0" already; call DEL for the earlier ADD first"#;
    assert_eq!(attachment.call("ADD").1["details"], details);
    assert_eq!(Sandbox::addresses(&sandbox.netns("c1"), "eth0"), ["10.1.0.2/24", "fd00:1::2/64"]);
    assert_eq!(sandbox.leases().len(), 2);
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn an_ipam_plugin_that_refuses_is_quoted_and_not_told_to_release() {
    let error = json!({"cniVersion": "1.0.0", "code": 11, "msg": "come back later", "details": "busy"});
    let sandbox = Sandbox::new().with_scripted_ipam(&error);
    std::fs::write(sandbox.dir.path().join("bin/fail"), "").unwrap();
    let attachment = sandbox.attachment("c1", r#"{"ipam": {"type": "scripted-ipam"}}"#);
    let (code, answer) = attachment.call("ADD");
    assert_eq!((code, answer), (Some(1), json!({"code": 11, "msg": "come back later", "details": "busy"})));
    assert_eq!(sandbox.ipam_calls(), ["ADD"]);
    sandbox.assert_untouched();
}

#[test]
fn an_ipam_plugin_that_fails_without_a_word_is_told_to_release() {
    let sandbox = Sandbox::new().with_scripted_ipam(&json!({"cniVersion": "1.0.0"}));
    std::fs::write(sandbox.dir.path().join("bin/result"), "").unwrap();
    std::fs::write(sandbox.dir.path().join("bin/fail"), "").unwrap();
    let attachment = sandbox.attachment("c1", r#"{"ipam": {"type": "scripted-ipam"}}"#);
    let msg = "netplugin failed with no error message: exit status: 1".to_owned();
    assert_eq!(attachment.refused(), (999, msg));
    assert_eq!(sandbox.ipam_calls(), ["ADD", "DEL"]);
    sandbox.assert_untouched();
}

/// `dhcp` looks up the interface once, and sends frames by it. The first look at the interface starts
/// no program, so it is over long before the links are made if the plugin begins at the same time.
const USES_THE_LINK: &str = r#"#!/bin/sh
cat > /dev/null
found=no
while read -r name _; do
    [ "$name" = "$CNI_IFNAME:" ] && found=yes
done < /proc/INSIDE/net/dev
locked=no
[ -e /run/hawser-bridge-BRIDGE.lock ] && locked=yes
echo "$CNI_COMMAND interface:$found locked:$locked" >> "$(dirname "$0")/calls"
error() {
    echo "{\"cniVersion\": \"1.0.0\", \"code\": 12, \"msg\": \"$1\"}"
    exit 1
}
if [ "$CNI_COMMAND" = ADD ]; then
    [ $found = yes ] || error "no interface"
    peer=$(nsenter --net="$CNI_NETNS" ip -o link show dev "$CNI_IFNAME" | sed 's/^.*@if\([0-9]*\):.*/\1/')
    port=$(ip -o link show master BRIDGE up)
    [ "${port%%:*}" = "$peer" ] || error "the peer of the interface is no port"
    END
fi
"#;

const BY_USING_THE_LINK: &str = r#"{"isGateway": true, "ipam": {"type": "uses-the-link"}}"#;

/// A sandbox with this plugin, and the process by which it looks into the container.
struct WithLinkUser {
    sandbox: Sandbox,
    inside: Child,
}

impl WithLinkUser {
    /// `end` is what ADD does once it has found the interface.
    fn new(end: &str) -> Self {
        let sandbox = Sandbox::new();
        // It waits for the end of its input.
        let start = || Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let inside = sandbox.netns("c1").run(start).unwrap();
        let script = USES_THE_LINK.replace("INSIDE", &inside.id().to_string());
        sandbox.add_plugin("uses-the-link", &script.replace("BRIDGE", &sandbox.bridge).replace("END", end));
        Self { sandbox, inside }
    }
}

impl Drop for WithLinkUser {
    fn drop(&mut self) {
        drop(self.inside.stdin.take());
        self.inside.wait().unwrap();
    }
}

const ADDED: &str = "ADD interface:yes locked:no";
const DELETED: &str = "DEL interface:no locked:no";

#[test]
fn an_ipam_plugin_that_may_use_the_link_begins_when_it_is_there() {
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24"}]});
    let user = WithLinkUser::new(&format!("echo '{result}'"));
    let attachment = user.sandbox.attachment("c1", BY_USING_THE_LINK);
    attachment.add();
    attachment.del();
    assert_eq!(user.sandbox.ipam_calls(), [ADDED, DELETED]);
    user.sandbox.assert_detached();
}

#[test]
fn an_ipam_plugin_that_may_use_the_link_and_refuses_leaves_nothing() {
    let user = WithLinkUser::new("error 'no lease'");
    let attachment = user.sandbox.attachment("c1", BY_USING_THE_LINK);
    assert_eq!(attachment.refused(), (12, "no lease".to_owned()));
    assert_eq!(user.sandbox.ipam_calls(), [ADDED]);
    user.sandbox.assert_untouched();
}

/// The addresses are released last, as in DEL: while the container still had them, another one
/// could get them.
#[test]
fn an_ipam_plugin_that_may_use_the_link_releases_when_all_else_is_undone() {
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.9/24"}]});
    for end in ["exit 1", &format!("echo '{result}'; exit 1")] {
        let user = WithLinkUser::new(end);
        let attachment = user.sandbox.attachment("c1", BY_USING_THE_LINK);
        let msg = "netplugin failed with no error message: exit status: 1".to_owned();
        assert_eq!(attachment.refused(), (999, msg));
        assert_eq!(user.sandbox.ipam_calls(), [ADDED, DELETED]);
        user.sandbox.assert_untouched();
    }
}

#[test]
fn an_ipam_plugin_that_may_use_the_link_is_not_asked_without_one() {
    let user = WithLinkUser::new("exit 1");
    let mut attachment = user.sandbox.attachment("c1", BY_USING_THE_LINK);
    attachment.conf["mtu"] = json!(60);
    assert!(attachment.refused().1.starts_with("failed to create bridge"));
    assert_eq!(user.sandbox.ipam_calls(), [""; 0]);
    user.sandbox.assert_untouched();
}

#[test]
fn an_add_of_the_same_id_in_another_namespace_keeps_the_firsts_lease() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let first = sandbox.attachment("c1", DUAL);
    first.add();
    let leases = sandbox.leases();
    let mut second = sandbox.attachment("c2", DUAL);
    second.id.clone_from(&first.id);
    let (_, msg) = second.refused();
    assert!(msg.ends_with("duplicate allocation is not allowed"), "{msg}");
    assert_eq!(sandbox.leases(), leases);
    first.del();
    sandbox.assert_detached();
}

#[test]
fn ipam_plugins_that_are_missing_or_give_nothing_are_refused() {
    let sandbox = Sandbox::new().with_scripted_ipam(&json!({"cniVersion": "1.0.0"}));
    let bin = sandbox.bin();
    let missing = sandbox.attachment("c1", r#"{"ipam": {"type": "no-such-ipam"}}"#);
    let msg = format!("failed to find plugin \"no-such-ipam\" in path [{}]", bin.display());
    assert_eq!(missing.refused(), (999, msg));
    let empty = sandbox.attachment("c1", r#"{"ipam": {"type": "scripted-ipam"}}"#);
    assert_eq!(empty.refused(), (999, "IPAM plugin returned missing IP config".to_owned()));
    sandbox.assert_untouched();
}

#[test]
fn rules_are_taken_back_when_a_later_step_fails() {
    // 0.2.0 has no shape for a result without addresses, which shows last.
    let sandbox = Sandbox::new();
    let mut attachment = sandbox.attachment("c1", r#"{"macspoofchk": true, "cniVersion": "0.2.0"}"#);
    assert_eq!(attachment.refused().1, "cannot convert: no valid IP addresses");
    sandbox.assert_untouched();
    attachment.conf["cniVersion"] = json!("1.0.0");
    attachment.add();
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn rules_that_the_kernel_refuses_take_everything_back() {
    for key in ["ipMasq", "macspoofchk"] {
        let sandbox = Sandbox::new().with_host_local();
        // Chains under our names, hooked in elsewhere.
        sandbox.nft(
            r#"table inet cni_plugins_masquerade {
                chain postrouting { type filter hook input priority 7; }
            }
            table bridge nat {
                chain PREROUTING { type filter hook forward priority 7; }
            }"#,
        );
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.conf[key] = json!(true);
        let (code, msg) = attachment.refused();
        assert_eq!(code, 999);
        assert!(msg.starts_with("failed to change the rules of nf_tables: "), "{msg}");
        sandbox.assert_untouched();
        sandbox.nft("flush ruleset");
        attachment.add();
        attachment.del();
        sandbox.assert_detached();
    }
}

#[test]
fn a_bridge_of_others_gets_its_flags_and_addresses_back() {
    let sandbox = Sandbox::new().with_host_local();
    let name = &sandbox.bridge;
    Sandbox::ip(&sandbox.host, &format!("link add {name} type bridge"));
    Sandbox::ip(&sandbox.host, &format!("addr add 10.9.0.1/24 dev {name}"));
    let before = Sandbox::ip(&sandbox.host, &format!("addr show dev {name}"));
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["forceAddress"] = json!(true);
    attachment.conf["promiscMode"] = json!(true);
    attachment.conf["macspoofchk"] = json!(true);
    sandbox.nft("table bridge nat { chain PREROUTING { type filter hook forward priority 7; }; }");
    attachment.refused();
    let after = Sandbox::ip(&sandbox.host, &format!("addr show dev {name}"));
    let address = |state: &[serde_json::Value]| state[0]["addr_info"][0]["local"].clone();
    assert_eq!((&before[0]["flags"], address(&before)), (&after[0]["flags"], address(&after)));
    sandbox.assert_detached();
}
