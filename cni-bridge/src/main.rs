//! CNI plugin `bridge`: joins a container to a Linux bridge by a veth pair.
//!
//! `config` and `plan` decide, `attach`, `gateway` and `undo` touch the kernel,
//! `add` and `del` are the verbs.

mod add;
mod attach;
mod bridge_lock;
mod config;
mod del;
mod error;
mod gateway;
mod plan;
mod undo;

use std::process::ExitCode;

use cni_plugin::{CniError, Plugin};

use crate::error::Error;

fn main() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: "bridge",
        version: env!("CARGO_PKG_VERSION"),
        add: |call| block_on(add::add(call)),
        del: |call| block_on(del::del(call)),
        check: None,
        status: None,
        gc: None,
    })
}

/// Netlink sockets need an event loop; one thread is enough for one call.
fn block_on<T>(verb: impl Future<Output = Result<T, Error>>) -> Result<T, CniError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .map_err(|e| CniError::internal(format_args!("start event loop: {e}")))?;
    runtime.block_on(verb).map_err(CniError::from)
}
