//! `hawser-csi`: see `--help`.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use csi_driver::config::{Config, Flags};
use csi_driver::operations::cli::{Command, CommandLine};
use csi_driver::operations::doctor::Doctor;
use csi_driver::operations::upgrade::Upgrade;
use csi_driver::operations::views::{Shown, View};
use tokio::runtime::Runtime;

/// Grace period for operations under way at SIGTERM; the journal covers the rest.
const LAST_OPERATIONS: Duration = Duration::from_secs(10);

/// Memory arenas of the allocator. More would only grow: the calls of hundreds of volumes allocate
/// at the same time, but few threads run at the same time.
const HEAPS: u32 = 2;

/// Exit code of a `doctor` that could not look: neither "nothing found" nor "something left".
const UNABLE: u8 = 2;

fn main() -> ExitCode {
    let (ended, failed) = match CommandLine::parse() {
        CommandLine { command: Some(Command::View(view)), .. } => (show(&view), ExitCode::FAILURE),
        CommandLine { command: Some(Command::Doctor(doctor)), .. } => (examine(*doctor), UNABLE.into()),
        CommandLine { command: Some(Command::Upgrade(upgrade)), .. } => {
            (replace(&upgrade), ExitCode::FAILURE)
        }
        CommandLine { driver: Some(flags), .. } => (run(flags), ExitCode::FAILURE),
        // clap refuses this: the driver has required flags.
        CommandLine { driver: None, command: None } => (Ok(ExitCode::SUCCESS), ExitCode::FAILURE),
    };
    ended.unwrap_or_else(|error| {
        #[expect(clippy::print_stderr, reason = "the one line for who started it")]
        {
            eprintln!("hawser-csi: {}{}", trace::escaped(&linux::chain(error.as_ref())), hint());
        }
        failed
    })
}

/// Journal, sockets and FUSE connections are root's.
fn hint() -> &'static str {
    if rustix::process::geteuid().is_root() { "" } else { ": run hawser-csi as root" }
}

fn show(view: &View) -> anyhow::Result<ExitCode> {
    let Shown { text, without_driver } = view.show()?;
    if let Some(why) = without_driver {
        #[expect(clippy::print_stderr, reason = "standard output has the rows alone")]
        {
            eprintln!("hawser-csi: {}", trace::escaped(&why.to_string()));
        }
    }
    print(&text);
    Ok(ExitCode::SUCCESS)
}

fn replace(upgrade: &Upgrade) -> anyhow::Result<ExitCode> {
    let report = upgrade.run()?;
    print(&report.text);
    Ok(if report.is_complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn examine(doctor: Doctor) -> anyhow::Result<ExitCode> {
    trace::init("hawser-csi", &doctor.driver.log, None).context("start logging")?;
    let runtime = runtime()?;
    let context = runtime.enter();
    let report = doctor.run()?;
    drop(context);
    print(&report.text);
    Ok(if report.left == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(flags: Flags) -> anyhow::Result<ExitCode> {
    linux::memory::limit_heaps(HEAPS).context("limit heaps")?;
    trace::init("hawser-csi", &flags.log, flags.trace_file.as_deref()).context("start logging")?;
    let config = Config::check(flags)?;
    let runtime = runtime()?;
    let result = runtime.block_on(csi_driver::run(config));
    runtime.shutdown_timeout(LAST_OPERATIONS);
    result?;
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> anyhow::Result<Runtime> {
    // Slow and blocking work has its own threads. With one thread for the rest, a call needs no
    // other thread to wake up between connection and answer.
    tokio::runtime::Builder::new_current_thread()
        .max_blocking_threads(csi_driver::engine::admission::THREADS)
        .enable_all()
        .build()
        .context("start runtime")
}

fn print(text: &str) {
    // A reader that closed its end early (`| head`) is no error.
    let _closed = std::io::stdout().write_all(text.as_bytes());
}
