//! The parameters of a volume's mount pod.

use std::collections::BTreeMap;
use std::fmt;

use quantity::{Quantity, QuantityError};
use serde::{Deserialize, Serialize};

use super::number;
use crate::error::{Error, Result};
use crate::model::capacity::parse_bytes;

/// kubelet's timeout for a stage or unstage allows no more.
pub(crate) const MAX_GRACE_SECONDS: u32 = 60;
/// One day.
pub(crate) const MAX_DELETE_DELAY_SECONDS: u32 = 86_400;
/// A pod's name is the prefix, `-`, 32 digits, `-` and five more digits. It is also the pod's host name, a
/// DNS label: at most 63 bytes.
const MAX_PREFIX_BYTES: usize = 24;
const MAX_LABEL_BYTES: usize = 63;
const MAX_LABEL_PREFIX_BYTES: usize = 253;
/// With less memory, the daemon would be killed before it serves.
const MIN_MEMORY_LIMIT_BYTES: u64 = 32 << 20;

/// The settings of the daemon's pod.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct PodParameters {
    pub name_prefix: Option<String>,
    pub labels: BTreeMap<String, String>,
    pub resources: Resources,
    pub log_level: Option<LogLevel>,
    pub grace_seconds: Option<u32>,
    pub delete_delay_seconds: Option<u32>,
}

/// Kubernetes quantities, in their original text.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Resources {
    pub cpu_request: Option<String>,
    pub cpu_limit: Option<String>,
    pub memory_request: Option<String>,
    pub memory_limit: Option<String>,
}

impl Resources {
    pub(crate) fn memory_limit_bytes(&self) -> Option<u64> {
        parse_bytes(self.memory_limit.as_deref()?).ok()
    }

