//! The plugin's configuration, validated. No I/O.

use cni_plugin::{CniError, Dns, Invocation};
use linux::netlink::{DuplicateDetection, Link, Mac, PortFlags};

use crate::keys::Keys;
use crate::vlan;

const DEFAULT_BRIDGE: &str = "cni0";
/// IPAM plugins that only choose addresses.
const PLAIN_IPAM: [&str; 2] = ["host-local", "static"];

/// The settings of ADD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    /// A valid interface name.
    pub(crate) bridge: String,
    /// `None`: the kernel's default.
    pub(crate) mtu: Option<u32>,
    pub(crate) promiscuous: bool,
    pub(crate) port: PortFlags,
    pub(crate) role: Role,
    /// Replaces an address of the bridge that conflicts with the gateway's.
    pub(crate) force_address: bool,
    pub(crate) duplicate_detection: DuplicateDetection,
    pub(crate) container_mac: Option<Mac>,
    /// `None`: not requested, or nothing to masquerade.
    pub(crate) masquerade: Option<MasqueradeBackend>,
    /// Drops frames of the container whose source MAC is not its own.
    pub(crate) spoof_check: bool,
    pub(crate) container: Container,
    /// Overrides the IPAM plugin's.
    pub(crate) dns: Option<Dns>,
}

/// The bridge's role for the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    /// Only a switch.
    Switch,
    /// It has the gateway address, and the host forwards.
    Gateway,
    /// As `Gateway`, and the containers' default route leads there.
    DefaultGateway,
}

/// The configuration of the container's interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Container {
    /// Up, with addresses and routes of this IPAM plugin.
    Layer3 { ipam: String },
    /// Up, without addresses.
    Layer2,
    /// Left down.
    Disabled,
}

/// The mechanism that masquerades source addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MasqueradeBackend {
    /// nf_tables when the kernel has it, the host's iptables otherwise.
    Unset,
    NfTables,
    Iptables,
}

impl Config {
    /// Whether the bridge ignores the container until its addresses and rules are complete. Not
    /// while duplicate addresses are detected, which needs the answers of other hosts.
    pub(crate) fn starts_locked(&self) -> bool {
        self.has_plain_ipam() && self.duplicate_detection == DuplicateDetection::Off
    }

    /// Whether the multicast reports of a new container can wait for a second: its port is locked at
    /// first, no bridge or switch needs them to forward its multicast, and the network ends at the host.
    pub(crate) fn delays_reports(&self, bridge: &Link) -> bool {
        self.starts_locked() && self.is_gateway() && !bridge.snoops
    }

    /// Whether the IPAM plugin does not use the container's interface. Others may send frames with its
    /// MAC, and lease addresses for it (`dhcp`).
    pub(crate) fn has_plain_ipam(&self) -> bool {
        self.ipam().is_some_and(|ipam| PLAIN_IPAM.contains(&ipam))
    }

    /// Reads and validates it for ADD, CHECK and STATUS.
    pub(crate) fn read(call: &Invocation) -> Result<Self, CniError> {
        let keys = Keys::read(&call.conf)?;
        vlan::check(&keys)?;
        let [mac_of_args] = cni_plugin::args::parse(&call.args, ["MAC"])?;
        let config = Self::new(keys.clone(), mac_of_args)?;
        vlan::refuse(&keys)?;
        Ok(config)
    }

