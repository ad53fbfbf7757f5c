//! Exec probes: a program in the container, through CRI's ExecSync.

use std::collections::HashMap;
use std::time::Duration;

use tonic::Code;

use super::answer::{Answer, kept};
use crate::clients::cri::Cri;
use crate::container_config::expansion::expand;
use crate::objects::{Container, EnvVar, ExecAction};

/// The kernel's limit for one argument.
const MOST_TEXT_BYTES: usize = 128 << 10;
const MOST_COMMAND_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub(crate) struct Exec {
    command: Vec<String>,
}

impl Exec {
    /// As in kubelet, `$(VAR)` stands for literal values of the container's environment alone.
    ///
    /// # Errors
    ///
    /// The command is longer than the kernel takes.
    pub(crate) fn new(action: &ExecAction, container: &Container) -> Result<Self, String> {
        let literal = |variable: &'_ EnvVar| variable.value_from.is_none();
        let literals: HashMap<&str, Option<&str>> = container
            .env
            .iter()
            .map(|variable| (variable.name.as_str(), literal(variable).then_some(variable.value.as_str())))
            .collect();
        let value_of = |name: &str| literals.get(name).copied().flatten();
        let (mut command, mut left) = (Vec::new(), MOST_COMMAND_BYTES);
        for word in &action.command {
            let word = expand(word, value_of, MOST_TEXT_BYTES.min(left)).ok_or_else(|| {
                format!("exec.command: longer than {MOST_COMMAND_BYTES} bytes after $(VAR) is replaced, or a word of it than {MOST_TEXT_BYTES}")
            })?;
            left -= word.len();
            command.push(word);
        }
        Ok(Self { command })
    }

    /// For messages.
    fn shown(&self) -> String {
        kept(self.command.join(" ").as_bytes())
    }

    pub(super) async fn ask(&self, cri: &Cri, id: &str, timeout: Duration) -> Result<Answer, String> {
        match cri.exec_sync(id, self.command.clone(), Some(timeout)).await {
            Ok(done) if done.exit_code == 0 => Ok(Answer::Success),
            Ok(done) => Ok(Answer::Failure(output(&done.stdout, &done.stderr))),
            Err(error) if error.code == Code::DeadlineExceeded => {
                let command = self.shown();
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
        let (command, code) = (self.shown(), done.exit_code);
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
        let exec = Exec::new(&ExecAction { command }, &container).unwrap();
        assert_eq!(exec.command, ["cat", "/ready", "$(NAME)", "$(FILE)"]);
    }

    #[test]
    fn a_command_does_not_grow_beyond_what_the_kernel_takes() {
        let container: Container = serde_json::from_value(serde_json::json!({
            "name": "c", "env": [{"name": "A", "value": "x".repeat(100_000)}]
        }))
        .unwrap();
        let action = |words: usize| ExecAction { command: vec!["$(A)".to_owned(); words] };
        assert_eq!(Exec::new(&action(20), &container).unwrap().command.len(), 20);
        assert!(Exec::new(&action(40_000), &container).unwrap_err().contains("exec.command"));
    }
}
