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
        Error::UnknownVolume { .. }
        | Error::UnknownSnapshot { .. }
        | Error::UnknownNode { .. }
        | Error::NotAtPath { .. } => Code::NotFound,
        Error::ExistsOtherwise { .. }
        | Error::SnapshotOtherwise { .. }
        | Error::StagedOtherwise { .. }
        | Error::PublishedOtherwise { .. }
        | Error::AttachedOtherwise { .. } => Code::AlreadyExists,
        Error::NotStaged { .. }
        | Error::StagedElsewhere { .. }
        | Error::ServesAnother { .. }
        | Error::StillPublished { .. }
        | Error::StillStaged { .. }
        | Error::SecondTarget { .. }
        | Error::UnusablePath { .. }
        | Error::ForeignMount { .. }
        | Error::AttachedElsewhere { .. }
        | Error::NotAttached { .. }
        | Error::StillAttached { .. }
        | Error::NoReflink { .. }
        | Error::NoControl { .. }
        | Error::DataOfNobody { .. }
        | Error::Unready { .. } => Code::FailedPrecondition,
        Error::LargerThanPool { .. } | Error::SourceLarger { .. } | Error::BeyondSize { .. } => {
            Code::OutOfRange
        }
        Error::PoolFull { .. }
        | Error::PoolOutOfInodes { .. }
        | Error::OutOfTopology { .. }
        | Error::TooManyVolumes { .. } => Code::ResourceExhausted,
        Error::Pending { .. }
        | Error::Crowded { .. }
        | Error::Abandoned { .. }
        | Error::BeingDeleted { .. }
        | Error::BadToken { .. }
        | Error::Copying { .. }
        | Error::LeaseLost { .. }
        | Error::ControlLost { .. }
        | Error::Unfilled { .. }
        | Error::Busy { .. }
        | Error::PathChanged { .. }
        | Error::DaemonLives { .. }
        | Error::Panicked { .. }
        | Error::Uncleared { .. }
        | Error::JournalUnreadable { .. }
        | Error::Rollback { .. } => Code::Aborted,
        Error::PoolAway { .. } => Code::Unavailable,
        Error::Deadline { .. } | Error::NobodyDialled { .. } | Error::Silent { .. } => Code::DeadlineExceeded,
        Error::Launch { .. }
        | Error::DaemonEnded { .. }
        | Error::DaemonRefused { .. }
        | Error::DaemonVersion { .. }
        | Error::HandOver { .. }
        | Error::ControlRefused { .. }
        | Error::SnapshotFailed { .. }
        | Error::Kernel { .. } => Code::Internal,
    }
}

/// A status travels in a header, and a client ends its whole connection for headers of
/// more than 16 KiB. Percent-encoding makes three bytes of one.
const MAX_MESSAGE_BYTES: usize = 4096;

/// The reply: the code, and the chain of causes as its message. Details stay empty
/// (CSI spec, "Error scheme").
pub(crate) fn status(error: &Error) -> Status {
    Status::new(code(error), trace::shortened(chain(error), MAX_MESSAGE_BYTES))
}

#[cfg(test)]
mod tests;
