//! The life of a pod: init containers and sidecars, probes, hooks, deadlines, admission.

use std::fs;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::Value;
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, NodeRuntime, Sandbox, eventually, examples};

fn node<'a>(sandbox: &'a Sandbox, flags: &[&str]) -> (Node<'a>, LeakCheck) {
    let kubelet_flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
    let options = NodeOptions { kubelet_flags, ..NodeOptions::default() };
    let node = Node::start(sandbox, options).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    (node, idle)
}

/// A container of the demo image, as a line of YAML; `more` follows with a comma.
fn container(name: &str, words: &[&str], more: &str) -> String {
    let (image, words) = (examples::DEMO_IMAGE, words.join("\", \""));
    format!(
        "  - {{name: {name}, image: {image}, imagePullPolicy: IfNotPresent, command: [/demo-app, \"{words}\"]{more}}}\n"
    )
}

/// A pod; `rest` are fields of its spec.
fn pod(name: &str, rest: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: default}}\nspec:\n{rest}")
}

fn put(node: &Node<'_>, name: &str, rest: &str) {
    node.put_manifest(&format!("{name}.yaml"), &pod(name, rest)).expect("put");
}

/// Waits until the status of a pod is as `check` wants it; the pod.
fn wait_for(node: &Node<'_>, name: &str, what: &str, check: impl Fn(&Value) -> bool) -> Value {
    node.wait_for("pod", name, what, |pod| check(&pod["status"])).expect(what)
}

fn condition<'a>(status: &'a Value, name: &str) -> &'a Value {
    let conditions = status["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    conditions.iter().find(|condition| condition["type"] == name).unwrap_or(&Value::Null)
}

fn is_ready(status: &Value) -> bool {
    condition(status, "Ready")["status"] == "True"
}

/// A cell of `get pods`.
fn cell(node: &Node<'_>, name: &str, column: usize) -> String {
    let row = node.client(&["get", "pod", name, "--no-headers", "-o", "wide"]).expect("get");
    row.split_whitespace().nth(column).unwrap_or_default().to_owned()
}

fn exec(node: &Node<'_>, name: &str, words: &[&str]) {
    node.client(&[&["exec", name, "--", "/demo-app"][..], words].concat()).expect("exec");
}

/// A command of the client, and how long it took.
fn timed(node: &Node<'_>, words: &[&str]) -> Result<Duration> {
    let begun = Instant::now();
    node.client(words)?;
    Ok(begun.elapsed())
}

