use serde_json::{Value, json};

use super::plan::{self, Listing};
use super::rules::*;
use crate::config::Config;
use crate::family::Family;

const OWNER: Owner<'static> = Owner { network: "net1", container_id: "cid1" };
const CHAIN: &str = "CNI-DN-e8f6f419596f7f47b3468";

fn wanted(mut value: Value, mappings: Value, family: Family) -> Wanted {
    value["runtimeConfig"] = json!({"portMappings": mappings});
    let config = Config::of_json(value, &["10.7.2.4/24", "fd00::4/64"]);
    let (_, container) = config.container.each().find(|(of, _)| *of == family).unwrap();
    Wanted::new(&config, &OWNER, family, container).unwrap()
}

fn two_ports() -> Value {
    json!([
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"hostPort": 53, "containerPort": 53, "protocol": "udp", "hostIP": "10.9.9.9"}
    ])
}

fn lines(rules: &[Rule]) -> Vec<String> {
    rules.iter().map(|rule| format!("{} {}", rule.chain, rule.words.join(" "))).collect()
}

#[test]
fn the_container_has_the_references_chain_entries_and_rules() {
    let wanted = wanted(json!({"conditionsV4": ["-s", "10.0.0.0/8"]}), two_ports(), Family::V4);
    assert_eq!(wanted.chain, CHAIN);
    let entry = |protocol: &str, port: u16| {
        let comment = r#"-m comment --comment dnat name: "net1" id: "cid1""#;
        format!(
            "CNI-HOSTPORT-DNAT {comment} -m multiport -p {protocol} --destination-ports {port} -s 10.0.0.0/8 -j {CHAIN}"
        )
    };
    assert_eq!(lines(&wanted.entries), [entry("tcp", 8080), entry("udp", 53)]);
    let rule = |text: &str| format!("{CHAIN} {text}");
    assert_eq!(
        lines(&wanted.forwards),
        [
            rule("-p tcp --dport 8080 -s 10.7.2.4/24 -j CNI-HOSTPORT-SETMARK"),
            rule("-p tcp --dport 8080 -s 127.0.0.1 -j CNI-HOSTPORT-SETMARK"),
            rule("-p tcp --dport 8080 -j DNAT --to-destination 10.7.2.4:80"),
            rule("-p udp --dport 53 -d 10.9.9.9 -s 10.7.2.4/24 -j CNI-HOSTPORT-SETMARK"),
            rule("-p udp --dport 53 -d 10.9.9.9 -s 127.0.0.1 -j CNI-HOSTPORT-SETMARK"),
            rule("-p udp --dport 53 -d 10.9.9.9 -j DNAT --to-destination 10.7.2.4:53"),
        ]
    );
}

#[test]
fn the_other_familys_ports_stand_in_the_entry_only() {
    let wanted = wanted(json!({}), two_ports(), Family::V6);
    assert_eq!(wanted.entries.len(), 2);
    assert_eq!(
        lines(&wanted.forwards),
        [
            format!("{CHAIN} -p tcp --dport 8080 -s fd00::4/64 -j CNI-HOSTPORT-SETMARK"),
            format!("{CHAIN} -p tcp --dport 8080 -j DNAT --to-destination [fd00::4]:80"),
        ]
    );
}

#[test]
fn shared_chains_depend_on_who_masquerades() {
    let shared = |value| wanted(value, two_ports(), Family::V4);
    let own = shared(json!({"markMasqBit": 4}));
    assert_eq!(own.shared_chains, ["CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ", "CNI-HOSTPORT-DNAT"]);
    assert_eq!(
        lines(&own.shared),
        [
            "CNI-HOSTPORT-SETMARK -m comment --comment CNI portfwd masquerade mark -j MARK --set-xmark 0x10/0x10",
            "CNI-HOSTPORT-MASQ -m mark --mark 0x10/0x10 -j MASQUERADE",
            "POSTROUTING -m comment --comment CNI portfwd requiring masquerade -j CNI-HOSTPORT-MASQ",
            "PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
            "OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT",
        ]
    );
    assert_eq!(own.shared[2].place, Place::First);
    let external = shared(json!({"externalSetMarkChain": "KUBE-MARK-MASQ"}));
    assert_eq!((external.shared_chains.len(), external.shared.len()), (1, 2));
    assert!(lines(&external.forwards)[0].ends_with("-j KUBE-MARK-MASQ"));
    let none = shared(json!({"snat": false}));
    assert_eq!((none.shared.len(), none.forwards.len()), (2, 2));
    let all = shared(json!({"masqAll": true}));
    assert_eq!(all.forwards.len(), 4);
    assert!(lines(&all.forwards)[0].contains("-s 0.0.0.0/0 "));
}

