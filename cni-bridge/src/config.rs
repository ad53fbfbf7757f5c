//! The plugin's configuration, checked. No I/O.

use cni_plugin::conf::Fields;
use cni_plugin::{CniError, Dns, Invocation};
use linux::netlink::{DuplicateDetection, Mac};

const DEFAULT_BRIDGE: &str = "cni0";

/// What ADD is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// A valid interface name.
    pub(crate) bridge: String,
    /// `None`: the kernel's default.
    pub(crate) mtu: Option<u32>,
    pub(crate) promiscuous: bool,
    pub(crate) hairpin: bool,
    pub(crate) isolated: bool,
    pub(crate) role: Role,
    /// Replace an address of the bridge that contradicts the gateway's.
    pub(crate) force_address: bool,
    pub(crate) duplicate_detection: DuplicateDetection,
    pub(crate) container_mac: Option<Mac>,
    pub(crate) container: Container,
    /// Wins over the IPAM plugin's.
    pub(crate) dns: Option<Dns>,
}

/// What the bridge is to the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// A switch only.
    Switch,
    /// It has the gateway address, and the host forwards.
    Gateway,
    /// And the containers' default route goes there.
    DefaultGateway,
}

/// What happens to the container's end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Container {
    /// Up, with addresses and routes of this IPAM plugin.
    Layer3 { ipam: String },
    /// Up, without addresses.
    Layer2,
    /// Left down.
    Disabled,
}

impl Config {
    pub(crate) fn read(call: &Invocation) -> Result<Self, CniError> {
        let fields = call.conf.fields();
        check_vlans(&fields)?;
        let [mac_of_args] = cni_plugin::args::parse(&call.args, ["MAC"])?;
        let container = container(call, &fields)?;
        let (hairpin, promiscuous) = (fields.bool("hairpinMode")?, fields.bool("promiscMode")?);
        if hairpin && promiscuous {
            return Err(CniError::internal("cannot set hairpin mode and promiscuous mode at the same time"));
        }
        if let Some(refusal) = unsupported(&fields)?.into_iter().next() {
            return Err(CniError::config(refusal));
        }
        let role = match (fields.bool("isDefaultGateway")?, fields.bool("isGateway")?) {
            (true, _) => Role::DefaultGateway,
            (false, true) => Role::Gateway,
            (false, false) => Role::Switch,
        };
        let duplicate_detection =
            if fields.bool("enabledad")? { DuplicateDetection::On } else { DuplicateDetection::Off };
        Ok(Self {
            bridge: bridge_name(&fields)?,
            mtu: fields.u32("mtu")?.filter(|mtu| *mtu > 0),
            promiscuous,
            hairpin,
            isolated: fields.bool("portIsolation")?,
            role,
            force_address: fields.bool("forceAddress")?,
            duplicate_detection,
            container_mac: container_mac(&fields, mac_of_args)?,
            container,
            dns: dns(&fields)?,
        })
    }
}

/// What the configuration asks for that this version does not do, one sentence
/// per key. ADD refuses; DEL says so and removes the rest.
pub(crate) fn unsupported(fields: &Fields<'_>) -> Result<Vec<String>, CniError> {
    let mut asked = Vec::new();
    for key in ["ipMasq", "macspoofchk"] {
        if fields.bool(key)? {
            asked.push(format!("{key}: true is not supported by this version of the bridge plugin"));
        }
    }
    if let Some(vlan) = fields.i64("vlan")?.filter(|vlan| *vlan != 0) {
        asked.push(format!("vlan: {vlan} is not supported by this version of the bridge plugin"));
    }
    if let Some(trunk) = fields.get("vlanTrunk") {
        asked.push(format!("vlanTrunk: {trunk} is not supported by this version of the bridge plugin"));
    }
    Ok(asked)
}

fn check_vlans(fields: &Fields<'_>) -> Result<(), CniError> {
    match fields.i64("vlan")? {
        Some(vlan) if !(0..=4094).contains(&vlan) => {
            Err(CniError::internal(format_args!("invalid VLAN ID {vlan} (must be between 0 and 4094)")))
        }
        _ => Ok(()),
    }
}

