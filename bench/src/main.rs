//! `cargo xtask bench`: figures, never judged by a test.

mod cni;
mod csi;
mod memory_fs;
mod observe;
mod pod_start;
mod pod_watch;
mod pods;
mod rows;
mod scene;
mod statistics;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use xtask::progress::exit_code;

/// Measure
#[derive(Debug, Parser)]
#[command(bin_name = "xtask bench")]
struct Arguments {
    what: Bench,
    /// Runs of each kind: at least 10 of `pods`, and 20 of `cni`, `csi`, `takeover` and `volume`. Long parts have fewer
    /// runs: 10 pulls of an image at most; 5 of parallel ADDs, of killed keepers, of trees and of pgbench; 1 of a
    /// hundred pods or two hundred volumes at once, and of a million files
    #[arg(long, default_value_t = 20)]
    runs: usize,
    /// Of `cni`, `csi`, `pods` and `volume`: only cases whose title contains this
    #[arg(long, value_name = "WORD")]
    only: Option<String>,
    /// Of `volume`: libfuse's example `passthrough_hp`, measured beside ours
    #[arg(long, value_name = "PROGRAM")]
    passthrough_hp: Option<PathBuf>,
    /// Of `volume`: everything runs on one processor, so that no request wakes another one up
    #[arg(long)]
    one_processor: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// From the manifest's rename to the business program's first statement
    PodStart,
    /// The life of pods: start, exec, deletion, a hundred at once, three hundred idle, an image's download
    Pods,
    /// Our CNI plugins and the reference's in turn, and what the kernel itself needs
    Cni,
    /// The driver's calls, two hundred volumes at once, and memory
    Csi,
    /// From the kill of a volume's daemon to the next answer
    Takeover,
    /// Operations in volumes, native directories and other FUSE file systems, and what the record costs
    Volume,
}

fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    // The bench starts itself so.
    if let [mode, .., at] = &words[..]
        && mode == memory_fs::MODE
    {
        return exit_code(memory_fs::serve(Path::new(at)));
    }
    exit_code(run(&Arguments::parse()))
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.one_processor && arguments.what != Bench::Volume {
        bail!("--one-processor: only `bench volume` has it");
    }
    match (arguments.what, arguments.only.as_deref()) {
        (Bench::Cni, only) => cni::run(arguments.runs, only),
        (Bench::Volume, only) => {
            let peer = arguments.passthrough_hp.as_deref();
            csi::volume::run(arguments.runs, only, peer, arguments.one_processor)
        }
        (Bench::Pods, only) => pods::run(arguments.runs, only),
        (Bench::Csi, only) => csi::run(arguments.runs, only),
        (_, Some(word)) => {
            bail!("--only {word}: only `bench cni`, `csi`, `pods` and `volume` have cases to choose from")
        }
        (Bench::PodStart, None) => pod_start::run(arguments.runs),
        (Bench::Takeover, None) => csi::takeover::run(arguments.runs),
    }
}
