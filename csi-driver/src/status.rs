//! The one table from errors to gRPC codes.
//!
//! Invariant: kubelet takes ABORTED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED,
//! UNAVAILABLE and CANCELLED for "something may be left, I shall call again",
//! and every other code for "nothing is there" (its `isFinalError`). So a code
//! of the second kind is only for errors that left nothing behind.

use tonic::{Code, Status};

use crate::error::{Error, chain};

pub(crate) fn code(error: &Error) -> Code {
    match error {
        Error::MissingField { .. } | Error::InvalidField { .. } | Error::UnknownParameter { .. } => {
            Code::InvalidArgument
        }
        Error::UnknownVolume { .. } | Error::NotAtPath { .. } => Code::NotFound,
        Error::ExistsOtherwise { .. } | Error::StagedOtherwise { .. } | Error::PublishedOtherwise { .. } => {
            Code::AlreadyExists
        }
        Error::NotStaged { .. }
        | Error::StagedElsewhere { .. }
        | Error::StillPublished { .. }
        | Error::StillStaged { .. }
        | Error::SecondTarget { .. }
        | Error::UnusablePath { .. }
        | Error::ForeignMount { .. }
        | Error::Unready { .. } => Code::FailedPrecondition,
        Error::LargerThanPool { .. } => Code::OutOfRange,
        Error::PoolFull { .. } | Error::OutOfTopology { .. } => Code::ResourceExhausted,
        Error::Pending { .. }
        | Error::Abandoned { .. }
        | Error::BeingDeleted { .. }
        | Error::Busy { .. }
        | Error::DaemonLives { .. }
        | Error::Panicked { .. }
        | Error::Uncleared { .. }
        | Error::JournalUnreadable { .. }
        | Error::Rollback { .. } => Code::Aborted,
        Error::Deadline { .. } | Error::NobodyDialled { .. } => Code::DeadlineExceeded,
        Error::Launch { .. }
        | Error::DaemonEnded { .. }
        | Error::DaemonRefused { .. }
        | Error::HandOver { .. }
        | Error::Kernel { .. } => Code::Internal,
    }
}

/// The reply: the code, and the whole chain of causes as its message. Details
/// stay empty (CSI spec, "Error scheme").
pub(crate) fn status(error: &Error) -> Status {
    Status::new(code(error), chain(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_whose_rollback_failed_is_never_final() {
        let left_behind = Error::Rollback {
            cause: Box::new(Error::MissingField { field: "a" }),
            rollback: Box::new(Error::MissingField { field: "b" }),
        };
        assert_eq!(code(&left_behind), Code::Aborted);
        assert_eq!(status(&left_behind).message(), "a is required; and rolling back: b is required");
    }
}
