//! Other uses of the binaries that link this crate: a shim and an unpacker are the same executable,
//! started under other names.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use crate::error::chain;
use crate::{images, shim};

/// `argv[0]` of a shim; `argv[1]` is the sandbox's directory.
pub(crate) const SHIM_NAME: &str = "hawser-shim";

/// `argv[0]` of the process that unpacks one layer. `argv[1]` is its job, `argv[2]` its parent,
/// `argv[3]` its control group, if it has one.
pub(crate) const UNPACKER_NAME: &str = "hawser-unpack";

/// Must be the first statement of `main` in every binary that starts a runtime: if this process was
/// started as a shim or an unpacker, does that work and returns its exit code.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut args = std::env::args_os();
    let name = args.next()?;
    if name == UNPACKER_NAME {
        let (job, parent) = (args.next()?.into_string().ok()?, args.next()?.into_string().ok()?);
        return Some(unpack(&job, &parent, args.next().as_deref().map(Path::new)));
    }
    if name != SHIM_NAME {
        return None;
    }
    let dir = args.next()?;
    match shim::run(Path::new(&dir)) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            // stderr is shim.log in the sandbox's directory.
            let _no_reader = writeln!(std::io::stderr(), "{}", trace::escaped(&chain(&error)));
            Some(ExitCode::FAILURE)
        }
    }
}

#[expect(clippy::print_stdout, reason = "the answer to the process that asked")]
fn unpack(job: &str, parent: &str, cgroup: Option<&Path>) -> ExitCode {
    match images::run_unpacker(job, parent, cgroup) {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            let _no_reader = writeln!(std::io::stderr(), "{}", chain(&problem));
            ExitCode::FAILURE
        }
    }
}
