//! Suite `cni`: `bridge`, `host-local`, `loopback` and `portmap` of ours and of the reference.

use std::path::PathBuf;

use anyhow::Result;

use super::foreign::{REFERENCE_PLUGINS, reference_plugins};
use crate::build;
use crate::progress::{part, say};

/// Where both sides' executables are.
#[derive(Debug)]
pub(super) struct Plugins {
    pub(super) reference: PathBuf,
    pub(super) ours: PathBuf,
}

/// What the suite consists of. A part ends with `N scenarios, N passed, N failed`, and fails when one failed.
type Part = fn(&Plugins) -> Result<()>;
const PARTS: [(&str, Part); 0] = [];

pub(super) fn run() -> Result<()> {
    let reference = part(&format!("reference CNI plugins {REFERENCE_PLUGINS}"), reference_plugins)?;
    let ours = part("build the static binaries", build::products)?;
    let plugins = Plugins { reference, ours };
    say(&format!("ours: {}; reference: {}", plugins.ours.display(), plugins.reference.display()));
    PARTS.iter().try_for_each(|(name, run)| part(name, || run(&plugins)))
}
