//! Images that take the time of others.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tests::image::{Program, write_archive};
use tests::manifests::Pod;
use tests::{Node, NodeOptions, Sandbox, binaries, eventually};

const DEADLINE: Duration = Duration::from_secs(60);
/// Unpacked for long enough to be met.
const LARGE: u64 = 128 << 20;

/// The process that unpacks a layer of `archive`.
fn unpacker_of(archive: &Path) -> Option<Pid> {
    let archive = archive.display().to_string();
    let pids = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_it = |pid: &i32| {
        let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let arguments = String::from_utf8_lossy(&arguments);
        arguments.starts_with("hawser-unpack\0") && arguments.contains(&archive)
    };
    pids.filter(is_it).map(Pid::from_raw).next()
}

/// At the start of a node, before its other images are imported.
#[test]
fn an_image_that_is_unpacked_for_ever_keeps_no_pod_from_another_that_must_not_be_pulled() {
    let sandbox = Sandbox::new();
    let mut node = Node::prepare(&sandbox, NodeOptions::default()).unwrap();
    let file = sandbox.path("large");
    fs::File::create(&file).unwrap().set_len(LARGE).unwrap();
    let program = Program { image: "hawser.dev/slow:test", binary: &file, path: "large", directories: &[] };
    let slow = sandbox.path("i/slow.tar");
    write_archive(&program, &slow).unwrap();
    node.start_driver().unwrap();
    node.start_kubelet().unwrap();
    let unpacker = eventually("the image is being unpacked", DEADLINE, || {
        let unpacker = unpacker_of(&slow).context("no process")?;
        kill(unpacker, Signal::SIGSTOP).context("stop it")?;
        Ok(unpacker)
    })
    .unwrap();

    let binary = binaries::find("demo-app").unwrap();
    let program =
        Program { image: "hawser.dev/late:test", binary: &binary, path: "demo-app", directories: &["tmp"] };
    write_archive(&program, &sandbox.path("i/late.tar")).unwrap();
    let pod = Pod { image: program.image, ..Pod::new("program", &["print", "works"]) };
    let pod = pod.yaml().replace("IfNotPresent", "Never");
    node.put_manifest("program.yaml", &pod).unwrap();
    node.wait_for_phase("program", "Succeeded").unwrap();
    kill(unpacker, Signal::SIGCONT).expect("it is still being unpacked");
    node.stop().unwrap();
}
