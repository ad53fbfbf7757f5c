//! The parts of CNI that every plugin executable shares: the invocation (environment and
//! configuration), the verbs, result versions, errors, and delegation to other plugins by exec.
//!
//! Invariant: this crate does not touch the kernel's network. A plugin is a [`Plugin`] value with
//! one function for each verb, and [`run`] implements the protocol:
//!
//! ```no_run
//! fn main() -> std::process::ExitCode {
//!     cni_plugin::run(&cni_plugin::Plugin {
//!         name: "example",
//!         version: env!("CARGO_PKG_VERSION"),
//!         add: |call| Ok(cni_plugin::CniResult::default()),
//!         del: |call| Ok(()),
//!         check: None,
//!         status: None,
//!         gc: None,
//!     })
//! }
//! ```

pub mod args;
pub mod conf;
pub mod delegate;
mod error;
mod gc;
mod hash;
mod invocation;
mod json;
mod result;
mod skel;
mod version;

pub use conf::NetConf;
pub use error::{CniError, code};
pub use gc::ValidAttachments;
pub use hash::sha512_hex;
pub use invocation::{Command, Environment, Invocation};
pub use result::{CniResult, Dns, Interface, IpConfig, Route};
pub use skel::{Plugin, Verb, run, warn};
pub use version::Version;
