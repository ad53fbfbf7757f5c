//! Where the static product binaries are. `cargo xtask` builds them and says so
//! in `HAWSER_BIN_DIR`; without it the place where it builds them is taken.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

/// The target that makes static binaries without breaking procedural macros:
/// named explicitly, so that `crt-static` is not applied to what runs at build time.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Package and binary of everything that runs on a node or in an image for long.
pub const PRODUCTS: [(&str, &str); 6] = [
    ("volume-local", "hawser-volume"),
    ("keeper", "hawser-keeper"),
    ("csi-driver", "hawser-csi"),
    ("runtime", "hawser-runtime"),
    ("kubelet", "hawser-kubelet"),
    ("demo-app", "demo-app"),
];

/// Package and binary of the plugins that a node's CNI directory needs.
pub const CNI_PLUGINS: [(&str, &str); 4] = [
    ("cni-bridge", "bridge"),
    ("ipam-host-local", "host-local"),
    ("cni-loopback", "loopback"),
    ("cni-portmap", "portmap"),
];

pub fn workspace_root() -> PathBuf {
    let manifest_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest_dir.parent().expect("the package lies in the workspace").to_path_buf()
}

/// Where cargo builds: `CARGO_TARGET_DIR`, from the workspace's root, or `target` there.
pub fn target_dir() -> PathBuf {
    let named = std::env::var_os("CARGO_TARGET_DIR").filter(|dir| !dir.is_empty());
    workspace_root().join(named.unwrap_or_else(|| "target".into()))
}

/// The directory of the static release binaries.
pub fn dir() -> PathBuf {
    match std::env::var_os("HAWSER_BIN_DIR") {
        Some(dir) => PathBuf::from(dir),
        None => target_dir().join(TARGET).join("release"),
    }
}

/// The binary `name` of the package whose test or bench runs, which cargo built with it.
pub fn under_test(name: &str) -> Result<PathBuf> {
    // Where cargo does not start the test, such as in the laboratory, the binary
    // lies above the directory of the test's own, or beside a program that is no test.
    let path = match std::env::var_os(format!("CARGO_BIN_EXE_{name}")) {
        Some(path) => PathBuf::from(path),
        None => {
            let own = std::env::current_exe().context("the path of the test")?;
            let built = own.ancestors().nth(2).context("the directory of the test")?;
            let beside = own.with_file_name(name);
            if beside.is_file() { beside } else { built.join(name) }
        }
    };
    ensure!(path.is_file(), "{}: not built with the tests of its package", path.display());
    Ok(path)
}

/// The binary `name`, which must be there.
pub fn find(name: &str) -> Result<PathBuf> {
    let path = dir().join(name);
    if !path.is_file() {
        bail!("{}: not built; `cargo xtask test` builds it", path.display());
    }
    Ok(path)
}
