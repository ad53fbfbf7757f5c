//! `install`: our plugins in a node's plugin directory, in place of others'.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ::tests::binaries;
use anyhow::{Context, Result};

use crate::build::products;
use crate::progress::{part, step};

pub(crate) fn run(cni_bin_dir: &Path) -> Result<()> {
    let from = part("build the static binaries", products)?;
    fs::create_dir_all(cni_bin_dir).with_context(|| cni_bin_dir.display().to_string())?;
    for (_package, plugin) in binaries::CNI_PLUGINS {
        let target = cni_bin_dir.join(plugin);
        step(&format!("{}", target.display()), || replace(&from.join(plugin), &target))?;
    }
    Ok(())
}

/// By rename: a plugin that runs right now keeps its file, and no runtime ever starts half a binary.
fn replace(source: &Path, target: &Path) -> Result<()> {
    let unfinished =
        target.with_file_name(format!(".{}.new", target.file_name().unwrap_or_default().display()));
    fs::copy(source, &unfinished).with_context(|| unfinished.display().to_string())?;
    fs::set_permissions(&unfinished, Permissions::from_mode(0o755)).context("chmod 0755")?;
    fs::rename(&unfinished, target).with_context(|| target.display().to_string())
}
