//! ConfigMaps, Secrets and the pod's fields in containers, as files and as variables; parts of
//! volumes; the pod's names.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use tests::node::{TIMEOUT, text};
use tests::{LeakCheck, Node, NodeOptions, Sandbox, eventually};

/// A pod that sleeps. `container` are fields of its container, `spec` fields of the pod, one a line.
fn pod(name: &str, container: &[&str], spec: &[&str]) -> String {
    let lines = |indent: &str, lines: &[&str]| -> String {
        lines.iter().map(|line| format!("{indent}{line}\n")).collect()
    };
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, labels: {{app: shop}}}}\nspec:\n  \
         terminationGracePeriodSeconds: 2\n{}  containers:\n  - name: business\n    image: {}\n    \
         imagePullPolicy: IfNotPresent\n    command: [/demo-app, sleep, forever]\n{}",
        lines("  ", spec),
        tests::examples::DEMO_IMAGE,
        lines("    ", container),
    )
}

fn node(sandbox: &Sandbox) -> (Node<'_>, LeakCheck) {
    let node = Node::start(sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    (node, idle)
}

/// What demo-app prints in the pod's container.
fn exec(node: &Node<'_>, pod: &str, words: &[&str]) -> Result<String> {
    node.client(&[&["exec", pod, "--", "/demo-app"], words].concat())
}

fn cat(node: &Node<'_>, pod: &str, path: &str) -> Result<String> {
    exec(node, pod, &["cat", path])
}

fn wait_for_content(node: &Node<'_>, pod: &str, path: &str, content: &str) {
    let reached = eventually(&format!("{path} in {pod} is {content:?}"), TIMEOUT, || {
        let found = cat(node, pod, path)?;
        ensure!(found == content, "{found:?}");
        Ok(())
    });
    reached.with_context(|| format!("{}\n{}", node.describe_all(), node.outputs())).expect("the new content");
}

fn config_map(color: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: settings}}\ndata: {{color: {color}, size: large}}\n"
    )
}

fn secret(password: &str) -> String {
    format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: token}}\nstringData: {{password: {password}}}\n")
}

/// The type of the file system that is mounted on the pod's volume on the host.
fn mounted_on(node: &Node<'_>, volume: &Path) -> Option<String> {
    let mounts = linux::mountinfo::read().expect("the kernel answers");
    let root = node.root_dir();
    mounts
        .into_iter()
        .find(|mount| mount.mount_point.starts_with(&root) && mount.mount_point.ends_with(volume))
        .map(|mount| mount.fs_type)
}

