//! A manifest that changes while its pod runs: what the pod takes over as it is, and what needs another
//! pod.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::image::Program;
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, binaries, eventually, examples};

/// The demo image, by another name.
const NEXT_IMAGE: &str = "hawser.dev/demo-app:next";

/// What a test varies of the pod: two containers that sleep, and a volume with its labels.
#[derive(Debug, Clone, Copy)]
struct Shape<'a> {
    image: &'a str,
    label: &'a str,
    memory: &'a str,
    cpu: &'a str,
    words: &'a str,
}

const FIRST: Shape<'_> =
    Shape { image: examples::DEMO_IMAGE, label: "blue", memory: "64Mi", cpu: "500m", words: "forever" };

impl Shape<'_> {
    /// With restartPolicy Never: nothing restarts but what the manifest asks for.
    fn yaml(self, policy: &str) -> String {
        let Self { image, label, memory, cpu, words } = self;
        format!(
            "apiVersion: v1
kind: Pod
metadata: {{name: web, namespace: default, labels: {{color: {label}}}}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 2
  volumes: [{{name: own, downwardAPI: {{items: [{{path: labels, fieldRef: {{fieldPath: metadata.labels}}}}]}}}}]
  containers:
  - name: first
    image: {image}
    imagePullPolicy: IfNotPresent
    command: [/demo-app, sleep, {words}]
    volumeMounts: [{{name: own, mountPath: /data}}]
  - name: second
    image: {demo}
    imagePullPolicy: IfNotPresent
    command: [/demo-app, sleep, forever]
    resources: {{limits: {{memory: {memory}, cpu: {cpu}}}, requests: {{memory: 16Mi, cpu: 10m}}}}
    resizePolicy: [{policy}]
",
            demo = examples::DEMO_IMAGE,
        )
    }
}

fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    let demo_app = binaries::find("demo-app").expect("the program");
    let program =
        Program { image: NEXT_IMAGE, binary: &demo_app, path: "demo-app", directories: &["data", "tmp"] };
    node.offer_image(&program).expect("written");
    let idle = node.leak_check().expect("the kernel answers");
    (node, idle)
}

fn apply(node: &Node<'_>, yaml: &str) -> Result<String> {
    let file = node.sandbox().path("applied.yaml");
    fs::write(&file, yaml).context("write")?;
    let applied = node.client(&["apply", "-f", &file.display().to_string()]);
    fs::remove_file(&file).context("remove")?;
    applied
}

fn wait_for(node: &Node<'_>, what: &str, check: impl Fn(&Value) -> bool) -> Value {
    node.wait_for("pod", "web", what, check).expect(what)
}

fn status_of<'a>(pod: &'a Value, container: &str) -> &'a Value {
    let statuses = pod["status"]["containerStatuses"].as_array().map_or(&[][..], Vec::as_slice);
    statuses.iter().find(|status| status["name"] == container).unwrap_or(&Value::Null)
}

fn both_run(pod: &Value) -> bool {
    ["first", "second"].iter().all(|name| !status_of(pod, name)["state"]["running"].is_null())
}

/// What the kernel allows the container `second`, in bytes.
fn memory_limit(node: &Node<'_>, pod: &Value) -> Option<u64> {
    let id = text(&status_of(pod, "second")["containerID"]);
    let id = id.split_once("://").map_or("", |(_, id)| id);
    let pod = format!("kubepods/burstable/pod{}", text(&pod["metadata"]["uid"]));
    let hierarchies = linux::cgroup::Hierarchies::detect().expect("control groups");
    let group = node.sandbox().cgroup_root().join(pod).join(id);
    let memory = hierarchies.usage(Path::new("/").join(&group).as_path()).memory?;
    if let Some(swap) = memory.swap {
        assert_eq!(swap.limit, Some(0), "a memory limit allows no additional swap");
    }
    memory.limit
}

