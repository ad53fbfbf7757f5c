//! Exec probes: a program in the container, through CRI's ExecSync.

use std::time::Duration;

use tonic::Code;

use super::answer::{Answer, kept};
use crate::cri::Cri;
use crate::expansion::expand;
use crate::objects::{Container, ExecAction};

/// The kernel's limit for one argument.
const MOST_TEXT_BYTES: usize = 128 << 10;

#[derive(Debug)]
pub(crate) struct Exec {
    command: Vec<String>,
}

impl Exec {
    /// As in kubelet, `$(VAR)` stands for literal values of the container's environment alone.
    pub(crate) fn new(action: &ExecAction, container: &Container) -> Self {
        let value_of = |name: &str| {
            let literal = container.env.iter().rev().find(|variable| variable.name == name);
            literal.filter(|variable| variable.value_from.is_none()).map(|variable| variable.value.as_str())
        };
        let expanded =
            |word: &String| expand(word, value_of, MOST_TEXT_BYTES).unwrap_or_else(|| word.clone());
        Self { command: action.command.iter().map(expanded).collect() }
    }

    pub(super) async fn ask(&self, cri: &Cri, id: &str, timeout: Duration) -> Result<Answer, String> {
        match cri.exec_sync(id, self.command.clone(), Some(timeout)).await {
            Ok(done) if done.exit_code == 0 => Ok(Answer::Success),
            Ok(done) => Ok(Answer::Failure(output(&done.stdout, &done.stderr))),
            Err(error) if error.code == Code::DeadlineExceeded => {
                let command = self.command.join(" ");
                Ok(Answer::Failure(format!(
                    "command timed out: \"{command}\" timed out after {} s",
                    timeout.as_secs()
                )))
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// For a hook: any failure is an error.
    pub(crate) async fn run(&self, cri: &Cri, id: &str) -> Result<(), String> {
        let done = cri.exec_sync(id, self.command.clone(), None).await.map_err(|error| error.to_string())?;
        if done.exit_code == 0 {
            return Ok(());
        }
        let (command, code) = (self.command.join(" "), done.exit_code);
        Err(format!("command '{command}' exited with {code}: {}", output(&done.stdout, &done.stderr)))
    }
}

fn output(stdout: &[u8], stderr: &[u8]) -> String {
    let mut text = kept(stdout);
    text.push_str(&kept(stderr));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literal_variables_stand_in_a_command() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "c",
            "env": [
                {"name": "FILE", "value": "/ready"},
                {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            ]
        }))
        .unwrap();
        let command = ["cat", "$(FILE)", "$(NAME)", "$$(FILE)"].map(str::to_owned).to_vec();
        let exec = Exec::new(&ExecAction { command }, &container);
        assert_eq!(exec.command, ["cat", "/ready", "$(NAME)", "$(FILE)"]);
    }
}
