//! StorageClass parameters, validated; the provisioner passes them to CreateVolume.

mod pod;

use std::collections::HashMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::policies::{CapacityPolicy, DataPath, Policies, Wanted};
use crate::model::snapshot_mode::SnapshotMode;
pub(crate) use pod::{LogLevel, MAX_DELETE_DELAY_SECONDS, MAX_GRACE_SECONDS, PodParameters, Resources};

/// Every parameter, as listed in docs/CSI.md.
const KNOWN: &[&str] = &[
    "backend",
    "threads",
    "knownInodeLimit",
    "snapshotMode",
    "dataPath",
    "capacity",
    "changedFromOutside",
    "writebackCache",
    "mountPodNamePrefix",
    "mountPodLabels",
    "mountPodCpuRequest",
    "mountPodCpuLimit",
    "mountPodMemoryRequest",
    "mountPodMemoryLimit",
    "mountPodLogLevel",
    "mountPodGracePeriodSeconds",
    "mountPodDeleteDelaySeconds",
];
/// Prefix of Kubernetes' own keys, which some provisioners pass on (secrets, claim and volume
/// names).
pub(crate) const KUBERNETES_PREFIX: &str = "csi.storage.k8s.io/";
pub(crate) const MAX_THREADS: u32 = 16;
/// Default limit of the inodes of a volume that the kernel knows. The daemon keeps at most twice as
/// many, of about 160 bytes each, up to 400 with the longest names.
pub(crate) const KNOWN_INODE_LIMIT: u32 = 500_000;
/// With fewer inodes, a pod would wait for its own directory listing.
pub(crate) const KNOWN_INODE_LIMITS: RangeInclusive<u32> = 1000..=10_000_000;

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    /// Event loops of the volume's daemon; 0: the daemon's default.
    pub threads: u32,
    /// Limit of the inodes that the kernel knows; 0: [`KNOWN_INODE_LIMIT`].
    pub known_inode_limit: u32,
    /// How snapshots and clones of the volume are made; `None`: by reflink.
    pub snapshot_mode: Option<SnapshotMode>,
    /// `None`: what the pool allows.
    pub data_path: Option<DataPath>,
    /// `None`: what the pool and the data path allow.
    pub capacity: Option<CapacityPolicy>,
    /// Programs on the node change the volume's files without its mount.
    pub changed_from_outside: bool,
    /// The kernel keeps what is written and sends it to the daemon later.
    pub writeback_cache: bool,
    pub pod: PodParameters,
}

impl Parameters {
    pub(crate) fn parse(parameters: &HashMap<String, String>) -> Result<Self> {
        let mut parsed = Self::default();
        for (name, value) in parameters {
            match name.as_str() {
                "backend" if value == "local" => {}
                "backend" => return Err(Error::invalid("parameters.backend", value, "known is local")),
                "threads" => parsed.threads = number("parameters.threads", value, 1..=MAX_THREADS)?,
                "knownInodeLimit" => {
                    parsed.known_inode_limit =
                        number("parameters.knownInodeLimit", value, KNOWN_INODE_LIMITS)?;
                }
                "snapshotMode" => {
                    parsed.snapshot_mode = Some(parse_snapshot_mode("parameters.snapshotMode", value)?);
                }
                "dataPath" => {
                    let field = "parameters.dataPath";
                    parsed.data_path = Some(one_of(field, value, &DataPath::ALL, DataPath::as_str)?);
                }
                "capacity" => {
                    let field = "parameters.capacity";
                    parsed.capacity =
                        Some(one_of(field, value, &CapacityPolicy::ALL, CapacityPolicy::as_str)?);
                }
                "changedFromOutside" => {
                    parsed.changed_from_outside = switch("parameters.changedFromOutside", value)?;
                }
                "writebackCache" => parsed.writeback_cache = switch("parameters.writebackCache", value)?,
                name if parsed.pod.parse(name, value)? => {}
                name if name.starts_with(KUBERNETES_PREFIX) => {}
                _ => {
                    let known = KNOWN.join(", ");
                    return Err(Error::UnknownParameter { name: name.clone(), known });
                }
            }
        }
        parsed.pod.resources.check()?;
        parsed.check_policies()?;
        Ok(parsed)
    }

    pub(crate) fn wanted_policies(&self) -> Wanted {
        // Only the daemon's data path has one.
        let with_cache = self.writeback_cache.then_some(DataPath::Daemon);
        Wanted { data_path: self.data_path.or(with_cache), capacity: self.capacity }
    }

    /// The policies of a volume whose record names none: an earlier version created it.
    pub(crate) fn policies_of_earlier_versions(&self) -> Policies {
        Policies {
            data_path: self.data_path.unwrap_or_default(),
            capacity: self.capacity.unwrap_or_default(),
        }
    }

    fn check_policies(&self) -> Result<()> {
        if self.writeback_cache {
            let reason = match (self.data_path, self.changed_from_outside) {
                (Some(DataPath::Passthrough), _) => {
                    Some("the kernel has none for dataPath passthrough: choose daemon")
                }
                (_, true) => Some(
                    "with it the kernel does not see what others write, and changedFromOutside announces that they do",
                ),
                _ => None,
            };
            if let Some(reason) = reason {
                return Err(Error::invalid("parameters.writebackCache", "true", reason));
            }
        }
        let (Some(DataPath::Passthrough), Some(CapacityPolicy::Daemon)) = (self.data_path, self.capacity)
        else {
            return Ok(());
        };
        let reason = "the daemon does not see the writes of dataPath passthrough: choose kernel or none";
        Err(Error::invalid("parameters.capacity", CapacityPolicy::Daemon.as_str(), reason))
    }
}

