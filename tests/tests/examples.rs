//! The pods of `examples/`: each file is applied as it is, and shows what its first lines promise.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::manifests::Pod;
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually};

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// A node with the class of the examples, and what it has without their pods.
fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    (node, idle)
}

/// `hawser-kubelet apply -f examples/NAME`; what it prints.
fn apply(node: &Node<'_>, name: &str) -> String {
    let path = directory().join(name);
    node.client(&["apply", "-f", &path.display().to_string()]).expect("applied")
}

/// Deletes what was applied, as a user would; nothing may be left.
fn finish(node: Node<'_>, idle: &LeakCheck) {
    for kind in ["pod", "configmap", "secret"] {
        let objects = node.list(kind).expect("a list");
        // The driver removes the pods that serve volumes.
        for object in objects.iter().filter(|object| object["metadata"]["namespace"] == "default") {
            node.delete(kind, &text(&object["metadata"]["name"])).expect("deleted");
        }
    }
    node.finish(idle).expect("nothing is left");
}

/// Waits until the status of a pod is as `check` wants it; the pod.
fn wait_for(node: &Node<'_>, pod: &str, what: &str, check: impl Fn(&Value) -> bool) -> Value {
    node.wait_for("pod", pod, what, |pod| check(&pod["status"])).expect(what)
}

fn is_ready(status: &Value) -> bool {
    let conditions = status["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

fn wait_until_ready(node: &Node<'_>, pod: &str) -> Value {
    wait_for(node, pod, "it is ready", is_ready)
}

/// What demo-app prints in a container of the pod.
fn exec(node: &Node<'_>, pod: &str, container: &str, words: &[&str]) -> Result<String> {
    node.client(&[&["exec", pod, "-c", container, "--", "/demo-app"], words].concat())
}

fn cat(node: &Node<'_>, pod: &str, container: &str, path: &str) -> String {
    exec(node, pod, container, &["cat", path]).with_context(|| node.outputs()).expect(path)
}

fn log(node: &Node<'_>, pod: &str, container: &str) -> String {
    node.client(&["logs", pod, "-c", container]).with_context(|| node.outputs()).expect("a log")
}

#[test]
fn init_containers_prepare_the_work_of_the_container() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    assert!(apply(&node, "pods/init-containers.yaml").contains("init-containers created"));
    let pod = wait_until_ready(&node, "init-containers");
    let finished = |place: usize, time: &str| {
        text(&pod["status"]["initContainerStatuses"][place]["state"]["terminated"][time])
    };
    assert!(finished(0, "finishedAt") <= finished(1, "startedAt"), "{}", pod["status"]);
    assert_eq!(log(&node, "init-containers", "check"), "12 plates\n");
    assert_eq!(cat(&node, "init-containers", "kitchen", "/kitchen/order"), "12 plates\n");
    finish(node, &idle);
}

#[test]
fn a_sidecar_serves_the_container_and_ends_after_it() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/sidecar.yaml");
    let pod = node.wait_for_phase("sidecar", "Succeeded").expect("it ends");
    assert!(log(&node, "sidecar", "client").contains("127.0.0.1\tlocalhost"));
    let client = &pod["status"]["containerStatuses"][0];
    assert_eq!((&client["restartCount"], &client["state"]["terminated"]["exitCode"]), (&0.into(), &0.into()));
    let ended = |status: &Value| text(&status["state"]["terminated"]["finishedAt"]);
    assert!(ended(client) <= ended(&pod["status"]["initContainerStatuses"][0]), "{}", pod["status"]);
    finish(node, &idle);
}

#[test]
fn a_job_runs_to_its_end() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/job.yaml");
    node.wait_for_phase("job", "Succeeded").expect("it ends");
    assert_eq!(log(&node, "job", "report"), "the report is ready\n");
    let row = node.client(&["get", "pod", "job", "--no-headers"]).expect("get");
    assert!(row.contains("Completed"), "{row}");
    finish(node, &idle);
}

#[test]
fn probes_decide_about_a_server() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/probes.yaml");
    wait_until_ready(&node, "probes");
    exec(&node, "probes", "server", &["remove", "/data/ready"]).expect("removed");
    let pod = wait_for(&node, "probes", "it is not ready", |status| !is_ready(status));
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    exec(&node, "probes", "server", &["write", "/data/ready", "yes"]).expect("written");
    wait_until_ready(&node, "probes");
    exec(&node, "probes", "server", &["remove", "/tmp/alive"]).expect("removed");
    node.wait_for_event("Killing", &["Container server failed liveness probe"]).expect("killed");
    wait_for(&node, "probes", "it is ready again", |status| {
        status["containerStatuses"][0]["restartCount"] == 1 && is_ready(status)
    });
    finish(node, &idle);
}

