//! `hawser-csi`: see `--help`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use csi_driver::config::{Config, Flags};

/// What is under way at SIGTERM may finish; the journal covers what does not.
const LAST_OPERATIONS: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    match run(Flags::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            #[expect(clippy::print_stderr, reason = "the one line for who started it")]
            {
                eprintln!("hawser-csi: {error:#}");
            }
            ExitCode::FAILURE
        }
    }
}

fn run(flags: Flags) -> anyhow::Result<()> {
    trace::init("hawser-csi", &flags.log, flags.trace_file.as_deref()).context("start logging")?;
    let config = Config::check(flags)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("start runtime")?;
    let result = runtime.block_on(csi_driver::run(config));
    runtime.shutdown_timeout(LAST_OPERATIONS);
    Ok(result?)
}
