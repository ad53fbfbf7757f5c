//! A mapping from a port of the host to a port of the container. No I/O.

use std::net::IpAddr;

use crate::error::Error;
use crate::family::Family;

/// The protocols with ports that both backends support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Protocol {
    Sctp,
    Tcp,
    Udp,
}

impl Protocol {
    const ALL: [Self; 3] = [Self::Sctp, Self::Tcp, Self::Udp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sctp => "sctp",
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }

    /// IANA's number, as in the IP header.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::Sctp => 132,
            Self::Tcp => 6,
            Self::Udp => 17,
        }
    }

    /// Runtimes use upper and lower case.
    pub(crate) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.name().eq_ignore_ascii_case(name))
    }

    pub(crate) fn from_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|protocol| protocol.number() == number)
    }
}

/// One element of `runtimeConfig.portMappings`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) host_port: u16,
    pub(crate) container_port: u16,
    /// As written; see [`Protocol::parse`].
    pub(crate) protocol: String,
    /// As written; empty: every address of the host.
    pub(crate) host_ip: String,
}

/// An entry for one family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub(crate) protocol: Protocol,
    /// `None`: every address of the host.
    pub(crate) host_ip: Option<IpAddr>,
    pub(crate) host_port: u16,
    pub(crate) container_port: u16,
}

impl Entry {
    pub(crate) fn protocol(&self) -> Result<Protocol, Error> {
        Protocol::parse(&self.protocol).ok_or_else(|| Error::UnknownProtocol { name: self.protocol.clone() })
    }

    /// `None` if the host address is of the other family. As in the reference, an invalid address
    /// counts as IPv6: a container without IPv6 does not get that port; for any other it is an
    /// error.
    pub(crate) fn in_family(&self, family: Family) -> Result<Option<Mapping>, Error> {
        let protocol = self.protocol()?;
        let mapping = Mapping {
            protocol,
            host_ip: None,
            host_port: self.host_port,
            container_port: self.container_port,
        };
        if self.host_ip.is_empty() {
            return Ok(Some(mapping));
        }
        // For the reference, an IPv4 address in IPv6 notation is an IPv4 address.
        let host_ip = self.host_ip.parse::<IpAddr>().map(|ip| ip.to_canonical());
        match host_ip {
            Err(_) if family == Family::V4 => Ok(None),
            Err(_) => Err(Error::HostIp { text: self.host_ip.clone() }),
            Ok(ip) if Family::of(ip) != family => Ok(None),
            Ok(ip) => Ok(Some(Mapping { host_ip: Some(ip).filter(|ip| !ip.is_unspecified()), ..mapping })),
        }
    }
}

/// The `entries` for `family`, in their order.
pub(crate) fn in_family(entries: &[Entry], family: Family) -> Result<Vec<Mapping>, Error> {
    entries.iter().filter_map(|entry| entry.in_family(family).transpose()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(protocol: &str, host_ip: &str) -> Entry {
        Entry {
            host_port: 8080,
            container_port: 80,
            protocol: protocol.to_owned(),
            host_ip: host_ip.to_owned(),
        }
    }

    #[test]
    fn a_host_address_chooses_the_family_and_the_unspecified_one_matches_all_of_it() {
        let host_ips = |text: &str| {
            Family::BOTH.map(|family| entry("TCP", text).in_family(family).unwrap().map(|m| m.host_ip))
        };
        let ip = |text: &str| Some(Some(text.parse::<IpAddr>().unwrap()));
        assert_eq!(host_ips(""), [Some(None), Some(None)]);
        assert_eq!(host_ips("10.0.0.1"), [ip("10.0.0.1"), None]);
        assert_eq!(host_ips("::ffff:10.0.0.1"), [ip("10.0.0.1"), None]);
        assert_eq!(host_ips("fd00::1"), [None, ip("fd00::1")]);
        assert_eq!(host_ips("0.0.0.0"), [Some(None), None]);
        assert_eq!(host_ips("::"), [None, Some(None)]);
    }

    #[test]
    fn a_host_address_that_is_none_counts_as_ipv6() {
        assert_eq!(entry("tcp", "localhost").in_family(Family::V4).unwrap(), None);
        let error = entry("tcp", "localhost").in_family(Family::V6).unwrap_err();
        assert_eq!(error.to_string(), "hostIP \"localhost\" is no IP address");
    }

    #[test]
    fn protocols_are_known_in_both_cases_and_by_number() {
        for protocol in Protocol::ALL {
            assert_eq!(Protocol::parse(&protocol.name().to_uppercase()), Some(protocol));
            assert_eq!(Protocol::from_number(protocol.number()), Some(protocol));
        }
        let error = entry("", "").in_family(Family::V4).unwrap_err();
        assert_eq!(error.to_string(), "protocol \"\" has no ports to map");
    }
}
