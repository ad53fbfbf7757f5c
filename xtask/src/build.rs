//! The static release binaries, and cargo as this tool starts it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use ::tests::binaries;
use anyhow::{Context, Result, ensure};

use crate::progress::say;

/// `cargo`, the one that runs this tool, in the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(binaries::workspace_root());
    for (name, _) in std::env::vars_os() {
        if is_of_own_package(&name) {
            command.env_remove(name);
        }
    }
    command
}

/// Whether `cargo run` sets this variable for the package of the tool that runs. Build scripts that read their own
/// package's (ring's) would run again for each other tool, and all that depends on them would be built again.
fn is_of_own_package(variable: &OsStr) -> bool {
    let name = variable.to_string_lossy();
    name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
}

/// Runs `command` with the terminal's own output; an exit code other than 0 is an error.
pub fn run(command: &mut Command) -> Result<()> {
    let line = words(command);
    let status = command.status().with_context(|| format!("start {line}"))?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

/// The command as one would type it.
pub fn words(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

/// Builds everything that is dropped on a node or into an image; the directory.
/// A caller that sets `HAWSER_BIN_DIR` has built everything there.
pub fn products() -> Result<PathBuf> {
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
pub fn plugins() -> Result<PathBuf> {
    if std::env::var_os("HAWSER_BIN_DIR").is_some() {
        let dir = binaries::dir();
        return expect_all(&binaries::CNI_PLUGINS, &dir).map(|()| dir);
    }
    build_as_plugins(&binaries::CNI_PLUGINS)?;
    Ok(plugin_dir())
}

fn build_as_plugins(packages: &[(&str, &str)]) -> Result<()> {
    let mut command = build_of_plugins();
    for (package, _binary) in packages {
        command.args(["-p", package]);
    }
    run(&mut command)
}

/// `cargo build` as plugins are built; what to build is the caller's.
pub fn build_of_plugins() -> Command {
    static_build("plugin", plugin_target())
}

/// Where it puts what it built.
pub fn plugin_dir() -> PathBuf {
    binaries::target_dir().join(plugin_target()).join("plugin")
}

/// A plugin lives some milliseconds, and glibc's start-up asks the processor
/// some fifty questions, which trap in a virtual machine; musl's asks none
/// (docs/decisions/0010). glibc where musl's standard library cannot be had.
fn plugin_target() -> &'static str {
    static TARGET: OnceLock<&str> = OnceLock::new();
    TARGET.get_or_init(|| {
        if has_standard_library(MUSL) || add_target(MUSL) {
            return MUSL;
        }
        say(&format!(
            "the plugins are built for {} instead, and start slower; for the other, run \
             `rustup target add {MUSL}`",
            binaries::TARGET
        ));
        binaries::TARGET
    })
}

const MUSL: &str = "x86_64-unknown-linux-musl";

fn has_standard_library(target: &str) -> bool {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let asked = Command::new(rustc).args(["--print", "target-libdir", "--target", target]).output();
    asked.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir())
}

/// Whether `rustup` could get it.
fn add_target(target: &str) -> bool {
    say(&format!("rustup target add {target}"));
    let mut rustup = Command::new("rustup");
    rustup.args(["target", "add", target]).current_dir(binaries::workspace_root());
    rustup.status().is_ok_and(|status| status.success()) && has_standard_library(target)
}

/// By which profile of Cargo.toml a product is built. The keeper is to be small in memory, as the plugins
/// are: it is resident with 0.5 MiB, and with 1.3 MiB as the other products are built.
fn profile_of(package: &str) -> &'static str {
    match package {
        "keeper" => "plugin",
        "volume-local" => "daemon",
        _ => "release",
    }
}

fn build_products() -> Result<()> {
    let built_by = |profile: &'static str| {
        binaries::PRODUCTS.into_iter().filter(move |(package, _binary)| profile_of(package) == profile)
    };
    if !binaries::dir().join("hawser-kubelet").is_file() {
        say("the first build takes about ten minutes on two processors");
    }
    for profile in ["release", "daemon"] {
        let mut command = static_build(profile, binaries::TARGET);
        for (package, _binary) in built_by(profile) {
            command.args(["-p", package]);
        }
        run(&mut command)?;
    }
    let small: Vec<_> = built_by("plugin").chain(binaries::CNI_PLUGINS).collect();
    build_as_plugins(&small)?;
    let daemon_dir = binaries::target_dir().join(binaries::TARGET).join("daemon");
    link_beside_others(&daemon_dir, built_by("daemon"))?;
    link_beside_others(&plugin_dir(), small)
}

/// Where everyone looks for them.
fn link_beside_others(
    dir: &Path,
    built: impl IntoIterator<Item = (&'static str, &'static str)>,
) -> Result<()> {
    for (_package, binary) in built {
        let (from, to) = (dir.join(binary), binaries::dir().join(binary));
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
    let _renamed = std::fs::remove_file(&unfinished);
    Ok(())
}

fn static_build(profile: &str, target: &str) -> Command {
    let mut command = cargo();
    command.args(["build", "--profile", profile, "--target", target]);
    // Static, and only what runs on the node: with --target given, RUSTFLAGS of
    // the target do not reach procedural macros. (musl's are static anyway.)
    command.env("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS", "-C target-feature=+crt-static");
    command
}

/// An error for every user but root.
pub fn require_root(task: &str) -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "cargo xtask {task} needs root (uid 0): it makes namespaces, mounts and cgroups"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_does_not_get_the_variables_of_the_package_that_calls_it() {
        let removed: Vec<_> = cargo()
            .get_envs()
            .filter(|(_, value)| value.is_none())
            .map(|(name, _)| name.to_owned())
            .collect();
        for name in ["CARGO_PKG_NAME", "CARGO_MANIFEST_DIR"] {
            assert!(
                std::env::var_os(name).is_some() && removed.iter().any(|removed| removed == name),
                "{name}"
            );
        }
        assert!(!removed.iter().any(|name| name == "CARGO" || name == "PATH"), "{removed:?}");
    }
}
