//! `hawser-volume`: serves one volume on a FUSE connection that the driver
//! hands over. See the library for how.

use std::process::ExitCode;

use clap::Parser;
use volume_fs::config::Arguments;

fn main() -> ExitCode {
    match volume_fs::run(Arguments::parse()) {
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
