//! The command line and the environment.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use proto::handover::NONCE_VARIABLE;
use tracing::Level;

use crate::confine::Isolation;
use crate::{Error, Result};

/// More event loops are never faster: each keeps a buffer as large as its largest write.
pub const MAX_THREADS: usize = 64;

/// What the daemon calls its release, for administrators.
pub(crate) const RELEASE: &str = env!("CARGO_PKG_VERSION");

/// Serves one Hawser volume over FUSE.
#[derive(Debug, Parser)]
#[command(name = "hawser-volume", version)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Dial the driver, take over a FUSE connection and serve it until it is unmounted.
    Serve(Serve),
}

#[derive(Debug, Args)]
pub struct Serve {
    /// Unix socket (seqpacket) on which the driver waits for this daemon.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Make the namespaces too (a child process has none of its own, a container has).
    #[arg(long)]
    pub confine: bool,
    /// Wait for a volume without a limit: the driver starts this daemon before a volume needs it.
    #[arg(long)]
    pub wait: bool,
    /// Event loops, if the driver gives no number.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = threads)]
    pub threads: usize,
    /// Least severe message on standard error: error, warn, info, debug, trace.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub log_level: Level,
}

/// Whether the driver has a volume for a daemon that it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Cold,
    /// Before a volume needs the daemon.
    Ahead,
}

impl Serve {
    pub(crate) fn isolation(&self) -> Isolation {
        if self.confine { Isolation::Own } else { Isolation::ByTheRuntime }
    }

    pub(crate) fn start(&self) -> Start {
        if self.wait { Start::Ahead } else { Start::Cold }
    }
}

fn threads(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(threads) if (1..=MAX_THREADS).contains(&threads) => Ok(threads),
        Ok(_) => Err(format!("must be between 1 and {MAX_THREADS}")),
        Err(error) => Err(error.to_string()),
    }
}

/// The driver's single-use nonce, which is removed from the environment at once. Must run before the
/// process has a second thread.
pub(crate) fn take_nonce() -> Result<String> {
    linux::credentials::take_secret(NONCE_VARIABLE)
        .map_err(|source| Error::Kernel { step: "read the nonce", source })?
        .and_then(|nonce| nonce.into_string().ok())
        .filter(|nonce| !nonce.is_empty())
        .ok_or(Error::NonceMissing { variable: NONCE_VARIABLE })
}

pub(crate) fn log_to_stderr(level: Level) {
    // Fails only if there is a subscriber already: then that one is used.
    let _already_there =
        tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).try_init();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_count_out_of_range_is_named() {
        for (given, reason) in
            [("0", "between 1 and 64"), ("65", "between 1 and 64"), ("many", "invalid digit")]
        {
            let line = ["hawser-volume", "serve", "--socket", "/s", "--threads", given];
            let error = Arguments::try_parse_from(line).unwrap_err().to_string();
            assert!(error.contains(given) && error.contains(reason), "{error}");
        }
    }
}
