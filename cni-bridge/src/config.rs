//! The plugin's configuration, checked. No I/O.

use cni_plugin::conf::Fields;
use cni_plugin::{CniError, Dns, Invocation, code};
use linux::netlink::{DuplicateDetection, Mac, PortFlags};

use crate::vlan;

const DEFAULT_BRIDGE: &str = "cni0";

/// What ADD is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// A valid interface name.
    pub(crate) bridge: String,
    /// `None`: the kernel's default.
    pub(crate) mtu: Option<u32>,
    pub(crate) promiscuous: bool,
    pub(crate) port: PortFlags,
    pub(crate) role: Role,
    /// Replace an address of the bridge that contradicts the gateway's.
    pub(crate) force_address: bool,
    pub(crate) duplicate_detection: DuplicateDetection,
    pub(crate) container_mac: Option<Mac>,
    /// `None`: not asked for, or nothing to masquerade.
    pub(crate) masquerade: Option<MasqueradeBackend>,
    /// Drop frames of the container with another source MAC than its own.
    pub(crate) spoof_check: bool,
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

/// By what source addresses are masqueraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MasqueradeBackend {
    /// nf_tables when the kernel has it, the host's iptables otherwise.
    Unset,
    NfTables,
    Iptables,
}

impl Config {
    /// For ADD, CHECK and STATUS.
    pub(crate) fn read(call: &Invocation) -> Result<Self, CniError> {
        let fields = call.conf.fields();
        vlan::check(&fields).map_err(loading)?;
        let [mac_of_args] = cni_plugin::args::parse(&call.args, ["MAC"])?;
        let container = container(call, &fields)?;
        let config = Self::of(&fields, container, mac_of_args).map_err(loading)?;
        match vlan::unsupported(&fields) {
            Some(refusal) => Err(refusal),
            None => Ok(config),
        }
    }

    fn of(fields: &Fields<'_>, container: Container, mac_of_args: Option<String>) -> Result<Self, CniError> {
        let (hairpin, promiscuous) = (fields.bool("hairpinMode")?, fields.bool("promiscMode")?);
        if hairpin && promiscuous {
            return Err(CniError::internal("cannot set hairpin mode and promiscuous mode at the same time"));
        }
        let role = match (fields.bool("isDefaultGateway")?, fields.bool("isGateway")?) {
            (true, _) => Role::DefaultGateway,
            (false, true) => Role::Gateway,
            (false, false) => Role::Switch,
        };
        let duplicate_detection =
            if fields.bool("enabledad")? { DuplicateDetection::On } else { DuplicateDetection::Off };
        Ok(Self {
            bridge: bridge_name(fields)?,
            mtu: mtu(fields)?,
            promiscuous,
            port: PortFlags { hairpin, isolated: fields.bool("portIsolation")? },
            role,
            force_address: fields.bool("forceAddress")?,
            duplicate_detection,
            container_mac: container_mac(fields, mac_of_args)?,
            masquerade: masquerade(fields, &container)?,
            spoof_check: fields.bool("macspoofchk")?,
            container,
            dns: dns(fields)?,
        })
    }

    /// Whether the bridge gets the gateway's addresses.
    pub(crate) fn is_gateway(&self) -> bool {
        self.role != Role::Switch && self.ipam().is_some()
    }

    /// The IPAM plugin, if addresses come from one.
    pub(crate) fn ipam(&self) -> Option<&str> {
        match &self.container {
            Container::Layer3 { ipam } => Some(ipam),
            Container::Layer2 | Container::Disabled => None,
        }
    }
}

/// The reference's words around a value of the wrong type.
fn loading(error: CniError) -> CniError {
    if error.code != code::INVALID_NETWORK_CONFIG {
        return error;
    }
    CniError { msg: format!("failed to load netconf: {}", error.msg), ..error }
}

/// Bytes. Like in the reference, what is not positive means the kernel's default.
fn mtu(fields: &Fields<'_>) -> Result<Option<u32>, CniError> {
    let mtu = fields.i64("mtu")?.filter(|mtu| *mtu > 0);
    let checked = mtu.map(|mtu| {
        u32::try_from(mtu)
            .map_err(|_| CniError::config(format_args!("mtu: expected at most 4294967295, found {mtu}")))
    });
    checked.transpose()
}

/// Layer 2 has no addresses to masquerade; the backend's name counts only when
/// it is used, as in the reference.
fn masquerade(fields: &Fields<'_>, container: &Container) -> Result<Option<MasqueradeBackend>, CniError> {
    let backend = fields.string("ipMasqBackend")?;
    let wanted = fields.bool("ipMasq")? && matches!(container, Container::Layer3 { .. });
    match backend.as_deref() {
        _ if !wanted => Ok(None),
        None | Some("") => Ok(Some(MasqueradeBackend::Unset)),
        Some("nftables") => Ok(Some(MasqueradeBackend::NfTables)),
        Some("iptables") => Ok(Some(MasqueradeBackend::Iptables)),
        Some(other) => Err(CniError::internal(format_args!("unknown ipmasq backend {other:?}"))),
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
    let refusal = if name.is_empty() {
        "name cannot be empty"
    } else if name.len() > 15 {
        "numerical result out of range"
    } else if name == "."
        || name == ".."
        || name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace())
    {
        "invalid argument"
    } else {
        return Ok(name);
    };
    let msg = format_args!("failed to create bridge {name:?}: could not add {name:?}: {refusal}").to_string();
    Err(CniError::internal(msg).with_details("bridge: expected an interface name"))
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
            CniError::internal(format_args!("failed to make veth pair: address {text}: invalid MAC address"))
                .with_details(format_args!("{place}: expected a MAC address of 6 bytes"))
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