#[test]
fn hooks_write_into_a_volume_that_outlives_the_pod() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "storageclass.yaml");
    apply(&node, "pods/hooks.yaml");
    wait_until_ready(&node, "hooks");
    assert_eq!(cat(&node, "hooks", "shop", "/diary/morning"), "the shop is open\n");
    node.delete("pod", "hooks").expect("deleted");
    let reader = Pod::new("reader", &["cat", "/data/evening"]).with_claim("diary");
    node.put_manifest("reader.yaml", &reader.yaml()).expect("put");
    node.wait_for_log("reader", &["the shop is closed\n"]).expect("the hook ran before the end");
    node.remove_manifest("reader.yaml").expect("removed");
    node.wait_for_no_pod("reader").expect("gone");
    finish(node, &idle);
}

#[test]
fn configuration_is_in_variables_and_in_files_that_change() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/configuration.yaml");
    wait_until_ready(&node, "configuration");
    let variables = cat(&node, "configuration", "painter", "/proc/self/environ");
    for variable in ["PAINT_color=blue", "DOOR=4711", "LABEL=blue, large"] {
        assert!(variables.split('\0').any(|found| found == variable), "{variable}: {variables}");
    }
    assert_eq!(cat(&node, "configuration", "painter", "/door/code"), "4711");
    assert_eq!(cat(&node, "configuration", "painter", "/config/color"), "blue");

    let example = fs::read_to_string(directory().join("pods/configuration.yaml")).expect("the example");
    let edited = sandbox.path("configuration.yaml");
    fs::write(&edited, example.replace("color: blue", "color: green")).expect("written");
    node.client(&["apply", "-f", &edited.display().to_string()]).expect("applied");
    eventually("the new color", TIMEOUT, || {
        let color = exec(&node, "configuration", "painter", &["cat", "/config/color"])?;
        ensure!(color == "green", "{color}");
        Ok(())
    })
    .expect("the file follows");
    let pod = node.get("pod", "configuration").expect("a pod");
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0, "the pod has not changed");
    let variables = cat(&node, "configuration", "painter", "/proc/self/environ");
    assert!(variables.contains("PAINT_color=blue"), "variables stay: {variables}");
    fs::remove_file(edited).expect("removed");
    finish(node, &idle);
}

#[test]
fn a_projected_volume_has_files_of_all_its_sources() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/projected.yaml");
    wait_until_ready(&node, "projected");
    for (path, content) in [
        ("/all/today", "soup"),
        ("/all/kitchen/spice", "saffron"),
        ("/all/pod/labels", "app=\"restaurant\""),
        ("/all/pod/memory", "64"),
    ] {
        assert_eq!(cat(&node, "projected", "restaurant", path), content, "{path}");
    }
    finish(node, &idle);
}

#[test]
fn a_pod_learns_of_itself() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/downward-api.yaml");
    let pod = wait_for(&node, "downward-api", "its printer has ended", |status| {
        let statuses = status["containerStatuses"].as_array().map_or(&[][..], Vec::as_slice);
        statuses.iter().any(|status| status["name"] == "mirror" && !status["state"]["terminated"].is_null())
            && statuses.iter().any(|status| status["name"] == "reader" && status["ready"] == true)
    });
    let address = text(&pod["status"]["podIP"]);
    let line = format!("default/downward-api has {address} and 500m of a CPU\n");
    assert_eq!(log(&node, "downward-api", "mirror"), line);
    assert_eq!(cat(&node, "downward-api", "reader", "/pod/labels"), "app=\"mirror\"\ntier=\"front\"");
    assert_eq!(cat(&node, "downward-api", "reader", "/pod/owner"), "nina");
    finish(node, &idle);
}

#[test]
fn containers_mount_parts_of_a_volume() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/sub-path.yaml");
    wait_until_ready(&node, "sub-path");
    assert_eq!(cat(&node, "sub-path", "all", "/logs/web/note"), "web was here\n");
    assert_eq!(cat(&node, "sub-path", "all", "/logs/pods/sub-path/note"), "sub-path was here\n");
    finish(node, &idle);
}

