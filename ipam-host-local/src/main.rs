//! CNI IPAM plugin `host-local`.

#![cfg_attr(not(test), no_main)]

use std::process::ExitCode;

use cni_plugin::Plugin;

linux::bare_main!(serve);

fn serve() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: "host-local",
        version: env!("CARGO_PKG_VERSION"),
        add: ipam_host_local::add,
        del: ipam_host_local::del,
        check: Some(ipam_host_local::check),
        status: Some(ipam_host_local::status),
        gc: Some(ipam_host_local::gc),
    })
}
