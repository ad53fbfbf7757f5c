//! The plugin's keys as they are written: right types, values not judged yet.
//! No I/O.

use cni_plugin::conf::Fields;
use cni_plugin::{CniError, Dns, NetConf};
use serde_json::Value;

/// Absent switches are off.
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
    /// To be shown.
    pub(crate) written: Value,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrunkEntry {
    pub(crate) min_id: Option<i64>,
    pub(crate) max_id: Option<i64>,
    pub(crate) id: Option<i64>,
}

impl Keys {
    /// A value of the wrong type is an error in the reference's words.
    pub(crate) fn read(conf: &NetConf) -> Result<Self, CniError> {
        Self::of(conf).map_err(|e| CniError { msg: format!("failed to load netconf: {}", e.msg), ..e })
    }

    fn of(conf: &NetConf) -> Result<Self, CniError> {
        let fields = conf.fields();
        // Without bridge VLANs it has nothing to say.
        fields.bool("preserveDefaultVlan")?;
        conf.prev_result()?;
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
