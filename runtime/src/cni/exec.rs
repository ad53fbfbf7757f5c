//! Runs one plugin once (CNI specification, "Section 2: Execution Protocol").

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tracing::Instrument;

use super::conflist::Plugin;
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
    let fail = |problem: String| failure(list, plugin, verb, problem);
    let program = cni.bin_dir.join(&plugin.kind);
    if !program.is_file() {
        return Err(fail(format!(
            "failed to find plugin {:?} in path [{}]",
            plugin.kind,
            cni.bin_dir.display()
        )));
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
        let mut child = command.spawn().map_err(|e| format!("run {}: {e}", program.display()))?;
        let mut stdin = child.stdin.take().ok_or("no stdin")?;
        let text = serde_json::to_vec(config).map_err(|e| e.to_string())?;
        // A plugin that ends without reading stdin explains that on stdout.
        let _plugin_ended = stdin.write_all(&text).await;
        drop(stdin);
        child.wait_with_output().await.map_err(|e| format!("run {}: {e}", program.display()))
    };
    let output = tokio::time::timeout(DEADLINE, work.instrument(span))
        .await
        .map_err(|_| fail(format!("no answer within {} s, killed", DEADLINE.as_secs())))?
        .map_err(fail)?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(fail(error_text(&output.stdout, &output.stderr, &output.status)))
}

pub(super) fn failure(list: &NetworkList, plugin: &Plugin, verb: &'static str, problem: String) -> Error {
    Error::Plugin {
        plugin: plugin.kind.clone(),
        verb,
        network: list.name.clone(),
        config: list.file.clone(),
        problem,
    }
}

/// `code 11: msg: details`, or the output if it is not an error object.
fn error_text(stdout: &[u8], stderr: &[u8], status: &std::process::ExitStatus) -> String {
    if let Ok(error) = serde_json::from_slice::<Value>(stdout)
        && let Some(message) = error["msg"].as_str()
    {
        let details =
            error["details"].as_str().filter(|d| !d.is_empty()).map(|d| format!(": {d}")).unwrap_or_default();
        return format!("code {}: {message}{details}", error["code"]);
    }
    let said = String::from_utf8_lossy(if stdout.is_empty() { stderr } else { stdout }).trim().to_owned();
    if said.is_empty() {
        format!("netplugin failed with no error message: {status}")
    } else {
        format!("netplugin failed: {said:?} ({status})")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_plugins_error_object_is_quoted_whole() {
        let status = std::process::ExitStatus::from_raw(256);
        let text = error_text(br#"{"code":11,"msg":"no address","details":"pool is full"}"#, b"", &status);
        assert_eq!(text, "code 11: no address: pool is full");
        assert_eq!(error_text(b"", b"panic\n", &status), "netplugin failed: \"panic\" (exit status: 1)");
        assert_eq!(error_text(b"", b"", &status), "netplugin failed with no error message: exit status: 1");
    }
}
