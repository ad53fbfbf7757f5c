//! `hawser-keeper`: holds descriptors of volumes.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;

use keeper::config::{self, Command, Config, HELP};
use keeper::{Inherited, Level, Log, server};

const USAGE_ERROR: u8 = 2;

fn main() -> ExitCode {
    match config::parse(std::env::args_os().skip(1)) {
        Ok(Command::Serve(config)) => serve(&config),
        Ok(Command::Help) => print(HELP),
        Ok(Command::Version) => print(concat!("hawser-keeper ", env!("CARGO_PKG_VERSION"), "\n")),
        Err(e) => {
            report(&e);
            ExitCode::from(USAGE_ERROR)
        }
    }
}

fn serve(config: &Config) -> ExitCode {
    let inherited = match Inherited::of_environment() {
        Ok(inherited) => inherited,
        Err(e) => {
            report(&e);
            return ExitCode::FAILURE;
        }
    };
    match server::run(config, inherited) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            report(&e);
            ExitCode::FAILURE
        }
    }
}

/// With its causes, in one line.
fn report(error: &dyn Error) {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line = format!("{line}: {error}");
        cause = error.source();
    }
    Log { most: Level::Error }.write(Level::Error, format_args!("{line}"));
}

fn print(text: &str) -> ExitCode {
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
