//! A small runtime: calls a network's plugins as libcni does, and remembers
//! what ADD ended with.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::scenario::{Call, PrevResult, Verb};
use super::world::{self, NETNS_DIR, World};

/// What one executable answered.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) plugin: String,
    /// `exit status: N` or the signal.
    pub(super) exit: String,
    pub(super) success: bool,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// Results of ADD by container and interface, as libcni's cache has them.
#[derive(Debug, Default, Clone)]
pub(super) struct Results(BTreeMap<(String, String), Value>);

impl Results {
    /// What the ADD of this attachment ended with.
    pub(super) fn of(&self, container: &str, ifname: &str) -> Option<&Value> {
        self.0.get(&(container.to_owned(), ifname.to_owned()))
    }

    /// Adds what another cache has.
    pub(super) fn take(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

/// One executable as it is about to be started.
#[derive(Debug)]
pub(super) struct Execution {
    pub(super) plugin: String,
    pub(super) command: Command,
    pub(super) stdin: String,
}

/// Calls every plugin of `network` in the order of the verb, until one fails,
/// in the calling thread's world.
pub(super) fn call(
    bin_dir: &Path,
    network: &Value,
    call: &Call,
    results: &mut Results,
) -> Result<Vec<Answer>> {
    let key = (call.container.clone(), call.ifname.to_owned());
    let mut prev_result = match (&call.prev_result, call.verb) {
        (PrevResult::Given(value), _) => Some(value.clone()),
        (PrevResult::Cached, Verb::Check | Verb::Del) => results.0.get(&key).cloned(),
        _ => None,
    };
    let mut answers = Vec::new();
    for plugin in plugins(network, call.verb)? {
        let execution = execution(bin_dir, network, plugin, call, prev_result.as_ref());
        let output = world::finish(execution.command, execution.stdin.as_bytes())?;
        let answer = Answer {
            plugin: execution.plugin,
            exit: output.status.to_string(),
            success: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        let success = answer.success;
        if success && call.verb == Verb::Add {
            prev_result = Some(serde_json::from_str(&answer.stdout).unwrap_or(Value::Null));
        }
        answers.push(answer);
        if !success {
            return Ok(answers);
        }
    }
    match (call.verb, prev_result) {
        (Verb::Add, Some(result)) => drop(results.0.insert(key, result)),
        (Verb::Del, _) => drop(results.0.remove(&key)),
        _ => {}
    }
    Ok(answers)
}

/// The plugins in the order in which the verb calls them.
fn plugins(network: &Value, verb: Verb) -> Result<Vec<&Value>> {
    let plugins = network["plugins"].as_array().context("a network without plugins")?;
    Ok(if verb == Verb::Del { plugins.iter().rev().collect() } else { plugins.iter().collect() })
}

/// One plugin of the list with the environment and the configuration that a runtime gives it.
pub(super) fn execution(
    bin_dir: &Path,
    network: &Value,
    plugin: &Value,
    call: &Call,
    prev_result: Option<&Value>,
) -> Execution {
    let name = plugin["type"].as_str().unwrap_or_default().to_owned();
    let mut command = World::command(&bin_dir.join(&name));
    let netns = call.netns.map_or_else(|| format!("{NETNS_DIR}/{}", call.container), str::to_owned);
    command
        .env("CNI_COMMAND", call.verb.word())
        .env("CNI_CONTAINERID", &call.container)
        .env("CNI_NETNS", netns)
        .env("CNI_IFNAME", call.ifname)
        .env("CNI_PATH", bin_dir)
        .env("CNI_ARGS", call.args);
    for (name, value) in &call.environment {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let stdin = call.stdin.clone().unwrap_or_else(|| configuration(network, plugin, call, prev_result));
    Execution { plugin: name, command, stdin }
}

/// What libcni puts on stdin.
fn configuration(network: &Value, plugin: &Value, call: &Call, prev_result: Option<&Value>) -> String {
    let mut conf = plugin.clone();
    conf["name"] = network["name"].clone();
    // A list without a version gives its plugins none.
    if let Some(version) = network.get("cniVersion") {
        conf["cniVersion"] = version.clone();
    }
    let mut offered = serde_json::Map::new();
    for (capability, value) in call.runtime.as_object().into_iter().flatten() {
        if plugin["capabilities"][capability] == json!(true) {
            offered.insert(capability.clone(), value.clone());
        }
    }
    if !offered.is_empty() {
        conf["runtimeConfig"] = Value::Object(offered);
    }
    if let Some(prev_result) = prev_result {
        conf["prevResult"] = prev_result.clone();
    }
    if let Some(valid) = &call.valid {
        conf["cni.dev/valid-attachments"] = valid.clone();
        conf["cni.dev/attachments"] = valid.clone();
    }
    conf.to_string()
}
