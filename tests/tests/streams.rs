//! `hawser-kubelet exec`, `attach` and `port-forward`, from the command to the container and back.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Stdio};

use anyhow::ensure;
use linux::terminal::{Terminal, set_size};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::termios::{LocalModes, tcgetattr};
use tests::manifests::Pod;
use tests::node::TIMEOUT;
use tests::{LeakCheck, Node, Sandbox, eventually};

/// A node with the pod `web`, which serves its /etc.
fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    Node::start_with_web(sandbox).expect("it serves")
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
        said.starts_with("error: ")
            && said.contains("\"/missing\": ")
            && said.contains("no such file or directory"),
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
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_command_that_is_killed_takes_its_program_along() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
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
    let words = ["port 81 ", "connection refused"].map(|words| said.to_lowercase().contains(words));
    assert!(said.starts_with("error: ") && words == [true; 2], "{said}");
    command.kill().expect("it is killed");
    command.wait().expect("it ends");
    let (code, said) = failure(&node, &["port-forward", "absent", "80"]);
    assert_eq!(code, Some(1));
    assert_eq!(said, "Error from server (NotFound): pods \"absent\" not found in namespace \"default\"\n");
    node.finish(&idle).expect("nothing is left");
}

/// A container that says what it repeats, and ends with its stdin.
#[test]
fn a_container_reads_what_an_attached_command_reads() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let copy = Pod::new("copy", &["copy"]).yaml() + "      stdin: true\n      stdinOnce: true\n";
    node.put_manifest("copy.yaml", &copy).expect("put");
    wait_for_programs(&node, 2);
    let attached = eventually("the container runs", TIMEOUT, || {
        let mut command = node.client_command(&["attach", "copy", "-i"])?;
        let mut command =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        command.stdin.take().expect("piped").write_all(b"good day\n")?;
        let output = command.wait_with_output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok(output)
    });
    let attached = attached.expect("it is attached");
    assert_eq!(String::from_utf8_lossy(&attached.stdout), "good day\n");
    wait_for_programs(&node, 1);
    assert_eq!(node.client(&["logs", "copy"]).expect("a log"), "good day\n");
    node.wait_for_phase("copy", "Succeeded").expect("the kubelet knows its end");
    let (code, said) = failure(&node, &["attach", "copy"]);
    assert_eq!(code, Some(1));
    assert!(
        said.contains(
            "container \"business\" in pod \"copy\" is not running (terminated: Completed, exit code 0)"
        ),
        "{said}"
    );
    let (_, said) = failure(&node, &["attach", "absent"]);
    assert_eq!(said, "Error from server (NotFound): pods \"absent\" not found in namespace \"default\"\n");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_terminal_is_connected_with_that_of_a_container_and_restored() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let shell = Pod::new("shell", &["terminal"]).yaml() + "      stdin: true\n      tty: true\n";
    node.put_manifest("shell.yaml", &shell).expect("put");
    node.wait_for_log("shell", &["0 columns, 0 rows"]).expect("it runs");
    let Terminal { ours, programs } = Terminal::open(0).expect("a terminal");
    set_size(&ours, 100, 30).expect("it has a size");
    let before = tcgetattr(&programs).expect("a terminal");
    let copy = || Stdio::from(programs.try_clone().expect("a copy"));
    let mut command = node.client_command(&["attach", "pod/shell", "-i", "-t"]).expect("a command");
    let mut command = command.stdin(copy()).stdout(copy()).stderr(copy()).spawn().expect("it starts");
    let mut keyboard = File::from(ours);
    let mut seen = String::new();
    see(&mut keyboard, &mut seen, "100 columns, 30 rows\r\n");
    assert!(seen.contains("try pressing enter"), "{seen}");
    let during = tcgetattr(&programs).expect("a terminal");
    assert!(!during.local_modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    // The window changes.
    set_size(&keyboard, 80, 24).expect("it has a size");
    kill(Pid::from_raw(command.id().cast_signed()), Signal::SIGWINCH).expect("it runs");
    see(&mut keyboard, &mut seen, "80 columns, 24 rows\r\n");
    // The key is for the container's program, not for the command.
    keyboard.write_all(b"\x03").expect("written");
    assert!(command.wait().expect("it ends").success());
    let after = tcgetattr(&programs).expect("a terminal");
    assert_eq!(after.local_modes, before.local_modes);
    assert_eq!(after.input_modes, before.input_modes);
    assert_eq!(after.output_modes, before.output_modes);
    node.finish(&idle).expect("nothing is left");
}

/// Reads what a terminal shows, until it has shown `wanted`.
fn see(terminal: &mut File, seen: &mut String, wanted: &str) {
    let shown = eventually("the terminal shows it", TIMEOUT, || {
        let mut bytes = [0; 4096];
        match terminal.read(&mut bytes) {
            Ok(length) => seen.push_str(&String::from_utf8_lossy(&bytes[..length])),
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e.into()),
        }
        ensure!(seen.contains(wanted), "{seen:?}");
        Ok(())
    });
    shown.expect("it is shown");
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
