//! The errors of a command that goes on after one.

use std::io::{self, Write};

use super::{Error, printable};

/// Prints each error when the next one arrives. The last one is the command's.
#[derive(Debug, Default)]
pub(super) struct Failures {
    last: Option<Error>,
}

impl Failures {
    /// A closed stdout is an error of all that would follow.
    pub(super) fn add(&mut self, error: Error) -> Result<(), Error> {
        if matches!(error, Error::Output(_)) {
            return Err(error);
        }
        if let Some(before) = self.last.replace(error) {
            let text = super::describe_error(&before);
            let _no_reader = writeln!(io::stderr(), "{}", printable::printable(&text));
        }
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    pub(super) fn result(self) -> Result<(), Error> {
        self.last.map_or(Ok(()), Err)
    }
}
