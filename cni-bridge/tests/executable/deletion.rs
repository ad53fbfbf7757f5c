//! DEL: whatever is left of an attachment goes, however much is known of it.

use linux::netlink::Netlink;
use serde_json::{Value, json};

use crate::sandbox::{Attachment, DUAL, Sandbox, ip_not_utf_8, run_in};

/// With everything that leaves rules.
fn attachment<'a>(sandbox: &'a Sandbox, backend: &str) -> Attachment<'a> {
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["ipMasq"] = json!(true);
    attachment.conf["ipMasqBackend"] = json!(backend);
    attachment.conf["macspoofchk"] = json!(true);
    attachment
}

#[test]
fn rules_go_without_namespace_and_without_result() {
    for backend in ["", "nftables", "iptables"] {
        for netns in ["", "/gone/netns"] {
            let mut sandbox = Sandbox::new().with_host_local();
            attachment(&sandbox, backend).add();
            sandbox.remove_container("c1");
            let mut attachment = attachment(&sandbox, backend);
            attachment.netns = netns.to_owned();
            attachment.del();
            attachment.del();
            sandbox.assert_detached();
        }
    }
}

#[test]
fn rules_go_whatever_the_configuration_says_now() {
    let sandbox = Sandbox::new().with_host_local();
    for backend in ["nftables", "iptables"] {
        attachment(&sandbox, backend).add();
        // No ipMasq, no macspoofchk.
        sandbox.attachment("c1", DUAL).del();
        sandbox.assert_detached();
    }
}

/// From 234 bytes on no chain can be named after it (13 bytes before it, the
/// interface's name and 5 more behind).
#[test]
fn an_attachment_goes_however_long_its_id_is() {
    let sandbox = Sandbox::new().with_host_local();
    // As after any ADD with `macspoofchk`.
    sandbox.nft("add table bridge nat");
    for length in [233, 234, 243, 300] {
        let mut masqueraded = attachment(&sandbox, "");
        masqueraded.id = "c".repeat(length);
        let mut refused = masqueraded.clone();
        masqueraded.conf["macspoofchk"] = json!(false);
        masqueraded.add();
        assert_eq!(sandbox.rules_with("masquerade comment").len(), 2);
        masqueraded.del();
        sandbox.assert_detached();
        masqueraded.add();
        masqueraded.collect(&[]);
        sandbox.assert_detached();
        if length > 233 {
            assert_eq!(refused.refused().0, 999);
            sandbox.assert_detached();
            refused.netns = String::new();
            refused.del();
        }
    }
}

fn set_alias(attachment: &Attachment<'_>, alias: &str) {
    let veth = attachment.host_veth();
    let words = ["link", "set", "dev", &veth, "alias", alias];
    let done = attachment.sandbox.host.run(|| std::process::Command::new("ip").args(words).status().unwrap());
    assert!(done.unwrap().success());
}

/// As an ADD leaves it that is killed between making the pair and naming it.
#[test]
fn a_port_without_alias_goes_by_its_name() {
    let sandbox = Sandbox::new().with_host_local();
    let added = sandbox.attachment("c1", DUAL).added();
    let veth = added.host_veth();
    let mut forgotten = added.clone();
    forgotten.netns = String::new();
    forgotten.conf["prevResult"] = Value::Null;
    let stays = |del: &Attachment<'_>| {
        del.del();
        assert_eq!(Sandbox::links(&sandbox.netns("c1")), ["eth0", "lo"]);
    };
    set_alias(&added, "somebody else's");
    stays(&forgotten);
    set_alias(&added, "");
    let mut other = forgotten.clone();
    other.id = "c2".to_owned();
    stays(&other);
    run_in(&sandbox.host, &format!("ip link set {veth} nomaster"));
    stays(&forgotten);
    run_in(&sandbox.host, &format!("ip link set {veth} master {}", sandbox.bridge));
    forgotten.del();
    sandbox.assert_detached();
}

