//! The processes that serve volumes: their start, the hand-over, requests to them, and their end.

pub(crate) mod control;
pub(crate) mod dial;
pub(crate) mod handover;
pub(crate) mod keeper;
pub(crate) mod launcher;
pub(crate) mod notes;
pub(crate) mod process;
pub(crate) mod returned;
pub(crate) mod untrusted_text;
pub(crate) mod waits;
pub(crate) mod warm;
pub(crate) mod watch;
