//! The `ipam` section, and all other sources of requested addresses.

use std::net::IpAddr;
use std::path::PathBuf;

use cni_plugin::conf::{Fields, Keys, parse_cidr};
use cni_plugin::{CniError, NetConf, Route, Version};

use crate::range::RawRange;
use crate::{Error, RangeSet};

const DEFAULT_DATA_DIR: &str = "/var/lib/cni/networks";

/// The keys that the plugin reads, besides the common ones.
pub const KEYS: Keys = &[
    "ipam.ranges[][].subnet",
    "ipam.ranges[][].rangeStart",
    "ipam.ranges[][].rangeEnd",
    "ipam.ranges[][].gateway",
    "ipam.subnet",
    "ipam.rangeStart",
    "ipam.rangeEnd",
    "ipam.gateway",
    "ipam.routes[].dst",
    "ipam.routes[].gw",
    "ipam.routes[].mtu",
    "ipam.routes[].advmss",
    "ipam.routes[].priority",
    "ipam.routes[].table",
    "ipam.routes[].scope",
    "ipam.dataDir",
    "ipam.resolvConf",
    "capabilities.ipRanges",
    "args.cni.ips",
    "runtimeConfig.ips",
    "runtimeConfig.ipRanges[][].subnet",
    "runtimeConfig.ipRanges[][].rangeStart",
    "runtimeConfig.ipRanges[][].rangeEnd",
    "runtimeConfig.ipRanges[][].gateway",
];

/// The validated configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// No two overlap. At least one, unless [`Self::read_for_status`] allows none.
    pub ranges: Vec<RangeSet>,
    /// Requested addresses without duplicates: from `CNI_ARGS`, `args.cni.ips` and
    /// `runtimeConfig.ips`, in this order.
    pub requested: Vec<IpAddr>,
    /// Leases are in `<data_dir>/<network name>`.
    pub data_dir: PathBuf,
    pub resolv_conf: Option<PathBuf>,
}

impl Config {
    pub fn read(conf: &NetConf, args: &str) -> Result<Self, CniError> {
        let config = Self::read_all(conf, args)?;
        if config.ranges.is_empty() { Err(Error::NoRanges.into()) } else { Ok(config) }
    }

    /// Without ranges if they may all be the runtime's: libcni gives STATUS no `runtimeConfig`.
    pub fn read_for_status(conf: &NetConf, args: &str) -> Result<Self, CniError> {
        let document = conf.fields(KEYS);
        let capabilities = document.object("capabilities")?;
        let from_runtime = capabilities.map(|all| all.bool("ipRanges")).transpose()?.unwrap_or(false);
        if from_runtime && document.object("runtimeConfig")?.is_none() {
            Self::read_all(conf, args)
        } else {
            Self::read(conf, args)
        }
    }

    fn read_all(conf: &NetConf, args: &str) -> Result<Self, CniError> {
        let document = conf.fields(KEYS);
        let ipam = document.object("ipam")?.ok_or(Error::NoIpam)?;
        let runtime = document.object("runtimeConfig")?;
        let [from_args] = cni_plugin::args::parse_validating(args, ["IP"], validate_ip)?;

        Ok(Self {
            requested: requested(from_args, &document, runtime.as_ref())?,
            ranges: range_sets(&ipam, runtime.as_ref(), conf.cni_version)?,
            data_dir: data_dir_of(&ipam)?,
            resolv_conf: path(&ipam, "resolvConf")?,
        })
    }
}

/// [`Config::data_dir`] alone. GC needs nothing else, and may lack ranges: libcni gives it no
/// `runtimeConfig`.
pub(crate) fn data_dir(conf: &NetConf) -> Result<PathBuf, CniError> {
    data_dir_of(&conf.fields(KEYS).object("ipam")?.ok_or(Error::NoIpam)?)
}

fn data_dir_of(ipam: &Fields<'_>) -> Result<PathBuf, CniError> {
    Ok(path(ipam, "dataDir")?.unwrap_or_else(|| PathBuf::from(DEFAULT_DATA_DIR)))
}

