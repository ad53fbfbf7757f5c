//! The static release binaries, and cargo as this tool starts it.

use std::path::{Path, PathBuf};
use std::process::Command;

use ::tests::binaries;
use anyhow::{Context, Result, ensure};

/// `cargo`, the one that runs this tool, in the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(binaries::workspace_root());
    command
}

/// Runs `command` with the terminal's own output; an exit code other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = words(command);
    let status = command.status().with_context(|| format!("start {line}"))?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

/// The command as one would type it.
pub(crate) fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Builds everything that is dropped on a node or into an image; the directory.
/// Whoever sets `HAWSER_BIN_DIR` has built it there.
pub(crate) fn products() -> Result<PathBuf> {
    let dir = binaries::dir();
    if std::env::var_os("HAWSER_BIN_DIR").is_none() {
        build_products()?;
    }
    expect_all(&binaries::PRODUCTS, &dir)?;
    expect_all(&binaries::CNI_PLUGINS, &dir)?;
    Ok(dir)
}

fn expect_all(packages: &[(&str, &str)], dir: &Path) -> Result<()> {
    for (package, binary) in packages {
        let path = dir.join(binary);
        ensure!(path.is_file(), "no {}, which package {package} builds", path.display());
    }
    Ok(())
}

/// Builds the CNI plugins only; the directory.
pub(crate) fn plugins() -> Result<PathBuf> {
    if std::env::var_os("HAWSER_BIN_DIR").is_some() {
        let dir = binaries::dir();
        return expect_all(&binaries::CNI_PLUGINS, &dir).map(|()| dir);
    }
    build_static("plugin", &binaries::CNI_PLUGINS)?;
    Ok(binaries::workspace_root().join("target").join(binaries::TARGET).join("plugin"))
}

fn build_products() -> Result<()> {
    build_static("release", &binaries::PRODUCTS)?;
    // Beside the others, where everyone looks for them.
    let built = plugins()?;
    for (_package, plugin) in binaries::CNI_PLUGINS {
        let (from, to) = (built.join(plugin), binaries::dir().join(plugin));
        replace(&from, &to).with_context(|| format!("link {} to {}", from.display(), to.display()))?;
    }
    Ok(())
}

/// Never absent: other tasks may be starting it right now.
fn replace(from: &Path, to: &Path) -> std::io::Result<()> {
    let unfinished = to.with_extension("new");
    match std::fs::remove_file(&unfinished) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    std::fs::hard_link(from, &unfinished)?;
    std::fs::rename(&unfinished, to)?;
    // Two names of one file are left alone by rename(2).
    drop(std::fs::remove_file(&unfinished));
    Ok(())
}

fn build_static(profile: &str, packages: &[(&str, &str)]) -> Result<()> {
    let mut command = cargo();
    command.args(["build", "--profile", profile, "--target", binaries::TARGET]);
    for (package, _binary) in packages {
        command.args(["-p", package]);
    }
    // Static, and only what runs on the node: with --target given, RUSTFLAGS of
    // the target do not reach procedural macros.
    command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", "-C target-feature=+crt-static");
    run(&mut command)
}

/// One clear line for whoever is not root.
pub(crate) fn require_root(task: &str) -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "cargo xtask {task} needs root (uid 0): it makes namespaces, mounts and cgroups"
    );
    Ok(())
}
