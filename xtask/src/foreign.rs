//! Programs of other people: where they are, or how they come onto this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::tests::binaries::target_dir;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::build;

/// The release of the reference plugins that ours must be replaceable by.
pub const REFERENCE_PLUGINS: &str = "v1.9.1";
/// The release of csi-test whose csi-sanity the driver must pass.
pub const CSI_SANITY: &str = "v5.6.0";
/// The release of cri-tools whose critest the runtime must pass. The module proxy has no list of its versions.
pub const CRITEST: &str = "v1.36.0";
/// The release that reads deny.toml.
const CARGO_DENY: &str = "0.20.2";
const GO_NEEDED: (u32, u32) = (1, 25);

/// bridge, host-local, loopback and portmap as Go modules; built once.
pub fn reference_plugins() -> Result<PathBuf> {
    let dir = target_dir().join("conformance").join(format!("cni-plugins-{REFERENCE_PLUGINS}"));
    for module in ["main/bridge", "main/loopback", "ipam/host-local", "meta/portmap"] {
        let package = format!("github.com/containernetworking/plugins/plugins/{module}");
        go_install(&package, REFERENCE_PLUGINS, &dir)?;
    }
    Ok(dir)
}

/// csi-sanity as a Go module; built once.
pub fn csi_sanity() -> Result<PathBuf> {
    let dir = target_dir().join("conformance").join(format!("csi-sanity-{CSI_SANITY}"));
    go_install("github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity", CSI_SANITY, &dir)
}

/// critest, the test binary of a Go module; built once.
pub fn critest() -> Result<PathBuf> {
    let binary = target_dir().join("conformance").join(format!("critest-{CRITEST}"));
    if !binary.is_file() {
        let go = go()?;
        let mut download = Command::new(&go);
        download.args(["mod", "download", "-json", &format!("sigs.k8s.io/cri-tools@{CRITEST}")]);
        let output = download.output().with_context(|| build::words(&download))?;
        ensure!(output.status.success(), "{}: {}", build::words(&download), output.status);
        let module: Module = serde_json::from_slice(&output.stdout).context("what go mod download prints")?;
        let mut command = Command::new(&go);
        command.args(["test", "-c", "-o"]).arg(&binary).arg("./cmd/critest");
        build::run(command.env("CGO_ENABLED", "0").current_dir(module.dir))?;
    }
    ensure!(binary.is_file(), "go test -c left no {}", binary.display());
    Ok(binary)
}

/// What `go mod download -json` prints of a module.
#[derive(Debug, Deserialize)]
struct Module {
    /// Where its source is.
    #[serde(rename = "Dir")]
    dir: PathBuf,
}

/// The program of a package, in `dir`, to which it is built when it is not there.
fn go_install(package: &str, version: &str, dir: &Path) -> Result<PathBuf> {
    let binary = dir.join(package.rsplit('/').next().unwrap_or(package));
    if !binary.is_file() {
        let mut command = Command::new(go()?);
        command.args(["install", &format!("{package}@{version}")]);
        build::run(command.env("GOBIN", dir).env("CGO_ENABLED", "0"))?;
    }
    ensure!(binary.is_file(), "go install left no {}", binary.display());
    Ok(binary)
}

/// cargo-deny; built once, which takes minutes.
pub fn cargo_deny() -> Result<PathBuf> {
    let dir = target_dir().join("tools").join(format!("cargo-deny-{CARGO_DENY}"));
    let binary = dir.join("bin/cargo-deny");
    if !binary.is_file() {
        let mut install = build::cargo();
        install.args(["install", "cargo-deny", "--locked", "--version", CARGO_DENY, "--root"]).arg(&dir);
        build::run(&mut install)?;
    }
    ensure!(binary.is_file(), "cargo install left no {}", binary.display());
    Ok(binary)
}

/// Go of the release that is needed, from PATH or from where its archive unpacks.
pub fn go() -> Result<PathBuf> {
    let found =
        find_program("go").or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|go| go.is_file()));
    let Some(go) = found else { bail!("missing: go {}.{} or newer (go.dev/dl)", GO_NEEDED.0, GO_NEEDED.1) };
    let output =
        Command::new(&go).args(["env", "GOVERSION"]).output().with_context(|| go.display().to_string())?;
    let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    ensure!(
        go_release(&version) >= Some(GO_NEEDED),
        "missing: go {}.{} or newer; {} is {version:?}",
        GO_NEEDED.0,
        GO_NEEDED.1,
        go.display()
    );
    Ok(go)
}

/// `go1.25.1` is (1, 25).
fn go_release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.strip_prefix("go")?.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// A program of a Debian package, which is installed when it is not there.
pub fn debian_program(program: &str, package: &str) -> Result<PathBuf> {
    if let Some(found) = find_program(program) {
        return Ok(found);
    }
    let Some(apt_get) = find_program("apt-get") else {
        bail!("missing: {program}, and no apt-get here to install package {package}");
    };
    build::run(Command::new(&apt_get).arg("update"))?;
    let mut install = Command::new(&apt_get);
    install
        .args(["install", "--yes", "--no-install-recommends", package])
        .env("DEBIAN_FRONTEND", "noninteractive");
    build::run(&mut install)?;
    find_program(program).with_context(|| format!("package {package} brought no {program}"))
}

/// A file of a Debian package that is unpacked below `target/`, once: the package may conflict with installed ones.
pub fn debian_file(package: &str, file: &str) -> Result<PathBuf> {
    let dir = target_dir().join("conformance/debian").join(package);
    let found = dir.join(file);
    if found.is_file() {
        return Ok(found);
    }
    let Some(apt_get) = find_program("apt-get") else {
        bail!("missing: {file} of Debian's package {package}, and no apt-get here to download it");
    };
    fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
    build::run(Command::new(&apt_get).arg("update"))?;
    build::run(Command::new(&apt_get).args(["download", package]).current_dir(&dir))?;
    for entry in fs::read_dir(&dir).with_context(|| dir.display().to_string())? {
        let path = entry.with_context(|| dir.display().to_string())?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            build::run(Command::new("dpkg-deb").arg("--extract").arg(&path).arg(&dir))?;
            fs::remove_file(&path).with_context(|| path.display().to_string())?;
        }
    }
    ensure!(found.is_file(), "package {package} brought no {file}");
    Ok(found)
}

/// What ldd finds; nothing for a static program or a script.
pub fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd").arg(program).stderr(Stdio::null()).output().context("ldd (libc-bin)")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let words = text.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    Ok(words.map(PathBuf::from).filter(|path| path.is_file()).collect())
}

pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let standard =
        ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(standard)
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_go_release_is_read_from_its_version() {
        assert_eq!(go_release("go1.25.1"), Some((1, 25)));
        assert_eq!(go_release("go1.27rc1"), Some((1, 27)));
        assert_eq!(go_release("devel"), None);
        assert!(go_release("go1.9") < Some(GO_NEEDED));
    }
}
