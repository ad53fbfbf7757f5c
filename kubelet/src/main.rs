//! The binary: the daemon and its client commands. Everything is in the library.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    if let Some(exit_code) = runtime::reexec::run_if_asked() {
        return exit_code;
    }
    kubelet::cli::execute(kubelet::config::Cli::parse())
}
