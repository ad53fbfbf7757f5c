//! IPv4 or IPv6.

use std::net::IpAddr;

/// The two families have tables, rules and addresses of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) const BOTH: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

impl std::fmt::Display for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::V4 => "ipv4",
            Self::V6 => "ipv6",
        })
    }
}
