//! Suite `cni`: `bridge`, `host-local`, `loopback` and `portmap` of ours and of the reference.

mod attach;
mod crew;
mod differences;
mod mixed;
mod names;
mod observe;
mod probe;
mod reference_pair;
mod runtime;
mod scenario;
mod scenarios;
mod switch;
mod world;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use xtask::build;
use xtask::foreign::{REFERENCE_PLUGINS, debian_program, reference_plugins};
use xtask::progress::{complain, part, say};

pub(super) const PLUGINS: [&str; 4] = ["bridge", "host-local", "loopback", "portmap"];

/// Whose executables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Reference,
    Ours,
}

/// What is installed on this machine for the suite.
#[derive(Debug)]
pub(super) struct Node {
    reference: PathBuf,
    ours: PathBuf,
    programs: Programs,
    /// Only scenarios whose name contains this.
    only: Option<String>,
}

/// The witnesses, and what the reference's plugins start.
#[derive(Debug)]
struct Programs {
    ip: PathBuf,
    nft: PathBuf,
    /// Where Debian's package iptables has its programs, of both variants.
    iptables_dir: PathBuf,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Reference => Self::Ours,
            Self::Ours => Self::Reference,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Reference => "the reference",
            Self::Ours => "Hawser",
        }
    }
}

impl Node {
    /// Whether this part or scenario was asked for.
    pub(super) fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.contains(only))
    }

    pub(super) fn plugin_dir(&self, side: Side) -> &Path {
        match side {
            Side::Reference => &self.reference,
            Side::Ours => &self.ours,
        }
    }
}

impl Programs {
    fn find() -> Result<Self> {
        let save = debian_program("iptables-nft-save", "iptables")?;
        Ok(Self {
            ip: debian_program("ip", "iproute2")?,
            nft: debian_program("nft", "nftables")?,
            iptables_dir: save.parent().map(Path::to_owned).unwrap_or_default(),
        })
    }

    /// `iptables-legacy-save` and its like.
    fn iptables(&self, name: &str) -> PathBuf {
        self.iptables_dir.join(name)
    }
}

/// What the suite consists of. A part ends with `N scenarios, N passed, N failed`, and fails when one failed.
type Part = fn(&Node) -> Result<()>;
const PARTS: [(&str, Part); 4] = [
    ("reference pair: each scenario by the reference and by ours", reference_pair::run),
    ("switch: a node in place, and back, as in docs/CNI.md", switch::run),
    ("mixed: both on one node", mixed::run),
    ("runtime: pods on containerd and runc", runtime::run),
];

pub(super) fn run(only: Option<&str>) -> Result<()> {
    let programs = part("ip, nft, iptables", Programs::find)?;
    let reference = part(&format!("reference CNI plugins {REFERENCE_PLUGINS}"), reference_plugins)?;
    let ours = part("build the static plugins", build::plugins)?;
    let node = Node { reference, ours, programs, only: only.map(str::to_owned) };
    say(&format!("ours: {}; reference: {}", node.ours.display(), node.reference.display()));
    let mut failed = Vec::new();
    for (name, run) in PARTS {
        if let Err(error) = part(name, || run(&node)) {
            complain(&format!("error: {error:#}"));
            failed.push(name);
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    Ok(())
}
