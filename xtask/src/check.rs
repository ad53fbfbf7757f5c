//! `check`: what a reviewer should not have to say.

use anyhow::Result;
use xtask::build::{self, cargo};
use xtask::progress::part;

const PARTS: [(&str, &[&str]); 3] = [
    ("rustfmt", &["fmt", "--all", "--check"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
    ("rustdoc", &["doc", "--workspace", "--no-deps"]),
];

pub(crate) fn run() -> Result<()> {
    for (name, words) in PARTS {
        part(name, || build::run(cargo().args(words).env("RUSTDOCFLAGS", "-D warnings")))?;
    }
    Ok(())
}