#[test]
fn the_port_goes_after_the_container_renamed_its_interface() {
    let sandbox = Sandbox::new().with_host_local();
    let added = sandbox.attachment("c1", DUAL).added();
    let container = sandbox.netns("c1");
    run_in(&container, "ip link set eth0 down");
    run_in(&container, "ip link set eth0 name other");
    added.del();
    sandbox.assert_detached();
}

#[test]
fn the_port_goes_when_the_container_gave_the_interfaces_name_to_another_one() {
    let sandbox = Sandbox::new().with_host_local();
    let added = sandbox.attachment("c1", DUAL).added();
    let container = sandbox.netns("c1");
    let port =
        Sandbox::ip(&sandbox.host, &format!("link show dev {}", added.host_veth()))[0]["ifindex"].clone();
    run_in(&container, "ip link set eth0 down");
    run_in(&container, "ip link set eth0 name other");
    // Its peer even has the index that the port has in the host's namespace.
    run_in(&container, &format!("ip link add eth0 type veth peer name peer0 index {port}"));
    added.del();
    sandbox.assert_detached();
    // Again without a peer of that index.
    let added = sandbox.attachment("c1", DUAL).added();
    run_in(&container, "ip link set eth0 down");
    run_in(&container, "ip link set eth0 name other");
    run_in(&container, "ip link add eth0 type bridge");
    added.del();
    sandbox.assert_detached();
}

/// The kernel does not delete it.
#[test]
fn the_port_goes_when_the_container_gave_the_interfaces_name_to_lo() {
    let sandbox = Sandbox::new().with_host_local();
    let container = sandbox.netns("c1");
    let given = ["ip link set lo name eth0", "ip link property add dev lo altname eth0"];
    let taken = ["ip link set eth0 name lo", "ip link property del dev lo altname eth0"];
    for (give, take) in given.into_iter().zip(taken) {
        let added = sandbox.attachment("c1", DUAL).added();
        run_in(&container, "ip link set eth0 down");
        run_in(&container, "ip link set eth0 name other");
        run_in(&container, "ip link set lo down");
        run_in(&container, give);
        added.del();
        added.del();
        run_in(&container, take);
        sandbox.assert_detached();
    }
}

#[test]
fn a_host_link_with_a_text_that_is_not_utf_8_keeps_no_attachment() {
    let sandbox = Sandbox::new().with_host_local();
    for words in [
        "link set foreign0 alias TEXT",
        "link property add dev foreign0 altname TEXT",
        "link set foreign0 name TEXT",
    ] {
        run_in(&sandbox.host, "ip link add foreign0 index 777 type bridge");
        ip_not_utf_8(&sandbox.host, words);
        let mut added = sandbox.attachment("c1", DUAL).added();
        added.netns = String::new();
        added.del();
        added.del();
        let collected = sandbox.attachment("c1", DUAL).added();
        collected.collect(&[]);
        sandbox.host.run(|| Netlink::open().unwrap().delete_link(777).unwrap()).unwrap();
        sandbox.assert_detached();
    }
}

#[test]
fn a_link_of_the_attachment_with_a_text_that_is_not_utf_8_keeps_nothing_else() {
    let sandbox = Sandbox::new().with_host_local();
    let container = sandbox.netns("c1");
    // The container's interface.
    for words in ["link set eth0 alias TEXT", "link property add dev eth0 altname TEXT"] {
        let added = sandbox.attachment("c1", DUAL).added();
        ip_not_utf_8(&container, words);
        added.del();
        sandbox.assert_detached();
    }
    // The host's end: the container's interface decides, and GC cannot know whose it is.
    let added = attachment(&sandbox, "").added();
    ip_not_utf_8(&sandbox.host, &format!("link set {} alias TEXT", added.host_veth()));
    added.collect(&[]);
    assert_eq!(Sandbox::links(&container), ["eth0", "lo"]);
    added.del();
    sandbox.assert_detached();
    // The bridge.
    let mut added = sandbox.attachment("c1", DUAL).added();
    ip_not_utf_8(&sandbox.host, &format!("link set {} alias TEXT", sandbox.bridge));
    added.netns = String::new();
    added.del();
    run_in(&sandbox.host, &format!("ip link set {} alias readable", sandbox.bridge));
    sandbox.assert_detached();
}