fn container(call: &Invocation, fields: &Fields<'_>) -> Result<Container, CniError> {
    match (call.conf.ipam_type()?, fields.bool("disableContainerInterface")?) {
        (Some(_), true) => {
            Err(CniError::internal("cannot use IPAM when DisableContainerInterface flag is set"))
        }
        (Some(ipam), false) => Ok(Container::Layer3 { ipam }),
        (None, false) => Ok(Container::Layer2),
        (None, true) => Ok(Container::Disabled),
    }
}

fn bridge_name(fields: &Fields<'_>) -> Result<String, CniError> {
    let name = fields.string("bridge")?.unwrap_or_else(|| DEFAULT_BRIDGE.to_owned());
    // The kernel's own rules (dev_valid_name); the name goes into paths, too.
    let valid = !name.is_empty()
        && name.len() <= 15
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace());
    if valid {
        Ok(name)
    } else {
        Err(CniError::config(format_args!("bridge: expected an interface name, found {name:?}")))
    }
}

/// `CNI_ARGS` is overruled by `args.cni.mac`, that by `runtimeConfig.mac`.
fn container_mac(fields: &Fields<'_>, of_args: Option<String>) -> Result<Option<Mac>, CniError> {
    let mut wanted = of_args.filter(|mac| !mac.is_empty()).map(|mac| ("CNI_ARGS MAC", mac));
    let args = fields.object("args")?;
    let cni = args.as_ref().map(|args| args.object("cni")).transpose()?.flatten();
    for (place, holder) in [("args.cni.mac", cni), ("runtimeConfig.mac", fields.object("runtimeConfig")?)] {
        let mac = holder.as_ref().map(|holder| holder.string("mac")).transpose()?.flatten();
        if let Some(mac) = mac.filter(|mac| !mac.is_empty()) {
            wanted = Some((place, mac));
        }
    }
    let parsed = wanted.map(|(place, text)| {
        parse_mac(&text).ok_or_else(|| {
            CniError::config(format_args!("{place}: expected a MAC address of 6 bytes, found {text:?}"))
        })
    });
    parsed.transpose()
}

/// `02:00:5e:10:00:01`, with dashes, or `0200.5e10.0001`.
fn parse_mac(text: &str) -> Option<Mac> {
    let (separator, group) = if text.contains('.') {
        ('.', 4)
    } else if text.contains('-') {
        ('-', 2)
    } else {
        (':', 2)
    };
    let groups: Vec<&str> = text.split(separator).collect();
    let digits = groups.concat();
    let well_formed =
        groups.iter().all(|g| g.len() == group) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if !well_formed || digits.len() != 12 {
        return None;
    }
    let mut mac = Mac::default();
    for (byte, at) in mac.iter_mut().zip((0..12).step_by(2)) {
        *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
    }
    Some(mac)
}

fn dns(fields: &Fields<'_>) -> Result<Option<Dns>, CniError> {
    let Some(dns) = fields.object("dns")? else { return Ok(None) };
    // An empty list counts as set, as in the reference.
    let set = ["nameservers", "search", "options"].iter().any(|key| dns.get(key).is_some());
    let dns = Dns::read(&dns)?;
    Ok((set || !dns.domain.is_empty()).then_some(dns))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn macs_are_read_in_three_notations() {
        let mac = Some([0x02, 0x00, 0x5e, 0x10, 0x00, 0xff]);
        assert_eq!(parse_mac("02:00:5e:10:00:ff"), mac);
        assert_eq!(parse_mac("02-00-5E-10-00-FF"), mac);
        assert_eq!(parse_mac("0200.5e10.00ff"), mac);
        for wrong in [
            "",
            "02:00:5e:10:00",
            "02:00:5e:10:00:ff:01",
            "0200:5e10:00ff",
            "02:00:5e:10:00:fg",
            "é2:00:5e:10:00:f",
        ] {
            assert_eq!(parse_mac(wrong), None, "{wrong}");
        }
    }
}
