//! What a scenario is: a network, steps in order, and where both sides may differ.

use serde_json::{Value, json};

use super::differences::Difference;
use super::probe::Probe;
use super::world::Filters;

#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) name: String,
    /// A network configuration list: `name`, `cniVersion`, `plugins`.
    pub(super) network: Value,
    pub(super) filters: Filters,
    pub(super) steps: Vec<Step>,
    pub(super) differences: Vec<Difference>,
}

#[derive(Debug, Clone)]
pub(super) enum Step {
    Call(Box<Call>),
    /// Lines as `ip -batch` reads them, in a namespace.
    Ip {
        netns: &'static str,
        lines: String,
    },
    Sysctl {
        netns: &'static str,
        name: &'static str,
        value: &'static str,
    },
    /// A file of the node: path, content.
    File(String, String),
    /// A file of the node goes.
    Remove(String),
    /// A command line of `nft` or `iptables` on the host.
    Filter(String),
    /// A container's namespace comes before its ADD.
    Container(&'static str),
    /// A container's namespace vanishes.
    Vanish(&'static str),
    Probe(Probe),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verb {
    Add,
    Check,
    Del,
    Gc,
    Status,
    Version,
}

impl Verb {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }
}

/// What a runtime does for one verb: calls the plugins of the list in the verb's order.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) verb: Verb,
    /// The container's name; its id and the name of its namespace too.
    pub(super) container: String,
    pub(super) ifname: &'static str,
    /// `CNI_ARGS`
    pub(super) args: &'static str,
    /// `CNI_NETNS`, where it is not the container's.
    pub(super) netns: Option<&'static str>,
    /// What the runtime offers for capabilities: `portMappings`, `ips`, `mac` and so on.
    pub(super) runtime: Value,
    /// Attachments still in use, for GC.
    pub(super) valid: Option<Value>,
    pub(super) prev_result: PrevResult,
    /// Environment on top, `None` to remove.
    pub(super) environment: Vec<(&'static str, Option<String>)>,
    /// Instead of the configuration that the runtime would write.
    pub(super) stdin: Option<String>,
}

/// Where the `prevResult` of CHECK and DEL comes from.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum PrevResult {
    /// What ADD ended with, as a runtime with a cache does.
    Cached,
    Missing,
    Given(Value),
}

impl Call {
    pub(super) fn new(verb: Verb, container: impl Into<String>) -> Self {
        Self {
            verb,
            container: container.into(),
            ifname: "eth0",
            args: "",
            netns: None,
            runtime: json!({}),
            valid: None,
            prev_result: PrevResult::Cached,
            environment: Vec::new(),
            stdin: None,
        }
    }

    pub(super) fn ifname(self, ifname: &'static str) -> Self {
        Self { ifname, ..self }
    }

    pub(super) fn args(self, args: &'static str) -> Self {
        Self { args, ..self }
    }

    pub(super) fn netns(self, netns: &'static str) -> Self {
        Self { netns: Some(netns), ..self }
    }

    pub(super) fn runtime(self, runtime: Value) -> Self {
        Self { runtime, ..self }
    }

    pub(super) fn valid(self, valid: Value) -> Self {
        Self { valid: Some(valid), ..self }
    }

    pub(super) fn prev_result(self, prev_result: PrevResult) -> Self {
        Self { prev_result, ..self }
    }

    pub(super) fn environment(mut self, name: &'static str, value: Option<&str>) -> Self {
        self.environment.push((name, value.map(str::to_owned)));
        self
    }

    pub(super) fn stdin(self, stdin: impl Into<String>) -> Self {
        Self { stdin: Some(stdin.into()), ..self }
    }
}

pub(super) fn add(container: impl Into<String>) -> Call {
    Call::new(Verb::Add, container)
}

pub(super) fn check(container: impl Into<String>) -> Call {
    Call::new(Verb::Check, container)
}

pub(super) fn del(container: impl Into<String>) -> Call {
    Call::new(Verb::Del, container)
}

impl Scenario {
    pub(super) fn new(name: impl Into<String>, network: Value) -> Self {
        Self { name: name.into(), network, filters: Filters::Nft, steps: Vec::new(), differences: Vec::new() }
    }

    pub(super) fn filters(self, filters: Filters) -> Self {
        Self { filters, ..self }
    }

    pub(super) fn call(self, call: Call) -> Self {
        self.step(Step::Call(Box::new(call)))
    }

    pub(super) fn add(self, container: &'static str) -> Self {
        self.call(add(container))
    }

    pub(super) fn check(self, container: &'static str) -> Self {
        self.call(check(container))
    }

    pub(super) fn del(self, container: &'static str) -> Self {
        self.call(del(container))
    }

    pub(super) fn ip(self, netns: &'static str, lines: impl Into<String>) -> Self {
        self.step(Step::Ip { netns, lines: lines.into() })
    }

    pub(super) fn probe(self, probe: Probe) -> Self {
        self.step(Step::Probe(probe))
    }

    pub(super) fn step(mut self, step: Step) -> Self {
        self.steps.push(step);
        self
    }

    /// A step before all others.
    pub(super) fn first(mut self, step: Step) -> Self {
        self.steps.insert(0, step);
        self
    }

    pub(super) fn differs(mut self, differences: impl IntoIterator<Item = Difference>) -> Self {
        self.differences.extend(differences);
        self
    }
}

/// A list of one plugin, version 1.0.0, network `net`.
pub(super) fn network(plugin: Value) -> Value {
    list("1.0.0", [plugin])
}

pub(super) fn list(version: &str, plugins: impl Into<Vec<Value>>) -> Value {
    json!({ "cniVersion": version, "name": "net", "plugins": plugins.into() })
}
