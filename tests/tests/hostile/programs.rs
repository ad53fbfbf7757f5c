//! The host's own program in the hands of a container: an image's script may name
//! it as its interpreter (the class of CVE-2019-5736).

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::statvfs::{FsFlags, fstatvfs};
use tests::attacker::Attack;
use tests::image::{Program, write_archive};
use tests::node::text;
use tests::{Node, Sandbox, binaries};

use crate::node;

/// Interpreters of scripts: the program that is about to become the container, and
/// every descriptor that it has open then.
const INTERPRETERS: [&str; 12] =
    ["exe", "fd/3", "fd/4", "fd/5", "fd/6", "fd/7", "fd/8", "fd/9", "fd/10", "fd/11", "fd/12", "fd/13"];

/// A pod `name` of one container for each interpreter, whose image holds nothing but its script.
fn pod_of_scripts(node: &Node<'_>, name: &str, interpreters: &[(String, String)]) -> String {
    let mut yaml = format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: default}}
spec:
  restartPolicy: Never
  containers:
"
    );
    for (name, interpreter) in interpreters {
        let image = format!("hawser.dev/{name}:test");
        // Under a dot-name, where the node looks for no image.
        let script = node.sandbox().path(&format!("i/.{name}"));
        std::fs::write(&script, format!("#!/proc/self/{interpreter}\n")).expect("write the script");
        let program = Program { image: &image, binary: &script, path: "script", directories: &["tmp"] };
        write_archive(&program, &node.sandbox().path(&format!("i/{name}.tar"))).expect("write the image");
        yaml += &format!("    - {{name: {name}, image: {image}, imagePullPolicy: IfNotPresent}}\n");
    }
    yaml
}

/// Why each container of an ended pod has ended.
fn reasons(pod: &serde_json::Value) -> Vec<(String, Option<String>)> {
    let containers = pod["status"]["containerStatuses"].as_array().expect("the status of each container");
    let of = |container: &serde_json::Value| {
        // The state, or the last one while the kubelet waits to say so again.
        let ended = [&container["state"], &container["lastState"]].map(|state| &state["terminated"]);
        let reason = ended.iter().find(|ended| !ended.is_null()).map(|ended| text(&ended["reason"]));
        (text(&container["name"]).to_owned(), reason.map(|reason| reason.to_owned()))
    };
    containers.iter().map(of).collect()
}

/// What a write to a file changes.
fn state(program: &Path) -> (u64, i64, i64, u32) {
    let metadata = std::fs::metadata(program).expect("the program is there");
    (metadata.len(), metadata.ctime(), metadata.ctime_nsec(), metadata.mode())
}

#[test]
fn a_script_whose_interpreter_is_the_runtime_ends_and_leaves_the_hosts_program_as_it_is() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let program = binaries::find("hawser-kubelet").unwrap();
    let before = state(&program);
    let named = INTERPRETERS.map(|interpreter| (interpreter.replace('/', ""), interpreter.to_owned()));
    node.put_manifest("scripts.yaml", &pod_of_scripts(&node, "scripts", &named)).unwrap();
    let pod = node.wait_for_phase("scripts", "Failed").unwrap();
    // The kernel did start the host's program in there, with the script as its argument.
    let log = node.client(&["logs", "scripts", "-c", "exe"]).unwrap();
    assert!(log.contains("unrecognized subcommand '/script'"), "{log}");
    // No descriptor leads to a program at all.
    for (name, reason) in reasons(&pod) {
        assert!(name == "exe" || reason.as_deref() == Some("StartError"), "{name}: {reason:?}");
    }
    assert_eq!(state(&program), before);
    node.finish(&idle).unwrap();
}

/// The interpreter is looked up before close-on-exec closes anything.
#[test]
fn a_script_whose_interpreter_is_above_a_directory_of_the_host_does_not_start() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let program = binaries::find("hawser-kubelet").unwrap();
    let program = program.strip_prefix("/").expect("an absolute path").display();
    for number in 3..=16 {
        let name = format!("above{number}");
        let interpreter = format!("fd/{number}/{}{program}", "../".repeat(16));
        // Each in a pod of its own, whose descriptors have small numbers.
        let yaml = pod_of_scripts(&node, &name, &[(name.clone(), interpreter)]);
        node.put_manifest(&format!("{name}.yaml"), &yaml).unwrap();
        let pod = node.wait_for_phase(&name, "Failed").unwrap();
        assert_eq!(reasons(&pod), [(name, Some("StartError".to_owned()))]);
    }
    node.finish(&idle).unwrap();
}

#[test]
fn who_holds_the_program_of_a_shim_cannot_change_it_and_all_shims_share_it() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    for name in ["one", "two"] {
        node.put_manifest(&format!("{name}.yaml"), &Attack::new(name, "echo runs; sleep 1000").yaml())
            .unwrap();
        node.wait_for_log(name, &["runs"]).unwrap();
    }
    let processes = sandbox.tag().processes().unwrap();
    let shims: Vec<i32> =
        processes.iter().filter(|p| p.command_line.starts_with("hawser-shim ")).map(|p| p.pid).collect();
    assert_eq!(shims.len(), 2, "{processes:?}");
    let host = std::fs::metadata(binaries::find("hawser-kubelet").unwrap()).unwrap();
    for pid in shims {
        // As a container would, that sees a shim in its /proc for an instant.
        let held = File::open(format!("/proc/{pid}/exe")).unwrap();
        let found = held.metadata().unwrap();
        assert_eq!((found.dev(), found.ino()), (host.dev(), host.ino()), "one file, and its pages, for all");
        assert!(fstatvfs(&held).unwrap().flags().contains(FsFlags::ST_RDONLY));
        let denied =
            |result: std::io::Result<()>| Errno::from_raw(result.unwrap_err().raw_os_error().unwrap());
        // The same mode again.
        assert_eq!(denied(held.set_permissions(found.permissions())), Errno::EROFS);
        let again = format!("/proc/self/fd/{}", held.as_raw_fd());
        let opened = denied(OpenOptions::new().append(true).open(again).map(drop));
        // While it runs anywhere, the kernel sees that first.
        assert!([Errno::EROFS, Errno::ETXTBSY].contains(&opened), "{opened}");
    }
    node.finish(&idle).unwrap();
}
