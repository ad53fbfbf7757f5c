//! kubelet's HTTP endpoints of a real node: what they answer, and what hostile clients can do to them.

mod client;
mod hostile;
mod network;
mod streams;
mod volumes;

use std::os::unix::fs::PermissionsExt;

use anyhow::ensure;
use client::{Answer, Place};
use serde_json::Value;
use tests::manifests::Pod;
use tests::node::TIMEOUT;
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually};

/// A node with the pod `web`, which serves its /etc and has logged that it does.
fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    Node::start_with_web(sandbox).expect("it serves")
}

fn get(node: &Node<'_>, path: &str) -> Answer {
    Place::unix(node).get(path)
}

#[test]
fn the_socket_is_roots_and_answers_what_kubelet_answers() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let socket = node.root_dir().join("hawser/http.sock");
    let mode = std::fs::metadata(&socket).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!((get(&node, "/healthz").status, get(&node, "/healthz").text().as_str()), (200, "ok"));

    let pods = get(&node, "/pods");
    let list: Value = serde_json::from_slice(&pods.body).expect("JSON");
    assert_eq!((&list["kind"], &list["apiVersion"]), (&"PodList".into(), &"v1".into()));
    let items = list["items"].as_array().expect("a list");
    let web = items.iter().find(|pod| pod["metadata"]["name"] == "web").expect("the pod");
    assert_eq!(web["status"]["phase"], "Running");
    assert_eq!(web["spec"]["containers"][0]["args"][0], "serve");

    let own = get(&node, "/metrics");
    assert!(own.header("content-type").starts_with("text/plain; version=0.0.4"), "{own:?}");
    let own = own.text();
    for metric in ["kubelet_running_pods 1\n", "kubelet_node_name{node=\"demo\"} 1\n", "\nprocess_open_fds "]
    {
        assert!(own.contains(metric), "{metric} in {own}");
    }
    assert!(own.contains("kubelet_running_containers{container_state=\"running\"} 1\n"), "{own}");
    assert!(own.contains("path=\"healthz\",server_type=\"readwrite\"} 2\n"), "{own}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn usage_has_kubelets_names_and_shape() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let pod = "namespace=\"default\",pod=\"web\"";
    let names = [
        "node_cpu_usage_seconds_total ".to_owned(),
        "node_memory_working_set_bytes ".to_owned(),
        format!("pod_cpu_usage_seconds_total{{{pod}}} "),
        format!("pod_memory_working_set_bytes{{{pod}}} "),
        format!("container_cpu_usage_seconds_total{{container=\"business\",{pod}}} "),
        format!("container_memory_working_set_bytes{{container=\"business\",{pod}}} "),
        format!("container_start_time_seconds{{container=\"business\",{pod}}} "),
    ];
    let text = get(&node, "/metrics/resource").text();
    for name in &names {
        let line = text.lines().find_map(|line| line.strip_prefix(name.as_str()));
        let value = line.and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok());
        assert!(value.is_some_and(|value| value > 0.0), "{name} in {text}");
    }
    assert!(text.contains("\nscrape_error 0\n") && text.contains("\nresource_scrape_error 0\n"), "{text}");

    let summary: Value = serde_json::from_slice(&get(&node, "/stats/summary").body).expect("JSON");
    assert_eq!(summary["node"]["nodeName"], "demo");
    for figure in ["/node/cpu/usageCoreNanoSeconds", "/node/memory/workingSetBytes", "/node/fs/capacityBytes"]
    {
        assert!(
            summary.pointer(figure).and_then(Value::as_u64).is_some_and(|v| v > 0),
            "{figure}: {summary}"
        );
    }
    let pods = summary["pods"].as_array().expect("a list");
    let web = pods.iter().find(|pod| pod["podRef"]["name"] == "web").expect("the pod");
    assert_eq!(web["podRef"]["namespace"], "default");
    let container = &web["containers"][0];
    assert_eq!(container["name"], "business");
    for figure in [&container["cpu"]["usageCoreNanoSeconds"], &container["memory"]["workingSetBytes"]] {
        assert!(figure.as_u64().is_some_and(|value| value > 0), "{web}");
    }
    assert!(web["network"]["interfaces"].as_array().is_some_and(|found| !found.is_empty()), "{web}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn logs_take_kubelets_options_and_refuse_wrong_ones() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_manifest("words.yaml", &Pod::new("words", &["print", "one\ntwo\nthree"]).yaml()).expect("put");
    node.wait_for_log("words", &["three"]).expect("it prints");
    let logs = |query: &str| get(&node, &format!("/containerLogs/default/words/business{query}"));
    assert_eq!(logs("").text(), "one\ntwo\nthree\n");
    assert_eq!(logs("?tailLines=1").text(), "three\n");
    assert_eq!(logs("?limitBytes=5").text(), "one\nt");
    assert_eq!(logs("?sinceSeconds=3600&tailLines=2").text(), "two\nthree\n");
    let stamped = logs("?timestamps=true&tailLines=1").text();
    assert!(stamped.ends_with("Z three\n") || stamped.ends_with(" three\n"), "{stamped}");
    assert!(stamped.starts_with("20"), "{stamped}");
    // Its container has ended, so following ends too.
    assert_eq!(logs("?follow=true").text(), "one\ntwo\nthree\n");
    for (query, status, words) in [
        ("?tailLines=-1", 422, "tailLines=-1: a number is needed"),
        ("?sinceSeconds=0", 422, "sinceSeconds=0"),
        ("?follow=perhaps", 422, "follow=perhaps: true or false is needed"),
        ("?previous=true", 400, "previous terminated container \"business\" in pod \"words\" not found"),
    ] {
        let answer = logs(query);
        assert!(answer.status == status && answer.text().contains(words), "{query}: {answer:?}");
    }
    assert_eq!(get(&node, "/containerLogs/default/absent/business").status, 404);
    assert_eq!(get(&node, "/containerLogs/other/words/business").status, 404);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_log_is_followed_until_its_container_ends() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let follow = Place::unix(&node).open("/containerLogs/default/web/business?follow=true");
    let reading = std::thread::spawn(move || follow.read());
    node.remove_manifest("web.yaml").expect("removed");
    let answer = reading.join().expect("it ends");
    assert!(answer.status == 200 && answer.text().contains("serving"), "{answer:?}");
    eventually("no pod is left", TIMEOUT, || {
        let pods: Value = serde_json::from_slice(&get(&node, "/pods").body)?;
        ensure!(pods["items"] == serde_json::json!([]), "{pods}");
        Ok(())
    })
    .expect("the pod is gone");
    node.finish(&idle).expect("nothing is left");
}
