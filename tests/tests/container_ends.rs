//! What is known of containers that have ended: their messages, reasons and logs; and why a container does
//! not start.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use tests::attacker::{self, Attack};
use tests::image::Program;
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually};

fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    attacker::install(&node).expect("an image");
    let idle = node.leak_check().expect("the kernel answers");
    (node, idle)
}

fn put(node: &Node<'_>, attack: Attack<'_>) {
    node.put_manifest(&format!("{}.yaml", attack.name), &attack.yaml()).expect("put");
}

/// The end of a container that is not started again.
fn ended(node: &Node<'_>, pod: &str) -> Value {
    let ended = eventually(&format!("{pod} has ended"), TIMEOUT, || {
        let status = node.get("pod", pod)?["status"].take();
        let ended = status["containerStatuses"][0]["state"]["terminated"].clone();
        ensure!(!ended.is_null(), "{status}");
        Ok(ended)
    });
    ended.with_context(|| format!("{}\n{}", node.describe_all(), node.outputs())).expect("it ends")
}

#[test]
fn the_message_of_a_container_is_the_end_of_its_file_or_of_its_log() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let fallback = "terminationMessagePolicy: FallbackToLogsOnError";
    let lines = "i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo line $i; done";
    put(&node, Attack::new("file", "echo the cause > /dev/termination-log; exit 3"));
    let own = "terminationMessagePath: /tmp/last";
    put(&node, Attack::new("own", "echo elsewhere > /tmp/last").with_container_fields(own));
    let long = "/busybox yes xxxxxxx | /busybox head -c 8000 > /dev/termination-log; echo the end >> /dev/termination-log";
    put(&node, Attack::new("long", long));
    // One that takes no space on the disk, and is not read whole.
    put(&node, Attack::new("hole", "/busybox truncate -s 1024G /dev/termination-log"));
    put(&node, Attack::new("silent", lines));
    put(&node, Attack::new("none", &format!("{lines}; exit 1")));
    let failed = format!("{lines}; exit 1");
    put(&node, Attack::new("log", &failed).with_container_fields(fallback));
    put(&node, Attack::new("success", lines).with_container_fields(fallback));
    let both = format!("echo of the file > /dev/termination-log; {failed}");
    put(&node, Attack::new("both", &both).with_container_fields(fallback));

    let message = |pod: &str| text(&ended(&node, pod)["message"]);
    assert_eq!(message("file"), "the cause\n");
    assert_eq!(message("own"), "elsewhere\n");
    let long = message("long");
    assert!(long.len() == 4096 && long.ends_with("xxx\nthe end\n"), "{} bytes: {long}", long.len());
    assert_eq!(message("hole"), "\0".repeat(4096));
    for pod in ["silent", "none", "success"] {
        assert!(ended(&node, pod)["message"].is_null(), "{pod}");
    }
    let log = message("log");
    assert!(log.starts_with("line 21\n") && log.ends_with("line 100\n"), "{log}");
    assert_eq!(message("both"), "of the file\n");
    let file = ended(&node, "file");
    assert_eq!((&file["reason"], &file["exitCode"]), (&"Error".into(), &3.into()), "{file}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn the_log_of_the_instance_before_is_shown() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let script =
        "[ -e /data/was ] && echo second && exec /busybox sleep 3600\necho first; echo x > /data/was; exit 4";
    let twice = Attack::new("twice", script)
        .with_pod_fields("volumes: [{name: d, emptyDir: {}}]")
        .with_container_fields("volumeMounts: [{name: d, mountPath: /data}]")
        .yaml()
        .replace("restartPolicy: Never", "restartPolicy: Always");
    node.put_manifest("twice.yaml", &twice).expect("put");
    node.wait_for_log("twice", &["second\n"]).expect("it runs again");
    let log = |words: &[&str]| node.client(&[&["logs", "twice"], words].concat());
    assert_eq!(log(&[]).expect("a log"), "second\n");
    for words in [&["-p"][..], &["--previous", "-c", "attack"], &["--previous", "--all-containers"]] {
        assert_eq!(log(words).expect("a log"), "first\n", "{words:?}");
    }
    let stamped = log(&["-p", "--timestamps"]).expect("a log");
    let (time, line) = stamped.split_once(' ').expect("a time and a line");
    assert!(time.starts_with("20") && time.ends_with('Z') && line == "first\n", "{stamped}");
    let status = node.get("pod", "twice").expect("a pod")["status"]["containerStatuses"][0].take();
    assert_eq!(status["lastState"]["terminated"]["exitCode"], 4, "{status}");
    assert_eq!(status["restartCount"], 1, "{status}");

    put(&node, Attack::new("once", "exec /busybox sleep 3600"));
    node.wait_for_phase("once", "Running").expect("it runs");
    let refused = node.client(&["logs", "once", "-p"]).expect_err("there is none");
    let expected = "previous terminated container \"attack\" in pod \"once\" not found";
    assert!(format!("{refused:#}").contains(expected), "{refused:#}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn what_kept_a_container_from_starting_or_killed_it_is_its_reason() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let hungry = "x=a; while :; do x=$x$x; done";
    put(&node, Attack::new("hungry", hungry).with_container_fields("resources: {limits: {memory: 24Mi}}"));
    let killed = ended(&node, "hungry");
    assert_eq!((&killed["reason"], &killed["exitCode"]), (&"OOMKilled".into(), &137.into()), "{killed}");

    let never = |name: &str, image: &str| {
        let yaml = Attack::new(name, "exit 0").with_image(image).yaml();
        let yaml = yaml.replace("imagePullPolicy: IfNotPresent", "imagePullPolicy: Never");
        node.put_manifest(&format!("{name}.yaml"), &yaml).expect("put");
    };
    never("absent", "hawser.dev/absent:1");
    let waiting = wait_for_reason(&node, "absent", "ErrImageNeverPull").expect("it waits");
    let message = text(&waiting["message"]);
    let expected = "Container image \"hawser.dev/absent:1\" is not present with pull policy of Never";
    assert!(message.starts_with(expected), "{message}");
    never("wrong", "UPPER:1");
    wait_for_reason(&node, "wrong", "InvalidImageName").expect("it waits");
    node.finish(&idle).expect("nothing is left");
}

fn wait_for_reason(node: &Node<'_>, pod: &str, reason: &str) -> Result<Value> {
    let waits = eventually(&format!("{pod} waits: {reason}"), TIMEOUT, || {
        let status = node.get("pod", pod)?["status"].take();
        let waiting = &status["containerStatuses"][0]["state"]["waiting"];
        ensure!(waiting["reason"] == reason, "{status}");
        Ok(waiting.clone())
    });
    waits.with_context(|| node.outputs())
}

fn kill_shims(node: &Node<'_>) {
    for process in node.sandbox().tag().processes().expect("processes") {
        if process.command_line.starts_with("hawser-shim ") {
            node.kill(process.pid).expect("killed");
        }
    }
}

#[test]
fn a_pod_of_policy_never_whose_sandbox_is_lost_fails_once_a_container_has_run() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let absent = "hawser.dev/later:1";
    let never = |yaml: String| yaml.replace("imagePullPolicy: IfNotPresent", "imagePullPolicy: Never");
    let waits = never(Attack::new("waits", "echo here").with_image(absent).yaml());
    node.put_manifest("waits.yaml", &waits).expect("put");
    let second =
        format!("\n    - {{name: second, image: {absent}, imagePullPolicy: Never, command: [/busybox]}}\n");
    let half = Attack::new("half", "exit 0").yaml().trim_end().to_owned() + &second;
    node.put_manifest("half.yaml", &half).expect("put");
    wait_for_reason(&node, "waits", "ErrImageNeverPull").expect("it has a sandbox");
    ended(&node, "half");
    kill_shims(&node);
    let failed = node.wait_for_phase("half", "Failed").expect("it fails");
    assert_eq!(failed["status"]["reason"], "SandboxLost");
    assert_eq!(failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 0);
    eventually("the container that never ran is unknown", TIMEOUT, || {
        let status = node.get("pod", "half")?["status"].take();
        let never_ran = &status["containerStatuses"][1]["state"]["terminated"];
        ensure!(never_ran["reason"] == "ContainerStatusUnknown" && never_ran["exitCode"] == 137, "{status}");
        Ok(())
    })
    .expect("it is");
    node.wait_for_event("SandboxLost", &["starts no container in another one"]).expect("an event");
    // In the other one nothing has run: it goes on in another sandbox.
    let busybox = attacker::busybox().expect("busybox");
    let later = Program {
        image: absent,
        binary: &busybox,
        path: "busybox",
        directories: &["proc", "dev", "sys", "etc"],
    };
    node.offer_image(&later).expect("an image");
    node.wait_for_log("waits", &["here\n"]).expect("it runs");
    let done = node.wait_for_phase("waits", "Succeeded").expect("it ends");
    assert_eq!(done["status"]["containerStatuses"][0]["restartCount"], 0);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_shares_what_its_yaml_asks_for() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let sleep = "exec /busybox sleep 3600";
    put(&node, Attack::new("ipc", sleep).with_pod_fields("hostIPC: true"));
    put(&node, Attack::new("own", sleep));
    let shared = Attack::new("pid", sleep).with_pod_fields("shareProcessNamespace: true");
    let second = format!(
        "{}    - {{name: second, image: {}, imagePullPolicy: IfNotPresent, command: [/busybox, sleep, \"7200\"]}}\n",
        shared.yaml().trim_end_matches('\n').to_owned() + "\n",
        attacker::IMAGE
    );
    node.put_manifest("pid.yaml", &second).expect("put");
    for pod in ["ipc", "own", "pid"] {
        node.wait_for_phase(pod, "Running").expect("it runs");
    }
    let exec = |pod: &str, words: &[&str]| {
        node.client(&[&["exec", pod, "--", "/busybox"], words].concat()).expect("exec")
    };
    let ipc = |pod: &str| exec(pod, &["readlink", "/proc/self/ns/ipc"]);
    let nodes = std::fs::read_link("/proc/self/ns/ipc").expect("ours").display().to_string();
    assert_eq!(ipc("ipc").trim(), nodes);
    assert_ne!(ipc("own").trim(), nodes);
    let seen = exec("pid", &["ps", "-o", "args"]);
    assert!(seen.contains("sleep 3600") && seen.contains("sleep 7200"), "{seen}");
    let alone = exec("own", &["ps", "-o", "args"]);
    assert!(alone.contains("sleep 3600") && !alone.contains("sleep 7200"), "{alone}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_mount_made_on_the_host_reaches_the_container_that_asks_for_it() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let host = sandbox.make_dir("host").expect("a directory");
    linux::mount::bind(&host, &host).expect("bound");
    linux::mount::make_shared(&host).expect("shared");
    std::fs::create_dir(host.join("inner")).expect("made");
    let volume = format!("volumes: [{{name: h, hostPath: {{path: {}}}}}]", host.display());
    let sleep = "exec /busybox sleep 3600";
    for (name, propagation, more) in [
        ("none", "None", ""),
        ("receives", "HostToContainer", ""),
        ("sends", "Bidirectional", "securityContext: {privileged: true}"),
    ] {
        let fields =
            format!("volumeMounts: [{{name: h, mountPath: /host, mountPropagation: {propagation}}}]\n{more}");
        put(&node, Attack::new(name, sleep).with_pod_fields(&volume).with_container_fields(&fields));
        node.wait_for_phase(name, "Running").expect("it runs");
    }
    let exec = |pod: &str, words: &[&str]| node.client(&[&["exec", pod, "--", "/busybox"], words].concat());
    exec("sends", &["mount", "-t", "tmpfs", "here", "/host/inner"]).expect("it is privileged");
    exec("sends", &["touch", "/host/inner/seen"]).expect("written");
    assert!(host.join("inner/seen").exists(), "the mount has reached the host");
    exec("receives", &["ls", "/host/inner/seen"]).expect("and the container that receives");
    exec("none", &["ls", "/host/inner/seen"]).expect_err("and no other one");
    // What was there before is there; readOnly alone does not hold for it.
    for (name, recursive) in [("flat", "Disabled"), ("whole", "Enabled")] {
        let fields = format!(
            "volumeMounts: [{{name: h, mountPath: /host, readOnly: true, recursiveReadOnly: {recursive}}}]"
        );
        put(&node, Attack::new(name, sleep).with_pod_fields(&volume).with_container_fields(&fields));
        node.wait_for_phase(name, "Running").expect("it runs");
        exec(name, &["touch", "/host/x"]).expect_err("the volume is read-only");
    }
    exec("flat", &["touch", "/host/inner/flat"]).expect("a mount of its own");
    let refused = exec("whole", &["touch", "/host/inner/whole"]).expect_err("it is read-only, too");
    assert!(format!("{refused:#}").contains("Read-only file system"), "{refused:#}");
    let unprivileged = Attack::new("refused", sleep).with_pod_fields(&volume).with_container_fields(
        "volumeMounts: [{name: h, mountPath: /host, mountPropagation: Bidirectional}]",
    );
    node.put_manifest("refused.yaml", &unprivileged.yaml()).expect("put");
    node.wait_for_event("InvalidManifest", &["only to privileged containers"]).expect("refused");
    exec("sends", &["umount", "/host/inner"]).expect("it is privileged");
    node.remove_all_manifests().expect("removed");
    node.wait_for_no_pods().expect("they end");
    linux::mount::unmount(&host, linux::mount::UnmountMode::Detach).expect("unmounted");
    std::fs::remove_dir_all(&host).expect("it is the test's");
    node.finish(&idle).expect("nothing is left");
}
