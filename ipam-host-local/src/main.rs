//! CNI IPAM plugin `host-local`.

use std::process::ExitCode;

use cni_plugin::Plugin;

fn main() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: "host-local",
        version: env!("CARGO_PKG_VERSION"),
        add: ipam_host_local::add,
        del: ipam_host_local::del,
        check: Some(ipam_host_local::check),
        status: None,
        gc: None,
    })
}
