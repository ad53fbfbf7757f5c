//! kubectl's commands against a node with real containers: `wait`, `top`, `logs`, `cp` and others.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use serde_json::Value;
use tests::attacker::{self, Attack};
use tests::manifests::Pod;
use tests::node::TIMEOUT;
use tests::{LeakCheck, Node, NodeOptions, Sandbox};

/// The exit code of a command, and what it said on stderr.
fn failure(node: &Node<'_>, words: &[&str]) -> (Option<i32>, String) {
    let output = node.client_output(words).expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A pod whose container has busybox's programs where the image's PATH leads.
const TOOLS: &str = "/busybox --install -s / && echo installed && exec sleep 3600";

/// A node on which this pod, whose command is [`TOOLS`], has its programs.
fn node_with<'a>(sandbox: &'a Sandbox, tools: &Attack<'_>) -> (Node<'a>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    attacker::install(&node).expect("an image");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_manifest("tools.yaml", &tools.yaml()).expect("put");
    node.wait_for_log("tools", &["installed"]).expect("it has its programs");
    (node, idle)
}

#[test]
fn pods_are_applied_watched_and_deleted_from_the_keyboard() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    let labelled = |name: &str, args: &[&str]| {
        Pod::new(name, args).yaml().replace("namespace: default", "namespace: default, labels: {app: web}")
    };
    let file = sandbox.path("pods.yaml");
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n";
    let text = [
        labelled("one", &["serve", "[::]:80", "/etc"]),
        deployment.to_owned(),
        labelled("two", &["serve", "[::]:80", "/etc"]),
    ];
    fs::write(&file, text.join("---\n")).expect("written");
    let manifests = file.display().to_string();
    let output = node.client_output(&["apply", "-f", &manifests]).expect("it runs");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "pod/one created\npod/two created\n");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("kind: Unsupported value: \"Deployment\": nothing here makes pods"), "{said}");

    let waited = node.client(&["wait", "pods", "-l", "app=web", "--for=condition=Ready"]).expect("ready");
    let mut lines: Vec<&str> = waited.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["pod/one condition met", "pod/two condition met"]);
    for pod in ["one", "two"] {
        node.wait_for_log(pod, &["serving"]).expect("it serves");
    }
    let prefixed = node.client(&["logs", "-l", "app in (web)", "--prefix", "--tail", "1"]).expect("logs");
    let lines: Vec<&str> = prefixed.lines().collect();
    assert!(
        matches!(lines.as_slice(), [one, two]
            if one.starts_with("[pod/one/business] ") && two.starts_with("[pod/two/business] ")),
        "{prefixed}"
    );
    let running = [
        "get",
        "pods",
        "--field-selector",
        "status.phase=Running",
        "-o",
        "jsonpath={.items[*].metadata.name}",
    ];
    assert_eq!(node.client(&running).expect("a list"), "one two");
    let events = node.client(&["events", "--for", "pod/one", "--types", "Normal"]).expect("events");
    assert!(events.contains("Started") && !events.contains("Pod/two"), "{events}");

    let top = node.client(&["top", "pods", "--containers", "--no-headers"]).expect("figures");
    let rows: Vec<Vec<&str>> = top.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows.len(), 2, "{top}");
    assert_eq!(rows[0][..2], ["one", "business"], "{top}");
    assert!(rows[0][2].ends_with('m') && rows[0][3].ends_with("Mi"), "{top}");
    let top = node.client(&["top", "node"]).expect("figures");
    let cells: Vec<&str> = top.lines().nth(1).expect("a row").split_whitespace().collect();
    assert!(cells.len() == 5 && cells[2].ends_with('%') && cells[4].ends_with('%'), "{top}");
    assert_ne!(cells[3], "0Mi", "{top}");

    let deleted = node.client(&["delete", "pods", "-l", "app=web", "--now"]).expect("deleted");
    assert_eq!(deleted, "pod \"one\" deleted\npod \"two\" deleted\n");
    assert_eq!(node.list("pods").expect("a list"), Vec::<Value>::new());
    fs::remove_file(&file).expect("removed");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_watch_ends_with_the_kubelet() {
    let sandbox = Sandbox::new();
    let mut node = Node::start(&sandbox, NodeOptions::default()).expect("the node starts");
    let mut command = node.client_command(&["get", "pods", "-w"]).expect("a command");
    let mut watch = command.stdout(std::process::Stdio::piped()).spawn().expect("it starts");
    node.put_manifest("web.yaml", &Pod::new("web", &["serve", "[::]:80", "/etc"]).yaml()).expect("put");
    node.wait_for_log("web", &["serving"]).expect("it serves");
    node.kubelet().expect("it runs").stop(TIMEOUT).expect("it ends in time");
    assert!(watch.wait().expect("it ends").success());
    let mut table = String::new();
    std::io::Read::read_to_string(&mut watch.stdout.take().expect("piped"), &mut table).expect("text");
    assert!(table.starts_with("NAME ") && table.contains("Running"), "{table}");
    node.start_kubelet().expect("it starts");
    node.remove_all_manifests().expect("removed");
    node.wait_for_no_pods().expect("they end");
    node.stop().expect("it stops");
}

