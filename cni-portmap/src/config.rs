//! The plugin's configuration, validated. No I/O.
//!
//! Errors have the reference's messages, and its code 999 for all of them. ADD and DEL prefix them
//! with `failed to parse config: `, CHECK does not.

use std::net::IpAddr;

use cni_plugin::conf::{Fields, Keys};
use cni_plugin::{CniError, CniResult, Invocation};
use ipnetwork::{IpNetwork, Ipv4Network, Ipv6Network};

use crate::family::Family;
use crate::mapping::Entry;

/// Kubernetes uses bits 14 and 15, Calico 20 to 31 (the reference's choice).
const DEFAULT_MARK_BIT: u8 = 13;

/// The settings of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) backend: Backend,
    /// Masquerades packets from the container to itself, and from 127.0.0.1.
    pub(crate) snat: bool,
    /// Masquerades all packets that pass through a host port.
    pub(crate) masq_all: bool,
    pub(crate) mark: Mark,
    conditions_v4: Vec<String>,
    conditions_v6: Vec<String>,
    /// In the runtime's order; all numbers are above zero.
    pub(crate) entries: Vec<Entry>,
    /// The result of the previous plugins, if the call has it.
    pub(crate) prev_result: Option<CniResult>,
    /// The first IPv4 and the first IPv6 address of the container's interface.
    pub(crate) container: ContainerAddresses,
}

/// The kernel's firewall that holds the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Backend {
    /// The configuration does not choose: nf_tables if the kernel has it.
    Unset,
    /// Requested by name, or by conditions in its syntax.
    Nftables,
    /// Requested by name, or by options that only iptables has.
    Iptables,
}

/// How the iptables backend marks packets to masquerade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    /// This bit (0 to 31), in our own chain.
    Bit(u8),
    /// A chain of another program, which also masquerades.
    ExternalChain(String),
}

impl Mark {
    /// `0x2000`; zero with an external chain.
    pub(crate) fn value(&self) -> u32 {
        match self {
            Self::Bit(bit) => 1 << bit,
            Self::ExternalChain(_) => 0,
        }
    }
}

/// Addresses with their networks' prefix lengths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ContainerAddresses {
    pub(crate) v4: Option<Ipv4Network>,
    pub(crate) v6: Option<Ipv6Network>,
}

impl ContainerAddresses {
    /// The families that the container has, IPv4 first.
    pub(crate) fn each(&self) -> impl Iterator<Item = (Family, IpNetwork)> {
        let v4 = self.v4.map(|address| (Family::V4, IpNetwork::V4(address)));
        let v6 = self.v6.map(|address| (Family::V6, IpNetwork::V6(address)));
        v4.into_iter().chain(v6)
    }
}

/// How much of the configuration a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// All of it.
    Keep,
    /// Rules are found for removal without `prevResult` and the mappings: invalid ones count as
    /// absent.
    Remove,
}

impl Config {
    /// Whether ADD sets `route_localnet` of the link towards the container, which first needs the
    /// guard of 127.0.0.0/8.
    pub(crate) fn opens_localnet(&self, family: Family) -> bool {
        self.snat && family == Family::V4 && self.container.v4.is_some()
    }

    pub(crate) fn read(call: &Invocation, purpose: Purpose) -> Result<Self, CniError> {
        let fields = call.conf.fields(KEYS);
        let raw = Raw::read(&fields).map_err(|why| {
            CniError::internal(format_args!("failed to parse network configuration: {}", why.msg))
        })?;
        let prev_result = match call.conf.prev_result() {
            Ok(prev_result) => prev_result,
            Err(_) if purpose == Purpose::Remove => None,
            Err(why) => {
                return Err(CniError::internal(format_args!("could not parse prevResult: {}", why.msg)));
            }
        };
        let container = prev_result.as_ref().map(|result| container_addresses(result, &call.ifname));
        raw.check(prev_result, container.unwrap_or_default(), purpose)
    }

