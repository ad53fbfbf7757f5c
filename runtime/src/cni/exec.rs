//! Runs one plugin once (CNI specification, "Section 2: Execution Protocol").

use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tracing::Instrument;

use super::conflist::Plugin;
use super::error::PluginProblem;
use super::{Attachment, Cni, NetworkList};
use crate::error::{Error, Result};

/// A slower plugin is killed: otherwise pods would wait for it forever.
const DEADLINE: Duration = Duration::from_secs(120);

/// Returns its stdout. A non-zero exit is an error with the plugin's own message.
pub(super) async fn run(
    cni: &Cni,
    list: &NetworkList,
    plugin: &Plugin,
    verb: &'static str,
    attachment: &Attachment,
    config: &Value,
) -> Result<Vec<u8>> {
    let span = tracing::info_span!(
        "cni",
        span = format!("cni.{}.{verb}", plugin.kind),
        network = list.name,
        container_id = attachment.container_id,
        ifname = attachment.ifname,
    );
    let fail = |problem: PluginProblem| failure(list, plugin, verb, problem);
    let program = cni.bin_dir.join(&plugin.kind);
    if !program.is_file() {
        let (plugin, bin_dir) = (plugin.kind.clone(), cni.bin_dir.clone());
        return Err(fail(PluginProblem::Missing { plugin, bin_dir }));
    }
    let args = attachment.args.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(";");
    let mut command = Command::new(&program);
    command
        .env("CNI_COMMAND", verb)
        .env("CNI_CONTAINERID", &attachment.container_id)
        .env("CNI_NETNS", attachment.netns.as_deref().unwrap_or(Path::new("")))
        .env("CNI_IFNAME", attachment.ifname)
        .env("CNI_ARGS", args)
        .env("CNI_PATH", &cni.bin_dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let work = async {
        let mut child = command.spawn()?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        // A plugin that ends without reading stdin explains that on stdout.
        let _plugin_ended = stdin.write_all(config.to_string().as_bytes()).await;
        drop(stdin);
        child.wait_with_output().await
    };
    let output = match tokio::time::timeout(DEADLINE, work.instrument(span)).await {
        Ok(ended) => ended.map_err(|source| fail(PluginProblem::Run { program, source }))?,
        Err(_elapsed) => return Err(fail(PluginProblem::Timeout { limit: DEADLINE })),
    };
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(fail(problem_of(&output)))
}

pub(super) fn failure(
    list: &NetworkList,
    plugin: &Plugin,
    verb: &'static str,
    problem: PluginProblem,
) -> Error {
    Error::Plugin {
        plugin: plugin.kind.clone(),
        verb,
        network: list.name.clone(),
        config: list.file.clone(),
        source: Box::new(problem),
    }
}

/// Its error object, or else its output.
fn problem_of(Output { stdout, stderr, status }: &Output) -> PluginProblem {
    let status = *status;
    if let Ok(error) = serde_json::from_slice::<Value>(stdout)
        && let Some(message) = error["msg"].as_str()
    {
        let details = error["details"].as_str().filter(|d| !d.is_empty()).map(str::to_owned);
        return PluginProblem::Failed { code: error["code"].clone(), message: message.to_owned(), details };
    }
    let output = String::from_utf8_lossy(if stdout.is_empty() { stderr } else { stdout }).trim().to_owned();
    if output.is_empty() {
        PluginProblem::Silent { status }
    } else {
        PluginProblem::NoErrorObject { output, status }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    #[test]
    fn a_plugins_error_object_is_quoted_whole() {
        let text = |stdout: &[u8], stderr: &[u8]| {
            let (stdout, stderr, status) = (stdout.to_vec(), stderr.to_vec(), ExitStatus::from_raw(256));
            problem_of(&Output { stdout, stderr, status }).to_string()
        };
        let object = br#"{"code":11,"msg":"no address","details":"pool is full"}"#;
        assert_eq!(text(object, b""), "code 11: no address: pool is full");
        assert_eq!(text(b"", b"panic\n"), "netplugin failed: \"panic\" (exit status: 1)");
        assert_eq!(text(b"", b""), "netplugin failed with no error message: exit status: 1");
    }
}