#[test]
fn configuration_is_mounted_and_updated_while_the_pod_runs() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let web = pod(
        "web",
        &[
            "volumeMounts:",
            "- {name: config, mountPath: /config}",
            "- {name: token, mountPath: /token}",
            "- {name: all, mountPath: /all}",
            "- {name: maybe, mountPath: /maybe}",
            "resources: {limits: {memory: 64Mi}}",
        ],
        &[
            "securityContext: {fsGroup: 2000, runAsUser: 1000}",
            "volumes:",
            "- {name: config, configMap: {name: settings, items: [{key: color, path: a/b, mode: 0400}]}}",
            "- {name: token, secret: {secretName: token, defaultMode: 0400}}",
            "- {name: maybe, configMap: {name: none, optional: true}}",
            "- name: all",
            "  projected:",
            "    sources:",
            "    - configMap: {name: settings}",
            "    - secret: {name: token, items: [{key: password, path: secret/password}]}",
            "    - downwardAPI:",
            "        items:",
            "        - {path: labels, fieldRef: {fieldPath: metadata.labels}}",
            "        - {path: memory, resourceFieldRef: {containerName: business, resource: limits.memory, divisor: 1Mi}}",
        ],
    );
    node.put_manifest("web.yaml", &web).expect("put");
    node.wait_for_event("FailedMount", &["volume \"config\": configmap \"settings\" not found"])
        .expect("waits");
    node.wait_for_event("FailedMount", &["volume \"token\": secret \"token\" not found"]).expect("waits");
    node.put_manifest("settings.yaml", &config_map("blue")).expect("put");
    node.put_manifest("token.yaml", &secret("hush")).expect("put");
    node.wait_for_phase("web", "Running").expect("its objects are there");

    for (path, content) in [
        ("/config/a/b", "blue"),
        ("/token/password", "hush"),
        ("/all/size", "large"),
        ("/all/secret/password", "hush"),
        ("/all/labels", "app=\"shop\""),
        ("/all/memory", "64"),
    ] {
        assert_eq!(cat(&node, "web", path).expect(path), content, "{path}");
    }
    assert_eq!(mounted_on(&node, Path::new("kubernetes.io~secret/token")).as_deref(), Some("tmpfs"));
    assert_eq!(mounted_on(&node, Path::new("kubernetes.io~projected/all")).as_deref(), Some("tmpfs"));
    let error = exec(&node, "web", &["write", "/config/x", "x"]).expect_err("the volume is read-only");
    assert!(format!("{error:#}").contains("Read-only file system"), "{error:#}");

    node.put_manifest("settings.yaml", &config_map("green")).expect("put");
    wait_for_content(&node, "web", "/config/a/b", "green");
    wait_for_content(&node, "web", "/all/color", "green");
    assert_eq!(cat(&node, "web", "/all/size").expect("still there"), "large");

    // What changes while no kubelet runs is updated by the next one.
    node.kubelet().expect("it runs").kill().expect("it is killed");
    node.put_manifest("token.yaml", &secret("whisper")).expect("put");
    node.start_kubelet().expect("it starts again");
    wait_for_content(&node, "web", "/token/password", "whisper");
    wait_for_content(&node, "web", "/all/secret/password", "whisper");
    let appeared = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: none}\ndata: {key: here}\n";
    node.put_manifest("none.yaml", appeared).expect("put");
    wait_for_content(&node, "web", "/maybe/key", "here");

    // A running pod keeps what it has when the object goes.
    node.remove_manifest("token.yaml").expect("removed");
    node.wait_for_event("FailedMount", &["volume \"token\": secret \"token\" not found"]).expect("an event");
    assert_eq!(cat(&node, "web", "/token/password").expect("it stays"), "whisper");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_container_waits_for_what_its_variables_need() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let web = pod(
        "web",
        &[
            "envFrom: [{prefix: S_, configMapRef: {name: settings}}]",
            "env:",
            "- {name: PASSWORD, valueFrom: {secretKeyRef: {name: token, key: password}}}",
            "- {name: NONE, valueFrom: {secretKeyRef: {name: none, key: x, optional: true}}}",
            "- {name: URL, value: \"$(PASSWORD)@$(S_color)/$(NONE)$$(A)\"}",
            "- {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}",
            "- {name: HOST, valueFrom: {fieldRef: {fieldPath: status.hostIPs}}}",
            "- {name: CPU, valueFrom: {resourceFieldRef: {resource: limits.cpu, divisor: 1m}}}",
            "resources: {limits: {cpu: 500m}}",
        ],
        &[],
    );
    node.put_manifest("web.yaml", &web).expect("put");
    let wait_for_reason = |message: &str| {
        let waits = eventually(message, TIMEOUT, || {
            let web = node.get("pod", "web")?;
            let waiting = &web["status"]["containerStatuses"][0]["state"]["waiting"];
            ensure!(waiting["reason"] == "CreateContainerConfigError", "{}", web["status"]);
            ensure!(text(&waiting["message"]) == message, "{waiting}");
            Ok(())
        });
        waits.with_context(|| node.outputs()).expect("it waits");
    };
    wait_for_reason("configmap \"settings\" not found");
    node.put_manifest("settings.yaml", &config_map("blue")).expect("put");
    wait_for_reason("secret \"token\" not found");
    node.put_manifest("token.yaml", &secret("hush")).expect("put");
    node.wait_for_phase("web", "Running").expect("its objects are there");
    let environment = cat(&node, "web", "/proc/self/environ").expect("exec");
    let variables: Vec<&str> = environment.split('\0').collect();
    for variable in
        ["S_color=blue", "S_size=large", "PASSWORD=hush", "URL=hush@blue/$(NONE)$(A)", "POD=web", "CPU=500"]
    {
        assert!(variables.contains(&variable), "{variable} is not in {variables:?}");
    }
    assert!(variables.iter().any(|variable| variable.starts_with("HOST=") && variable.len() > 5));
    assert!(!variables.iter().any(|variable| variable.starts_with("NONE=")), "{variables:?}");
    node.finish(&idle).expect("nothing is left");
}

/// Waits until the pod's container waits for this reason; its message.
fn wait_for_reason(node: &Node<'_>, pod: &str, reason: &str) -> String {
    let waits = eventually(&format!("{pod} waits: {reason}"), TIMEOUT, || {
        let object = node.get("pod", pod)?;
        let waiting = &object["status"]["containerStatuses"][0]["state"]["waiting"];
        ensure!(waiting["reason"] == reason, "{}", object["status"]);
        Ok(text(&waiting["message"]))
    });
    waits.with_context(|| node.outputs()).expect("it waits")
}