#[test]
fn files_are_copied_both_ways_and_never_beside_their_target() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with(&sandbox, &Attack::new("tools", TOOLS));
    node.put_manifest("web.yaml", &Pod::new("web", &["serve", "[::]:80", "/etc"]).yaml()).expect("put");
    node.wait_for_log("web", &["serving"]).expect("it serves");

    let here = sandbox.path("here");
    fs::create_dir_all(here.join("sub")).expect("made");
    let large: Vec<u8> = (0..300_000_u32).flat_map(u32::to_le_bytes).collect();
    fs::write(here.join("large"), &large).expect("written");
    fs::write(here.join("sub/script"), "#!/bin/sh\n").expect("written");
    fs::set_permissions(here.join("sub/script"), fs::Permissions::from_mode(0o755)).expect("set");
    let path = |name: &str| sandbox.path(name).display().to_string();
    node.client(&["cp", &path("here"), "tools:/data/there"]).expect("copied");
    // Into a directory that is there, under its own name.
    node.client(&["cp", &path("here/large"), "default/tools:/tmp", "-c", "attack"]).expect("copied");
    let seen =
        node.client(&["exec", "tools", "--", "cmp", "/data/there/large", "/tmp/large"]).expect("equal");
    assert_eq!(seen, "");
    node.client(&["exec", "tools", "--", "test", "-x", "/data/there/sub/script"]).expect("its mode");

    node.client(&["cp", "tools:/data/there", &path("back")]).expect("copied");
    assert!(fs::read(sandbox.path("back/large")).expect("read") == large);
    let mode = fs::metadata(sandbox.path("back/sub/script")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    fs::create_dir(sandbox.path("there")).expect("made");
    node.client(&["cp", "tools:/data/there", &path("there")]).expect("its content, as kubectl does it");
    assert!(fs::read(sandbox.path("there/large")).expect("read") == large);
    node.client(&["cp", "tools:/tmp/large", &path("here/sub")]).expect("copied");
    assert!(fs::read(sandbox.path("here/sub/large")).expect("read") == large);

    let (code, said) = failure(&node, &["cp", "tools:/none", &path("none")]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("/none"), "{said}");
    let (code, said) = failure(&node, &["cp", "web:/etc/hosts", &path("hosts")]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("container business of pod web cannot run tar, which cp needs there"), "{said}");
    let (_, said) = failure(&node, &["cp", &path("none"), "tools:/x"]);
    assert!(said.contains("doesn't exist in local filesystem"), "{said}");

    // A tar of the container's own that writes what its owner likes.
    let mut archive = tar::Builder::new(Vec::new());
    for (name, kind, content, link) in [
        ("d/link", tar::EntryType::Symlink, "", path("outside")),
        ("d/link/x", tar::EntryType::Regular, "x", String::new()),
        ("d/../../outside/y", tar::EntryType::Regular, "y", String::new()),
    ] {
        let mut header = tar::Header::new_gnu();
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.set_cksum();
        archive.append(&header, content.as_bytes()).expect("added");
    }
    fs::write(sandbox.path("evil.tar"), archive.into_inner().expect("written")).expect("written");
    fs::write(sandbox.path("tar"), "#!/sh\ncat /data/evil.tar\n").expect("written");
    fs::set_permissions(sandbox.path("tar"), fs::Permissions::from_mode(0o755)).expect("set");
    fs::create_dir(sandbox.path("outside")).expect("made");
    fs::create_dir(sandbox.path("target")).expect("made");
    symlink(sandbox.path("outside"), sandbox.path("target/old")).expect("made");
    node.client(&["cp", &path("evil.tar"), "tools:/data/evil.tar"]).expect("copied");
    node.client(&["cp", &path("tar"), "tools:/data/tar"]).expect("copied");
    let swap = ["exec", "tools", "--", "sh", "-c", "rm /tar && cp /data/tar /tar"];
    node.client(&swap).expect("its own tar");
    let (code, said) = failure(&node, &["cp", "tools:/d", &path("target/d")]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("tar contents corrupted: \"d/../../outside/y\" leads out"), "{said}");
    assert_eq!(fs::read_dir(sandbox.path("outside")).expect("read").count(), 0);
    for place in ["back", "here", "there", "target", "outside"] {
        fs::remove_dir_all(sandbox.path(place)).expect("removed");
    }
    for place in ["evil.tar", "tar"] {
        fs::remove_file(sandbox.path(place)).expect("removed");
    }
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_copy_into_a_full_volume_ends_with_the_exit_code_of_tar() {
    let sandbox = Sandbox::new();
    let tools = Attack::new("tools", TOOLS)
        .with_pod_fields("volumes: [{name: small, emptyDir: {medium: Memory, sizeLimit: 64Ki}}]")
        .with_container_fields("volumeMounts: [{name: small, mountPath: /small}]");
    let (node, idle) = node_with(&sandbox, &tools);
    let large = sandbox.path("large");
    fs::write(&large, vec![7; 1_200_000]).expect("written");
    let (code, said) = failure(&node, &["cp", &large.display().to_string(), "tools:/small/large"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("No space left on device"), "{said}");
    assert!(said.ends_with("command terminated with exit code 1\n"), "{said}");
    fs::remove_file(large).expect("removed");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_program_has_a_terminal_only_if_the_commands_input_is_one() {
    let sandbox = Sandbox::new();
    let (node, idle) = node_with(&sandbox, &Attack::new("tools", TOOLS));
    // The command's input is /dev/null, whose end ends the program too.
    let program = "tty; cat; exit 5";
    let output = node.client_output(&["exec", "-it", "tools", "--", "sh", "-c", program]).expect("it runs");
    assert_eq!(output.status.code(), Some(5), "{output:?}");
    assert_eq!(output.stdout, b"not a tty\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("Unable to use a TTY"), "{output:?}");
    node.finish(&idle).expect("nothing is left");
}
