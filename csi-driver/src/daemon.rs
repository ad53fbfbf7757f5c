//! The processes that serve volumes: how they are started, what they are given and asked, how their end is seen.

pub(crate) mod control;
pub(crate) mod dial;
pub(crate) mod handover;
pub(crate) mod keeper;
pub(crate) mod launcher;
pub(crate) mod notes;
pub(crate) mod process;
pub(crate) mod waits;
pub(crate) mod watch;
pub(crate) mod words;