#[test]
fn a_locked_down_pod_has_no_rights_to_lose() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "pods/locked-down.yaml");
    node.wait_for_phase("locked-down", "Succeeded").expect("it ends");
    let status = log(&node, "locked-down", "guest");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_default().split_whitespace().collect::<Vec<_>>()
    };
    assert_eq!(field("Uid"), ["1000"; 4], "{status}");
    assert!(field("Groups").contains(&"2000"), "{status}");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}: {status}");
    }
    assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1"], vec!["2"]), "{status}");
    finish(node, &idle);
}

#[test]
fn the_shop_of_two_tiers_waits_for_its_store() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    apply(&node, "storageclass.yaml");
    let said = apply(&node, "pods/two-tiers.yaml");
    assert_eq!(said.lines().filter(|line| line.ends_with(" created")).count(), 5, "{said}");
    wait_until_ready(&node, "store");
    wait_until_ready(&node, "shop");
    assert_eq!(log(&node, "shop", "order"), "3 lamps\n");
    let fetch = |url| exec(&node, "shop", "shop", &["fetch", url, "0"]);
    assert_eq!(fetch("http://127.0.0.1:18081/page").expect("the page"), "welcome to the shop");
    let refused = fetch("http://127.0.0.1:18080/please").expect_err("it is not the word");
    let refused = format!("{refused:#}");
    assert!(refused.contains("404 Not Found"), "{refused}");
    finish(node, &idle);
}

#[test]
fn a_snapshot_keeps_what_its_claim_had() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let said = apply(&node, "snapshot/1-volume.yaml");
    assert!(said.contains("storageclass.storage.k8s.io/hawser-copied created"), "{said}");
    node.wait_for_phase("writer", "Succeeded").expect("it has written");
    apply(&node, "snapshot/2-snapshot.yaml");
    apply(&node, "snapshot/3-restored.yaml");
    node.wait_for_phase("reader", "Succeeded").expect("the claim is restored");
    assert_eq!(log(&node, "reader", "reader"), "dear reader\n");
    let snapshot = node.get("volumesnapshot", "letters-monday").expect("a snapshot");
    assert_eq!(snapshot["status"]["readyToUse"], true, "{snapshot}");
    finish(node, &idle);
}

/// As README.md has it, and then every pod of examples/pods/ at once.
#[test]
fn a_directory_of_examples_is_applied_with_one_command() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let said = apply(&node, "");
    let created: BTreeSet<&str> = said.lines().filter_map(|line| line.strip_suffix(" created")).collect();
    let expected = [
        "csidriver.storage.k8s.io/csi.hawser.dev",
        "persistentvolumeclaim/shared",
        "pod/one",
        "pod/two",
        "storageclass.storage.k8s.io/hawser",
    ];
    assert_eq!(created, BTreeSet::from(expected), "{said}");
    wait_until_ready(&node, "one");
    wait_until_ready(&node, "two");

    let said = apply(&node, "pods");
    let pods: Vec<&str> =
        said.lines().filter_map(|line| line.strip_prefix("pod/")?.strip_suffix(" created")).collect();
    assert!(pods.len() >= files().len(), "{said}");
    for pod in pods {
        wait_for(&node, pod, "it is ready or has ended well", |status| {
            let statuses = status["containerStatuses"].as_array().map_or(&[][..], Vec::as_slice);
            let is_well =
                |status: &Value| status["ready"] == true || status["state"]["terminated"]["exitCode"] == 0;
            !statuses.is_empty() && statuses.iter().all(is_well)
        });
    }
    finish(node, &idle);
}

/// The names of the files below examples/pods/.
fn files() -> Vec<String> {
    let entries = fs::read_dir(directory().join("pods")).expect("the examples");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().display().to_string()).collect();
    names.sort();
    names
}

#[test]
fn each_example_has_its_row_its_two_lines_and_its_test() {
    let page = fs::read_to_string(directory().join("README.md")).expect("the page");
    let tests = include_str!("examples.rs");
    for name in files() {
        let row = format!("| [{name}](pods/{name}) |");
        assert!(page.contains(&row), "examples/README.md has no row {row}");
        assert!(tests.contains(&format!("\"pods/{name}\"")), "no test applies {name}");
        let text = fs::read_to_string(directory().join("pods").join(&name)).expect("an example");
        let comment = text.lines().take_while(|line| line.starts_with("# ")).count();
        assert_eq!(comment, 2, "{name} begins with two lines that say what it shows");
    }
}
