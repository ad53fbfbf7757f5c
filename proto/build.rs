//! Generates the Rust side of the contracts whose features are on. protox is a
//! protobuf compiler in Rust: no `protoc` on the machine.

use std::error::Error;
use std::path::Path;

const CONTRACTS: &[(&str, &[&str])] = &[
    ("CSI", &["csi/v1/identity.proto", "csi/v1/controller.proto", "csi/v1/node.proto"]),
    ("REGISTRATION", &["registration/v1/registration.proto"]),
    ("CRI", &["cri/v1/runtime.proto"]),
    ("HEALTH", &["grpc/health/v1/health.proto"]),
    ("KUBELET", &["hawser/kubelet/v1/kubelet.proto"]),
    ("ADMIN", &["hawser/admin/v1/admin.proto"]),
    ("HANDOVER", &["hawser/handover/v1/handover.proto", "hawser/control/v1/control.proto"]),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=proto");
    for (feature, files) in CONTRACTS {
        if std::env::var_os(format!("CARGO_FEATURE_{feature}")).is_none() {
            continue;
        }
        let descriptors = protox::compile(files.iter().map(Path::new), [Path::new("proto")])?;
        let grpc = tonic_prost_build::configure().generate_default_stubs(true);
        match *feature {
            "HANDOVER" => prost_build::Config::new().compile_fds(descriptors)?,
            // Printed as JSON too.
            "ADMIN" => grpc.message_attribute(".", "#[derive(serde::Serialize)]").compile_fds(descriptors)?,
            _ => grpc.compile_fds(descriptors)?,
        }
    }
    Ok(())
}
