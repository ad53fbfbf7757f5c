//! `check`: what a reviewer should not have to say.

use std::process::Command;

use ::tests::binaries::workspace_root;
use anyhow::Result;
use xtask::build::{self, cargo};
use xtask::foreign::cargo_deny;
use xtask::progress::part;

const PARTS: [(&str, &[&str]); 3] = [
    ("rustfmt", &["fmt", "--all", "--check"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ("rustdoc", &["doc", "--workspace", "--no-deps"]),
];

/// `advisories`: also check dependencies against the advisory database, which comes from github.com.
/// Releases need it; CI does without, since it may have no access.
pub(crate) fn run(advisories: bool) -> Result<()> {
    for (name, words) in PARTS {
        part(name, || build::run(cargo().args(words).env("RUSTDOCFLAGS", "-D warnings")))?;
    }
    let deny = part("cargo-deny", cargo_deny)?;
    let check =
        |what: &[&str]| build::run(Command::new(&deny).current_dir(workspace_root()).arg("check").args(what));
    part("licences and sources (deny.toml)", || check(&["licenses", "bans", "sources"]))?;
    if advisories { part("advisories (deny.toml)", || check(&["advisories"])) } else { Ok(()) }
}