impl fmt::Display for Parameters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "threads={}", self.threads)?;
        if self.known_inode_limit > 0 {
            write!(f, " knownInodeLimit={}", self.known_inode_limit)?;
        }
        if let Some(mode) = self.snapshot_mode {
            write!(f, " snapshotMode={}", mode.as_str())?;
        }
        if let Some(data_path) = self.data_path {
            write!(f, " dataPath={data_path}")?;
        }
        if let Some(capacity) = self.capacity {
            write!(f, " capacity={capacity}")?;
        }
        if self.changed_from_outside {
            write!(f, " changedFromOutside=true")?;
        }
        if self.writeback_cache {
            write!(f, " writebackCache=true")?;
        }
        write!(f, "{}", self.pod)
    }
}

/// Parses the parameter of a StorageClass or VolumeSnapshotClass.
pub(crate) fn parse_snapshot_mode(field: &'static str, value: &str) -> Result<SnapshotMode> {
    let modes = [SnapshotMode::Reflink, SnapshotMode::BlockingCopy];
    let known = || Error::invalid(field, value, "known are reflink and blocking-copy");
    modes.into_iter().find(|mode| mode.as_str() == value).ok_or_else(known)
}

/// `field` names the parameter.
fn one_of<T: Copy>(
    field: &'static str,
    value: &str,
    known: &[T],
    name: impl Fn(T) -> &'static str,
) -> Result<T> {
    let found = known.iter().copied().find(|known| name(*known) == value);
    found.ok_or_else(|| {
        let known: Vec<&str> = known.iter().copied().map(name).collect();
        Error::invalid(field, value, format!("known are {}", known.join(", ")))
    })
}

/// `field` names the parameter.
fn switch(field: &'static str, value: &str) -> Result<bool> {
    one_of(field, value, &[true, false], |is_on| if is_on { "true" } else { "false" })
}

/// `field` names the parameter or mount option.
pub(crate) fn number(field: &'static str, value: &str, range: RangeInclusive<u32>) -> Result<u32> {
    value.parse().ok().filter(|n| range.contains(n)).ok_or_else(|| {
        let reason = format!("a number from {} to {} is wanted", range.start(), range.end());
        Error::invalid(field, value, reason)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Parameters> {
        Parameters::parse(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
    }

    #[test]
    fn known_parameters_and_kubernetes_own_are_accepted() {
        let parsed = parse(&[("backend", "local"), ("threads", "4"), ("csi.storage.k8s.io/pvc/name", "x")]);
        assert_eq!(parsed.unwrap(), Parameters { threads: 4, ..Default::default() });
    }

    #[test]
    fn an_unknown_parameter_is_named() {
        let message = parse(&[("bakend", "local")]).unwrap_err().to_string();
        let words = "parameters: unknown parameter \"bakend\": known are backend, threads, knownInodeLimit, ";
        assert!(message.starts_with(words), "{message}");
    }

    #[test]
    fn a_wrong_value_is_shown_with_its_field() {
        let message = parse(&[("threads", "many")]).unwrap_err().to_string();
        assert_eq!(message, "parameters.threads: \"many\": a number from 1 to 16 is wanted");
        let message = parse(&[("snapshotMode", "copy")]).unwrap_err().to_string();
        assert_eq!(message, "parameters.snapshotMode: \"copy\": known are reflink and blocking-copy");
        assert!(parse(&[("backend", "s3")]).unwrap_err().to_string().contains("\"s3\""));
    }

    #[test]
    fn policies_that_cannot_hold_together_are_refused_by_name() {
        let parsed = parse(&[("dataPath", "passthrough"), ("capacity", "none")]).unwrap();
        let policies = (parsed.data_path, parsed.capacity);
        assert_eq!(policies, (Some(DataPath::Passthrough), Some(CapacityPolicy::None)));
        let message = parse(&[("dataPath", "passthrough"), ("capacity", "daemon")]).unwrap_err().to_string();
        assert!(message.starts_with("parameters.capacity: \"daemon\": "), "{message}");
        let message = parse(&[("capacity", "quota")]).unwrap_err().to_string();
        assert_eq!(message, "parameters.capacity: \"quota\": known are daemon, kernel, none");
    }

    #[test]
    fn a_writeback_cache_is_refused_where_the_kernel_cannot_have_one() {
        let cache = ("writebackCache", "true");
        let parsed = parse(&[cache]).unwrap();
        assert_eq!(parsed.wanted_policies().data_path, Some(DataPath::Daemon));
        for other in [("dataPath", "passthrough"), ("changedFromOutside", "true")] {
            let message = parse(&[cache, other]).unwrap_err().to_string();
            assert!(message.starts_with("parameters.writebackCache: \"true\": "), "{message}");
            parse(&[("writebackCache", "false"), other]).unwrap();
        }
        assert_eq!(parse(&[("writebackCache", "false")]).unwrap().wanted_policies().data_path, None);
    }

    #[test]
    fn every_known_name_is_parsed() {
        for name in KNOWN {
            let error = parse(&[(name, "\u{1}")]).unwrap_err();
            assert!(matches!(&error, Error::InvalidField { field, .. } if field.ends_with(name)), "{error}");
        }
    }

    #[test]
    fn every_known_name_is_documented() {
        let docs = include_str!("../../../docs/CSI.md");
        for name in KNOWN {
            assert!(docs.contains(&format!("`{name}`")), "{name}");
        }
    }
}
