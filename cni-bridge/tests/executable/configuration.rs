//! Which keys count, which values are refused, in which words.

use serde_json::{Value, json};

use crate::sandbox::{Attachment, DUAL, Sandbox, run_in};

#[test]
fn the_runtimes_mac_wins() {
    let sandbox = Sandbox::new();
    let mut attachment = sandbox.attachment("c1", r#"{"promiscMode": true}"#);
    attachment.args = "MAC=02:00:00:00:00:01;IgnoreUnknown=1;FOO=BAR";
    let mac = |attachment: &Attachment<'_>| {
        let mac = attachment.add()["interfaces"][2]["mac"].clone();
        assert_eq!(Sandbox::ip(&sandbox.netns("c1"), "link show dev eth0")[0]["address"], mac);
        attachment.del();
        mac
    };
    assert_eq!(mac(&attachment), "02:00:00:00:00:01");
    attachment.conf["args"] = json!({"cni": {"mac": "02:00:00:00:00:02"}});
    assert_eq!(mac(&attachment), "02:00:00:00:00:02");
    attachment.conf["runtimeConfig"] = json!({"mac": "02:00:00:00:00:03"});
    assert_eq!(mac(&attachment), "02:00:00:00:00:03");
    let bridge = &Sandbox::ip(&sandbox.host, &format!("link show dev {}", sandbox.bridge))[0];
    assert!(bridge["flags"].as_array().unwrap().contains(&json!("PROMISC")));

    attachment.conf["runtimeConfig"] = json!({"mac": "nonsense"});
    let msg = "failed to make veth pair: address nonsense: invalid MAC address";
    assert_eq!(attachment.refused(), (999, msg.to_owned()));
    // Not a unicast address: the kernel refuses it.
    attachment.conf["runtimeConfig"] = json!({"mac": "01:00:00:00:00:01"});
    let msg = "failed to make veth pair: cannot assign requested address";
    assert_eq!(attachment.refused(), (999, msg.to_owned()));
}

#[test]
fn vlans_are_judged_like_by_the_reference_and_then_refused_by_name() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = |key: &str, value: &Value| {
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.conf[key] = value.clone();
        attachment
    };
    for (key, value) in [("vlan", json!(7)), ("vlanTrunk", json!([{"id": 7}])), ("vlanTrunk", json!([]))] {
        let msg = format!("{key}: {value} is not supported: this bridge plugin has no VLANs yet");
        let attachment = attachment(key, &value);
        assert_eq!(attachment.refused(), (2, msg));
        sandbox.assert_untouched();
        attachment.del();
    }
    for (trunk, msg) in [
        (json!({"id": 0}), "incorrect trunk id parameter"),
        (json!({"id": 4095}), "incorrect trunk id parameter"),
        (json!({"minID": 0, "maxID": 5}), "incorrect trunk minID parameter"),
        (json!({"minID": 1, "maxID": 4095}), "incorrect trunk maxID parameter"),
        (json!({"minID": 6, "maxID": 5, "id": 9999}), "minID is greater than maxID in trunk parameter"),
        (json!({"minID": 5}), "minID and maxID should be configured simultaneously, maxID is missing"),
        (json!({"maxID": 5}), "minID and maxID should be configured simultaneously, minID is missing"),
    ] {
        assert_eq!(attachment("vlanTrunk", &json!([trunk])).refused(), (999, msg.to_owned()));
    }
    let msg = "invalid VLAN ID 5000 (must be between 0 and 4094)";
    assert_eq!(attachment("vlan", &json!(5000)).refused(), (999, msg.to_owned()));
    attachment("vlan", &json!(5000)).del();

    let mut none = attachment("vlan", &json!(0));
    none.conf["vlanTrunk"] = Value::Null;
    none.conf["preserveDefaultVlan"] = json!(true);
    none.add();
    none.del();
    sandbox.assert_detached();
}

