//! The usage line of errors.

use std::ffi::OsString;

use clap::Command;
use clap::error::{ContextKind, ContextValue};

/// The error with the usage line that `--help` prints. clap's own lists the options that the command line or the
/// environment sets as if they were required.
pub(super) fn as_in_help(mut error: clap::Error, words: &[OsString], command: &mut Command) -> clap::Error {
    let verb = words.get(1).and_then(|verb| verb.to_str()).unwrap_or_default();
    if error.get(ContextKind::Usage).is_some()
        && let Some(command) = command.find_subcommand_mut(verb)
    {
        error.insert(ContextKind::Usage, ContextValue::StyledStr(command.render_usage()));
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::Cli;

    fn usage_line(text: &str) -> String {
        text.lines().find(|line| line.starts_with("Usage:")).unwrap_or_default().to_owned()
    }

    /// Of an error about these words.
    fn usage(line: &str) -> String {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let mut command = Cli::command();
        let error = command.try_get_matches_from_mut(&words).unwrap_err();
        usage_line(&as_in_help(error, &words, &mut command).to_string())
    }

    #[test]
    fn errors_have_the_usage_line_of_help() {
        for (line, wanted) in [
            ("h get --root-dir /k", "Usage: h get [OPTIONS] <KIND> [NAME]..."),
            ("h get pods -o yaml --outptu", "Usage: h get [OPTIONS] <KIND> [NAME]..."),
            ("h apply --fast", "Usage: h apply [OPTIONS] --filename <FILE>"),
            ("h nothing", "Usage: h <COMMAND>"),
            ("h logs web --tail x", ""),
        ] {
            assert_eq!(usage(line), wanted, "{line}");
        }
        let words = ["h", "get", "--help"];
        let help = Cli::command().try_get_matches_from(words).unwrap_err().to_string();
        assert_eq!(usage_line(&help), usage("h get --root-dir /k"));
    }
}
