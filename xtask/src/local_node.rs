//! `up` and `down`: a node on this machine, to try things with, and its complete removal.
//!
//! Invariant: [`record::Record`] is on the disk before the first change of the machine, and it goes
//! last. So `down` finds what to remove, whenever `up` or the whole node was killed.

mod daemons;
mod down;
mod driver;
mod helper;
mod network;
mod network_claim;
mod place;
mod prepare;
mod processes;
mod record;
mod up;

use std::path::PathBuf;

pub(crate) use self::down::down;
pub(crate) use self::up::up;

#[derive(Debug, clap::Args)]
pub(crate) struct UpArguments {
    #[command(flatten)]
    pub(crate) directory: Directory,
    /// Control group of the node's pods
    #[arg(long, value_name = "PATH", default_value = "/hawser-up")]
    pub(crate) cgroup: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Directory {
    /// The node's own directory, which `up` creates and `down` removes
    #[arg(long = "dir", value_name = "DIR", default_value = place::DEFAULT_DIR)]
    pub(crate) path: PathBuf,
}
