//! CNI plugin `portmap`: maps ports of the host to the container.
//!
//! `config`, `conditions`, `mapping`, and both backends' `rules` and `plan` decide; `nftables`,
//! `iptables`, `localnet` and `flows` change the kernel's state; `add`, `del`, `check`, `status`
//! and `gc` are the verbs.

#![cfg_attr(not(test), no_main)]

mod add;
mod check;
mod conditions;
mod config;
mod del;
#[cfg(test)]
mod documented_keys;
mod error;
mod family;
mod flows;
mod gc;
mod iptables;
mod localnet;
mod mapping;
mod nftables;
mod status;

use std::process::ExitCode;

use cni_plugin::Plugin;

/// The plugin's type in configurations.
const NAME: &str = "portmap";

linux::bare_main!(serve);

fn serve() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: NAME,
        version: env!("CARGO_PKG_VERSION"),
        add: |call| Ok(add::add(call)?),
        del: |call| Ok(del::del(call)?),
        check: Some(|call| Ok(check::check(call)?)),
        status: Some(|call| Ok(status::status(call)?)),
        gc: Some(|call| Ok(gc::gc(call)?)),
    })
}