#[test]
fn an_interface_of_another_attachment_stays() {
    let sandbox = Sandbox::new().with_host_local();
    let first = sandbox.attachment("c1", DUAL).added();
    let mut second = sandbox.attachment("c1", "{}");
    second.ifname = "net1".to_owned();
    let second = second.added();
    // The container exchanges the names.
    let container = sandbox.netns("c1");
    for (from, to) in [("eth0", "other"), ("net1", "eth0"), ("other", "net1")] {
        run_in(&container, &format!("ip link set {from} down"));
        run_in(&container, &format!("ip link set {from} name {to}"));
    }
    second.del();
    assert_eq!(Sandbox::links(&container), ["lo", "net1"], "it is the first one's");
    first.del();
    sandbox.assert_detached();
}

#[test]
fn a_link_of_the_reference_goes_by_what_the_runtime_remembers() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL).added();
    attachment.netns = String::new();
    let veth = attachment.host_veth();
    run_in(&sandbox.host, &format!("ip link set {veth} down"));
    run_in(&sandbox.host, &format!("ip link set {veth} name veth0123abcd"));
    attachment.conf["prevResult"]["interfaces"][1]["name"] = json!("veth0123abcd");
    let set_alias = |alias: &str| set_alias(&attachment, alias);
    set_alias("somebody else's");
    attachment.del();
    assert_eq!(Sandbox::links(&sandbox.netns("c1")), ["eth0", "lo"], "an alias of others protects");
    // The reference sets none.
    set_alias("");
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn parallel_dels_of_one_attachment_all_succeed() {
    let sandbox = Sandbox::new().with_host_local();
    attachment(&sandbox, "").add();
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| attachment(&sandbox, "").del());
        }
    });
    sandbox.assert_detached();
}

#[test]
fn two_interfaces_of_one_container_share_a_chain_and_each_goes_alone() {
    let sandbox = Sandbox::new().with_host_local();
    let first = attachment(&sandbox, "iptables").added();
    let mut second = attachment(&sandbox, "iptables");
    second.ifname = "eth1".to_owned();
    second.conf["isDefaultGateway"] = json!(false);
    second.conf["isGateway"] = json!(true);
    let second = second.added();
    first.del();
    second.is_fine("CHECK");
    first.del();
    second.is_fine("CHECK");
    second.del();
    sandbox.assert_detached();
}

/// What DEL can know: the runtime remembers nothing, and the container has
/// taken its IPv6 address away.
fn forgetful<'a>(attachment: &Attachment<'a>) -> Attachment<'a> {
    run_in(&attachment.sandbox.netns("c1"), &format!("ip -6 addr flush dev {}", attachment.ifname));
    let mut forgetful = attachment.clone();
    forgetful.conf["prevResult"] = Value::Null;
    forgetful
}

#[test]
fn iptables_chains_of_both_families_go_when_one_address_is_gone_already() {
    let sandbox = Sandbox::new().with_host_local();
    let first = attachment(&sandbox, "iptables").added();
    forgetful(&first).del();
    sandbox.assert_detached();

    let first = attachment(&sandbox, "iptables").added();
    let mut second = attachment(&sandbox, "iptables");
    second.ifname = "eth1".to_owned();
    second.conf["isDefaultGateway"] = json!(false);
    second.conf["isGateway"] = json!(true);
    let second = second.added();
    forgetful(&first).del();
    second.is_fine("CHECK");
    second.del();
    // Nothing told whose the first one's was.
    second.collect(&[]);
    sandbox.assert_detached();
}