#[test]
fn parts_of_volumes_are_mounted_and_nothing_of_them_is_left() {
    let sandbox = Sandbox::new();
    let (mut node, idle) = node(&sandbox);
    let host = sandbox.make_dir("host").expect("a directory");
    node.put_class().expect("put");
    node.put_manifest("claim.yaml", &tests::manifests::claim("data", "16Mi")).expect("put");
    node.put_manifest("settings.yaml", &config_map("blue")).expect("put");
    let host_volume = format!("- {{name: host, hostPath: {{path: {}}}}}", host.display());
    let web = pod(
        "web",
        &[
            "env: [{name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]",
            "volumeMounts:",
            "- {name: scratch, mountPath: /scratch}",
            "- {name: scratch, mountPath: /part, subPath: a/b}",
            "- {name: scratch, mountPath: /own, subPathExpr: logs/$(POD)}",
            "- {name: data, mountPath: /data, subPath: mine}",
            "- {name: data, mountPath: /whole}",
            "- {name: host, mountPath: /host, subPath: made/here}",
            "- {name: config, mountPath: /etc/color, subPath: color}",
            "- {name: memory, mountPath: /memory, subPath: m}",
        ],
        &[
            "volumes:",
            "- {name: scratch, emptyDir: {}}",
            "- {name: memory, emptyDir: {medium: Memory}}",
            "- {name: data, persistentVolumeClaim: {claimName: data}}",
            "- {name: config, configMap: {name: settings}}",
            &host_volume,
        ],
    );
    node.put_manifest("web.yaml", &web).expect("put");
    node.wait_for_phase("web", "Running").expect("it runs");
    assert_eq!(cat(&node, "web", "/etc/color").expect("a file"), "blue");
    for (part, whole) in
        [("/part/x", "/scratch/a/b/x"), ("/own/x", "/scratch/logs/web/x"), ("/data/x", "/whole/mine/x")]
    {
        exec(&node, "web", &["write", part, part]).expect("written");
        assert_eq!(cat(&node, "web", whole).expect(whole), format!("{part}\n"));
    }
    exec(&node, "web", &["write", "/host/x", "host"]).expect("written");
    assert_eq!(std::fs::read_to_string(host.join("made/here/x")).expect("on the host"), "host\n");

    // The next kubelet knows the mounts of a killed one, and unmounts them with their pod.
    node.kubelet().expect("it runs").kill().expect("it is killed");
    node.start_kubelet().expect("it starts again");
    wait_for_content(&node, "web", "/data/x", "/data/x\n");
    node.remove_manifest("web.yaml").expect("removed");
    node.wait_for_no_pods().expect("it ends");
    std::fs::remove_dir_all(&host).expect("it is the test's");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_link_to_the_host_is_no_part_of_a_volume() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let host = sandbox.make_dir("host").expect("a directory");
    std::os::unix::fs::symlink("/etc", host.join("absolute")).expect("a link");
    std::os::unix::fs::symlink("../run", host.join("relative")).expect("a link");
    let volumes = format!("volumes: [{{name: host, hostPath: {{path: {}}}}}]", host.display());
    for link in ["absolute", "relative"] {
        let mount = format!("volumeMounts: [{{name: host, mountPath: /host, subPath: {link}}}]");
        node.put_manifest(&format!("{link}.yaml"), &pod(link, &[&mount], &[&volumes])).expect("put");
        let message = wait_for_reason(&node, link, "CreateContainerConfigError");
        let expected = "failed to prepare subPath for volumeMount \"host\" of container \"business\"";
        assert!(message.starts_with(expected) && message.contains(link), "{message}");
    }
    let expr = "volumeMounts: [{name: host, mountPath: /host, subPathExpr: $(NONE)}]";
    node.put_manifest("expr.yaml", &pod("expr", &[expr], &[&volumes])).expect("put");
    let message = wait_for_reason(&node, "expr", "CreateContainerConfigError");
    assert_eq!(message, "volumeMounts[0].subPathExpr: missing value for \"NONE\"");
    std::fs::remove_dir_all(&host).expect("it is the test's");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pods_own_claim_is_made_and_deleted_with_it() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    node.put_class().expect("put");
    let own = [
        "volumes:",
        "- name: data",
        "  ephemeral:",
        "    volumeClaimTemplate:",
        "      spec:",
        "        storageClassName: hawser",
        "        accessModes: [ReadWriteOnce]",
        "        resources: {requests: {storage: 16Mi}}",
    ];
    let mount = ["volumeMounts: [{name: data, mountPath: /data, subPath: x}]"];
    node.put_manifest("web.yaml", &pod("web", &mount, &own)).expect("put");
    node.wait_for_phase("web", "Running").expect("its claim is bound");
    exec(&node, "web", &["write", "/data/y", "text"]).expect("written");
    let (web, claim) =
        (node.get("pod", "web").expect("a pod"), node.get("pvc", "web-data").expect("its claim"));
    assert_eq!(claim["metadata"]["ownerReferences"][0]["uid"], web["metadata"]["uid"]);
    node.remove_manifest("web.yaml").expect("removed");
    let gone = eventually("claim and volume are gone", TIMEOUT, || {
        let left = node.client(&["get", "pvc,pv", "-A", "-o", "name"])?;
        ensure!(left.is_empty(), "{left}");
        Ok(())
    });
    gone.with_context(|| node.outputs()).expect("they go with the pod");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn a_pod_has_its_names_its_host_port_and_its_kernel_settings() {
    let sandbox = Sandbox::new();
    let mut node = Node::prepare(&sandbox, NodeOptions::default()).expect("directories");
    let conflist = tests::examples::conflist(&sandbox.path("lease")).expect("an example");
    let mut conflist: serde_json::Value = serde_json::from_str(&conflist).expect("JSON");
    let portmap = serde_json::json!({"type": "portmap", "capabilities": {"portMappings": true}});
    conflist["plugins"].as_array_mut().expect("a list").push(portmap);
    node.write_conflist(&conflist.to_string()).expect("written");
    node.start_all().expect("the node starts");
    // The tables of host ports stay once there was one.
    let first = pod("first", &["ports: [{containerPort: 80, hostPort: 8081}]"], &[]);
    node.put_manifest("first.yaml", &first).expect("put");
    node.wait_for_phase("first", "Running").expect("it runs");
    node.remove_manifest("first.yaml").expect("removed");
    node.wait_for_no_pods().expect("it ends");
    let idle = node.leak_check().expect("the kernel answers");
    let web = pod(
        "web",
        &["ports: [{containerPort: 80, hostPort: 8080}]"],
        &[
            "hostname: shop",
            "subdomain: db",
            "hostAliases: [{ip: 192.0.2.7, hostnames: [printer, printer.example]}]",
            "dnsPolicy: None",
            "dnsConfig: {nameservers: [192.0.2.53], searches: [example.com], options: [{name: ndots, value: \"2\"}]}",
            "hostPID: true",
            "securityContext: {sysctls: [{name: net.ipv4.ip_unprivileged_port_start, value: \"0\"}]}",
        ],
    )
    .replace("[/demo-app, sleep, forever]", "[/demo-app, serve, \"[::]:80\", /etc]");
    node.put_manifest("web.yaml", &web).expect("put");
    node.wait_for_log("web", &["serving"]).expect("it listens");
    let of = |path: &str| cat(&node, "web", path).expect(path);
    assert_eq!(of("/proc/sys/kernel/hostname"), "shop\n");
    assert_eq!(of("/proc/sys/net/ipv4/ip_unprivileged_port_start"), "0\n");
    let ip = text(&node.get("pod", "web").expect("a pod")["status"]["podIP"]);
    let hosts = of("/etc/hosts");
    assert!(hosts.contains(&format!("\n{ip}\tshop.db.default.svc.cluster.local\tshop\n")), "{hosts}");
    assert!(
        hosts.ends_with("\n# Entries added by HostAliases.\n192.0.2.7\tprinter\tprinter.example\n"),
        "{hosts}"
    );
    let resolv = of("/etc/resolv.conf");
    for line in ["search example.com", "nameserver 192.0.2.53", "options ndots:2"] {
        assert!(resolv.lines().any(|found| found == line), "{line} is not in {resolv}");
    }
    // hostPID: it sees the kubelet.
    let kubelet = node.kubelet().expect("it runs").pid();
    assert_eq!(
        cat(&node, "web", &format!("/proc/{kubelet}/comm")).expect("the node's /proc"),
        "hawser-kubelet\n"
    );
    // From another pod: a connection of the node to itself needs more of the sandbox than it has.
    let gateway = "10.244.7.1";
    let url = format!("http://{gateway}:8080/hostname");
    let client = pod("client", &[], &[]).replace("sleep, forever", &format!("fetch, \"{url}\""));
    node.put_manifest("client.yaml", &client.replace("spec:\n", "spec:\n  restartPolicy: Never\n"))
        .expect("put");
    node.wait_for_log("client", &["shop"]).expect("the host port leads to the pod");
    node.finish(&idle).expect("nothing is left");
}
