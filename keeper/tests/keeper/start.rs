//! The keeper's start, its limits, and its end.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Output, Stdio};

use keeper::wire::Role;
use nix::sys::signal::Signal;
use tests::{Sandbox, eventually};

use crate::fixture::{Keeper, LIMIT, command, key, table};

fn fail(keeper: &Keeper, path: &std::path::Path) -> String {
    let Output { status, stderr, .. } = command(&keeper.sandbox, path).output().unwrap();
    assert_eq!(status.code(), Some(1));
    String::from_utf8(stderr).unwrap()
}

#[test]
fn a_second_keeper_at_the_same_socket_is_refused() {
    let keeper = Keeper::start();
    let refused = fail(&keeper, &keeper.socket);
    assert!(
        refused.contains(&format!("{}: another keeper answers there", keeper.socket.display())),
        "{refused}"
    );
    keeper.client().ping().unwrap();
}

#[test]
fn the_socket_of_a_keeper_that_is_gone_is_replaced_and_no_other_file() {
    let mut keeper = Keeper::start();
    keeper.client().put(key(1), Role::StateTable, table().as_fd()).unwrap();
    keeper.process.kill().unwrap();
    assert!(keeper.socket.exists());
    keeper.start_again();
    assert_eq!(keeper.client().list().unwrap(), []);

    let other = keeper.sandbox.path("other");
    std::fs::write(&other, "precious").unwrap();
    let refused = fail(&keeper, &other);
    assert!(refused.contains("exists and is not a socket"), "{refused}");
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "precious");
    let nowhere = fail(&keeper, &keeper.sandbox.path("no/where"));
    assert!(nowhere.contains("no/where: its directory is missing: make it first"), "{nowhere}");
}

#[test]
fn sigterm_ends_a_keeper_that_holds_nothing() {
    let mut keeper = Keeper::start();
    keeper.client().daemon_socket(key(1)).unwrap();
    keeper.process.signal(Signal::SIGHUP).unwrap();
    keeper.client().ping().unwrap();
    let status = keeper.process.stop(LIMIT).unwrap();
    assert_eq!(status.code(), Some(0));
    assert!(!keeper.socket.exists());
}

#[test]
fn sigterm_ends_a_keeper_only_after_the_last_descriptor_is_forgotten() {
    let mut keeper = Keeper::start();
    let mut client = keeper.client();
    client.put(key(1), Role::StateTable, table().as_fd()).unwrap();
    client.put(key(2), Role::StateTable, table().as_fd()).unwrap();
    keeper.process.signal(Signal::SIGTERM).unwrap();
    eventually("it reports why it stays", LIMIT, || {
        let output = keeper.process.output();
        anyhow::ensure!(output.contains("asked to end, but holds 2 descriptors"), "{output}");
        Ok(())
    })
    .unwrap();
    client.forget(key(1), Role::StateTable).unwrap();
    assert!(client.get(key(2), Role::StateTable).unwrap().is_some());
    client.forget_volume(key(2)).unwrap();
    assert_eq!(keeper.process.wait(LIMIT).unwrap().code(), Some(0));
}

#[test]
fn it_may_open_as_many_files_as_the_hard_limit_allows() {
    let keeper = Keeper::start();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", keeper.process.pid())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let limits: Vec<&str> = line.split_whitespace().take(2).collect();
    assert_eq!(limits[0], limits[1]);
}

#[test]
fn its_oom_score_is_as_low_as_allowed() {
    let keeper = Keeper::start();
    let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", keeper.process.pid())).unwrap();
    let output = keeper.process.output();
    assert!(score.trim() == "-1000" || output.contains("oom_score_adj stays as it is"), "{score}: {output}");
}

#[test]
fn a_reader_of_its_log_that_stops_reading_does_not_stop_it() {
    let sandbox = Sandbox::enter(tests::Network::Callers).unwrap();
    let socket = sandbox.path("k.sock");
    let (mut log, stderr) = std::io::pipe().unwrap();
    let mut command = command(&sandbox, &socket);
    let mut process = command.args(["--log-level", "debug"]).stderr(stderr).spawn().unwrap();
    let connect = || keeper::client::Client::connect(&socket, LIMIT);
    let mut client = eventually("it answers", LIMIT, || Ok(connect()?)).unwrap();
    let table = table();
    // Each logs some 60 bytes; a pipe holds 64 KiB.
    for _ in 0..3000 {
        client.put(key(1), Role::StateTable, table.as_fd()).unwrap();
    }
    process.kill().unwrap();
    process.wait().unwrap();
    drop(command);
    let mut text = String::new();
    log.read_to_string(&mut text).unwrap();
    assert!(text.len() > 32 * 1024 && text.ends_with('\n'), "{}", text.len());
}

#[test]
fn wrong_arguments_are_named_and_help_is_printed() {
    let sandbox = Sandbox::enter(tests::Network::Callers).unwrap();
    let run = |arguments: &[&str]| {
        let null = File::open("/dev/null").unwrap();
        let output =
            sandbox.command(&crate::fixture::binary()).args(arguments).stdin(Stdio::from(null)).output();
        let output = output.unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let missing = "hawser-keeper: error: --socket PATH is missing: see hawser-keeper --help\n";
    assert_eq!(run(&[]), (Some(2), String::new(), missing.to_owned()));
    let (code, help, errors) = run(&["--help"]);
    assert_eq!((code, errors.as_str()), (Some(0), ""));
    assert!(help.contains("Usage: hawser-keeper --socket PATH"), "{help}");
    assert!(run(&["--version"]).1.starts_with("hawser-keeper "));
}
