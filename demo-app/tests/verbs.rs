//! Each verb as a container runs it: a process, its output, its exit code.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

fn demo_app(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demo-app"));
    command.args(words);
    command
}

fn run(words: &[&str]) -> Output {
    demo_app(words).output().expect("the program starts")
}

fn stdout(words: &[&str]) -> String {
    let output = run(words);
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn text_is_printed_and_files_are_written_and_read() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("note");
    assert_eq!(stdout(&["print", "two words"]), "two words\n");
    stdout(&["write", file.to_str().unwrap(), "kept"]);
    assert_eq!(stdout(&["cat", file.to_str().unwrap()]), "kept\n");
}

#[test]
fn exit_codes_are_the_ones_asked_for() {
    assert_eq!(run(&["exit", "7"]).status.code(), Some(7));
    let refused = run(&["exit", "256"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains(r#"CODE "256""#), "{refused:?}");
    assert_eq!(run(&[]).status.code(), Some(2));
}

#[test]
fn monotonic_is_the_clock_of_this_machine() {
    let clock = || nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    let before = clock().tv_sec();
    let printed: i64 = stdout(&["monotonic"]).trim().parse().unwrap();
    assert!((before..=clock().tv_sec()).contains(&(printed / 1_000_000_000)), "{printed}");
}

#[test]
fn a_lasting_verb_ends_on_sigterm() {
    let mut child = demo_app(&["count"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "1");
    assert_eq!(lines.next().unwrap().unwrap(), "2");
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

#[test]
fn a_served_file_is_fetched_over_both_families() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("greeting"), "hello\n").unwrap();
    let mut server =
        demo_app(&["serve", "[::]:0", dir.path().to_str().unwrap()]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let port = line.trim().rsplit(':').next().unwrap();
    assert_eq!(stdout(&["fetch", &format!("http://127.0.0.1:{port}/greeting")]), "hello\n");
    assert_eq!(stdout(&["fetch", &format!("http://[::1]:{port}/greeting")]), "hello\n");
    let missing = run(&["fetch", &format!("http://[::1]:{port}/absent"), "0"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("404 Not Found"), "{missing:?}");
    server.kill().unwrap();
    server.wait().unwrap();
}