    pub(crate) fn cpu_limit_thousandths(&self) -> Option<u64> {
        cpu(self.cpu_limit.as_deref()?).ok()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    pub(crate) const ALL: [Self; 5] = [Self::Error, Self::Warn, Self::Info, Self::Debug, Self::Trace];

    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

impl PodParameters {
    /// False if `name` is not one of these parameters.
    pub(super) fn parse(&mut self, name: &str, value: &str) -> Result<bool> {
        match name {
            "mountPodNamePrefix" => self.name_prefix = Some(name_prefix(value)?),
            "mountPodLabels" => self.labels = labels(value)?,
            "mountPodCpuRequest" => {
                self.resources.cpu_request = Some(checked(value, cpu, "parameters.mountPodCpuRequest")?);
            }
            "mountPodCpuLimit" => {
                self.resources.cpu_limit = Some(checked(value, cpu, "parameters.mountPodCpuLimit")?);
            }
            "mountPodMemoryRequest" => {
                let field = "parameters.mountPodMemoryRequest";
                self.resources.memory_request = Some(checked(value, parse_bytes, field)?);
            }
            "mountPodMemoryLimit" => {
                let field = "parameters.mountPodMemoryLimit";
                self.resources.memory_limit = Some(checked(value, parse_bytes, field)?);
            }
            "mountPodLogLevel" => {
                self.log_level = Some(LogLevel::parse("parameters.mountPodLogLevel", value)?);
            }
            "mountPodGracePeriodSeconds" => {
                let field = "parameters.mountPodGracePeriodSeconds";
                self.grace_seconds = Some(number(field, value, 0..=MAX_GRACE_SECONDS)?);
            }
            "mountPodDeleteDelaySeconds" => {
                let field = "parameters.mountPodDeleteDelaySeconds";
                self.delete_delay_seconds = Some(number(field, value, 0..=MAX_DELETE_DELAY_SECONDS)?);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl fmt::Display for PodParameters {
    /// The settings that differ from the default, each after a space.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Resources { cpu_request, cpu_limit, memory_request, memory_limit } = &self.resources;
        let labels = self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>();
        for (name, value) in [
            ("NamePrefix", self.name_prefix.clone()),
            ("Labels", (!labels.is_empty()).then(|| labels.join(","))),
            ("CpuRequest", cpu_request.clone()),
            ("CpuLimit", cpu_limit.clone()),
            ("MemoryRequest", memory_request.clone()),
            ("MemoryLimit", memory_limit.clone()),
            ("LogLevel", self.log_level.map(|level| level.as_str().to_owned())),
            ("GracePeriodSeconds", self.grace_seconds.map(|seconds| seconds.to_string())),
            ("DeleteDelaySeconds", self.delete_delay_seconds.map(|seconds| seconds.to_string())),
        ] {
            if let Some(value) = value {
                write!(f, " mountPod{name}={value}")?;
            }
        }
        Ok(())
    }
}

impl LogLevel {
    pub(crate) fn parse(field: &'static str, value: &str) -> Result<Self> {
        let known = || Error::invalid(field, value, "known are error, warn, info, debug and trace");
        Self::ALL.into_iter().find(|level| level.as_str() == value).ok_or_else(known)
    }
}

impl Resources {
    /// Kubernetes refuses a pod whose limit is below its request.
    pub(super) fn check(&self) -> Result<()> {
        let (request, limit) = (self.cpu_request.as_deref(), self.cpu_limit.as_deref());
        if let (Some(request), Some(limit)) = (request, limit)
            && is_below(limit, request, cpu)
        {
            let reason = format!("below mountPodCpuRequest {request}");
            return Err(Error::invalid("parameters.mountPodCpuLimit", limit, reason));
        }
        let (request, limit) = (self.memory_request.as_deref(), self.memory_limit.as_deref());
        if let (Some(request), Some(limit)) = (request, limit)
            && is_below(limit, request, parse_bytes)
        {
            let reason = format!("below mountPodMemoryRequest {request}");
            return Err(Error::invalid("parameters.mountPodMemoryLimit", limit, reason));
        }
        match &self.memory_limit {
            Some(limit) if parse_bytes(limit).is_ok_and(|bytes| bytes < MIN_MEMORY_LIMIT_BYTES) => {
                Err(Error::invalid("parameters.mountPodMemoryLimit", limit, "below 32Mi"))
            }
            Some(_) | None => Ok(()),
        }
    }
}

type ParseAmount = fn(&str) -> std::result::Result<u64, String>;

fn is_below(limit: &str, request: &str, parse: ParseAmount) -> bool {
    matches!((parse(limit), parse(request)), (Ok(most), Ok(least)) if most < least)
}

fn checked(value: &str, parse: ParseAmount, field: &'static str) -> Result<String> {
    parse(value).map(|_| value.to_owned()).map_err(|reason| Error::invalid(field, value, reason))
}

/// Thousandths of a CPU: `2`, `0.5` or `250m`.
fn cpu(text: &str) -> std::result::Result<u64, String> {
    let quantity: Quantity = text.parse().map_err(|e: QuantityError| e.to_string())?;
    let thousandths = quantity.exact_milli_value().filter(|thousandths| *thousandths > 0);
    thousandths.ok_or_else(|| format!("{text:?} is not a number of thousandths of a CPU, at least 1m"))
}

fn name_prefix(value: &str) -> Result<String> {
    let is_inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let has_ends = !value.is_empty() && !value.starts_with('-') && !value.ends_with('-');
    if has_ends && value.len() <= MAX_PREFIX_BYTES && value.bytes().all(is_inner) {
        return Ok(value.to_owned());
    }
    let reason = "1 to 24 lower-case letters, digits and `-`, none at the ends, are wanted";
    Err(Error::invalid("parameters.mountPodNamePrefix", value, reason))
}

fn labels(value: &str) -> Result<BTreeMap<String, String>> {
    let field = "parameters.mountPodLabels";
    let mut labels = BTreeMap::new();
    for pair in value.split(',') {
        let (key, label) =
            pair.split_once('=').ok_or_else(|| Error::invalid(field, pair, "key=value is wanted"))?;
        if key.starts_with("hawser.dev/") || key == "app.kubernetes.io/managed-by" {
            return Err(Error::invalid(field, key, "the driver's own"));
        }
        if !is_label_key(key) || !(label.is_empty() || is_label(label)) {
            return Err(Error::invalid(field, pair, "no Kubernetes label"));
        }
        if labels.insert(key.to_owned(), label.to_owned()).is_some() {
            return Err(Error::invalid(field, key, "given twice"));
        }
    }
    Ok(labels)
}

fn is_label_key(key: &str) -> bool {
    let (prefix, name) = key.split_once('/').map_or((None, key), |(prefix, name)| (Some(prefix), name));
    is_label(name) && prefix.is_none_or(is_dns_name)
}

fn is_label(text: &str) -> bool {
    let is_end = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= MAX_LABEL_BYTES
        && is_end(bytes.first())
        && is_end(bytes.last())
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
}

fn is_dns_name(text: &str) -> bool {
    let is_part = |part: &str| {
        is_label(part) && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    text.len() <= MAX_LABEL_PREFIX_BYTES && text.split('.').all(is_part)
}

#[cfg(test)]
mod tests {
    use super::super::Parameters;
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<PodParameters> {
        let pairs = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Parameters::parse(&pairs).map(|parameters| parameters.pod)
    }

    #[test]
    fn everything_about_a_pod_is_read() {
        let pod = parse(&[
            ("mountPodNamePrefix", "fast-1"),
            ("mountPodLabels", "team=storage,example.com/tier=1,empty="),
            ("mountPodCpuRequest", "50m"),
            ("mountPodCpuLimit", "0.5"),
            ("mountPodMemoryRequest", "32Mi"),
            ("mountPodMemoryLimit", "64Mi"),
            ("mountPodLogLevel", "debug"),
            ("mountPodGracePeriodSeconds", "0"),
            ("mountPodDeleteDelaySeconds", "300"),
        ])
        .unwrap();
        assert_eq!(
            pod.to_string(),
            " mountPodNamePrefix=fast-1 mountPodLabels=empty=,example.com/tier=1,team=storage \
             mountPodCpuRequest=50m mountPodCpuLimit=0.5 mountPodMemoryRequest=32Mi mountPodMemoryLimit=64Mi \
             mountPodLogLevel=debug mountPodGracePeriodSeconds=0 mountPodDeleteDelaySeconds=300"
        );
        assert_eq!(PodParameters::default().to_string(), "");
    }

    #[test]
    fn what_kubernetes_would_refuse_is_named() {
        for (pairs, named) in [
            (&[("mountPodNamePrefix", "-a")][..], "mountPodNamePrefix: \"-a\""),
            (&[("mountPodNamePrefix", "a23456789012345678901234x")], "1 to 24"),
            (&[("mountPodLabels", "team")], "\"team\": key=value is wanted"),
            (&[("mountPodLabels", "a=b,a=c")], "\"a\": given twice"),
            (&[("mountPodLabels", "a=b c")], "\"a=b c\": no Kubernetes label"),
            (&[("mountPodLabels", "UPPER.example/a=b")], "no Kubernetes label"),
            (&[("mountPodLabels", "hawser.dev/volume=x")], "the driver's own"),
            (&[("mountPodLabels", "app.kubernetes.io/managed-by=x")], "the driver's own"),
            (&[("mountPodCpuRequest", "1.0001")], "mountPodCpuRequest: \"1.0001\""),
            (&[("mountPodCpuRequest", "0")], "mountPodCpuRequest: \"0\""),
            (&[("mountPodCpuLimit", "-1m")], "mountPodCpuLimit: \"-1m\""),
            (&[("mountPodCpuLimit", "m")], "mountPodCpuLimit: \"m\""),
            (&[("mountPodCpuRequest", "1"), ("mountPodCpuLimit", "999m")], "below mountPodCpuRequest 1"),
            (
                &[("mountPodMemoryRequest", "128Mi"), ("mountPodMemoryLimit", "64Mi")],
                "below mountPodMemoryRequest 128Mi",
            ),
            (&[("mountPodMemoryLimit", "31Mi")], "\"31Mi\": below 32Mi"),
            (&[("mountPodLogLevel", "loud")], "mountPodLogLevel: \"loud\""),
            (&[("mountPodGracePeriodSeconds", "61")], "a number from 0 to 60"),
            (&[("mountPodDeleteDelaySeconds", "86401")], "a number from 0 to 86400"),
            (&[("mountPodDeleteDelaySeconds", "5m")], "mountPodDeleteDelaySeconds: \"5m\""),
        ] {
            let message = parse(pairs).unwrap_err().to_string();
            assert!(message.contains(named), "{named} in {message}");
        }
    }
}