#[test]
fn a_failing_ipam_plugin_does_not_keep_the_rest() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = attachment(&sandbox, "");
    attachment.add();
    attachment.conf["ipam"]["type"] = json!("no-such-ipam");
    assert!(attachment.fails("DEL").1.starts_with(r#"failed to find plugin "no-such-ipam""#));
    assert_eq!(Sandbox::links(&sandbox.netns("c1")), ["lo"]);
    assert_eq!(sandbox.rules_with("c1"), [""; 0]);
    attachment.conf["ipam"]["type"] = json!("host-local");
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn del_with_nothing_to_delete_makes_nothing() {
    let sandbox = Sandbox::new().with_host_local();
    attachment(&sandbox, "").del();
    attachment(&sandbox, "iptables").del();
    assert_eq!(sandbox.rules(), [""; 0], "no table was made by looking");
    sandbox.assert_untouched();
}

#[test]
fn del_copes_with_a_namespace_that_is_gone() {
    for netns in ["", "/gone/netns", "/etc/hostname"] {
        let mut sandbox = Sandbox::new().with_host_local();
        sandbox.attachment("c1", DUAL).add();
        sandbox.remove_container("c1");
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.netns = netns.to_owned();
        attachment.del();
        attachment.del();
        assert_eq!(sandbox.leases(), [""; 0], "CNI_NETNS={netns:?}");
    }
}

#[test]
fn del_without_the_path_of_a_living_namespace_still_removes_the_veth() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.add();
    attachment.netns = String::new();
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn del_and_a_retry_heal_after_kill_9_in_the_middle_of_add() {
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.2/24"}]});
    let sandbox = Sandbox::new().with_scripted_ipam(&result);
    let gate = sandbox.dir.path().join("bin/gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let attachment = sandbox.attachment("c1", r#"{"isGateway": true, "ipam": {"type": "scripted-ipam"}}"#);
    let mut killed = attachment.spawn("ADD");
    // Opening returns when the IPAM plugin reads: the links are made by then.
    let open_gate = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    drop(open_gate);
    std::fs::remove_file(&gate).unwrap();
    attachment.del();
    attachment.add();
    attachment.del();
    sandbox.assert_detached();
}

/// The reference before v0.8.0 masqueraded the whole network.
#[test]
fn a_jump_from_the_network_goes_with_the_attachment() {
    let sandbox = Sandbox::new().with_host_local();
    for (program, subnet) in [
        ("iptables-nft", "10.1.0.0/24"),
        ("iptables-nft", "10.1.0.0/20"),
        ("ip6tables-nft", "fd00:1::/64"),
        ("ip6tables-nft", "fd00:1::/60"),
    ] {
        let mut attachment = sandbox.attachment("c1", r#"{"ipMasq": true, "ipMasqBackend": "iptables"}"#);
        attachment.conf["ipam"] = json!({
            "type": "host-local", "subnet": subnet, "dataDir": sandbox.dir.path().join("leases")
        });
        let attachment = attachment.added();
        let listed = run_in(&sandbox.host, &format!("{program} -t nat -S POSTROUTING"));
        let jump = listed.lines().find(|line| line.contains("-j CNI-")).unwrap();
        let chain = jump.rsplit(' ').next().unwrap();
        run_in(&sandbox.host, &format!("{program} -t nat -F POSTROUTING"));
        run_in(&sandbox.host, &format!("{program} -t nat -A POSTROUTING -s {subnet} -j {chain}"));
        attachment.del();
        sandbox.assert_detached();
    }
}

fn move_to_legacy_table(sandbox: &Sandbox, program: &str) {
    let rules = run_in(&sandbox.host, &format!("{program}-nft -t nat -S"));
    let rules = rules.lines().filter(|line| line.contains("CNI-"));
    let script = rules.fold(String::from("*nat\n"), |script, line| script + line + "\n") + "COMMIT\n";
    run_in(&sandbox.host, &format!("{program}-nft -t nat -F"));
    run_in(&sandbox.host, &format!("{program}-nft -t nat -X"));
    let file = sandbox.dir.path().join("rules");
    std::fs::write(&file, script).unwrap();
    run_in(&sandbox.host, &format!("{program}-legacy-restore --noflush {}", file.display()));
}

/// How often the legacy table names our chains.
fn in_legacy_table(sandbox: &Sandbox, program: &str) -> usize {
    run_in(&sandbox.host, &format!("{program}-legacy -t nat -S")).matches("CNI-").count()
}

/// The kernel's old tables, which nf_tables does not show.
#[test]
fn legacy_rules_are_checked_and_deleted_and_collected() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = attachment(&sandbox, "iptables");
    attachment.conf["macspoofchk"] = json!(false);
    let attachment = attachment.added();
    let moved = |program: &str| move_to_legacy_table(&sandbox, program);
    let programs = ["iptables", "ip6tables"];
    let left = || programs.map(|program| in_legacy_table(&sandbox, program)).iter().sum::<usize>();
    programs.iter().for_each(|program| moved(program));
    assert!(left() > 0);
    attachment.is_fine("CHECK");
    attachment.collect(&[("c1", "eth0")]);
    attachment.is_fine("CHECK");
    attachment.del();
    assert_eq!(left(), 0);

    attachment.add();
    programs.iter().for_each(|program| moved(program));
    forgetful(&attachment).del();
    assert_eq!(left(), 0);

    attachment.add();
    programs.iter().for_each(|program| moved(program));
    attachment.collect(&[]);
    assert_eq!(left(), 0);
    sandbox.assert_detached();
}

/// Answers `--version` only, and records all other calls.
const FAILS: &str = "[ \"$1\" = --version ] && echo 'ip6tables v1.8.9 (legacy)' && exit
    echo \"$@\" >> \"$0.calls\"; echo 'no such thing' >&2; exit 1";

#[test]
fn a_failing_legacy_program_keeps_no_rule_of_the_other_ip_version() {
    let sandbox = Sandbox::new().with_host_local();
    let mut masqueraded = attachment(&sandbox, "iptables");
    masqueraded.conf["macspoofchk"] = json!(false);
    let masqueraded = masqueraded.added();
    ["iptables", "ip6tables"].iter().for_each(|program| move_to_legacy_table(&sandbox, program));
    sandbox.add_program("ip6tables-legacy", FAILS);
    let (_, msg) = masqueraded.fails("DEL");
    assert!(msg.ends_with("no such thing"), "{msg}");
    assert_eq!(in_legacy_table(&sandbox, "iptables"), 0);
    assert_ne!(in_legacy_table(&sandbox, "ip6tables"), 0);
    assert_eq!(sandbox.leases().len(), 2, "the addresses stay reserved");

    std::fs::remove_dir_all(sandbox.programs()).unwrap();
    masqueraded.del();
    assert_eq!(in_legacy_table(&sandbox, "ip6tables"), 0);
    sandbox.assert_detached();
}

#[test]
fn a_legacy_program_that_concerns_no_rule_of_the_attachment_is_not_started() {
    let sandbox = Sandbox::new().with_host_local();
    for program in ["iptables-legacy", "ip6tables-legacy"] {
        run_in(&sandbox.host, &format!("{program} -t nat -S"));
    }
    sandbox.add_program("ip6tables-legacy", FAILS);
    let v4 = r#"{"ipMasq": true, "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}"#;
    sandbox.attachment("c1", v4).added().del();
    sandbox.assert_detached();

    sandbox.add_program("iptables-legacy", FAILS);
    let plain = sandbox.attachment("c1", DUAL).added();
    plain.collect(&[("c1", "eth0")]);
    let calls = |program: &str| sandbox.programs().join(format!("{program}.calls"));
    assert!(calls("ip6tables-legacy").exists(), "GC looks for rules of an earlier configuration");
    ["iptables-legacy", "ip6tables-legacy"]
        .iter()
        .for_each(|name| std::fs::remove_file(calls(name)).unwrap());
    plain.del();
    let started = ["iptables-legacy", "ip6tables-legacy"].map(|name| calls(name).exists());
    assert_eq!(started, [false; 2]);
    sandbox.assert_detached();
}