#[test]
fn init_containers_run_in_order_before_the_containers() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, &[]);
    let data = ", volumeMounts: [{name: d, mountPath: /data}]";
    let volume = "  volumes: [{name: d, emptyDir: {}}]\n";
    let ordered = format!(
        "  restartPolicy: Never\n{volume}  initContainers:\n{}{}  containers:\n{}",
        container("first", &["write", "/data/note", "from the first"], data),
        container("second", &["cat", "/data/note"], data),
        container("main", &["cat", "/data/note"], data),
    );
    put(&node, "ordered", &ordered);
    let done = node.wait_for_phase("ordered", "Succeeded").expect("it ends");
    for status in done["status"]["initContainerStatuses"].as_array().expect("statuses") {
        assert_eq!(status["state"]["terminated"]["reason"], "Completed", "{status}");
        assert_eq!((&status["ready"], &status["restartCount"]), (&true.into(), &0.into()), "{status}");
    }
    assert_eq!(condition(&done["status"], "Initialized")["status"], "True");
    assert_eq!(condition(&done["status"], "Ready")["reason"], "PodCompleted");
    assert_eq!(done["status"]["hostIPs"][0]["ip"], done["status"]["hostIP"]);
    for name in ["second", "main"] {
        let log = node.client(&["logs", "ordered", "-c", name]).expect("logs");
        assert_eq!(log, "from the first\n", "{name}");
    }

    let waiting = format!(
        "  initContainers:\n{}{}  containers:\n{}",
        container("long", &["sleep", "forever"], ""),
        container("next", &["sleep", "forever"], ""),
        container("main", &["sleep", "forever"], ""),
    );
    put(&node, "waiting", &format!("  terminationGracePeriodSeconds: 1\n{waiting}"));
    let pod = wait_for(&node, "waiting", "the init container runs", |status| {
        !status["initContainerStatuses"][0]["state"]["running"].is_null()
    });
    assert_eq!(pod["status"]["phase"], "Pending");
    for status in [&pod["status"]["initContainerStatuses"][1], &pod["status"]["containerStatuses"][0]] {
        assert_eq!(status["state"]["waiting"]["reason"], "PodInitializing", "{status}");
    }
    let initialized = condition(&pod["status"], "Initialized");
    assert_eq!(initialized["reason"], "ContainersNotInitialized");
    assert_eq!(initialized["message"], "containers with incomplete status: [long next]");
    assert_eq!((cell(&node, "waiting", 1), cell(&node, "waiting", 2)), ("0/1".into(), "Init:0/2".into()));

    let fails = container("fails", &["exit", "3"], "");
    let main = container("main", &["print", "never"], "");
    put(&node, "failed", &format!("  restartPolicy: Never\n  initContainers:\n{fails}  containers:\n{main}"));
    let failed = node.wait_for_phase("failed", "Failed").expect("it fails");
    assert_eq!(failed["status"]["initContainerStatuses"][0]["state"]["terminated"]["exitCode"], 3);
    assert_eq!(cell(&node, "failed", 2), "Init:Error");
    put(&node, "again", &format!("  initContainers:\n{fails}  containers:\n{main}"));
    wait_for(&node, "again", "it backs off", |status| {
        let init = &status["initContainerStatuses"][0];
        init["state"]["waiting"]["reason"] == "CrashLoopBackOff" && init["restartCount"] == 1
    });
    assert_eq!(cell(&node, "again", 2), "Init:CrashLoopBackOff");
    let described = node.client(&["describe", "pod", "again"]).expect("describe");
    assert!(described.contains("Init Containers:\n  fails:\n"), "{described}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_sidecar_starts_before_the_containers_and_ends_after_them() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, &[]);
    let probe =
        ", restartPolicy: Always, startupProbe: {httpGet: {port: 80, path: /hosts}, periodSeconds: 1}";
    let sidecars = format!(
        "{}{}",
        container("server", &["serve", "[::]:80", "/etc"], probe),
        container("helper", &["sleep", "forever"], ", restartPolicy: Always"),
    );
    let main = container("main", &["fetch", "http://127.0.0.1:80/hosts", "0"], "");
    put(&node, "job", &format!("  restartPolicy: Never\n  initContainers:\n{sidecars}  containers:\n{main}"));
    let done = node.wait_for_phase("job", "Succeeded").expect("it ends");
    let status = &done["status"];
    assert_eq!(status["containerStatuses"][0]["restartCount"], 0, "the server answered at once");
    let finished = |status: &Value| text(&status["state"]["terminated"]["finishedAt"]);
    let [server, helper] = [0, 1].map(|place| finished(&status["initContainerStatuses"][place]));
    let main = finished(&status["containerStatuses"][0]);
    assert!(!main.is_empty() && main <= helper && helper <= server, "{main} {helper} {server}");

    // While the containers run, a sidecar that ends starts again.
    let crash = container("crash", &["sleep", "1"], ", restartPolicy: Always");
    let main = container("main", &["sleep", "forever"], "");
    let rest = format!("  initContainers:\n{crash}  containers:\n{main}");
    put(&node, "long", &format!("  terminationGracePeriodSeconds: 3\n  restartPolicy: Never\n{rest}"));
    wait_for(&node, "long", "the sidecar restarts", |status| {
        status["initContainerStatuses"][0]["restartCount"].as_u64() > Some(0)
            && status["phase"] == "Running"
            && status["containerStatuses"][0]["restartCount"] == 0
    });
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn probes_decide_about_readiness_and_restarts() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, &[]);
    let readiness =
        "readinessProbe: {httpGet: {port: 80, path: /ready}, periodSeconds: 1, failureThreshold: 1}";
    let serve = container("c", &["serve", "[::]:80", "/tmp"], &format!(", {readiness}"));
    put(&node, "ready", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{serve}"));
    node.wait_for_event("Unhealthy", &["Readiness probe failed: HTTP probe failed with statuscode: 404"])
        .expect("the file is not there");
    let unready = wait_for(&node, "ready", "it runs", |status| status["phase"] == "Running");
    assert_eq!(condition(&unready["status"], "Ready")["reason"], "ContainersNotReady");
    assert_eq!(cell(&node, "ready", 1), "0/1");
    exec(&node, "ready", &["write", "/tmp/ready", "yes"]);
    wait_for(&node, "ready", "it is ready", is_ready);
    exec(&node, "ready", &["remove", "/tmp/ready"]);
    let pod = wait_for(&node, "ready", "it is not ready", |status| !is_ready(status));
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);

    // The hook writes the file that liveness looks for, in each instance.
    let alive = "livenessProbe: {exec: {command: [/demo-app, cat, /tmp/alive]}, periodSeconds: 1, failureThreshold: 2, \
                 timeoutSeconds: 20, terminationGracePeriodSeconds: 1}";
    let hook = "lifecycle: {postStart: {exec: {command: [/demo-app, write, /tmp/alive, here]}}}";
    let main = container("c", &["sleep", "forever"], &format!(", {alive}, {hook}"));
    put(&node, "alive", &format!("  containers:\n{main}"));
    wait_for(&node, "alive", "it is ready", is_ready);
    exec(&node, "alive", &["remove", "/tmp/alive"]);
    node.wait_for_event("Killing", &["Container c failed liveness probe, will be restarted"])
        .expect("killed");
    let again = wait_for(&node, "alive", "it runs again", |status| {
        status["containerStatuses"][0]["restartCount"] == 1 && is_ready(status)
    });
    let last = &again["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!(last["exitCode"], 143, "{last}");

    // A container that never starts gets no readiness probe and is restarted.
    let startup = "startupProbe: {tcpSocket: {port: 81}, periodSeconds: 1, failureThreshold: 1}, readinessProbe: \
                   {exec: {command: [/demo-app, exit, \"0\"]}}";
    let main = container("c", &["sleep", "forever"], &format!(", {startup}"));
    put(&node, "never", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{main}"));
    node.wait_for_event("Killing", &["Container c failed startup probe, will be restarted"]).expect("killed");
    let never = wait_for(&node, "never", "it restarts", |status| {
        status["containerStatuses"][0]["restartCount"].as_u64() > Some(0)
    });
    assert!(!is_ready(&never["status"]));
    node.finish(&idle).expect("nothing is left");
}

/// Writes to a pipe once a program reads it.
fn write_to_reader(pipe: &Path) {
    let open = || -> Result<fs::File> {
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
        Ok(fs::OpenOptions::new().write(true).custom_flags(nonblocking).open(pipe)?)
    };
    let mut writer = eventually("a program reads the pipe", TIMEOUT, open).expect("a reader");
    writer.write_all(b"now").expect("written");
}

#[test]
fn a_container_that_ends_well_after_a_failed_probe_starts_again() {
    let sandbox = Sandbox::new();
    sandbox.make_dir("shared").expect("a directory");
    let shared = sandbox.path("shared");
    nix::unistd::mkfifo(&shared.join("end"), nix::sys::stat::Mode::S_IRWXU).expect("mkfifo");
    let (node, idle) = node(&sandbox, &[]);
    // The hook lasts until the program has read the pipe and ended, with exit code 0.
    let more = ", volumeMounts: [{name: d, mountPath: /data}], lifecycle: {preStop: {exec: {command: [/demo-app, \
                sleep, forever]}}}, livenessProbe: {exec: {command: [/demo-app, cat, /data/alive]}, \
                periodSeconds: 1, timeoutSeconds: 20, failureThreshold: 2}";
    // A probe that the end of the program cuts off decides nothing alone.
    let main = container("c", &["cat", "/data/end"], more);
    let volume = format!("  volumes: [{{name: d, hostPath: {{path: {}}}}}]\n", shared.display());
    put(&node, "once", &format!("  restartPolicy: OnFailure\n{volume}  containers:\n{main}"));
    node.wait_for_event("Killing", &["Container c failed liveness probe, will be restarted"])
        .expect("killed");
    fs::write(shared.join("alive"), "").expect("written");
    write_to_reader(&shared.join("end"));
    let again = wait_for(&node, "once", "it runs again", |status| {
        assert_ne!(status["phase"], "Succeeded", "{status}");
        status["containerStatuses"][0]["restartCount"].as_u64() > Some(0) && is_ready(status)
    });
    let last = &again["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!((&last["exitCode"], &again["status"]["phase"]), (&0.into(), &"Running".into()), "{last}");
    write_to_reader(&shared.join("end"));
    node.wait_for_phase("once", "Succeeded").expect("it ends by itself");
    fs::remove_file(shared.join("alive")).expect("removed");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_stays_ready_while_the_kubelet_restarts() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, &[]);
    let readiness =
        ", readinessProbe: {httpGet: {port: 80, path: /hosts}, periodSeconds: 1, successThreshold: 3}";
    let main = container("c", &["serve", "[::]:80", "/etc"], readiness);
    put(&node, "ready", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{main}"));
    wait_for(&node, "ready", "it is ready", is_ready);
    node.kubelet().expect("it runs").kill().expect("killed");
    node.start_kubelet().expect("it starts");
    // Longer than the first checks take.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        let pod = node.get("pod", "ready").expect("it is known");
        // Without conditions, the kubelet has not looked at the pod yet.
        assert_ne!(condition(&pod["status"], "Ready")["status"], "False", "{pod}");
    }
    wait_for(&node, "ready", "it is ready", is_ready);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_grpc_probe_follows_the_health_of_its_service() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, &[]);
    let readiness =
        "readinessProbe: {grpc: {port: 9000, service: shop}, periodSeconds: 1, failureThreshold: 1}";
    let main = container("c", &["health", "[::]:9000", "/tmp"], &format!(", {readiness}"));
    put(&node, "shop", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{main}"));
    let refusal = "Readiness probe failed: service unhealthy (responded with \"NOT_SERVING\")";
    node.wait_for_event("Unhealthy", &[refusal]).expect("the service does not serve yet");
    let unready = wait_for(&node, "shop", "it runs", |status| status["phase"] == "Running");
    assert!(!is_ready(&unready["status"]));
    exec(&node, "shop", &["write", "/tmp/shop", "open"]);
    wait_for(&node, "shop", "it is ready", is_ready);
    exec(&node, "shop", &["remove", "/tmp/shop"]);
    let pod = wait_for(&node, "shop", "it is not ready", |status| !is_ready(status));
    assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_container_is_stopped_by_its_own_signal() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, &[]);
    let more = ", livenessProbe: {exec: {command: [/demo-app, cat, /tmp/alive]}, periodSeconds: 1, \
                timeoutSeconds: 20, failureThreshold: 1}, lifecycle: {stopSignal: SIGINT, postStart: {exec: \
                {command: [/demo-app, write, /tmp/alive, here]}}}";
    let main = container("c", &["sleep", "forever"], more);
    put(&node, "stops", &format!("  os: {{name: linux}}\n  containers:\n{main}"));
    let running = wait_for(&node, "stops", "it is ready", is_ready);
    // The program ends with 128 and the number of its signal.
    let exit_code = match NodeRuntime::default() {
        NodeRuntime::Embedded => {
            assert_eq!(running["status"]["containerStatuses"][0]["stopSignal"], "SIGINT");
            130
        }
        // containerd 1.6 does not know stop signals of containers.
        NodeRuntime::Containerd => {
            node.wait_for_event("UnsupportedStopSignal", &["stopSignal SIGINT"]).expect("a warning");
            143
        }
    };
    exec(&node, "stops", &["remove", "/tmp/alive"]);
    let again = wait_for(&node, "stops", "it runs again", |status| {
        status["containerStatuses"][0]["restartCount"] == 1 && is_ready(status)
    });
    let last = &again["status"]["containerStatuses"][0]["lastState"]["terminated"];
    assert_eq!(last["exitCode"], exit_code, "{last}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn hostile_probes_cost_the_kubelet_little() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox, &[]);
    let sleep = |name, probe: &str| {
        let more = format!(", readinessProbe: {{{probe}, periodSeconds: 1}}");
        container(name, &["sleep", "forever"], &more)
    };
    let containers = [
        container("server", &["hostile", "[::]:80"], ""),
        sleep("away", "httpGet: {port: 80, path: /redirect}"),
        sleep("loop", "httpGet: {port: 80, path: /loop}"),
        sleep("slow", "httpGet: {port: 80, path: /slow}"),
        sleep("flood", "httpGet: {port: 80, path: /flood}"),
        sleep("prints", "exec: {command: [/demo-app, flood, \"10485760\", \"0\"]}, timeoutSeconds: 5"),
        sleep("fails", "exec: {command: [/demo-app, flood, \"10485760\", \"1\"]}, timeoutSeconds: 5"),
        sleep("hangs", "exec: {command: [/demo-app, sleep, forever]}"),
        sleep("missing", "exec: {command: [/missing]}"),
    ]
    .concat();
    put(&node, "hostile", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{containers}"));
    for (reason, words) in [
        ("ProbeWarning", "Readiness probe warning: Probe terminated redirects, Response body: away"),
        ("Unhealthy", "stopped after 10 redirects"),
        ("Unhealthy", "/slow\": did not answer within 1 s"),
        ("Unhealthy", "Readiness probe failed: xxxxxxxx"),
        ("Unhealthy", "command timed out: \"/demo-app sleep forever\" timed out after 1 s"),
        ("Unhealthy", "Readiness probe errored"),
    ] {
        let message = node.wait_for_event(reason, &[words]).expect("the event");
        assert!(message.len() < 2048, "{} bytes", message.len());
    }
    let pod = wait_for(&node, "hostile", "those that answer are ready", |status| {
        let statuses = status["containerStatuses"].as_array().map_or(&[][..], Vec::as_slice);
        statuses.iter().filter(|status| status["ready"] == true).count() == 4
    });
    for status in pod["status"]["containerStatuses"].as_array().expect("statuses") {
        let answers = ["server", "away", "flood", "prints"].contains(&text(&status["name"]).as_str());
        assert_eq!(status["ready"], answers, "{status}");
        assert_eq!(status["restartCount"], 0, "{status}");
    }
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn hooks_run_within_the_grace_period() {
    let sandbox = Sandbox::new();
    sandbox.make_dir("shared").expect("a directory");
    let (node, idle) = node(&sandbox, &[]);
    let shared = sandbox.path("shared");
    let volume = format!("  volumes: [{{name: d, hostPath: {{path: {}}}}}]\n", shared.display());
    let hook = ", volumeMounts: [{name: d, mountPath: /data}], lifecycle: {preStop: {exec: {command: \
                [/demo-app, write, /data/stopped, good bye]}}}";
    let main = container("c", &["sleep", "forever"], hook);
    let apply = |name: &str, rest: &str| {
        let file = sandbox.path(&format!("{name}-applied.yaml"));
        fs::write(&file, pod(name, rest)).expect("written");
        node.client(&["apply", "-f", &file.display().to_string()]).expect("applied");
        fs::remove_file(&file).expect("removed");
    };
    apply("polite", &format!("  terminationGracePeriodSeconds: 60\n{volume}  containers:\n{main}"));
    wait_for(&node, "polite", "it is ready", is_ready);
    let took = timed(&node, &["delete", "pod", "polite"]).expect("deleted");
    assert!(took < Duration::from_secs(30), "{took:?}");
    assert_eq!(fs::read_to_string(shared.join("stopped")).expect("the hook ran"), "good bye\n");
    fs::remove_file(shared.join("stopped")).expect("removed");

    // A hook that hangs ends with the grace period; SIGTERM still comes.
    let hang = ", lifecycle: {preStop: {exec: {command: [/demo-app, sleep, forever]}}}";
    let main = container("c", &["sleep", "forever"], hang);
    apply("hung", &format!("  terminationGracePeriodSeconds: 3\n  containers:\n{main}"));
    wait_for(&node, "hung", "it is ready", is_ready);
    let took = timed(&node, &["delete", "pod", "hung"]).expect("deleted");
    assert!((3..20).contains(&took.as_secs()), "{took:?}");
    node.wait_for_event("FailedPreStopHook", &["did not complete within the grace period of 3 s"])
        .expect("said");

    // A shorter grace period ends the hook too.
    apply("hurried", &format!("  terminationGracePeriodSeconds: 300\n  containers:\n{main}"));
    wait_for(&node, "hurried", "it is ready", is_ready);
    node.client(&["delete", "pod", "hurried", "--wait=false"]).expect("deleted");
    node.wait_for_event("Killing", &["Stopping container c"]).expect("said");
    let took = timed(&node, &["delete", "pod", "hurried", "--grace-period", "1"]).expect("deleted");
    assert!(took < Duration::from_secs(20), "{took:?}");

    // A deletion while the hook runs before a restart: it runs again.
    let drains = ", livenessProbe: {exec: {command: [/demo-app, cat, /tmp/alive]}, periodSeconds: 1, \
                  timeoutSeconds: 20, failureThreshold: 1}, lifecycle: {postStart: {exec: {command: \
                  [/demo-app, write, /tmp/alive, here]}}, preStop: {sleep: {seconds: 12}}}";
    let drains = container("c", &["sleep", "forever"], drains);
    apply("drains", &format!("  terminationGracePeriodSeconds: 60\n  containers:\n{drains}"));
    wait_for(&node, "drains", "it is ready", is_ready);
    exec(&node, "drains", &["remove", "/tmp/alive"]);
    node.wait_for_event("Killing", &["Container c failed liveness probe"]).expect("killed");
    let took = timed(&node, &["delete", "pod", "drains"]).expect("deleted");
    assert!((12..30).contains(&took.as_secs()), "{took:?}");

    // postStart: one that fails ends the container, one that hangs ends with the pod.
    let fails = ", lifecycle: {postStart: {exec: {command: [/demo-app, exit, \"7\"]}}}";
    let main = container("c", &["sleep", "forever"], fails);
    put(&node, "fails", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{main}"));
    node.wait_for_event("FailedPostStartHook", &["exited with 7"]).expect("said");
    wait_for(&node, "fails", "it starts again", |status| {
        status["containerStatuses"][0]["restartCount"].as_u64() > Some(0)
    });
    let hangs = ", lifecycle: {postStart: {sleep: {seconds: 1}}, preStop: {sleep: {seconds: 1}}}";
    let main = container("c", &["sleep", "forever"], hangs);
    apply("sleeps", &format!("  terminationGracePeriodSeconds: 60\n  containers:\n{main}"));
    wait_for(&node, "sleeps", "it is ready", is_ready);
    let took = timed(&node, &["delete", "pod", "sleeps"]).expect("deleted");
    assert!((1..30).contains(&took.as_secs()), "{took:?}");
    // The container before it is probed meanwhile.
    let hangs = ", lifecycle: {postStart: {exec: {command: [/demo-app, sleep, forever]}}}";
    let probed =
        ", readinessProbe: {httpGet: {port: 80, path: /ready}, periodSeconds: 1, failureThreshold: 1}";
    let both = container("first", &["serve", "[::]:80", "/tmp"], probed)
        + &container("c", &["sleep", "forever"], hangs);
    apply("hangs", &format!("  terminationGracePeriodSeconds: 1\n  containers:\n{both}"));
    let is = |ready: bool| {
        move |status: &Value| {
            let [first, hooked] = [0, 1].map(|place| &status["containerStatuses"][place]);
            first["ready"] == ready
                && !first["state"]["running"].is_null()
                && hooked["state"]["waiting"]["reason"] == "ContainerCreating"
                && !text(&hooked["containerID"]).is_empty()
        }
    };
    wait_for(&node, "hangs", "the hook runs", is(false));
    node.client(&["exec", "hangs", "-c", "first", "--", "/demo-app", "write", "/tmp/ready", "yes"])
        .expect("exec");
    wait_for(&node, "hangs", "it is ready", is(true));
    node.client(&["exec", "hangs", "-c", "first", "--", "/demo-app", "remove", "/tmp/ready"]).expect("exec");
    wait_for(&node, "hangs", "it is not ready", is(false));
    let took = timed(&node, &["delete", "pod", "hangs"]).expect("deleted");
    assert!(took < Duration::from_secs(20), "{took:?}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_hook_has_its_address_and_its_time_however_the_pod_ends() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, &[]);
    // The manifest of another pod takes its place while no kubelet runs.
    let asks = |path: &str| {
        let asks = format!(", lifecycle: {{preStop: {{httpGet: {{port: 80, path: {path}}}}}}}");
        format!("  containers:\n{}", container("c", &["serve", "[::]:80", "/etc"], &asks))
    };
    put(&node, "asks", &asks("/hosts"));
    let before = wait_for(&node, "asks", "it is ready", is_ready);
    node.kubelet().expect("it runs").stop(TIMEOUT).expect("it ends");
    put(&node, "asks", &asks("/passwd"));
    node.start_kubelet().expect("it starts");
    node.wait_for("pod", "asks", "the other pod is ready", |pod| {
        pod["metadata"]["uid"] != before["metadata"]["uid"] && is_ready(&pod["status"])
    })
    .expect("replaced");
    node.wait_for_event("Killing", &["Stopping container c"]).expect("it ran until then");
    let events = node.list("events").expect("events");
    let failed: Vec<_> = events.iter().filter(|event| event["reason"] == "FailedPreStopHook").collect();
    assert!(failed.is_empty(), "{failed:?}");

    // A deletion while a pod ends at its deadline: the hook runs again.
    let file = sandbox.path("ends-applied.yaml");
    let main = container("c", &["sleep", "forever"], ", lifecycle: {preStop: {sleep: {seconds: 12}}}");
    for deadline in [600, 1] {
        let rest = format!(
            "  terminationGracePeriodSeconds: 60\n  activeDeadlineSeconds: {deadline}\n  containers:\n{main}"
        );
        fs::write(&file, pod("ends", &rest)).expect("written");
        node.client(&["apply", "-f", &file.display().to_string()]).expect("applied");
        if deadline == 600 {
            wait_for(&node, "ends", "it is ready", is_ready);
        }
    }
    fs::remove_file(&file).expect("removed");
    wait_for(&node, "ends", "it is failed", |status| status["phase"] == "Failed");
    let took = timed(&node, &["delete", "pod", "ends"]).expect("deleted");
    assert!((12..30).contains(&took.as_secs()), "{took:?}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_ends_at_its_deadline_and_stays_failed() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, &[]);
    let main = container("c", &["sleep", "forever"], "");
    let rest = "  terminationGracePeriodSeconds: 1\n  activeDeadlineSeconds: 20\n  readinessGates: [{conditionType: open}]\n";
    put(&node, "late", &format!("{rest}  containers:\n{main}"));
    let pod = wait_for(&node, "late", "it runs", |status| status["phase"] == "Running");
    assert_eq!(condition(&pod["status"], "ContainersReady")["status"], "True");
    let ready = condition(&pod["status"], "Ready");
    assert_eq!((&ready["status"], &ready["reason"]), (&"False".into(), &"ReadinessGatesNotReady".into()));
    assert_eq!(cell(&node, "late", 8), "0/1");
    let failed = wait_for(&node, "late", "it has ended", |status| {
        status["phase"] == "Failed" && !status["containerStatuses"][0]["state"]["terminated"].is_null()
    });
    assert_eq!(failed["status"]["reason"], "DeadlineExceeded");
    assert_eq!(cell(&node, "late", 2), "Error", "kubectl shows how the container ended");
    node.kubelet().expect("it runs").stop(TIMEOUT).expect("it ends");
    node.start_kubelet().expect("it starts");
    let same = wait_for(&node, "late", "it is known", |status| status["phase"] == "Failed");
    assert_eq!(same["metadata"]["uid"], failed["metadata"]["uid"]);
    assert_eq!(same["status"]["reason"], "DeadlineExceeded");
    assert_eq!(same["status"]["containerStatuses"][0]["restartCount"], 0);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_that_has_ended_keeps_its_outcome_and_no_room() {
    // It counts from a pod's start, and a busy machine needs some seconds to start one.
    const DEADLINE: Duration = Duration::from_secs(20);
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, &["--max-pods", "1"]);
    let ends = |words: &[&str]| {
        let (main, deadline) = (container("c", words, ""), DEADLINE.as_secs());
        format!("  restartPolicy: Never\n  activeDeadlineSeconds: {deadline}\n  containers:\n{main}")
    };
    let mut before = Vec::new();
    for (name, code, phase) in [("good", "0", "Succeeded"), ("bad", "1", "Failed")] {
        put(&node, name, &ends(&["exit", code]));
        let pod = wait_for(&node, name, "its sandbox is stopped", |status| {
            status["phase"] == phase && condition(status, "PodReadyToStartContainers")["status"] == "False"
        });
        before.push(pod);
    }
    put(&node, "alone", &ends(&["sleep", "10"]));
    wait_for(&node, "alone", "it is ready", is_ready);
    let begun = Instant::now();
    node.kubelet().expect("it runs").stop(TIMEOUT).expect("it ends");
    eventually("the pod has ended and the deadlines are over", 2 * TIMEOUT, || {
        ensure!(node.processes("demo-app")?.is_empty(), "it runs");
        ensure!(begun.elapsed() > DEADLINE + Duration::from_secs(1), "it is not time");
        Ok(())
    })
    .expect("it ends without a kubelet");
    put(&node, "next", &format!("  containers:\n{}", container("c", &["sleep", "1"], "")));
    node.start_kubelet().expect("it starts");
    wait_for(&node, "next", "there is room for it", |status| status["phase"] == "Running");
    for before in before {
        let after = node.get("pod", &text(&before["metadata"]["name"])).expect("it is known");
        assert_eq!(after["status"], before["status"]);
        assert_eq!(after["status"]["reason"], Value::Null);
    }
    let alone = node.wait_for_phase("alone", "Succeeded").expect("it has succeeded");
    assert_eq!(alone["status"]["reason"], Value::Null);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn pods_beyond_the_nodes_room_are_rejected() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox, &["--max-pods", "2"]);
    let rejected = |node: &Node<'_>, name: &str, rest: &str, reason: &str, words: &str| {
        put(node, name, rest);
        let pod = node.wait_for_phase(name, "Failed").expect("rejected");
        assert_eq!(pod["status"]["reason"], reason);
        let message = text(&pod["status"]["message"]);
        assert!(message.starts_with("Pod was rejected: ") && message.contains(words), "{message}");
        assert_eq!(cell(node, name, 2), reason);
        node.wait_for_event(reason, &[words]).expect("said");
        node.remove_manifest(&format!("{name}.yaml")).expect("removed");
        node.wait_for_no_pod(name).expect("it goes");
    };
    let sleep = |more: &str| format!("  containers:\n{}", container("c", &["sleep", "forever"], more));
    put(
        &node,
        "first",
        &format!(
            "  terminationGracePeriodSeconds: 1\n{}",
            sleep(", ports: [{containerPort: 80, hostPort: 18080}]")
        ),
    );
    wait_for(&node, "first", "it is ready", is_ready);
    let cpu = sleep(", resources: {requests: {cpu: 4096}}");
    rejected(&node, "cpu", &cpu, "OutOfcpu", "resource: cpu, requested: 4096000, used: 0, capacity: ");
    let memory = sleep(", resources: {requests: {memory: 1Pi}}");
    rejected(
        &node,
        "memory",
        &memory,
        "OutOfmemory",
        "resource: memory, requested: 1125899906842624, used: 0",
    );
    let port = sleep(", ports: [{containerPort: 81, hostPort: 18080}]");
    rejected(&node, "port", &port, "NodePorts", "Predicate NodePorts failed");
    put(&node, "second", &format!("  terminationGracePeriodSeconds: 1\n{}", sleep("")));
    wait_for(&node, "second", "it is ready", is_ready);
    let third = "resource: pods, requested: 1, used: 2, capacity: 2";
    rejected(&node, "third", &sleep(""), "OutOfpods", third);
    let nodes = node.list("nodes").expect("nodes");
    assert_eq!(nodes[0]["status"]["allocatable"]["pods"], "2");
    assert!(text(&nodes[0]["status"]["capacity"]["memory"]).ends_with("Ki"), "{}", nodes[0]);

    // The next kubelet adopts both before it judges a third.
    node.kubelet().expect("it runs").stop(TIMEOUT).expect("it ends");
    put(&node, "third", &sleep(""));
    node.start_kubelet().expect("it starts");
    let pod = node.wait_for_phase("third", "Failed").expect("rejected");
    assert_eq!(pod["status"]["reason"], "OutOfpods");
    for name in ["first", "second"] {
        let pod = wait_for(&node, name, "it runs on", is_ready);
        assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], 0);
    }
    node.finish(&idle).expect("nothing is left");
}
