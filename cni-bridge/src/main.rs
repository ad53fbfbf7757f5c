//! CNI plugin `bridge`: joins a container to a Linux bridge by a veth pair.
//!
//! `config` and `plan` decide, `attach`, `gateway` and `undo` touch the kernel,
//! `add` and `del` are the verbs.

#![cfg_attr(not(test), no_main)]

mod add;
mod attach;
mod bridge_lock;
mod config;
mod container;
mod del;
mod error;
mod gateway;
mod plan;
mod random;
mod rules;
mod undo;
mod vlan;

use std::process::ExitCode;

use cni_plugin::Plugin;

linux::bare_main!(serve);

fn serve() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: "bridge",
        version: env!("CARGO_PKG_VERSION"),
        add: |call| Ok(add::add(call)?),
        del: |call| Ok(del::del(call)?),
        check: None,
        status: None,
        gc: None,
    })
}
