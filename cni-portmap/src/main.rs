//! CNI plugin `portmap`: ports of the host lead to the container.

use std::process::ExitCode;

use cni_plugin::{CniError, Plugin};

fn main() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: "portmap",
        version: env!("CARGO_PKG_VERSION"),
        add: |_| Err(CniError::internal("must be called as chained plugin")),
        del: |_| Ok(()),
        check: None,
        status: None,
        gc: None,
    })
}
