//! Plugins as a runtime calls them: a list of configurations, run in order for
//! ADD and in reverse for DEL, each with the result of the one before.
//!
//! The caller of a plugin is the calling thread: its network namespace is the host's.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

/// A network configuration list.
#[derive(Debug, Clone)]
pub struct Network {
    pub bin_dir: PathBuf,
    pub name: String,
    pub cni_version: String,
    /// Configurations as they stand in a conflist, without name and version.
    pub plugins: Vec<Value>,
}

/// One interface of one container.
#[derive(Debug, Clone)]
pub struct Attachment {
    pub container_id: String,
    pub ifname: String,
    /// Empty: unset.
    pub netns: PathBuf,
    /// What the runtime offers: `portMappings` and its like.
    pub capabilities: Map<String, Value>,
}

/// A plugin's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// `None` when a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A plugin about to be run: the command (environment included) and its stdin.
#[derive(Debug)]
pub struct Call {
    pub command: Command,
    pub stdin: Vec<u8>,
}

impl Attachment {
    pub fn new(container_id: &str, netns: &Path) -> Self {
        Self {
            container_id: container_id.to_owned(),
            ifname: "eth0".to_owned(),
            netns: netns.to_path_buf(),
            capabilities: Map::new(),
        }
    }

    #[must_use]
    pub fn with_port_mappings(mut self, mappings: Value) -> Self {
        self.capabilities.insert("portMappings".to_owned(), mappings);
        self
    }

    /// As a runtime that has closed the namespace before DEL.
    #[must_use]
    pub fn without_netns(&self) -> Self {
        Self { netns: PathBuf::new(), ..self.clone() }
    }
}

impl Network {
    /// The call of plugin number `plugin` with `verb`. `prev_result` is what the
    /// plugin before answered, or, for DEL and CHECK, the last plugin of ADD.
    pub fn call(
        &self,
        plugin: usize,
        verb: &str,
        attachment: &Attachment,
        prev_result: Option<&Value>,
    ) -> Call {
        let mut config = self.plugins[plugin].clone();
        config["name"] = json!(self.name);
        config["cniVersion"] = json!(self.cni_version);
        if let Some(result) = prev_result {
            config["prevResult"] = result.clone();
        }
        let wanted: Map<String, Value> = attachment
            .capabilities
            .iter()
            .filter(|(name, _)| config["capabilities"][name.as_str()] == json!(true))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
        if !wanted.is_empty() {
            config["runtimeConfig"] = Value::Object(wanted);
        }
        let kind = config["type"].as_str().unwrap_or_default();
        let mut command = Command::new(self.bin_dir.join(kind));
        command
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", &attachment.container_id)
            .env("CNI_NETNS", &attachment.netns)
            .env("CNI_IFNAME", &attachment.ifname)
            .env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=p")
            .env("CNI_PATH", &self.bin_dir);
        Call { command, stdin: config.to_string().into_bytes() }
    }

    /// ADD of every plugin in order; the last one's result. Like libcni it stops
    /// at the first failure and takes nothing back.
    pub fn add(&self, attachment: &Attachment) -> Result<Value> {
        let mut result = None;
        for plugin in 0..self.plugins.len() {
            let answer = self.call(plugin, "ADD", attachment, result.as_ref()).run()?;
            result = Some(answer.result().with_context(|| self.what("ADD", plugin, attachment))?);
        }
        result.context("a list without plugins")
    }

    /// CHECK of every plugin in order.
    pub fn check(&self, attachment: &Attachment, result: &Value) -> Result<()> {
        (0..self.plugins.len()).try_for_each(|plugin| {
            let answer = self.call(plugin, "CHECK", attachment, Some(result)).run()?;
            answer.silence().with_context(|| self.what("CHECK", plugin, attachment))
        })
    }

    /// DEL of every plugin in reverse, up to the first failure. `result` is what
    /// ADD answered, if it is known.
    pub fn del(&self, attachment: &Attachment, result: Option<&Value>) -> Result<()> {
        (0..self.plugins.len()).rev().try_for_each(|plugin| {
            let answer = self.call(plugin, "DEL", attachment, result).run()?;
            answer.silence().with_context(|| self.what("DEL", plugin, attachment))
        })
    }

    fn what(&self, verb: &str, plugin: usize, attachment: &Attachment) -> String {
        let kind = self.plugins[plugin]["type"].as_str().unwrap_or_default();
        format!("{verb} {kind} {}/{} of {}", attachment.container_id, attachment.ifname, self.name)
    }
}

impl Call {
    /// Runs it to its end.
    pub fn run(mut self) -> Result<Answer> {
        self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = self.command.get_program().display().to_string();
        let mut child = self.command.spawn().with_context(|| format!("start {program}"))?;
        let mut stdin = child.stdin.take().context("stdin is piped")?;
        stdin.write_all(&self.stdin).with_context(|| format!("write to {program}"))?;
        drop(stdin);
        let output = child.wait_with_output().with_context(|| format!("wait for {program}"))?;
        Ok(Answer {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}

impl Answer {
    /// The result of a successful ADD.
    pub fn result(&self) -> Result<Value> {
        ensure!(self.code == Some(0), "{}", self.words());
        serde_json::from_str(&self.stdout).with_context(|| format!("no JSON on stdout: {:?}", self.stdout))
    }

    /// What DEL, CHECK, GC and STATUS say on success: nothing.
    pub fn silence(&self) -> Result<()> {
        ensure!(self.code == Some(0), "{}", self.words());
        ensure!(self.stdout.is_empty(), "stdout is not empty: {:?}", self.stdout);
        Ok(())
    }

    /// Code and message of a failure in the protocol's form.
    pub fn error(&self) -> Result<(u64, String)> {
        ensure!(self.code == Some(1), "{}", self.words());
        let error: Value = serde_json::from_str(&self.stdout)
            .with_context(|| format!("no error object on stdout: {}", self.words()))?;
        match (error["code"].as_u64(), error["msg"].as_str()) {
            (Some(code), Some(msg)) if code > 0 && !msg.is_empty() => {
                Ok((code, format!("{msg} {}", error["details"].as_str().unwrap_or_default())))
            }
            _ => bail!("no code and msg in {error}"),
        }
    }

    fn words(&self) -> String {
        let code = self.code.map_or("a signal".to_owned(), |code| format!("exit code {code}"));
        format!("{code}, stdout {:?}, stderr {:?}", self.stdout, self.stderr)
    }
}

/// The addresses of a result, without their prefixes, in the result's order.
pub fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().map(Vec::as_slice).unwrap_or_default();
    let address = |ip: &Value| ip["address"].as_str()?.split('/').next().map(str::to_owned);
    ips.iter().filter_map(address).collect()
}
