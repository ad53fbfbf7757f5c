//! The other lives of the binaries that link this crate: a shim is the same
//! executable, started under another name.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::error::chain;
use crate::shim;

/// `argv[0]` of a shim; `argv[1]` is the sandbox's directory.
pub(crate) const SHIM_NAME: &str = "hawser-shim";

/// Must be the first statement of `main` in every binary that starts a runtime:
/// when this process was started as a shim, runs it and returns its exit code.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut args = std::env::args_os();
    if args.next()? != SHIM_NAME {
        return None;
    }
    let dir = args.next()?;
    match shim::run(Path::new(&dir)) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            // stderr is shim.log in the sandbox's directory.
            drop(writeln!(std::io::stderr(), "{}", chain(&error)));
            Some(ExitCode::FAILURE)
        }
    }
}
