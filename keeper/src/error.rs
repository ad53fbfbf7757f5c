//! Why a call to the keeper has no result.

use std::time::Duration;

use crate::wire::Refusal;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("connect to the keeper")]
    Connect {
        #[source]
        cause: linux::Error,
    },
    /// The keeper may do the request later.
    #[error("{op}: the keeper did not answer within {limit:?}")]
    TimedOut { op: &'static str, limit: Duration },
    /// It ended, or closed this connection for another one.
    #[error("{op}: the keeper closed the connection")]
    Closed { op: &'static str },
    /// Nothing has changed.
    #[error("{op}: the keeper refused: {refusal}")]
    Refused { op: &'static str, refusal: Refusal },
    /// Nothing has changed.
    #[error("{op}: the keeper has version {keepers} of the protocol, not {}", crate::wire::VERSION)]
    Version { op: &'static str, keepers: u16 },
    #[error("{op}: the keeper sent a packet that is not valid")]
    Invalid { op: &'static str },
    /// This process may not open as many.
    #[error("{op}: descriptors were lost: this process has too many open files")]
    TooManyDescriptors { op: &'static str },
    #[error("{op}: send to the keeper, or receive")]
    Socket {
        op: &'static str,
        #[source]
        cause: std::io::Error,
    },
    /// It would make the caller wait without a limit.
    #[error("not a non-blocking socket")]
    Blocking,
}
