//! Where a program must not start: one clear line, and a failure.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::Output;

use tests::{Node, NodeOptions, Sandbox, binaries};

fn single_line(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
}

#[test]
fn whoever_is_not_root_is_told_so_in_one_line() {
    let sandbox = Sandbox::new();
    let node = Node::prepare(&sandbox, NodeOptions::default()).unwrap();
    let program = sandbox.path("hawser-kubelet");
    fs::copy(binaries::find("hawser-kubelet").unwrap(), &program).unwrap();
    let template = node.kubelet_command().unwrap();
    let mut command = sandbox.command(&program);
    let output = command.args(template.get_args()).uid(65534).gid(65534).output().unwrap();
    assert!(single_line(&output).contains("root"), "{output:?}");
}

#[test]
fn a_second_kubelet_on_one_root_directory_is_refused_in_one_line() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).unwrap();
    let idle = node.leak_check().unwrap();
    let output = node.kubelet_command().unwrap().output().unwrap();
    let line = single_line(&output);
    assert!(line.contains(&node.root_dir().display().to_string()), "{line}");
    node.client(&["get", "pods"]).expect("the first goes on");
    node.finish(&idle).unwrap();
}
