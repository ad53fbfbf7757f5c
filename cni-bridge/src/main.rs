//! CNI plugin `bridge`: joins a container to a Linux bridge by a veth pair.
//!
//! `add`, `del`, `check`, `status` and `gc` are the verbs. `keys` reads; `config`, `vlan`, `plan`,
//! `masquerade`, `spoof` and `iptables_chain` decide; `attach`, `container`, `gateway`, `rules`,
//! `legacy` and `undo` change the kernel's state.

#![cfg_attr(not(test), no_main)]

mod add;
mod attach;
mod bridge_lock;
mod check;
mod config;
mod container;
mod del;
#[cfg(test)]
mod documented_keys;
mod error;
mod flows;
mod gateway;
mod gc;
mod introduction;
mod iptables_chain;
mod keys;
mod legacy;
mod masquerade;
mod names;
mod plan;
mod random;
mod reports;
mod rules;
mod spoof;
mod status;
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
        check: Some(|call| Ok(check::check(call)?)),
        status: Some(|call| Ok(status::status(call)?)),
        gc: Some(|call| Ok(gc::gc(call)?)),
    })
}
