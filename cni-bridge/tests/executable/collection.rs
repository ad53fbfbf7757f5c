//! GC: what nobody uses goes, of this network and no other.

use serde_json::{Value, json};

use crate::sandbox::{Attachment, DUAL, Sandbox, run_in, try_run_in};

/// With everything that leaves rules.
fn attachment<'a>(sandbox: &'a Sandbox, network: &str, id: &str) -> Attachment<'a> {
    let mut attachment = sandbox.attachment(id, DUAL);
    attachment.conf["name"] = json!(network);
    attachment.conf["cniVersion"] = json!("1.1.0");
    attachment.conf["ipMasq"] = json!(true);
    attachment.conf["macspoofchk"] = json!(true);
    attachment
}

#[test]
fn only_what_is_not_listed_of_this_network_goes() {
    let mut sandbox = Sandbox::new().with_host_local();
    ["c2", "c3"].into_iter().for_each(|id| sandbox.add_container(id));
    let stale = attachment(&sandbox, "net", "c1").added();
    let valid = attachment(&sandbox, "net", "c2").added();
    let mut other = attachment(&sandbox, "other", "c3");
    other.conf["ipam"]["ranges"] = json!([[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.100"}]]);
    let other = other.added();

    valid.collect(&[("c2", "eth0")]);
    assert_eq!(Sandbox::links(&sandbox.netns("c1")), ["lo"]);
    for kept in [&valid, &other] {
        kept.is_fine("CHECK");
    }
    let rules = sandbox.rules();
    assert!(!rules.iter().any(|line| line.contains("id: c1") || line.contains("-c1-")), "{rules:#?}");
    assert_eq!(sandbox.leases().len(), 3, "host-local forgot the stale one's addresses");
    stale.del();

    valid.collect(&[]);
    other.is_fine("CHECK");
    other.del();
    sandbox.assert_detached();
}

#[test]
fn names_too_long_for_an_alias_are_collected_and_deleted_all_the_same() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let network = "n".repeat(200);
    let long = |sandbox, id: &str| {
        let mut attachment = attachment(sandbox, &network, id);
        attachment.id = format!("{id}{}", "ab".repeat(31));
        attachment
    };
    let (stale, valid) = (long(&sandbox, "c1").added(), long(&sandbox, "c2").added());
    valid.collect(&[(&valid.id, "eth0")]);
    assert_eq!(Sandbox::links(&sandbox.netns("c1")), ["lo"], "no link keeps an address that is free again");
    valid.is_fine("CHECK");
    stale.del();
    let mut without_netns = valid;
    without_netns.netns = String::new();
    without_netns.del();
    sandbox.assert_detached();
}

#[test]
fn rules_are_collected_after_their_container_died_without_del() {
    let mut sandbox = Sandbox::new().with_host_local();
    let dead = attachment(&sandbox, "net", "c1").added();
    let conf = dead.conf.clone();
    drop(dead);
    // As after a kill of the runtime: the namespace goes, and with it the veth.
    run_in(&sandbox.netns("c1"), "ip link del eth0");
    sandbox.remove_container("c1");
    assert_eq!(sandbox.rules_with("masquerade comment").len(), 2);
    let mut gc = attachment(&sandbox, "net", "c1");
    gc.conf = conf;
    gc.collect(&[]);
    sandbox.assert_detached();
}

/// What libcni sends when nothing is in use: the JSON of a nil slice.
#[test]
fn a_null_list_collects_everything_of_the_network() {
    let sandbox = Sandbox::new().with_host_local();
    let mut added = attachment(&sandbox, "net", "c1").added();
    added.conf["cniVersion"] = json!("1.1.0");
    added.conf["cni.dev/valid-attachments"] = Value::Null;
    added.conf["cni.dev/attachments"] = Value::Null;
    added.is_fine("GC");
    sandbox.assert_detached();
}

#[test]
fn what_the_reference_made_is_collected_where_its_network_is_known() {
    let sandbox = Sandbox::new().with_host_local();
    let gc = attachment(&sandbox, "net", "c1");
    let chain = |id: &str| format!("CNI-{}", sha512_hex(&format!("net{id}")));
    let mut commands = Vec::new();
    for (network, id) in [("net", "stale"), ("net", "valid"), ("other", "foreign")] {
        let chain = chain(id);
        let comment = format!(r#"name: "{network}" id: "{id}""#);
        commands.push(format!("-t nat -N {chain}|"));
        commands.push(format!("-t nat -A {chain} -d 10.1.0.0/24 -m comment --comment|{comment}|-j ACCEPT"));
        commands
            .push(format!("-t nat -A {chain} ! -d 224.0.0.0/4 -m comment --comment|{comment}|-j MASQUERADE"));
        commands
            .push(format!("-t nat -A POSTROUTING -s 10.1.0.7/32 -m comment --comment|{comment}|-j {chain}"));
    }
    for command in &commands {
        let mut parts = command.split('|');
        let before = parts.next().unwrap().split_whitespace().map(str::to_owned);
        let comment = parts.next().filter(|text| !text.is_empty()).map(str::to_owned);
        let after = parts.next().unwrap_or_default().split_whitespace().map(str::to_owned);
        let words: Vec<String> = before.chain(comment).chain(after).collect();
        let done = sandbox.host.run(|| std::process::Command::new("iptables").args(&words).output().unwrap());
        let done = done.unwrap();
        assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    }
    gc.collect(&[("valid", "eth7")]);
    let saved = run_in(&sandbox.host, "iptables -t nat -S");
    let count = |id: &str| saved.lines().filter(|line| line.contains(&chain(id))).count();
    assert_eq!((count("stale"), count("valid"), count("foreign")), (0, 4, 4), "{saved}");
}

#[test]
fn a_missing_list_removes_nothing_and_links_of_others_stay() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = attachment(&sandbox, "net", "c1").added();
    let (code, message) = attachment.fails("GC");
    assert_eq!(code, 7);
    assert!(
        message.starts_with("cni.dev/valid-attachments: missing; GC removes nothing: pass "),
        "{message}"
    );
    attachment.is_fine("CHECK");

    let made =
        try_run_in(&sandbox.host, &format!("ip link add vethforeign master {} type veth", sandbox.bridge));
    assert!(made.status.success());
    attachment.collect(&[]);
    assert!(Sandbox::links(&sandbox.host).contains(&"vethforeign".to_owned()));
    run_in(&sandbox.host, "ip link del vethforeign");
    sandbox.assert_detached();
}

#[test]
fn the_ipam_plugin_is_told() {
    let sandbox = Sandbox::new().with_scripted_ipam(&json!({}));
    let conf = r#"{"cniVersion": "1.1.0", "ipam": {"type": "scripted-ipam"}}"#;
    sandbox.attachment("c1", conf).collect(&[]);
    assert_eq!(sandbox.ipam_calls(), ["GC"]);
}

/// 24 digits, by coreutils.
fn sha512_hex(text: &str) -> String {
    let script = format!("printf %s '{text}' | sha512sum");
    let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()[..24].to_owned()
}