    /// `mac_of_args`: the `MAC` of `CNI_ARGS`.
    fn new(keys: Keys, mac_of_args: Option<String>) -> Result<Self, CniError> {
        let container = match (&keys.ipam, keys.disable_container_interface) {
            (Some(_), true) => {
                let msg = "cannot use IPAM when DisableContainerInterface flag is set";
                return Err(CniError::internal(msg));
            }
            (Some(ipam), false) => Container::Layer3 { ipam: ipam.clone() },
            (None, false) => Container::Layer2,
            (None, true) => Container::Disabled,
        };
        if keys.hairpin_mode && keys.promisc_mode {
            return Err(CniError::internal("cannot set hairpin mode and promiscuous mode at the same time"));
        }
        let role = match (keys.is_default_gateway, keys.is_gateway) {
            (true, _) => Role::DefaultGateway,
            (false, true) => Role::Gateway,
            (false, false) => Role::Switch,
        };
        let duplicate_detection =
            if keys.enable_dad { DuplicateDetection::On } else { DuplicateDetection::Off };
        Ok(Self {
            mtu: mtu(keys.mtu, &keys)?,
            promiscuous: keys.promisc_mode,
            port: PortFlags { hairpin: keys.hairpin_mode, isolated: keys.port_isolation },
            role,
            force_address: keys.force_address,
            duplicate_detection,
            container_mac: container_mac(&keys, mac_of_args)?,
            masquerade: masquerade(&keys, &container)?,
            spoof_check: keys.mac_spoof_check,
            container,
            bridge: bridge_name(keys.bridge)?,
            dns: keys.dns,
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

/// In bytes. As in the reference, zero and negative values mean the kernel's default.
fn mtu(written: Option<i64>, keys: &Keys) -> Result<Option<u32>, CniError> {
    let Some(mtu) = written.filter(|mtu| *mtu > 0) else { return Ok(None) };
    u32::try_from(mtu).map(Some).map_err(|_| {
        let name = keys.bridge.as_deref().unwrap_or(DEFAULT_BRIDGE);
        refused_bridge(
            name,
            "invalid argument",
            format_args!("mtu: expected at most {}, found {mtu}", u32::MAX),
        )
    })
}

/// Layer 2 has no addresses to masquerade. As in the reference, the backend's name is validated
/// only if it is used.
fn masquerade(keys: &Keys, container: &Container) -> Result<Option<MasqueradeBackend>, CniError> {
    if !keys.ip_masq || !matches!(container, Container::Layer3 { .. }) {
        return Ok(None);
    }
    match keys.ip_masq_backend.as_deref() {
        None | Some("") => Ok(Some(MasqueradeBackend::Unset)),
        Some("nftables") => Ok(Some(MasqueradeBackend::NfTables)),
        Some("iptables") => Ok(Some(MasqueradeBackend::Iptables)),
        Some(other) => Err(CniError::internal(format_args!("unknown ipmasq backend {other:?}"))),
    }
}

fn bridge_name(written: Option<String>) -> Result<String, CniError> {
    let name = written.unwrap_or_else(|| DEFAULT_BRIDGE.to_owned());
    // The kernel's rules (dev_valid_name); the name is also used in paths.
    let has_other = || name.contains(|c: char| c == '/' || c == ':' || c.is_whitespace() || c == '\0');
    let mut expected = "bridge: expected an interface name".to_owned();
    let reason = if name.is_empty() {
        "LinkAttrs.Name cannot be empty"
    } else if name.len() > 15 {
        "numerical result out of range"
    } else if name == "." || name == ".." || has_other() {
        "invalid argument"
    } else if name.contains('%') {
        // The kernel turns `br%d` into `br0`, `br1`, and refuses any other `%` (dev_alloc_name).
        expected = format!("{expected} without %, found {name:?}");
        "invalid argument"
    } else {
        return Ok(name);
    };
    Err(refused_bridge(&name, reason, expected))
}

/// With the reference's message for a refusal by the kernel.
fn refused_bridge(name: &str, reason: &str, details: impl std::fmt::Display) -> CniError {
    let msg = format!("failed to create bridge {name:?}: could not add {name:?}: {reason}");
    CniError::internal(msg).with_details(details)
}

/// `args.cni.mac` overrides `CNI_ARGS`, and `runtimeConfig.mac` overrides both.
fn container_mac(keys: &Keys, of_args: Option<String>) -> Result<Option<Mac>, CniError> {
    let places = [
        ("runtimeConfig.mac", keys.runtime_mac.as_ref()),
        ("args.cni.mac", keys.args_mac.as_ref()),
        ("CNI_ARGS MAC", of_args.as_ref()),
    ];
    let written = places.into_iter().find_map(|(place, mac)| Some((place, mac.filter(|m| !m.is_empty())?)));
    let Some((place, text)) = written else { return Ok(None) };
    parse_mac(text).map(Some).ok_or_else(|| {
        CniError::internal(format_args!("failed to make veth pair: address {text}: invalid MAC address"))
            .with_details(format_args!("{place}: expected a MAC address of 6 bytes"))
    })
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// With all defaults, and without IPAM.
    pub(crate) fn plain() -> Config {
        Config::new(Keys::default(), None).unwrap()
    }

    #[test]
    fn of_three_macs_the_runtimes_wins_and_empty_ones_do_not_count() {
        let mac = |keys: Keys, args: &str| Config::new(keys, Some(args.to_owned())).map(|c| c.container_mac);
        let (args, args_cni, runtime) = ("02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03");
        let keys = |args_mac: &str, runtime_mac: &str| Keys {
            args_mac: Some(args_mac.to_owned()),
            runtime_mac: Some(runtime_mac.to_owned()),
            ..Keys::default()
        };
        assert_eq!(mac(keys("", ""), ""), Ok(None));
        assert_eq!(mac(keys("", ""), args), Ok(parse_mac(args)));
        assert_eq!(mac(keys(args_cni, ""), args), Ok(parse_mac(args_cni)));
        assert_eq!(mac(keys(args_cni, runtime), args), Ok(parse_mac(runtime)));
        assert_eq!(
            mac(keys("", "x"), args).unwrap_err().details,
            "runtimeConfig.mac: expected a MAC address of 6 bytes"
        );
    }

    #[test]
    fn a_template_of_names_is_no_bridges_name() {
        for name in ["br%d", "%", "50%"] {
            let keys = Keys { bridge: Some(name.to_owned()), ..Keys::default() };
            let refused = Config::new(keys, None).unwrap_err();
            let msg = format!("failed to create bridge {name:?}: could not add {name:?}: invalid argument");
            assert_eq!(refused.msg, msg);
            let details = format!("bridge: expected an interface name without %, found {name:?}");
            assert_eq!(refused.details, details);
        }
    }

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
