//! The errors of a command that goes on after one.

use std::io::{self, Write};

use tokio::task::JoinError;

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

    /// What a task of the command ended with.
    pub(super) fn add_ended(&mut self, ended: Result<Result<(), Error>, JoinError>) -> Result<(), Error> {
        ended.unwrap_or_else(|panicked| Err(Error::Task(panicked))).or_else(|error| self.add(error))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    pub(super) fn result(self) -> Result<(), Error> {
        self.last.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn panics() -> Result<(), Error> {
        panic!("a test")
    }

    #[tokio::test]
    async fn a_task_that_panics_is_an_error() {
        let mut failures = Failures::default();
        failures.add_ended(tokio::spawn(async { Ok(()) }).await).unwrap();
        assert!(failures.is_empty());
        failures.add_ended(tokio::spawn(panics()).await).unwrap();
        assert!(matches!(failures.result(), Err(Error::Task(_))));
    }
}
