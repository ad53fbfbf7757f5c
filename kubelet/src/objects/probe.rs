//! Probes and lifecycle hooks of a container, with Kubernetes' defaults (apis/core/v1/defaults.go).

use std::fmt;
use std::time::Duration;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::null_as_default;

/// What a probe decides about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProbeKind {
    Startup,
    Liveness,
    Readiness,
}

impl ProbeKind {
    pub const ALL: [Self; 3] = [Self::Startup, Self::Liveness, Self::Readiness];

    /// As in kubelet's events: `Liveness`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// One periodic check. An absent number and 0 mean the default.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Probe {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecAction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_get: Option<HttpGetAction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_socket: Option<TcpSocketAction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grpc: Option<GrpcAction>,
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "null_as_default")]
    pub initial_delay_seconds: u32,
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "null_as_default")]
    pub timeout_seconds: u32,
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "null_as_default")]
    pub period_seconds: u32,
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "null_as_default")]
    pub success_threshold: u32,
    #[serde(skip_serializing_if = "is_zero", deserialize_with = "null_as_default")]
    pub failure_threshold: u32,
    /// Replaces the pod's grace period if this probe ends the container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub termination_grace_period_seconds: Option<u64>,
}

impl Probe {
    pub fn initial_delay(&self) -> Duration {
        Duration::from_secs(self.initial_delay_seconds.into())
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs(or_default(self.timeout_seconds, 1).into())
    }

    pub fn period(&self) -> Duration {
        Duration::from_secs(or_default(self.period_seconds, 10).into())
    }

    pub fn successes(&self) -> u32 {
        or_default(self.success_threshold, 1)
    }

    pub fn failures(&self) -> u32 {
        or_default(self.failure_threshold, 3)
    }
}

fn or_default(number: u32, default: u32) -> u32 {
    if number == 0 { default } else { number }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The action of a probe or hook.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Handler<'a> {
    Exec(&'a ExecAction),
    HttpGet(&'a HttpGetAction),
    TcpSocket(&'a TcpSocketAction),
    Grpc(&'a GrpcAction),
    Sleep(SleepAction),
}

impl Probe {
    /// `None` if the probe has no action or more than one (`manifest` refuses both).
    pub fn handler(&self) -> Option<Handler<'_>> {
        let exec = self.exec.as_ref().map(Handler::Exec);
        let http_get = self.http_get.as_ref().map(Handler::HttpGet);
        let tcp_socket = self.tcp_socket.as_ref().map(Handler::TcpSocket);
        let grpc = self.grpc.as_ref().map(Handler::Grpc);
        only(exec.into_iter().chain(http_get).chain(tcp_socket).chain(grpc))
    }
}

impl Hook {
    /// `None` if the hook has no action or more than one (`manifest` refuses both).
    pub fn handler(&self) -> Option<Handler<'_>> {
        let exec = self.exec.as_ref().map(Handler::Exec);
        let http_get = self.http_get.as_ref().map(Handler::HttpGet);
        only(exec.into_iter().chain(http_get).chain(self.sleep.map(Handler::Sleep)))
    }
}

fn only<T>(mut items: impl Iterator<Item = T>) -> Option<T> {
    let first = items.next();
    if items.next().is_some() { None } else { first }
}

/// Runs a program in the container, without a shell; exit code 0 is success.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ExecAction {
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub command: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HttpGetAction {
    /// `/` if empty.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub path: String,
    pub port: Port,
    /// The pod's address if empty.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub host: String,
    #[serde(default, deserialize_with = "null_as_default")]
    pub scheme: Scheme,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_as_default")]
    pub http_headers: Vec<HttpHeader>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scheme {
    #[default]
    #[serde(rename = "HTTP")]
    Http,
    /// The certificate is not verified, as with kubelet.
    #[serde(rename = "HTTPS")]
    Https,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpHeader {
    pub name: String,
    #[serde(default, deserialize_with = "null_as_default")]
    pub value: String,
}

/// A connection that opens is success.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TcpSocketAction {
    pub port: Port,
    /// The pod's address if empty.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub host: String,
}

/// Calls `grpc.health.v1.Health/Check` on the pod's address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GrpcAction {
    pub port: u16,
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "null_as_default")]
    pub service: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SleepAction {
    pub seconds: u64,
}

/// A port number, or the name of one of the container's ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Port {
    Number(u16),
    Name(String),
}

impl Serialize for Port {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_u16(*number),
            Self::Name(name) => serializer.serialize_str(name),
        }
    }
}

impl<'de> Deserialize<'de> for Port {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PortVisitor)
    }
}

struct PortVisitor;

impl Visitor<'_> for PortVisitor {
    type Value = Port;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a port number between 1 and 65535, or a port's name")
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Port, E> {
        let port = u16::try_from(number).ok().filter(|port| *port > 0);
        port.map(Port::Number).ok_or_else(|| E::invalid_value(Unexpected::Unsigned(number), &self))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Port, E> {
        match u64::try_from(number) {
            Ok(number) => self.visit_u64(number),
            Err(_) => Err(E::invalid_value(Unexpected::Signed(number), &self)),
        }
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Port, E> {
        Ok(Port::Name(name.to_owned()))
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

/// One hook of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Hook {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecAction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_get: Option<HttpGetAction>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep: Option<SleepAction>,
}

/// Hooks of a container, and how it is stopped.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Lifecycle {
    /// Runs right after the container's start, beside its program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_start: Option<Hook>,
    /// Runs before SIGTERM, within the grace period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pre_stop: Option<Hook>,
    /// Instead of the image's signal or SIGTERM.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub stop_signal: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_numbers_and_zero_are_kubernetes_defaults() {
        let probe: Probe =
            serde_json::from_value(serde_json::json!({"tcpSocket": {"port": "web"}, "periodSeconds": 0}))
                .unwrap();
        assert_eq!(probe.tcp_socket.as_ref().unwrap().port, Port::Name("web".to_owned()));
        let seconds = (probe.initial_delay().as_secs(), probe.timeout().as_secs(), probe.period().as_secs());
        assert_eq!(seconds, (0, 1, 10));
        assert_eq!((probe.successes(), probe.failures()), (1, 3));
    }
}