#[test]
fn the_masquerade_backend_counts_only_where_it_is_used() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["ipMasqBackend"] = json!("ebtables");
    attachment.add();
    attachment.del();
    attachment.conf["ipMasq"] = json!(true);
    assert_eq!(attachment.refused(), (999, r#"unknown ipmasq backend "ebtables""#.to_owned()));
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn status_asks_the_ipam_plugin_and_needs_none_for_layer_2() {
    let sandbox = Sandbox::new().with_scripted_ipam(&json!({}));
    let conf =
        r#"{"cniVersion": "1.1.0", "ipMasq": true, "macspoofchk": true, "ipam": {"type": "scripted-ipam"}}"#;
    let attachment = sandbox.attachment("c1", conf);
    attachment.is_fine("STATUS");
    assert_eq!(sandbox.ipam_calls(), ["STATUS"]);
    sandbox.attachment("c1", r#"{"cniVersion": "1.1.0"}"#).is_fine("STATUS");
    let missing = sandbox.attachment("c1", r#"{"cniVersion": "1.1.0", "ipam": {"type": "no-such-ipam"}}"#);
    assert!(missing.fails("STATUS").1.starts_with(r#"failed to find plugin "no-such-ipam" in path"#));
    let old = sandbox.attachment("c1", r#"{"cniVersion": "1.0.0"}"#);
    assert_eq!(old.fails("STATUS"), (1, "config version does not allow STATUS".to_owned()));
}

#[test]
fn keys_match_without_regard_to_case() {
    let sandbox = Sandbox::new();
    let attachment = sandbox.attachment("c1", r#"{"MTU": 1300, "HairpinMode": true, "portisolation": true}"#);
    attachment.add();
    let port = &Sandbox::ip(&sandbox.host, "-d link show type veth")[0];
    let flags = &port["linkinfo"]["info_slave_data"];
    assert_eq!(
        (&port["mtu"], &flags["hairpin"], &flags["isolated"]),
        (&json!(1300), &json!(true), &json!(true))
    );
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn a_negative_mtu_is_the_kernels_default_and_unknown_arguments_are_refused() {
    let sandbox = Sandbox::new();
    let mut attachment = sandbox.attachment("c1", r#"{"mtu": -5}"#);
    attachment.add();
    assert_eq!(Sandbox::ip(&sandbox.host, "link show type veth")[0]["mtu"], 1500);
    attachment.del();
    attachment.args = "FOO=BAR";
    assert_eq!(attachment.refused(), (999, r#"ARGS: unknown args ["FOO=BAR"]"#.to_owned()));
    attachment.args = "FOO=BAR;IgnoreUnknown=1";
    attachment.conf["mtu"] = json!(10);
    let msg = format!("failed to create bridge {0:?}: could not add {0:?}: invalid argument", sandbox.bridge);
    run_in(&sandbox.host, &format!("ip link del {}", sandbox.bridge));
    assert_eq!(attachment.refused(), (999, msg));
    let details = "mtu: expected 68 to 65535, or 0 for the kernel's default, found 10";
    assert!(attachment.call("ADD").1["details"].as_str().unwrap().ends_with(details));
    attachment.conf["mtu"] = json!(0);
    attachment.args = "MAC=01:00:5e:00:00:01";
    let (_, refused) = attachment.call("ADD");
    assert_eq!(refused["msg"], "failed to make veth pair: cannot assign requested address");
    let details = "mac: expected that of one interface, not a group's and not zero, found 01:00:5e:00:00:01";
    assert!(refused["details"].as_str().unwrap().ends_with(details), "{refused}");
    sandbox.assert_untouched();
}

#[test]
fn wrong_configurations_are_named_and_nothing_is_made() {
    let sandbox = Sandbox::new().with_host_local();
    let refused = |key: &str, value: Value| {
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.conf[key] = value;
        let refused = attachment.refused();
        sandbox.assert_untouched();
        refused
    };
    let text = |code: i64, msg: &str| (code, msg.to_owned());
    assert_eq!(
        refused("mtu", json!("big")),
        text(999, r#"failed to load netconf: mtu: expected a whole number, found "big""#)
    );
    assert_eq!(
        refused("isGateway", json!(1)),
        text(999, "failed to load netconf: isGateway: expected true or false, found 1")
    );
    let add = r#"failed to create bridge "../x": could not add "../x": invalid argument"#;
    assert_eq!(refused("bridge", json!("../x")), text(999, add));
    let msg = "failed to load netconf: ipMasq: expected true or false, found \"yes\"";
    assert_eq!(refused("ipMasq", json!("yes")), text(999, msg));
    assert_eq!(refused("vlan", json!(5000)), text(999, "invalid VLAN ID 5000 (must be between 0 and 4094)"));
    assert_eq!(
        refused("disableContainerInterface", json!(true)),
        text(999, "cannot use IPAM when DisableContainerInterface flag is set")
    );
    let mut both = sandbox.attachment("c1", r#"{"hairpinMode": true, "promiscMode": true}"#);
    assert_eq!(both.refused().1, "cannot set hairpin mode and promiscuous mode at the same time");
    both = sandbox.attachment("c1", DUAL);
    both.netns = "/gone/netns".to_owned();
    let msg =
        r#"failed to open netns "/gone/netns": failed to Statfs "/gone/netns": no such file or directory"#;
    assert_eq!(both.refused(), text(999, msg));
    let looped = sandbox.dir.path().join("loop");
    std::os::unix::fs::symlink(&looped, &looped).unwrap();
    for (netns, reason) in [
        (looped.to_str().unwrap().to_owned(), "too many levels of symbolic links"),
        ("/etc/passwd/x".to_owned(), "not a directory"),
        (format!("/{}", "n".repeat(300)), "file name too long"),
    ] {
        both.netns = netns;
        let netns = &both.netns;
        let msg = format!("failed to open netns {netns:?}: failed to Statfs {netns:?}: {reason}");
        assert_eq!(both.refused(), (999, msg.clone()));
        assert_eq!(both.fails("DEL"), (999, msg));
    }

    let msg = r#"failed to create bridge "lo": "lo" already exists but is not a bridge"#;
    assert_eq!(refused("bridge", json!("lo")), text(999, msg));
    assert_eq!(sandbox.leases(), [""; 0]);
}
#[test]
fn older_versions_get_their_shapes() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["cniVersion"] = json!("0.2.0");
    let result = attachment.add();
    assert_eq!(result["ip4"]["routes"], json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]));
    assert_eq!(result["ip6"]["ip"], "fd00:1::2/64");
    attachment.del();
    attachment.conf["cniVersion"] = json!("0.3.1");
    attachment.conf["dns"] = json!({"nameservers": ["10.1.0.53"]});
    let result = attachment.add();
    assert_eq!(result["ips"][0]["version"], "4");
    assert_eq!(result["dns"], json!({"nameservers": ["10.1.0.53"]}));
    attachment.del();
}

#[test]
fn a_range_that_the_ipam_plugin_refuses_is_named_once() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", r#"{"ipam": {"type": "host-local", "subnet": "10.1.0.0/31"}}"#);
    let msg = "invalid range set 0: Network 10.1.0.0/31 too small to allocate from";
    assert_eq!(attachment.call("ADD"), (Some(1), json!({"code": 999, "msg": msg})));
    sandbox.assert_untouched();
}
