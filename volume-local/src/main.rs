//! `hawser-volume`: serves one volume on a FUSE connection that the driver
//! hands over. See the library, and `volume-fs`, for how.

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

/// One line, cause last.
#[expect(clippy::print_stderr, reason = "the one line a failed start is told by")]
fn report(error: &volume_fs::Error) {
    eprintln!("hawser-volume: {}", error.chain());
}
