//! Pods of an attacker: a shell with every usual tool, in an image that holds one
//! static busybox. A script is the attack; its log and exit code are the result.
//!
//! Invariant: the pods ask for nothing that a cluster's administrator would refuse
//! (no `privileged`, no hostPath): each is a tenant's default pod, unless a test
//! adds to its YAML.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::Node;
use crate::image::Program;

pub const IMAGE: &str = "hawser.dev/attacker:test";

/// Puts the attacker's image where the node finds images.
pub fn install(node: &Node<'_>) -> Result<()> {
    let program = Program {
        image: IMAGE,
        binary: &busybox()?,
        path: "busybox",
        directories: &["data", "tmp", "proc", "dev", "sys", "etc"],
    };
    node.offer_image(&program)
}

/// The static busybox of Debian's package `busybox-static`.
pub fn busybox() -> Result<PathBuf> {
    let places = ["/usr/bin/busybox", "/bin/busybox"].map(Path::new);
    let found = places.into_iter().find(|place| place.is_file());
    let found = found.context("no busybox: install Debian's package busybox-static")?;
    let program = std::fs::read(found).with_context(|| found.display().to_string())?;
    // A dynamic program names its loader (PT_INTERP, behind the program headers),
    // which the image would have to bring along.
    let head = &program[..program.len().min(4096)];
    let is_dynamic = head.windows(8).any(|window| window == b"ld-linux");
    ensure!(!is_dynamic, "{}: not static; install Debian's package busybox-static", found.display());
    Ok(found.to_owned())
}

/// A pod of one container, `attack`, that runs `script` with busybox's shell.
#[derive(Debug, Clone, Copy)]
pub struct Attack<'a> {
    pub name: &'a str,
    pub script: &'a str,
    /// Has busybox at its root.
    pub image: &'a str,
    /// More fields of the pod's spec, as lines of YAML without indentation.
    pub pod_fields: &'a str,
    /// More fields of the container, likewise.
    pub container_fields: &'a str,
}

impl<'a> Attack<'a> {
    /// A default pod, which is not started again.
    pub fn new(name: &'a str, script: &'a str) -> Self {
        Self { name, script, image: IMAGE, pod_fields: "", container_fields: "" }
    }

    #[must_use]
    pub fn with_image(self, image: &'a str) -> Self {
        Self { image, ..self }
    }

    #[must_use]
    pub fn with_pod_fields(self, pod_fields: &'a str) -> Self {
        Self { pod_fields, ..self }
    }

    #[must_use]
    pub fn with_container_fields(self, container_fields: &'a str) -> Self {
        Self { container_fields, ..self }
    }

    pub fn yaml(&self) -> String {
        format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
{pod_fields}  containers:
    - name: attack
      image: {image}
      imagePullPolicy: IfNotPresent
      command: [/busybox, sh, -c]
{container_fields}      args:
        - |
{script}",
            name = self.name,
            image = self.image,
            pod_fields = indented(self.pod_fields, 2),
            container_fields = indented(self.container_fields, 6),
            script = indented(self.script, 10),
        )
    }
}

fn indented(text: &str, columns: usize) -> String {
    text.trim_matches('\n').lines().map(|line| format!("{:columns$}{line}\n", "")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_and_script_stand_at_their_depth() {
        let attack = Attack::new("a", "echo one\necho two").with_pod_fields("hostPID: false");
        let yaml = attack.yaml();
        assert!(yaml.contains("\n  hostPID: false\n  containers:\n"), "{yaml}");
        assert!(yaml.ends_with("        - |\n          echo one\n          echo two\n"), "{yaml}");
    }
}