#[test]
fn images_resources_and_labels_change_in_place_and_other_fields_are_refused() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let kept = "{resourceName: memory, restartPolicy: NotRequired}";
    apply(&node, &FIRST.yaml(kept)).expect("applied");
    let started = wait_for(&node, "both run", both_run);
    assert_eq!(memory_limit(&node, &started), Some(64 << 20));
    let id = |pod: &Value, name: &str| text(&status_of(pod, name)["containerID"]);

    // Labels and limits: nothing restarts.
    let changed = Shape { label: "green", memory: "96Mi", cpu: "750m", ..FIRST };
    assert_eq!(apply(&node, &changed.yaml(kept)).expect("applied"), "pod/web configured\n");
    let resized = wait_for(&node, "the new limits are in force", |pod| {
        status_of(pod, "second")["resources"]["limits"]["memory"] == "96Mi"
    });
    assert_eq!(memory_limit(&node, &resized), Some(96 << 20));
    for seen in [&resized["metadata"]["generation"], &resized["status"]["observedGeneration"]] {
        assert_eq!(*seen, 2);
    }
    assert_eq!(status_of(&resized, "second")["resources"]["limits"]["cpu"], "750m");
    node.wait_for_event("ResizeCompleted", &["second"]).expect("said");
    eventually("the file has the new label", TIMEOUT, || {
        let labels =
            node.client(&["exec", "web", "-c", "first", "--", "/demo-app", "cat", "/data/labels"])?;
        ensure!(labels.contains("color=\"green\""), "{labels}");
        Ok(())
    })
    .expect("updated");
    for name in ["first", "second"] {
        assert_eq!(id(&resized, name), id(&started, name));
    }
    // As it is printed, with its status.
    let printed = node.client(&["get", "pod", "web", "-o", "yaml"]).expect("printed");
    assert!(printed.contains("startedAt"), "{printed}");
    assert_eq!(apply(&node, &printed.replace("green", "blue")).expect("applied"), "pod/web configured\n");
    let relabelled = wait_for(&node, "it has the label", |pod| pod["metadata"]["labels"]["color"] == "blue");
    assert_eq!(id(&relabelled, "first"), id(&started, "first"));

    // An image: its container alone restarts.
    let changed = Shape { image: NEXT_IMAGE, ..changed };
    apply(&node, &changed.yaml(kept)).expect("applied");
    let replaced = wait_for(&node, "the new image runs", |pod| {
        both_run(pod) && status_of(pod, "first")["image"] == NEXT_IMAGE
    });
    node.wait_for_event("Killing", &["Container first definition changed, will be restarted"]).expect("said");
    assert_eq!(status_of(&replaced, "first")["restartCount"], 1);
    assert_eq!(id(&replaced, "second"), id(&started, "second"));
    assert_eq!(replaced["metadata"]["uid"], started["metadata"]["uid"]);

    // Another kubelet changes what the first one has started.
    node.kubelet().expect("it runs").kill().expect("killed");
    node.start_kubelet().expect("it starts");
    apply(&node, &Shape { memory: "48Mi", ..changed }.yaml(kept)).expect("applied");
    let smaller = wait_for(&node, "the smaller limit is in force", |pod| {
        status_of(pod, "second")["resources"]["limits"]["memory"] == "48Mi"
    });
    assert_eq!(memory_limit(&node, &smaller), Some(48 << 20));
    assert_eq!(id(&smaller, "second"), id(&started, "second"));

    // Everything else.
    let refused = apply(&node, &Shape { words: "\"60\"", ..changed }.yaml(kept)).unwrap_err().to_string();
    let words =
        "spec.containers[0].command[2]: Forbidden: a running pod keeps it (\"forever\"; wanted: \"60\")";
    assert!(refused.contains(words), "{refused}");
    let refused = apply(&node, &Shape { cpu: "4096", ..changed }.yaml(kept).replace("cpu: 10m", "cpu: 4096"));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("cannot be resized: Node didn't have enough resource: cpu"), "{refused}");
    let after = wait_for(&node, "it runs on", both_run);
    assert_eq!(id(&after, "first"), id(&replaced, "first"));
    node.delete("pod", "web").expect("deleted");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_changed_file_changes_the_pod_in_place_or_replaces_it() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let restarted = "{resourceName: memory, restartPolicy: RestartContainer}";
    node.put_manifest("web.yaml", &FIRST.yaml(restarted)).expect("put");
    let started = wait_for(&node, "both run", both_run);
    let changed = Shape { memory: "96Mi", image: NEXT_IMAGE, ..FIRST };
    node.put_manifest("web.yaml", &changed.yaml(restarted)).expect("put");
    let both = wait_for(&node, "both have restarted", |pod| {
        let counts = ["first", "second"].map(|name| status_of(pod, name)["restartCount"].as_u64());
        both_run(pod) && counts == [Some(1), Some(1)]
    });
    node.wait_for_event("Killing", &["Container second resize requires restart"]).expect("said");
    assert_eq!(memory_limit(&node, &both), Some(96 << 20));
    assert_eq!(both["metadata"]["uid"], started["metadata"]["uid"]);
    let another = Shape { words: "\"3600\"", ..changed };
    node.put_manifest("web.yaml", &another.yaml(restarted)).expect("put");
    let replaced = wait_for(&node, "another pod runs", |pod| {
        both_run(pod) && pod["metadata"]["uid"] != started["metadata"]["uid"]
    });
    assert_eq!(status_of(&replaced, "first")["restartCount"], 0);
    node.finish(&idle).expect("nothing is left");
}