#[test]
fn what_is_missing_of_the_guard_is_added_behind_what_is_there() {
    let full = [
        ":CNI-HOSTPORT-GUARD - [0:0]",
        "-A CNI-HOSTPORT-GUARD -d 127.0.0.0/8 -m comment --comment \"CNI portfwd to localnet\" \
         -m addrtype ! --dst-type LOCAL --limit-iface-in -j DROP",
        "-A CNI-HOSTPORT-GUARD -s 127.0.0.0/8 -m comment --comment \"CNI portfwd from localnet\" \
         -m addrtype ! --src-type LOCAL --limit-iface-in -j DROP",
        "-I PREROUTING ! -i lo -m comment --comment \"CNI portfwd localnet guard\" -j CNI-HOSTPORT-GUARD",
    ];
    assert_eq!(plan::add_guard(&Listing::default()), full);
    assert_eq!(plan::missing_guard(&Listing::default()), None, "the reference makes none");
    let mut listed = vec![
        "-P PREROUTING ACCEPT".to_owned(),
        "-N CNI-HOSTPORT-GUARD".to_owned(),
        full[3].replace("-I ", "-A "),
        "-A CNI-HOSTPORT-GUARD -i eth1 -j RETURN".to_owned(),
        full[1].to_owned(),
    ];
    assert_eq!(plan::add_guard(&Listing::read(&listed)), full[2..3]);
    let (chain, rule) = plan::missing_guard(&Listing::read(&listed)).unwrap();
    assert_eq!(chain, "CNI-HOSTPORT-GUARD");
    assert!(rule.starts_with("-s 127.0.0.0/8 "), "{rule}");
    listed.push(full[2].to_owned());
    assert!(plan::add_guard(&Listing::read(&listed)).is_empty());
    assert_eq!(plan::missing_guard(&Listing::read(&listed)), None);
}

#[test]
fn only_what_sets_route_localnet_is_guarded() {
    let guarded = |value, family| wanted(value, two_ports(), family).guarded;
    assert!(guarded(json!({}), Family::V4));
    assert!(!guarded(json!({"snat": false}), Family::V4));
    assert!(!guarded(json!({}), Family::V6));
}

#[test]
fn entries_hold_fifteen_ports_each() {
    let mappings: Vec<Value> = (1..=31)
        .map(|port| json!({"hostPort": port, "containerPort": port, "protocol": if port == 31 { "sctp" } else { "TCP" }}))
        .collect();
    let wanted = wanted(json!({}), Value::from(mappings), Family::V4);
    let groups: Vec<(bool, usize)> = wanted
        .entries
        .iter()
        .map(|rule| {
            let at = rule.words.iter().position(|word| word == "--destination-ports").unwrap();
            (rule.words.contains(&"sctp".to_owned()), rule.words[at + 1].split(',').count())
        })
        .collect();
    assert_eq!(groups, [(true, 1), (false, 15), (false, 15)]);
}

#[test]
fn a_comment_tells_its_owner_unless_it_was_cut() {
    let comment = |id: &str| {
        let owner = Owner { network: "net1", container_id: id };
        owner.comment()
    };
    let read = comment("cid1");
    assert_eq!(owner_of_comment(&read), Some(OWNER));
    let cut = comment(&"x".repeat(300));
    assert_eq!((cut.len(), owner_of_comment(&cut)), (255, None));
    assert_eq!(owner_of_comment("CNI portfwd requiring masquerade"), None);
}

#[test]
fn a_rule_is_recognised_as_iptables_prints_it() {
    let gist = |text: &str| Gist::of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
    assert_eq!(
        gist("-p tcp --dport 8080 -s 10.7.2.4/24 -j CNI-HOSTPORT-SETMARK"),
        gist("-s 10.7.2.0/24 -p tcp -m tcp --dport 8080 -j CNI-HOSTPORT-SETMARK")
    );
    assert_eq!(
        gist("-p udp --dport 53 -d 10.9.9.9 -s ::/0 -j X"),
        gist("-d 10.9.9.9/32 -p 17 -m udp --dport 53 -j X")
    );
    let entry = gist("-m multiport -p tcp --destination-ports 1,2 -s 10.0.0.0/8 -j X");
    assert!(entry.enters_like(&gist("! -s 10.0.0.0/8 -p tcp -m multiport --dports 1,2 -j X")));
    assert!(!entry.enters_like(&gist("-p tcp -m multiport --dports 1 -j X")));
    assert_ne!(
        gist("-m mark --mark 0x10/0x10 -j MASQUERADE"),
        gist("-m mark --mark 0x20/0x20 -j MASQUERADE")
    );
    assert_ne!(gist("! -s 10.0.0.1 -j X"), gist("-s 10.0.0.1 -j X"));
    assert!(gist("-m comment --comment a -j X").does_like(&gist("-j X")));
}

fn listed(network: &str, id: &str) -> Vec<String> {
    let owner = Owner { network, container_id: id };
    let chain = owner.chain();
    let comment = netfilter::iptables::quote(&owner.comment());
    vec![
        format!("-N {chain}"),
        format!("-A {chain} -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.7.2.4:80"),
        format!(
            "-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment {comment} -m multiport --dports 80 -j {chain}"
        ),
    ]
}

#[test]
fn gc_takes_chains_that_their_comments_give_to_the_network() {
    let lines = [listed("net1", "cid1"), listed("net1", "cid2"), listed("net2", "cid1")].concat();
    let listing = Listing::read(&lines);
    let commands = plan::remove_stale("net1", |id| id == "cid2", &listing);
    let entry = lines[2].strip_prefix("-A ").unwrap();
    assert_eq!(commands, [format!("-D {entry}"), format!("-F {CHAIN}"), format!("-X {CHAIN}")]);
}

#[test]
fn an_add_is_taken_back_by_its_undo() {
    let wanted = wanted(json!({}), two_ports(), Family::V4);
    let change = plan::add(&wanted, &Listing::default());
    let count = |commands: &[String], verb: &str| commands.iter().filter(|c| c.starts_with(verb)).count();
    assert_eq!(count(&change.commands, ":"), count(&change.undo, "-X "));
    assert_eq!(count(&change.commands, "-A ") + count(&change.commands, "-I "), count(&change.undo, "-D "));
    let chains = change.undo.iter().position(|command| command.starts_with("-X ")).unwrap();
    assert_eq!(chains, count(&change.undo, "-D "), "rules first, then the chains that they are in");
}
