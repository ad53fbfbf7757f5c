//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::log::Level;

pub const HELP: &str = "\
Holds descriptors of volumes, so that a volume's daemon can be replaced while applications use it

Usage: hawser-keeper --socket PATH [--log-level LEVEL]

Options:
      --socket PATH        Unix socket for the driver: absolute, at most 107 bytes. Only root may
                           connect. A socket that no process serves is replaced
      --log-level LEVEL    error, warn, info or debug: lines on standard error [default: info]
  -h, --help               Print help
  -V, --version            Print version

SIGTERM and SIGINT end the keeper once it holds no descriptor: at once, or after the driver has
released the last one. SIGHUP is ignored.
";

/// sun_path of unix(7), without the zero at its end.
const MOST_PATH_BYTES: usize = 107;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub socket: PathBuf,
    pub log_level: Level,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Command {
    Serve(Config),
    Help,
    Version,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageError {
    #[error("unknown argument {}: see hawser-keeper --help", argument.display())]
    Unknown { argument: OsString },
    #[error("{option} needs a value")]
    NoValue { option: &'static str },
    #[error("{option} is given twice")]
    Twice { option: &'static str },
    #[error("--socket PATH is missing: see hawser-keeper --help")]
    NoSocket,
    #[error("--socket {}: must be an absolute path of at most 107 bytes", path.display())]
    Socket { path: PathBuf },
    #[error("--log-level {}: must be error, warn, info or debug", level.display())]
    LogLevel { level: OsString },
}

/// `arguments` without the program's name.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Command, UsageError> {
    let (mut socket, mut log_level) = (None, None);
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        let text = argument.to_str().unwrap_or_default();
        let (name, value) = text.split_once('=').map_or((text, None), |(name, value)| (name, Some(value)));
        let mut value_of = |option| {
            value.map(OsString::from).or_else(|| arguments.next()).ok_or(UsageError::NoValue { option })
        };
        match (name, value) {
            ("--socket", _) => set(&mut socket, "--socket", value_of("--socket")?)?,
            ("--log-level", _) => set(&mut log_level, "--log-level", value_of("--log-level")?)?,
            ("--help" | "-h", None) => return Ok(Command::Help),
            ("--version" | "-V", None) => return Ok(Command::Version),
            _ => return Err(UsageError::Unknown { argument }),
        }
    }
    let log_level = log_level.map_or(Ok(Level::Info), |level| {
        let known = Level::ALL.into_iter().find(|known| level.to_str() == Some(known.name()));
        known.ok_or(UsageError::LogLevel { level })
    })?;
    let path = PathBuf::from(socket.ok_or(UsageError::NoSocket)?);
    if !path.is_absolute() || path.as_os_str().len() > MOST_PATH_BYTES {
        return Err(UsageError::Socket { path });
    }
    Ok(Command::Serve(Config { socket: path, log_level }))
}

fn set(to: &mut Option<OsString>, option: &'static str, value: OsString) -> Result<(), UsageError> {
    if to.replace(value).is_some() { Err(UsageError::Twice { option }) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, UsageError> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn options_have_values_in_both_forms() {
        let config =
            |level| Command::Serve(Config { socket: PathBuf::from("/run/k.sock"), log_level: level });
        assert_eq!(parsed("--socket /run/k.sock"), Ok(config(Level::Info)));
        assert_eq!(parsed("--log-level=debug --socket=/run/k.sock"), Ok(config(Level::Debug)));
        assert_eq!(parsed("--socket /run/k.sock --log-level warn"), Ok(config(Level::Warn)));
        assert_eq!(parsed("--socket x --help"), Ok(Command::Help));
        assert_eq!(parsed("-V"), Ok(Command::Version));
    }

    #[test]
    fn wrong_arguments_are_named() {
        let long = format!("--socket /{}", "x".repeat(107));
        for (line, text) in [
            ("", "--socket PATH is missing: see hawser-keeper --help"),
            ("--socket", "--socket needs a value"),
            ("--socket a --socket b", "--socket is given twice"),
            ("--socket run/k.sock", "--socket run/k.sock: must be an absolute path of at most 107 bytes"),
            (&long, &format!("{long}: must be an absolute path of at most 107 bytes")),
            ("--socket /s --log-level loud", "--log-level loud: must be error, warn, info or debug"),
            ("--socket /s now", "unknown argument now: see hawser-keeper --help"),
            ("--help=yes", "unknown argument --help=yes: see hawser-keeper --help"),
        ] {
            assert_eq!(parsed(line).unwrap_err().to_string(), text);
        }
        parsed(&format!("--socket /{}", "x".repeat(106))).unwrap();
    }

    #[test]
    fn help_fits_a_terminal() {
        assert!(HELP.lines().all(|line| line.len() <= 100), "{HELP}");
    }
}
