//! The binary: the daemon and its client commands. Everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(exit_code) = runtime::reexec::run_if_asked() {
        return exit_code;
    }
    match kubelet::config::Cli::read() {
        Ok(cli) => kubelet::cli::execute(cli),
        Err(error) => {
            let _no_reader = error.print();
            // A wrong flag is an error like any other, as with kubectl.
            if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS }
        }
    }
}