    /// A configuration with these addresses (each with a prefix length) of the container.
    #[cfg(test)]
    pub(crate) fn of_json(value: serde_json::Value, addresses: &[&str]) -> Self {
        let ips: Vec<_> = addresses.iter().map(|a| serde_json::json!({"address": a})).collect();
        let result = serde_json::json!({"ips": ips});
        let result = CniResult::from_json(&result, cni_plugin::Version::V1_0_0).unwrap();
        let container = container_addresses(&result, "eth0");
        let raw = Raw::read(&Fields::of(&value, "").unwrap()).unwrap();
        raw.check(Some(result), container, Purpose::Keep).unwrap()
    }

    /// The configured conditions for entering our chains, in the backend's own syntax.
    pub(crate) fn conditions(&self, family: Family) -> &[String] {
        match family {
            Family::V4 => &self.conditions_v4,
            Family::V6 => &self.conditions_v6,
        }
    }

    /// All addresses in the result: the known addresses of the container, on any interface. Empty:
    /// none is known.
    pub(crate) fn known_addresses(&self) -> Vec<IpAddr> {
        let ips = self.prev_result.iter().flat_map(|result| &result.ips);
        ips.map(|ip| ip.address.ip()).collect()
    }
}

/// The keys that the plugin reads, besides the common ones.
pub(crate) const KEYS: Keys = &[
    "backend",
    "snat",
    "masqAll",
    "markMasqBit",
    "externalSetMarkChain",
    "conditionsV4",
    "conditionsV6",
    "runtimeConfig.portMappings[].hostPort",
    "runtimeConfig.portMappings[].containerPort",
    "runtimeConfig.portMappings[].protocol",
    "runtimeConfig.portMappings[].hostIP",
];

/// The keys as written.
struct Raw {
    backend: Option<String>,
    snat: Option<bool>,
    masq_all: bool,
    mark_bit: Option<i64>,
    mark_chain: Option<String>,
    conditions_v4: Vec<String>,
    conditions_v6: Vec<String>,
    entries: Vec<RawEntry>,
}

struct RawEntry {
    host_port: i64,
    container_port: i64,
    protocol: String,
    host_ip: String,
}

