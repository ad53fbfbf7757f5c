//! The tasks that are programs of other packages: they parse their own command
//! lines, and `cargo xtask` does not wait for them to be compiled.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;

use ::tests::binaries::workspace_root;
use anyhow::{Context, Result};
use xtask::build::{cargo, words};

/// Builds the binary and becomes it, so that signals and the exit code are the program's.
/// Returns only if cargo could not be started.
pub(crate) fn launch(package: &str, binary: &str, arguments: &[OsString]) -> Result<()> {
    let mut command = cargo();
    command.arg("run").arg("--manifest-path").arg(workspace_root().join("Cargo.toml"));
    command.args(["--package", package, "--bin", binary, "--"]).args(arguments);
    // Arguments may name files relative to the caller's directory.
    command.current_dir(".");
    Err(command.exec()).with_context(|| format!("start {}", words(&command)))
}
