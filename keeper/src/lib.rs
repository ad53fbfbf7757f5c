//! Holds descriptors of volumes in a process that does nothing else, so that a volume's daemon can
//! be killed and a successor can continue its FUSE connection.
//!
//! - [`wire`]: the packets. It does no I/O.
//! - [`server`]: the keeper, which `hawser-keeper` runs. `held` is what it holds, [`descriptors`] what
//!   it accepts.
//! - [`client`] for the driver, [`daemon`] for a volume's daemon.
//!
//! Invariant: the keeper waits for no peer and no file system, and opens no path once it serves.

pub mod client;
mod closer;
pub mod config;
pub mod daemon;
pub mod descriptors;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod held;
mod log;
mod packets;
pub mod server;
mod start;
mod store;
pub mod wire;

pub use error::Error;
pub use log::{Level, Log};
pub use start::StartError;
pub use store::Inherited;
