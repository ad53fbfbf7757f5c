//! `hawser-kubelet exec` and `port-forward`, from the command to the container and back.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Stdio};

use anyhow::ensure;
use tests::manifests::Pod;
use tests::node::TIMEOUT;
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually};

/// A node with the pod `web`, which serves its /etc.
fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    let web = Pod::new("web", &["serve", "[::]:80", "/etc"]);
    node.put_manifest("web.yaml", &web.yaml()).expect("put");
    node.wait_for_log("web", &["serving"]).expect("it listens");
    (node, idle)
}

/// The exit code of a command, and what it said on stderr.
fn failure(node: &Node<'_>, words: &[&str]) -> (Option<i32>, String) {
    let output = node.client_output(words).expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

fn wait_for_programs(node: &Node<'_>, number: usize) {
    let seen = eventually("programs of pods", TIMEOUT, || {
        let seen = node.processes("demo-app")?.len();
        ensure!(seen == number, "{seen} programs run");
        Ok(())
    });
    seen.expect("as many as there should be");
}

#[test]
fn a_program_runs_in_a_container_as_if_it_ran_here() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let print = ["exec", "web", "--", "/demo-app", "print", "good day"];
    assert_eq!(node.client(&print).expect("exec"), "good day\n");
    let (code, said) = failure(&node, &["exec", "pod/web", "--", "/demo-app", "exit", "7"]);
    assert_eq!((code, said.as_str()), (Some(7), "command terminated with exit code 7\n"));
    let (code, said) = failure(&node, &["exec", "web", "--", "/missing"]);
    assert_eq!(code, Some(1));
    assert!(
        said.starts_with("error: ") && said.contains("\"/missing\": no such file or directory"),
        "{said}"
    );
    let (_, said) = failure(&node, &["exec", "absent", "--", "/demo-app"]);
    assert_eq!(said, "Error from server (NotFound): pods \"absent\" not found in namespace \"default\"\n");
    let (_, said) = failure(&node, &["exec", "web", "-c", "other", "--", "/demo-app"]);
    assert!(said.contains("container other is not valid for pod web"), "{said}");

    // stdin, whole and to its end.
    let sent: Vec<u8> = (0..400_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut copy = node.client_command(&["exec", "-i", "web", "--", "/demo-app", "copy"]).expect("a command");
    let mut copy = copy.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let (mut stdin, mut stdout) = (copy.stdin.take().expect("piped"), copy.stdout.take().expect("piped"));
    let mut received = Vec::new();
    std::thread::scope(|scope| {
        let sent = &sent;
        scope.spawn(move || stdin.write_all(sent).expect("the program reads"));
        stdout.read_to_end(&mut received).expect("the program writes");
    });
    assert!(received == sent, "{} bytes", received.len());
    assert!(copy.wait().expect("it ends").success());

    // A command that is killed takes its program along.
    let mut sleep =
        node.client_command(&["exec", "web", "--", "/demo-app", "sleep", "forever"]).expect("a command");
    let mut sleep = sleep.spawn().expect("it starts");
    wait_for_programs(&node, 2);
    sleep.kill().expect("it is killed");
    sleep.wait().expect("it ends");
    wait_for_programs(&node, 1);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_port_of_a_pod_is_reached_from_here() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let (mut command, _printed, address) = forward(&node, ":80");
    for _ in 0..3 {
        let answer = get(&address);
        assert!(answer.starts_with("HTTP/1.0 200 ") && answer.contains("127.0.0.1\tlocalhost"), "{answer}");
    }
    command.kill().expect("it is killed");
    command.wait().expect("it ends");
    TcpStream::connect(&address).expect_err("the command listens no more");

    // Nothing listens there: the command goes on, and says so.
    let (mut command, _printed, address) = forward(&node, ":81");
    let mut answer = Vec::new();
    TcpStream::connect(&address).expect("the command listens").read_to_end(&mut answer).expect("an end");
    assert_eq!(answer, b"");
    let mut said = String::new();
    let stderr = command.stderr.take().expect("piped");
    BufReader::new(stderr).read_line(&mut said).expect("it says so");
    assert!(said.starts_with("error: port 81 of the pod: ") && said.contains("Connection refused"), "{said}");
    command.kill().expect("it is killed");
    command.wait().expect("it ends");
    let (code, said) = failure(&node, &["port-forward", "absent", "80"]);
    assert_eq!(code, Some(1));
    assert_eq!(said, "Error from server (NotFound): pods \"absent\" not found in namespace \"default\"\n");
    node.finish(&idle).expect("nothing is left");
}

/// The command, what it prints, and the address at which it listens.
fn forward(node: &Node<'_>, ports: &str) -> (Child, BufReader<ChildStdout>, String) {
    let mut command = node.client_command(&["port-forward", "web", ports]).expect("a command");
    let mut command = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let (mut line, mut printed) = (String::new(), BufReader::new(command.stdout.take().expect("piped")));
    printed.read_line(&mut line).expect("a line");
    let address = line.strip_prefix("Forwarding from ").and_then(|rest| rest.split(' ').next());
    let address = address.unwrap_or_else(|| panic!("{line:?}")).to_owned();
    (command, printed, address)
}

fn get(address: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the command listens");
    stream.write_all(b"GET /hosts HTTP/1.0\r\n\r\n").expect("written");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer, and its end");
    answer
}
