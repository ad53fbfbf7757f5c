//! The plugin's keys as written: with the right types, but not validated yet. No I/O.

use cni_plugin::conf::{COMMON_KEYS, Fields};
use cni_plugin::{CniError, Dns, NetConf};
use serde_json::Value;

/// The keys that the plugin reads, besides [`COMMON_KEYS`].
pub(crate) const KEYS: cni_plugin::conf::Keys = &[
    "bridge",
    "isGateway",
    "isDefaultGateway",
    "forceAddress",
    "ipMasq",
    "ipMasqBackend",
    "mtu",
    "hairpinMode",
    "promiscMode",
    "vlan",
    "vlanTrunk[].minID",
    "vlanTrunk[].maxID",
    "vlanTrunk[].id",
    "preserveDefaultVlan",
    "macspoofchk",
    "enabledad",
    "disableContainerInterface",
    "portIsolation",
    "ipam.type",
    "dns.nameservers",
    "dns.domain",
    "dns.search",
    "dns.options",
    "args.cni.mac",
    "runtimeConfig.mac",
];

/// Absent booleans are false.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keys {
    pub(crate) bridge: Option<String>,
    pub(crate) is_gateway: bool,
    pub(crate) is_default_gateway: bool,
    pub(crate) force_address: bool,
    pub(crate) ip_masq: bool,
    pub(crate) ip_masq_backend: Option<String>,
    /// Bytes.
    pub(crate) mtu: Option<i64>,
    pub(crate) hairpin_mode: bool,
    pub(crate) promisc_mode: bool,
    pub(crate) vlan: Option<i64>,
    pub(crate) vlan_trunk: Option<VlanTrunk>,
    pub(crate) mac_spoof_check: bool,
    pub(crate) enable_dad: bool,
    pub(crate) disable_container_interface: bool,
    pub(crate) port_isolation: bool,
    /// `ipam.type`; never empty.
    pub(crate) ipam: Option<String>,
    /// `args.cni.mac`
    pub(crate) args_mac: Option<String>,
    /// `runtimeConfig.mac`
    pub(crate) runtime_mac: Option<String>,
    pub(crate) dns: Option<Dns>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VlanTrunk {
    pub(crate) entries: Vec<TrunkEntry>,
    /// For messages.
    pub(crate) written: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrunkEntry {
    pub(crate) min_id: Option<i64>,
    pub(crate) max_id: Option<i64>,
    pub(crate) id: Option<i64>,
}

impl Keys {
    /// A value of the wrong type is an error with the reference's message.
    pub(crate) fn read(conf: &NetConf) -> Result<Self, CniError> {
        Self::of(conf).map_err(|e| CniError { msg: format!("failed to load netconf: {}", e.msg), ..e })
    }

    fn of(conf: &NetConf) -> Result<Self, CniError> {
        let fields = conf.fields(KEYS);
        // It has no effect without bridge VLANs.
        fields.bool("preserveDefaultVlan")?;
        // ADD does not use it.
        conf.fields(COMMON_KEYS).object("prevResult")?;
        let args = fields.object("args")?.map(|args| args.object("cni")).transpose()?.flatten();
        Ok(Self {
            bridge: fields.string("bridge")?,
            is_gateway: fields.bool("isGateway")?,
            is_default_gateway: fields.bool("isDefaultGateway")?,
            force_address: fields.bool("forceAddress")?,
            ip_masq: fields.bool("ipMasq")?,
            ip_masq_backend: fields.string("ipMasqBackend")?,
            mtu: fields.i64("mtu")?,
            hairpin_mode: fields.bool("hairpinMode")?,
            promisc_mode: fields.bool("promiscMode")?,
            vlan: fields.i64("vlan")?,
            vlan_trunk: vlan_trunk(&fields)?,
            mac_spoof_check: fields.bool("macspoofchk")?,
            enable_dad: fields.bool("enabledad")?,
            disable_container_interface: fields.bool("disableContainerInterface")?,
            port_isolation: fields.bool("portIsolation")?,
            ipam: conf.ipam_type()?,
            args_mac: args.map(|args| args.string("mac")).transpose()?.flatten(),
            runtime_mac: fields
                .object("runtimeConfig")?
                .map(|config| config.string("mac"))
                .transpose()?
                .flatten(),
            dns: dns(&fields)?,
        })
    }
}

fn vlan_trunk(fields: &Fields<'_>) -> Result<Option<VlanTrunk>, CniError> {
    let Some(written) = fields.get("vlanTrunk") else { return Ok(None) };
    let mut entries = Vec::new();
    for entry in fields.objects("vlanTrunk")? {
        entries.push(TrunkEntry {
            min_id: entry.i64("minID")?,
            max_id: entry.i64("maxID")?,
            id: entry.i64("id")?,
        });
    }
    Ok(Some(VlanTrunk { entries, written: written.clone() }))
}

fn dns(fields: &Fields<'_>) -> Result<Option<Dns>, CniError> {
    let Some(dns) = fields.object("dns")? else { return Ok(None) };
    // An empty list counts as set, as in the reference.
    let set = ["nameservers", "search", "options"].iter().any(|key| dns.get(key).is_some());
    let dns = Dns::read(&dns)?;
    Ok((set || !dns.domain.is_empty()).then_some(dns))
}

#[cfg(test)]
pub(crate) mod tests {
    use cni_plugin::{Command, Invocation};
    use proptest::prelude::*;
    use serde_json::{Map, json};

    use super::*;
    use crate::config::Config;

    /// An ADD; `conf` lacks name and version.
    pub(crate) fn call(network: &str, container_id: &str, ifname: &str, conf: &str) -> Invocation {
        let mut conf: Value = serde_json::from_str(conf).unwrap();
        conf["name"] = json!(network);
        conf["cniVersion"] = json!("1.1.0");
        Invocation {
            command: Command::Add,
            container_id: container_id.to_owned(),
            netns: Some("/run/netns/c".into()),
            ifname: ifname.to_owned(),
            args: String::new(),
            path: Vec::new(),
            conf: NetConf::parse(conf.to_string().into_bytes()).unwrap(),
        }
    }

    const SWITCHES: [&str; 10] = [
        "isGateway",
        "isDefaultGateway",
        "forceAddress",
        "ipMasq",
        "hairpinMode",
        "promiscMode",
        "macspoofchk",
        "enabledad",
        "disableContainerInterface",
        "portIsolation",
    ];

    fn value() -> impl Strategy<Value = Value> {
        prop_oneof![
            any::<bool>().prop_map(|b| json!(b)),
            any::<i64>().prop_map(|n| json!(n)),
            (0_i64..5000).prop_map(|n| json!(n)),
            ".{0,20}".prop_map(|text| json!(text)),
            Just(Value::Null),
            Just(json!([{"id": 5}, {"minID": 1, "maxID": 0}])),
            Just(json!({"type": "host-local", "mac": "02:00:00:00:00:01", "cni": {"mac": "x"}})),
        ]
    }

    fn key() -> impl Strategy<Value = &'static str> {
        let others = [
            "bridge",
            "mtu",
            "vlan",
            "vlanTrunk",
            "preserveDefaultVlan",
            "ipMasqBackend",
            "ipam",
            "args",
            "runtimeConfig",
            "dns",
            "prevResult",
        ];
        proptest::sample::select([SWITCHES.as_slice(), &others].concat())
    }

    proptest! {
        #[test]
        fn any_configuration_is_accepted_or_refused_in_words(
            keys in proptest::collection::vec((key(), value()), 0..8),
        ) {
            let conf: Map<String, Value> = keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
            match Config::read(&call("n", "c", "eth0", &Value::Object(conf).to_string())) {
                Ok(config) => {
                    prop_assert!((1..=15).contains(&config.bridge.len()));
                    prop_assert!(!(config.promiscuous && config.port.hairpin));
                    prop_assert!(config.masquerade.is_none() || config.ipam().is_some());
                }
                Err(error) => prop_assert!([2, 999].contains(&error.code) && !error.msg.is_empty()),
            }
        }

        #[test]
        fn switches_are_read_whatever_the_case(on in proptest::collection::vec(any::<bool>(), 10), upper in any::<bool>()) {
            let pairs = SWITCHES.iter().zip(&on).map(|(key, on)| {
                let key = if upper { key.to_uppercase() } else { (*key).to_owned() };
                (key, json!(on))
            });
            let conf = Value::Object(pairs.collect());
            let keys = Keys::read(&call("n", "c", "e", &conf.to_string()).conf).unwrap();
            let read = [
                keys.is_gateway, keys.is_default_gateway, keys.force_address, keys.ip_masq, keys.hairpin_mode,
                keys.promisc_mode, keys.mac_spoof_check, keys.enable_dad, keys.disable_container_interface,
                keys.port_isolation,
            ];
            prop_assert_eq!(read.to_vec(), on);
        }
    }
}
