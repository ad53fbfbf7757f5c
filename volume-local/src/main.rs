//! `hawser-volume`: serves one volume on a FUSE connection from the driver. See the library and
//! `volume-fs`.

use std::process::ExitCode;

use clap::Parser;
use volume_fs::config::Arguments;
use volume_local::LocalService;

fn main() -> ExitCode {
    match volume_fs::run(LocalService::new(), Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

/// One line, with all causes.
#[expect(clippy::print_stderr, reason = "the one line that reports a failed start")]
fn report(error: &volume_fs::Error) {
    eprintln!("hawser-volume: {}", linux::chain(error));
}
