//! `completion`: shell code that completes commands and flags, and with bash the names of objects.
//!
//! The code is made by `clap_complete`, which comes with clap and links nothing more: it knows every flag from the
//! same definitions as the parser.

use std::io::Write;

use clap::CommandFactory;
use clap_complete::shells;

use super::Error;
use crate::config::{Cli, CompletionArgs, Shell};

/// Runs behind the generated function.
const NAMES: &str = include_str!("completion/names.bash");

/// The program's name, as a user types it.
const PROGRAM: &str = "hawser-kubelet";
/// Its name in bash's functions: with a hyphen in it, clap_complete 4.6.11 gives functions and the places that
/// look for them different names.
const IN_FUNCTIONS: &str = "hawserkubelet";

pub(super) fn completion(args: &CompletionArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut code = Vec::new();
    let mut command = Cli::command();
    match args.shell {
        Shell::Bash => {
            let mut command = command.name(IN_FUNCTIONS);
            clap_complete::generate(shells::Bash, &mut command, IN_FUNCTIONS, &mut code);
            let text = String::from_utf8_lossy(&code)
                .replace(&format!(" {IN_FUNCTIONS}\n"), &format!(" {PROGRAM}\n"));
            code = [text.as_bytes(), NAMES.as_bytes()].concat();
        }
        Shell::Zsh => clap_complete::generate(shells::Zsh, &mut command, PROGRAM, &mut code),
        Shell::Fish => clap_complete::generate(shells::Fish, &mut command, PROGRAM, &mut code),
    }
    out.write_all(&code).map_err(Error::Output)
}