impl Raw {
    fn read(fields: &Fields<'_>) -> Result<Self, CniError> {
        let runtime = fields.object("runtimeConfig")?;
        let mappings = runtime.as_ref().map(|runtime| runtime.objects("portMappings")).transpose()?;
        let entry = |fields: &Fields<'_>| -> Result<RawEntry, CniError> {
            Ok(RawEntry {
                host_port: fields.i64("hostPort")?.unwrap_or(0),
                container_port: fields.i64("containerPort")?.unwrap_or(0),
                protocol: fields.string("protocol")?.unwrap_or_default(),
                host_ip: fields.string("hostIP")?.unwrap_or_default(),
            })
        };
        Ok(Self {
            backend: fields.string("backend")?,
            snat: fields.get("snat").map(|_| fields.bool("snat")).transpose()?,
            masq_all: fields.bool("masqAll")?,
            mark_bit: fields.i64("markMasqBit")?,
            mark_chain: fields.string("externalSetMarkChain")?,
            conditions_v4: fields.strings("conditionsV4")?,
            conditions_v6: fields.strings("conditionsV6")?,
            entries: mappings.unwrap_or_default().iter().map(entry).collect::<Result<_, _>>()?,
        })
    }

    /// The reference's checks, in its order.
    fn check(
        self,
        prev_result: Option<CniResult>,
        container: ContainerAddresses,
        purpose: Purpose,
    ) -> Result<Config, CniError> {
        if self.mark_bit.is_some() && self.mark_chain.is_some() {
            return Err(CniError::internal("Cannot specify externalSetMarkChain and markMasqBit"));
        }
        let bit = self.mark_bit.map_or(Some(DEFAULT_MARK_BIT), |bit| u8::try_from(bit).ok());
        let bit = bit
            .filter(|bit| *bit <= 31)
            .ok_or_else(|| CniError::internal("MasqMarkBit must be between 0 and 31"))?;
        let backend = self.backend()?;
        let entries = self.entries.into_iter().filter_map(|entry| entry.check(purpose).transpose());
        let entries = entries.collect::<Result<_, _>>()?;
        Ok(Config {
            backend,
            snat: self.snat.unwrap_or(true),
            masq_all: self.masq_all,
            mark: self.mark_chain.map_or(Mark::Bit(bit), Mark::ExternalChain),
            conditions_v4: self.conditions_v4,
            conditions_v6: self.conditions_v6,
            entries,
            prev_result,
            container,
        })
    }

    /// By default, the reference uses iptables unless only nft works, and then refuses nft's
    /// syntax. Here, the syntax chooses the backend.
    fn backend(&self) -> Result<Backend, CniError> {
        let (mut of_iptables, mut of_nftables) = (Vec::new(), Vec::new());
        if self.mark_chain.is_some() {
            of_iptables.push("externalSetMarkChain");
        }
        for (key, conditions) in
            [("conditionsV4", &self.conditions_v4), ("conditionsV6", &self.conditions_v6)]
        {
            match conditions.first().map(String::as_str) {
                None | Some("") => {}
                Some(first) if first.starts_with(['-', '!']) => of_iptables.push(key),
                Some(_) => of_nftables.push(key),
            }
        }
        let (asked, foreign, foreign_options) = match self.backend.as_deref() {
            None if of_iptables.is_empty() && of_nftables.is_empty() => return Ok(Backend::Unset),
            None if of_iptables.is_empty() => return Ok(Backend::Nftables),
            None | Some("iptables") => ("iptables", "nftables", of_nftables),
            Some(other) => (other, "iptables", of_iptables),
        };
        if !foreign_options.is_empty() {
            return Err(CniError::internal(format_args!(
                "{asked} backend was requested but configuration contains {foreign}-specific options [{}]",
                foreign_options.join(" ")
            )));
        }
        match asked {
            "iptables" => Ok(Backend::Iptables),
            "nftables" => Ok(Backend::Nftables),
            unknown => Err(CniError::internal(format_args!("unrecognized backend {unknown:?}"))),
        }
    }
}

impl RawEntry {
    /// `None`: the entry is skipped.
    fn check(self, purpose: Purpose) -> Result<Option<Entry>, CniError> {
        let invalid = |which: &str, number: i64| {
            CniError::internal(format_args!("Invalid {which} port number: {number}"))
        };
        for (which, number) in [("container", self.container_port), ("host", self.host_port)] {
            // The reference has no upper limit here: its firewall program refuses the port at ADD,
            // and DEL has nothing to remove.
            let too_high = number > i64::from(u16::MAX);
            if number <= 0 || (too_high && purpose == Purpose::Keep) {
                return Err(invalid(which, number));
            }
        }
        let ports = (u16::try_from(self.host_port), u16::try_from(self.container_port));
        let (Ok(host_port), Ok(container_port)) = ports else { return Ok(None) };
        Ok(Some(Entry { host_port, container_port, protocol: self.protocol, host_ip: self.host_ip }))
    }
}

/// Uses an address if its interface is the container's `ifname`, or if the result does not name its
/// interface.
fn container_addresses(result: &CniResult, ifname: &str) -> ContainerAddresses {
    let mut found = ContainerAddresses::default();
    for ip in &result.ips {
        let interface = ip.interface.and_then(|index| usize::try_from(index).ok());
        let interface = interface.and_then(|index| result.interfaces.get(index));
        if interface.is_some_and(|interface| interface.name != ifname || interface.sandbox.is_empty()) {
            continue;
        }
        match ip.address {
            IpNetwork::V4(address) => _ = found.v4.get_or_insert(address),
            IpNetwork::V6(address) => _ = found.v6.get_or_insert(address),
        }
    }
    found
}

#[cfg(test)]
mod tests;
