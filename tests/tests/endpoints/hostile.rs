//! Clients of the endpoints that want to do harm.

use std::fs;
use std::io::{Read, Write};

use anyhow::{Context, ensure};
use tests::node::TIMEOUT;
use tests::{Node, Sandbox, eventually};

use crate::client::{self, Place};
use crate::{get, node};

/// Resident memory of the kubelet, in KiB.
fn memory(node: &mut Node<'_>) -> u64 {
    let pid = node.kubelet().expect("it runs").pid();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a figure");
    resident.trim_end_matches("kB").trim().parse().expect("a number")
}

fn descriptors(node: &mut Node<'_>) -> u64 {
    let pid = node.kubelet().expect("it runs").pid();
    fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").count() as u64
}

/// The kubelet gives memory and descriptors back some time after a client has gone or was dropped.
fn eventually_below(what: &str, bound: u64, mut figure: impl FnMut() -> u64) {
    eventually(what, TIMEOUT, || {
        let figure = figure();
        ensure!(figure < bound, "{figure}, not below {bound}");
        Ok(())
    })
    .expect("below the bound");
}

#[test]
fn names_of_a_path_lead_to_no_file() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let outside = sandbox.path("secret");
    fs::write(&outside, "2026-01-01T00:00:00Z stdout F secret\n").expect("written");
    let up = "..%2f".repeat(12);
    for path in [
        format!("/containerLogs/default/web/{up}{}", outside.display().to_string().trim_start_matches('/')),
        format!("/containerLogs/default/{up}etc/business"),
        format!("/containerLogs/{up}/web/business"),
        "/containerLogs/default/web/../../../../etc/passwd".to_owned(),
        "/containerLogs/default/web/business%00".to_owned(),
        "/logs/".to_owned(),
        "//etc/passwd".to_owned(),
        "/pods/../../etc/passwd".to_owned(),
    ] {
        let answer = get(&node, &path);
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
        assert!(
            !answer.text().contains("secret\n") && !answer.text().contains("root:"),
            "{path}: {answer:?}"
        );
    }
    let answer = get(&node, "/containerLogs/default/web/%zz");
    assert_eq!(
        (answer.status, answer.text().contains("an escape that is broken")),
        (400, true),
        "{answer:?}"
    );
    fs::remove_file(outside).expect("removed");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn endless_and_countless_headers_end_the_connection() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let before = memory(&mut node);
    let lines: [&dyn Fn(usize) -> String; 2] =
        [&|_| "a".repeat(64 << 10), &|at| format!("X-{at}: y\r\n").repeat(100)];
    for line in lines {
        let mut stream = Place::unix(&node).connect();
        stream.write_all(b"GET /healthz HTTP/1.1\r\nX: ").expect("sent");
        // 64 MiB, if the kubelet took them.
        let refused = (0..1024).any(|at| stream.write_all(line(at).as_bytes()).is_err());
        let mut answer = Vec::new();
        // The rest of what was sent may reset the connection.
        let _reset = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(refused && !answer.contains(" 200 "), "{answer}");
    }
    assert_eq!(get(&node, "/healthz").status, 200);
    eventually_below("KiB of memory", before + (8 << 10), || memory(&mut node));
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_thousand_connections_that_ask_nothing_keep_no_client_out() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let (memory_before, descriptors_before) = (memory(&mut node), descriptors(&mut node));
    let place = Place::unix(&node);
    client::allow_many_connections();
    let idle_clients: Vec<_> = (0..1000).map(|_| place.connect()).collect();
    for _ in 0..10 {
        assert_eq!(get(&node, "/healthz").status, 200);
    }
    eventually_below("descriptors", descriptors_before + 200, || descriptors(&mut node));
    eventually_below("KiB of memory", memory_before + (16 << 10), || memory(&mut node));
    let metrics = get(&node, "/metrics").text();
    let closed =
        metrics.lines().find_map(|line| line.strip_prefix("hawser_kubelet_refused_connections_total "));
    assert!(
        closed.and_then(|count| count.parse::<u64>().ok()).is_some_and(|count| count >= 800),
        "{metrics}"
    );
    drop(idle_clients);
    node.finish(&idle).expect("nothing is left");
}

/// Each of them would hold 8 MiB, if the kubelet read ahead.
#[test]
fn clients_that_stop_reading_a_log_hold_no_memory() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let log = node.log_dir();
    let pod = fs::read_dir(&log).expect("the logs").flatten().map(|entry| entry.path());
    let mut pod = pod.filter(|path| path.display().to_string().contains("default_web_"));
    let file = pod.next().expect("the pod's logs").join("business/0.log");
    let line = format!("2026-01-01T00:00:00.000000000Z stdout F {}\n", "x".repeat(984));
    let mut written = fs::File::options().append(true).open(&file).expect("the log");
    written.write_all(line.repeat(8 << 10).as_bytes()).expect("written");
    let place = Place::unix(&node);
    // A reader that reads gets all of it.
    let whole = place.get("/containerLogs/default/web/business");
    assert!(whole.body.len() > 8_000_000, "{} bytes", whole.body.len());
    let before = memory(&mut node);
    let stopped: Vec<_> = (0..50)
        .map(|_| {
            let mut asked = place.open("/containerLogs/default/web/business?follow=true");
            assert_eq!(asked.head().status, 200);
            asked
        })
        .collect();
    eventually_below("KiB of memory", before + (16 << 10), || memory(&mut node));
    assert_eq!(get(&node, "/healthz").status, 200);
    // What they held is given back.
    drop(stopped);
    let log_name = file.display().to_string();
    let pid = node.kubelet().expect("it runs").pid();
    eventually("the kubelet closes the log", TIMEOUT, || {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).context("its descriptors")?.flatten();
        let open = open.filter_map(|fd| fs::read_link(fd.path()).ok());
        let open = open.filter(|link| link.display().to_string() == log_name).count();
        ensure!(open == 0, "{open} times open");
        Ok(())
    })
    .expect("closed");
    node.finish(&idle).expect("nothing is left");
}
