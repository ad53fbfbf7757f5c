//! Numbers of the client commands, with errors that say what is wanted.

use std::fmt::Display;
use std::str::FromStr;

/// A whole number from `least` on.
pub(super) fn whole<T: FromStr + PartialOrd + Display>(text: &str, least: T) -> Result<T, String> {
    match text.parse() {
        Ok(number) if number >= least => Ok(number),
        _ => Err(format!("{text:?}: a whole number is wanted, at least {least}")),
    }
}

/// A port of a pod or of this machine.
pub(super) fn port(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(port @ 1..) => Ok(port),
        _ => Err(format!(
            "port {text:?}: a number from 1 to 65535 is wanted (names of ports are not supported)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::config::{Cli, Forward};

    #[test]
    fn ports_are_numbers() {
        for (text, local, remote) in
            [("80", 80, 80), ("8080:80", 8080, 80), (":80", 0, 80), ("0:80", 0, 80), ("65535", 65535, 65535)]
        {
            assert_eq!(text.parse(), Ok(Forward { local, remote }), "{text}");
        }
        for (text, port) in [
            (":http", "http"),
            ("http", "http"),
            ("80800", "80800"),
            ("80:-1", "-1"),
            ("0", "0"),
            (":0", "0"),
            ("80:", ""),
        ] {
            let message = format!(
                "port {port:?}: a number from 1 to 65535 is wanted (names of ports are not supported)"
            );
            assert_eq!(text.parse::<Forward>(), Err(message), "{text}");
        }
    }

    #[test]
    fn errors_say_which_number_is_wanted() {
        for (line, wanted) in [
            ("h logs web --tail=1x", "\"1x\": a whole number is wanted, at least -1"),
            ("h logs web --tail=-2", "\"-2\": a whole number is wanted, at least -1"),
            ("h logs web --limit-bytes 0", "\"0\": a whole number is wanted, at least 1"),
            ("h logs web --max-log-requests few", "\"few\": a whole number is wanted, at least 0"),
            ("h delete pod web --grace-period=1m", "\"1m\": a whole number is wanted, at least 0"),
            ("h stop --pods --grace-period=1m", "\"1m\": a whole number is wanted, at least 0"),
        ] {
            let error = Cli::try_parse_from(line.split_whitespace()).unwrap_err().to_string();
            assert!(error.contains(&format!("': {wanted}\n")), "{line}: {error}");
        }
        Cli::try_parse_from(["h", "logs", "web", "--tail=-1"]).unwrap();
    }
}
