//! The binary's messages when it cannot run a command.

#![expect(clippy::unwrap_used, reason = "helpers of tests fail the test")]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

const BINARY: &str = env!("CARGO_BIN_EXE_hawser-kubelet");

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn without_a_kubelet_one_line_shows_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let error = |start: &str| {
        let mut command = Command::new(BINARY);
        command.args(["get", "pods", "--root-dir"]).arg(root.path()).env("HAWSER_START", start);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        stderr(&output)
    };
    let beginning =
        format!("error: no hawser-kubelet answers at {}/hawser/kubelet.sock: ", root.path().display());
    assert_eq!(error(""), format!("{beginning}start one with 'hawser-kubelet run', or set --root-dir\n"));
    assert_eq!(
        error("cargo xtask up --dir /srv/up"),
        format!("{beginning}start it again with `cargo xtask up --dir /srv/up`, or set --root-dir\n")
    );
}

/// The user `nobody` cannot access the build directory, so it runs a copy.
#[test]
fn a_user_other_than_root_gets_one_line() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let binary = dir.path().join("hawser-kubelet");
    // Copy in a separate process: a child of a concurrent test could inherit our writable
    // descriptor, and exec(2) refuses a file that is open for writing.
    assert!(Command::new("cp").arg(BINARY).arg(&binary).status().unwrap().success());
    let output = Command::new(&binary)
        .args(["run", "--manifests", "/nowhere"])
        .current_dir("/")
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "error: hawser-kubelet run creates mounts, namespaces and cgroups: run it as root (sudo hawser-kubelet run …)\n"
    );
}

#[test]
fn a_wrong_flag_is_an_error_like_any_other() {
    let output = Command::new(BINARY).args(["get", "pods", "--outptu", "yaml"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).starts_with("error: unexpected argument '--outptu' found"), "{output:?}");
    let output = Command::new(BINARY).arg("--version").output().unwrap();
    assert!(output.status.success() && output.stdout.starts_with(b"hawser-kubelet "), "{output:?}");
}

#[test]
fn every_command_has_help() {
    for command in [
        "run",
        "apply",
        "get",
        "describe",
        "logs",
        "events",
        "wait",
        "top",
        "exec",
        "attach",
        "port-forward",
        "cp",
        "delete",
        "stop",
    ] {
        let output = Command::new(BINARY).args([command, "--help"]).output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && help.contains("--root-dir <DIR>"), "{command}: {help}");
    }
}
