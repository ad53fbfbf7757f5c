use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn raw(value: &Value) -> Result<Config, CniError> {
    let fields = Fields::of(value, "")?;
    Raw::read(&fields)?.check(None, ContainerAddresses::default(), Purpose::Keep)
}

fn failure(value: &Value) -> String {
    raw(value).unwrap_err().msg
}

#[test]
fn defaults_are_the_references() {
    let config = raw(&json!({"snat": null, "backend": null})).unwrap();
    assert_eq!(config.backend, Backend::Unset);
    assert_eq!((config.snat, config.masq_all, config.mark.value()), (true, false, 0x2000));
    assert_eq!((config.entries.len(), config.known_addresses()), (0, vec![]));
}

#[test]
fn wrong_values_are_refused_in_the_references_words() {
    assert_eq!(
        failure(&json!({"markMasqBit": 5, "externalSetMarkChain": "X"})),
        "Cannot specify externalSetMarkChain and markMasqBit"
    );
    for bit in [-1, 32, 256] {
        assert_eq!(failure(&json!({"markMasqBit": bit})), "MasqMarkBit must be between 0 and 31");
    }
    assert_eq!(failure(&json!({"backend": "pf"})), r#"unrecognized backend "pf""#);
    let mapping = |host: i64, container: i64| {
        let entry = json!({"hostPort": host, "containerPort": container, "protocol": "tcp"});
        failure(&json!({"runtimeConfig": {"portMappings": [entry]}}))
    };
    assert_eq!(mapping(0, 0), "Invalid container port number: 0");
    assert_eq!(mapping(-1, 80), "Invalid host port number: -1");
    assert_eq!(mapping(65536, 80), "Invalid host port number: 65536");
    assert_eq!(
        failure(&json!({"runtimeConfig": {"portMappings": [{"hostPort": "80"}]}})),
        r#"runtimeConfig.portMappings[0].hostPort: expected a whole number, found "80""#
    );
}

#[test]
fn the_syntax_of_the_options_asks_for_its_backend() {
    let backend = |value: Value| raw(&value).unwrap().backend;
    assert_eq!(backend(json!({"conditionsV4": ["-s", "10.0.0.0/8"]})), Backend::Iptables);
    assert_eq!(backend(json!({"conditionsV6": ["!", "-s", "fd00::/8"]})), Backend::Iptables);
    assert_eq!(backend(json!({"externalSetMarkChain": "KUBE-MARK-MASQ"})), Backend::Iptables);
    assert_eq!(backend(json!({"conditionsV4": ["ip saddr 10.0.0.0/8"]})), Backend::Nftables);
    assert_eq!(backend(json!({"conditionsV4": [""], "backend": "nftables"})), Backend::Nftables);
    assert_eq!(
        failure(&json!({"backend": "nftables", "conditionsV4": ["-s"], "externalSetMarkChain": "X"})),
        "nftables backend was requested but configuration contains iptables-specific options \
         [externalSetMarkChain conditionsV4]"
    );
    assert_eq!(
        failure(&json!({"backend": "iptables", "conditionsV6": ["ip6 saddr fd00::1"]})),
        "iptables backend was requested but configuration contains nftables-specific options [conditionsV6]"
    );
    assert_eq!(
        failure(&json!({"conditionsV4": ["-s"], "conditionsV6": ["ip6 saddr fd00::1"]})),
        "iptables backend was requested but configuration contains nftables-specific options [conditionsV6]"
    );
}

#[test]
fn ports_that_no_rule_can_have_do_not_stop_a_removal() {
    let value = json!({"runtimeConfig": {"portMappings": [
        {"hostPort": 70000, "containerPort": 80}, {"hostPort": 80, "containerPort": 80}
    ]}});
    let fields = Fields::of(&value, "").unwrap();
    let config =
        Raw::read(&fields).unwrap().check(None, ContainerAddresses::default(), Purpose::Remove).unwrap();
    assert_eq!(config.entries.len(), 1);
}

#[test]
fn the_first_address_of_each_family_on_the_containers_interface_counts() {
    let result = json!({
        "interfaces": [{"name": "cni0"}, {"name": "eth0"}, {"name": "eth0", "sandbox": "/n"},
                       {"name": "eth1", "sandbox": "/n"}],
        "ips": [
            {"address": "10.0.0.1/24", "interface": 0}, {"address": "10.0.0.2/24", "interface": 1},
            {"address": "10.0.0.3/24", "interface": 3}, {"address": "10.0.0.4/24", "interface": 2},
            {"address": "10.0.0.5/24", "interface": 2}, {"address": "fd00::6/64"},
            {"address": "fd00::7/64", "interface": 2}
        ]
    });
    let result = CniResult::from_json(&result, cni_plugin::Version::V1_0_0).unwrap();
    let found = container_addresses(&result, "eth0");
    let texts: Vec<String> = found.each().map(|(_, address)| address.to_string()).collect();
    assert_eq!(texts, ["10.0.0.4/24", "fd00::6/64"]);
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-70000i64..70000).prop_map(Value::from),
        "[-!a-z0-9. ]{0,8}".prop_map(Value::from),
        prop::collection::vec("[-!a-z0-9. ]{0,8}", 0..3).prop_map(Value::from),
    ];
    let entry = prop::collection::btree_map(
        prop::sample::select(vec!["hostPort", "containerPort", "protocol", "hostIP"]),
        leaf.clone(),
        0..4,
    );
    let mappings = prop::collection::vec(entry, 0..3);
    let keys = prop::sample::select(vec![
        "backend",
        "snat",
        "masqAll",
        "markMasqBit",
        "externalSetMarkChain",
        "conditionsV4",
        "CONDITIONSv6",
    ]);
    (prop::collection::btree_map(keys, leaf, 0..5), mappings).prop_map(|(top, mappings)| {
        let mut value = json!(top);
        value["runtimeConfig"] = json!({"portMappings": mappings});
        value
    })
}

proptest! {
    #[test]
    fn any_configuration_is_refused_or_sound(value in any_json()) {
        if let Ok(config) = raw(&value) {
            prop_assert!(config.entries.iter().all(|entry| entry.host_port > 0 && entry.container_port > 0));
            prop_assert!(config.mark.value().count_ones() <= 1);
            let iptables = |family| {
                config.conditions(family).first().is_some_and(|first| first.starts_with(['-', '!']))
            };
            if Family::BOTH.into_iter().any(iptables) {
                prop_assert_eq!(config.backend, Backend::Iptables);
            }
        }
    }

    #[test]
    fn a_written_mapping_comes_back(host in 1u16.., container in 1u16.., protocol in "[a-z]{0,7}", ip in any::<[u8; 4]>()) {
        let host_ip = std::net::Ipv4Addr::from(ip).to_string();
        let value = json!({"runtimeConfig": {"portMappings": [
            {"hostPort": host, "containerPort": container, "protocol": protocol, "hostIP": host_ip}
        ]}});
        let wanted = Entry { host_port: host, container_port: container, protocol, host_ip };
        prop_assert_eq!(raw(&value).unwrap().entries, vec![wanted]);
    }
}