fn path(ipam: &Fields<'_>, key: &str) -> Result<Option<PathBuf>, CniError> {
    Ok(ipam.string(key)?.filter(|text| !text.is_empty()).map(PathBuf::from))
}

/// `ipam.routes`. Only ADD reads it, so an invalid one does not prevent the release of a lease.
pub fn routes(conf: &NetConf) -> Result<Vec<Route>, CniError> {
    let ipam = conf.fields(KEYS).object("ipam")?.ok_or(Error::NoIpam)?;
    ipam.objects("routes")?.iter().map(Route::read).collect()
}

/// In the order that defines the number in `last_reserved_ip.N`: the runtime's ranges, the single
/// range of the old form, the list.
fn range_sets(
    ipam: &Fields<'_>,
    runtime: Option<&Fields<'_>>,
    version: Version,
) -> Result<Vec<RangeSet>, CniError> {
    let mut raw = Vec::new();
    if let Some(runtime) = runtime {
        raw.extend(raw_sets(runtime, "ipRanges")?);
    }
    let single = raw_range(ipam)?;
    if single.subnet.is_some() {
        raw.push(vec![single]);
    }
    raw.extend(raw_sets(ipam, "ranges")?);

    let mut sets: Vec<RangeSet> = Vec::new();
    for (index, ranges) in raw.iter().enumerate() {
        sets.push(RangeSet::new(ranges).map_err(|source| Error::InvalidRangeSet { index, source })?);
    }
    let v4 = sets.iter().filter(|set| set.is_ipv4()).count();
    if version < Version::V0_3_0 && (v4 > 1 || sets.len() - v4 > 1) {
        return Err(Error::TooManyForVersion { version }.into());
    }
    for (first, set) in sets.iter().enumerate() {
        if let Some(offset) = sets[first + 1..].iter().position(|other| set.overlaps(other)) {
            return Err(Error::RangeSetsOverlap { first, second: first + 1 + offset }.into());
        }
    }
    Ok(sets)
}

fn raw_sets(fields: &Fields<'_>, key: &str) -> Result<Vec<Vec<RawRange>>, CniError> {
    fields.object_lists(key)?.iter().map(|set| set.iter().map(raw_range).collect()).collect()
}

fn raw_range(fields: &Fields<'_>) -> Result<RawRange, CniError> {
    Ok(RawRange {
        subnet: fields.cidr("subnet")?,
        start: fields.ip("rangeStart")?,
        end: fields.ip("rangeEnd")?,
        gateway: fields.ip("gateway")?,
    })
}

fn requested(
    from_args: Option<String>,
    document: &Fields<'_>,
    runtime: Option<&Fields<'_>>,
) -> Result<Vec<IpAddr>, CniError> {
    let mut requested: Vec<IpAddr> = from_args.as_deref().and_then(parse_ip).into_iter().collect();
    let args = document.object("args")?;
    let cni = args.as_ref().map(|args| args.object("cni")).transpose()?.flatten();
    for holder in cni.iter().chain(runtime) {
        let places = holder.array("ips")?;
        for ((path, _), text) in places.iter().zip(holder.strings("ips")?) {
            requested.push(parse_ip(&text).ok_or_else(|| {
                let wrong =
                    if text.is_empty() { Error::NoRequestedIp } else { Error::InvalidRequestedIp { text } };
                CniError::from(wrong).with_details(path)
            })?);
        }
    }
    let mut unique: Vec<IpAddr> = Vec::with_capacity(requested.len());
    for ip in requested {
        if !unique.contains(&ip) {
            unique.push(ip);
        }
    }
    Ok(unique)
}

/// Validates `IP` in `CNI_ARGS`; an empty one requests nothing.
fn validate_ip(text: &str) -> Result<(), String> {
    let is_right = text.is_empty() || parse_ip(text).is_some();
    if is_right { Ok(()) } else { Err(format!("invalid IP address {text}")) }
}

/// An address, with or without a prefix length (which is ignored).
fn parse_ip(text: &str) -> Option<IpAddr> {
    let ip = text.parse().ok().or_else(|| parse_cidr(text).map(|network| network.ip()));
    ip.map(|ip: IpAddr| ip.to_canonical())
}
