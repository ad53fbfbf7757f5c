//! The only table from errors to gRPC codes.
//!
//! Invariant: for kubelet, ABORTED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE and
//! CANCELLED mean "something may be left, call again". Every other code means "nothing is left"
//! (kubelet's `isFinalError`). So another code is only for errors that left nothing behind.

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
        | Error::NoKernelQuota { .. }
        | Error::NoPassthrough { .. }
        | Error::NoKeeper
        | Error::NoControl { .. }
        | Error::CannotStage { .. }
        | Error::NotWrittenBack { .. }
        | Error::DaemonCannot { .. }
        | Error::CannotUpgrade { .. }
        | Error::CannotPrepare { .. }
        | Error::UnknownData { .. }
        | Error::Unready { .. } => Code::FailedPrecondition,
        Error::LargerThanPool { .. } | Error::SourceLarger { .. } | Error::BeyondSize { .. } => {
            Code::OutOfRange
        }
        Error::PoolFull { .. }
        | Error::PoolOutOfInodes { .. }
        | Error::OutOfTopology { .. }
        | Error::NotOnThisNode { .. }
        | Error::TooManyVolumes { .. } => Code::ResourceExhausted,
        Error::Pending { .. }
        | Error::Crowded { .. }
        | Error::Abandoned { .. }
        | Error::Interrupted { .. }
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
        Error::Deadline { .. } | Error::DialTimeout { .. } | Error::Silent { .. } => Code::DeadlineExceeded,
        Error::Launch { .. }
        | Error::DaemonEnded { .. }
        | Error::DaemonRefused { .. }
        | Error::DaemonVersion { .. }
        | Error::HandOver { .. }
        | Error::WrongDescriptor { .. }
        | Error::ControlRefused { .. }
        | Error::SnapshotFailed { .. }
        | Error::Kernel { .. } => Code::Internal,
    }
}

/// A status is sent in a header, and a client closes the whole connection if headers exceed 16 KiB.
/// Percent-encoding triples a byte.
const MAX_MESSAGE_BYTES: usize = 4096;

/// The reply: the code, and the chain of causes as its message. The details stay empty (CSI spec,
/// "Error scheme").
pub(crate) fn status(error: &Error) -> Status {
    Status::new(code(error), trace::shortened(chain(error), MAX_MESSAGE_BYTES))
}

#[cfg(test)]
mod tests;
