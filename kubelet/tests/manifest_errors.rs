//! Errors for a bad manifest: file, line, column, field, value.

use kubelet::manifest::parse;

/// The errors of a text, one per line.
fn errors(text: &str) -> String {
    let parsed = parse(text.as_bytes(), "web.yaml");
    parsed.errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

fn warnings(text: &str) -> String {
    let parsed = parse(text.as_bytes(), "web.yaml");
    assert_eq!(parsed.errors, [], "want a valid manifest");
    parsed.manifests.iter().flat_map(|manifest| manifest.warnings.clone()).collect::<Vec<_>>().join("\n")
}

/// A pod whose spec consists of these lines, from line 6 on.
fn pod(spec: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\nspec:\n{spec}")
}

const CONTAINER: &str = "  containers:\n  - name: c\n    image: demo:1\n";

#[test]
fn broken_yaml_names_its_line() {
    assert_eq!(
        errors("apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n spec: x\n"),
        "web.yaml:5:2: while parsing a block mapping, did not find expected key"
    );
}

#[test]
fn a_value_of_the_wrong_type_names_its_field() {
    let text = pod("  containers:\n  - name: c\n    image: demo\n    ports:\n    - containerPort: http\n");
    assert_eq!(
        errors(&text),
        "web.yaml:10:22: Pod \"web\" is invalid: spec.containers[0].ports[0].containerPort: invalid type: \
         string \"http\", expected a whole number from 0 to 65535"
    );
    for (field, mistake) in [
        ("restartPolicy: {a: b}", "invalid type: a mapping of fields, expected one word"),
        ("containers: {a: b}", "invalid type: a mapping of fields, expected a list"),
        (
            "terminationGracePeriodSeconds: [1]",
            "invalid type: a list, expected a whole number that is not negative",
        ),
    ] {
        let found =
            errors(&format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec: {{{field}}}\n"));
        let field = field.split(':').next().unwrap();
        assert!(found.ends_with(&format!("Pod \"web\" is invalid: spec.{field}: {mistake}")), "{found}");
    }
    let unnamed = errors("apiVersion: v1\nkind: Pod\nmetadata: {name: [x]}\nspec: {containers: []}\n");
    assert!(unnamed.contains(": Pod is invalid: metadata.name: invalid type: a list"), "{unnamed}");
}

#[test]
fn long_names_and_values_do_not_hide_the_mistake() {
    let long = "x".repeat(5000);
    let text =
        format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: {long}}}\nspec: {{restartPolicy: {long}}}\n");
    let found = errors(&text);
    assert!(found.len() < 1000 && found.ends_with("supported values: Always, OnFailure, Never"), "{found}");
}

#[test]
fn a_stop_signal_needs_its_name_and_the_pods_system() {
    let stopped = |signal: &str| format!("{CONTAINER}    lifecycle: {{stopSignal: {signal}}}\n");
    assert_eq!(
        errors(&pod(&stopped("SIGUSR1"))),
        "web.yaml:9:29: Pod \"web\" is invalid: spec.containers[0].lifecycle.stopSignal: Forbidden: may not be set for \
         containers with empty `spec.os.name`: set it to linux"
    );
    let on_linux = |signal: &str| pod(&format!("{}  os: {{name: linux}}\n", stopped(signal)));
    assert_eq!(
        errors(&on_linux("SIGWHAT")),
        "web.yaml:9:29: Pod \"web\" is invalid: spec.containers[0].lifecycle.stopSignal: Unsupported value: \"SIGWHAT\": \
         must be the name of a signal, such as \"SIGUSR1\" or \"SIGRTMIN+3\""
    );
    assert_eq!(errors(&on_linux("SIGRTMIN+3")), "");
}

#[test]
fn lines_count_from_the_top_of_the_file_in_every_document() {
    let bad = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: [\n";
    let text = format!("{}---\n{bad}---\n{}", pod(CONTAINER), pod("  restartPolicy: Sometimes\n"));
    let parsed = parse(text.as_bytes(), "web.yaml");
    assert_eq!(parsed.manifests.len(), 1, "the good document counts");
    let lines: Vec<usize> = parsed.errors.iter().map(|error| error.place.line).collect();
    assert_eq!(lines, [13, 20], "{:?}", parsed.errors);
}

#[test]
fn unknown_kinds_and_versions_are_refused_with_the_known_ones() {
    assert_eq!(
        errors("apiVersion: v1\nkind: Endpoints\nmetadata: {name: x}\n"),
        "web.yaml:2:7: kind: Unsupported value: \"Endpoints\": supported values: Pod, PersistentVolume, \
         PersistentVolumeClaim, StorageClass, CSIDriver, VolumeSnapshot, VolumeSnapshotClass, \
         VolumeSnapshotContent, ConfigMap, Secret"
    );
    assert_eq!(
        errors("apiVersion: v2\nkind: Pod\n"),
        "web.yaml:1:13: apiVersion: Unsupported value: \"v2\": Pod is of apiVersion v1"
    );
    assert_eq!(errors("kind: Pod\n"), "web.yaml:1:1: apiVersion: Required value: v1");
    assert_eq!(errors("metadata: {name: x}\n"), "web.yaml:1:1: kind: Required value");
}

#[test]
fn quantity_errors_name_their_position() {
    let text = pod(
        "  containers:\n  - name: c\n    image: demo\n    resources:\n      limits:\n        memory: 64MB\n",
    );
    let error = errors(&text);
    assert!(
        error.starts_with(
            "web.yaml:11:17: Pod \"web\" is invalid: spec.containers[0].resources.limits.memory: invalid quantity \"64MB\""
        ),
        "{error}"
    );
}

#[test]
fn resources_are_checked_by_name_and_huge_pages_have_kubernetes_rules() {
    let with = |resources: &str| errors(&pod(&format!("{CONTAINER}    resources: {resources}\n")));
    assert_eq!(with("{limits: {memory: 1Gi, hugepages-2Mi: 4Mi, example.com/gpu: 1}}"), "");
    for (resources, message) in [
        (
            "{limits: {gpu: 1}}",
            "limits.gpu: Invalid value: \"gpu\": must be a standard resource for containers",
        ),
        (
            "{limits: {cpu: 1, hugepages-2Mi: 3Mi}}",
            "limits.hugepages-2Mi: Invalid value: \"3Mi\": 3Mi is not positive integer multiple of hugepages-2Mi",
        ),
        (
            "{limits: {cpu: 1, hugepages-2Mi: 4Mi}, requests: {hugepages-2Mi: 2Mi}}",
            "requests.hugepages-2Mi: Invalid value: \"2Mi\": must be equal to hugepages-2Mi limit of 4Mi",
        ),
        (
            "{requests: {cpu: 1, hugepages-2Mi: 2Mi}}",
            "limits: Required value: Limit must be set for non overcommitable resources",
        ),
        ("{limits: {hugepages-2Mi: 2Mi}}", ": Forbidden: HugePages require cpu or memory"),
    ] {
        let found = with(resources);
        assert!(found.contains(message), "{resources}: {found}");
    }
}

/// Each may be a mount, and the kernel limits the mounts of all pods together.
#[test]
fn a_pod_of_too_many_volumes_is_refused() {
    let volumes = |count: usize| {
        let each: String = (0..count).map(|n| format!("  - {{name: v{n}, emptyDir: {{}}}}\n")).collect();
        pod(&format!("  containers: [{{name: c, image: i}}]\n  volumes:\n{each}"))
    };
    assert_eq!(warnings(&volumes(500)), "");
    let refused = errors(&volumes(501));
    assert!(refused.contains("spec.volumes: Too many: 501: must have at most 500 items"), "{refused}");
}

#[test]
fn every_broken_rule_is_reported_at_once() {
    let text = pod(concat!(
        "  volumes:\n  - name: data\n  containers:\n",
        "  - name: c\n    image: demo\n    volumeMounts:\n    - name: dat\n      mountPath: /data\n",
        "  - name: c\n",
    ));
    assert_eq!(
        errors(&text),
        "web.yaml:7:5: Pod \"web\" is invalid: spec.volumes[0]: Required value: must specify a volume type\n\
         web.yaml:12:13: Pod \"web\" is invalid: spec.containers[0].volumeMounts[0].name: Not found: \"dat\"\n\
         web.yaml:14:11: Pod \"web\" is invalid: spec.containers[1].name: Duplicate value: \"c\"\n\
         web.yaml:14:5: Pod \"web\" is invalid: spec.containers[1].image: Required value"
    );
}

#[test]
fn names_follow_dns() {
    let error = errors("apiVersion: v1\nkind: Pod\nmetadata:\n  name: My_Pod\nspec:\n  containers: []\n");
    assert!(
        error.starts_with("web.yaml:4:9: Pod \"My_Pod\" is invalid: metadata.name: Invalid value: \"My_Pod\": a lowercase RFC 1123 subdomain"),
        "{error}"
    );
    assert!(error.contains("spec.containers: Required value"), "{error}");
}

#[test]
fn a_pod_whose_log_directory_would_have_too_long_a_name_is_refused() {
    let named = |namespace: &str, bytes: usize| {
        let name = vec!["x".repeat(60); 5].join(".");
        errors(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {}, namespace: \"{namespace}\"}}\n\
             spec:\n  containers:\n  - {{name: c, image: \"demo:1\"}}\n",
            &name[..bytes]
        ))
    };
    assert_eq!((named("", 214), named("a", 220)), (String::new(), String::new()));
    for found in [named("", 215), named("a", 221)] {
        let expected =
            "metadata.name: Too long: may not be more than 221 bytes together with the namespace, has 222";
        assert!(found.contains(expected), "{found}");
    }
}

#[test]
fn a_wrong_enum_value_lists_the_valid_ones() {
    assert_eq!(
        errors(&pod(&format!("{CONTAINER}  restartPolicy: Sometimes\n"))),
        "web.yaml:9:18: Pod \"web\" is invalid: spec.restartPolicy: Unsupported value: \"Sometimes\", supported values: \
         Always, OnFailure, Never"
    );
}

#[test]
fn fields_without_effect_are_warnings_with_their_position() {
    let text = pod(&format!("{CONTAINER}  overhead: {{cpu: 1m}}\n  hostnameOverride: x\n"));
    assert_eq!(
        warnings(&text),
        "web.yaml:9:13: spec.overhead is not supported: it is not counted\n\
         web.yaml:10:21: spec.hostnameOverride is not supported: Kubernetes has this field, but this kubelet does \
         not honour it"
    );
    assert_eq!(
        warnings(&pod(&format!("{CONTAINER}  nodeSelector: {{disk: ssd}}\n"))),
        "web.yaml:9:17: spec.nodeSelector is not supported: there is one node, and the pod runs on it"
    );
    let nested = pod(&format!("{CONTAINER}    restartPolicyRules: [{{action: Restart}}]\n"));
    assert_eq!(
        warnings(&nested),
        "web.yaml:9:25: spec.containers[0].restartPolicyRules is not supported: Kubernetes has this field, but \
         this kubelet does not honour it"
    );
}

#[test]
fn misspelt_fields_are_refused() {
    let ports = "    ports:\n    - containerPort: 80\n      hostIp: 192.0.2.1\n      hostPrt: 80\n";
    assert_eq!(
        errors(&pod(&format!("{CONTAINER}{ports}  dnsPolcy: None\n"))),
        "web.yaml:11:15: Pod \"web\" is invalid: spec.containers[0].ports[0].hostIp: unknown field, misspelt? \
         Kubernetes 1.36 has hostIP here\n\
         web.yaml:12:16: Pod \"web\" is invalid: spec.containers[0].ports[0].hostPrt: unknown field, misspelt? \
         Kubernetes 1.36 does not have it here\n\
         web.yaml:13:13: Pod \"web\" is invalid: spec.dnsPolcy: unknown field, misspelt? \
         Kubernetes 1.36 does not have it here"
    );
    let claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec:\n  \
                 accessModes: [ReadWriteMany]\n  resources:\n    requests: {storage: 1Gi}\n    limit: {storage: 2Gi}\n  \
                 storageClasName: fast\n";
    assert_eq!(
        errors(claim),
        "web.yaml:8:12: PersistentVolumeClaim \"data\" is invalid: spec.resources.limit: unknown field, misspelt? \
         Kubernetes 1.36 does not have it here\n\
         web.yaml:9:20: PersistentVolumeClaim \"data\" is invalid: spec.storageClasName: unknown field, misspelt? \
         Kubernetes 1.36 does not have it here"
    );
}

/// A row that refuses everything below a volume must not hide the name that is wrong, and an
/// empty value is no reason to accept a name that nothing reads.
#[test]
fn a_misspelt_field_is_refused_whatever_its_value_and_the_rule_above_it() {
    let volumes = "  volumes:\n  - name: v\n    emptyDr: {}\n";
    assert_eq!(
        errors(&pod(&format!("{CONTAINER}{volumes}"))),
        "web.yaml:11:14: Pod \"web\" is invalid: spec.volumes[0].emptyDr: unknown field, misspelt? \
         Kubernetes 1.36 does not have it here"
    );
    let driver =
        "apiVersion: storage.k8s.io/v1\nkind: CSIDriver\nmetadata: {name: d}\nspec: {attachRequird: false}\n";
    assert_eq!(
        errors(driver),
        "web.yaml:4:23: CSIDriver \"d\" is invalid: spec.attachRequird: unknown field, misspelt? \
         Kubernetes 1.36 does not have it here"
    );
}

#[test]
fn a_value_that_kubernetes_refuses_does_not_make_a_known_field_unknown() {
    let text = pod(&format!("{CONTAINER}  hostnameOverride: [1]\n  tolerations: 7\n"));
    assert_eq!(
        warnings(&text),
        "web.yaml:9:21: spec.hostnameOverride is not supported: Kubernetes has this field, but this kubelet does \
         not honour it"
    );
}

#[test]
fn fields_that_would_change_the_pod_are_refused() {
    assert_eq!(
        errors(&pod(&format!("{CONTAINER}  ephemeralContainers:\n  - name: first\n    image: demo\n"))),
        "web.yaml:10:5: Pod \"web\" is invalid: spec.ephemeralContainers: not supported: a manifest cannot \
         describe them"
    );
    let error =
        errors(&pod(&format!("{CONTAINER}  volumes:\n  - name: v\n    nfs: {{server: x, path: /}}\n")));
    assert!(error.contains("spec.volumes[0].nfs: not supported: supported volumes are"), "{error}");
}

#[test]
fn empty_unsupported_fields_are_accepted() {
    let text = pod(&format!("{CONTAINER}  initContainers: []\n  hostUsers: true\n  volumes: null\n"));
    assert_eq!(warnings(&text), "");
    let read_back = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: data\n  creationTimestamp: null\n  \
                     resourceVersion: \"12\"\n  managedFields: [{manager: x}]\nspec:\n  accessModes: [ReadWriteMany]\n  \
                     resources:\n    requests:\n      storage: 1Gi\nstatus:\n  phase: Bound\n";
    assert_eq!(warnings(read_back), "");
    // Of any version of Kubernetes.
    let running = "status:\n  phase: [Odd]\n  unknown: 1\n  containerStatuses:\n  - name: c\n    state:\n      running: \
                   {startedAt: \"2026-01-01T00:00:00Z\"}\n";
    assert_eq!(warnings(&format!("{}{running}", pod(CONTAINER))), "");
}

#[test]
fn claims_and_volumes_need_what_kubernetes_needs() {
    let claim = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: data}\nspec: {}\n";
    assert_eq!(
        errors(claim),
        "web.yaml:4:7: PersistentVolumeClaim \"data\" is invalid: spec.accessModes: Required value: at least 1 access mode is required\n\
         web.yaml:4:7: PersistentVolumeClaim \"data\" is invalid: spec.resources.requests.storage: Required value"
    );
    let volume = "apiVersion: v1\nkind: PersistentVolume\nmetadata: {name: v}\nspec:\n  capacity: {storage: 1Gi}\n  \
                  accessModes: [ReadWriteOnce]\n";
    let found = errors(volume);
    assert!(found.contains("spec: Required value: must specify a volume type"), "{found}");
    let found = errors(&format!("{volume}  nfs: {{server: x, path: /}}\n"));
    assert!(found.contains("spec.nfs: not supported: the supported volumes are csi"), "{found}");
}

#[test]
fn json_is_read_like_yaml() {
    let text = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web"},
        "spec": {"containers": [{"name": "c", "image": "demo:1", "resources": {"limits": {"cpu": 0.5}}}]}}"#;
    assert_eq!(errors(text), "");
    assert_eq!(parse(text.as_bytes(), "f").manifests.len(), 1);
}

#[test]
fn proc_mount_default_is_the_default_and_anything_else_is_refused() {
    let text = |kind: &str| {
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  containers:\n  - name: c\n    image: demo:1\n    securityContext: {{procMount: {kind}}}\n"
        )
    };
    assert_eq!(errors(&text("Default")), "");
    assert!(errors(&text("Unmasked")).contains("securityContext.procMount"), "{}", errors(&text("Unmasked")));
}

#[test]
fn config_maps_and_secrets_keep_kubernetes_rules() {
    let object = |kind: &str, rest: &str| {
        errors(&format!("apiVersion: v1\nkind: {kind}\nmetadata: {{name: web}}\n{rest}"))
    };
    assert_eq!(object("ConfigMap", "data: {a.b-C_1: x}\nbinaryData: {b: AP8=}\n"), "");
    assert_eq!(
        object("ConfigMap", "data: {a: x}\nbinaryData: {a: AP8=}\n"),
        "web.yaml:4:11: ConfigMap \"web\" is invalid: data.a: Invalid value: \"a\": duplicate of key present in binaryData"
    );
    for bad in ["a/b", "..", ".", "..x", "a b"] {
        let found = object("ConfigMap", &format!("data: {{\"{bad}\": x}}\n"));
        assert!(found.contains(&format!("data: Invalid value: {bad:?}: ")), "{found}");
    }
    let large = "x".repeat((1 << 20) + 1);
    for (kind, field) in [("ConfigMap", "data"), ("Secret", "stringData")] {
        assert_eq!(object(kind, &format!("{field}: {{a: {}}}\n", &large[1..])), "");
        let found = object(kind, &format!("{field}: {{a: {large}}}\n"));
        assert!(
            found.ends_with(&format!(
                "{kind} \"web\" is invalid: data: Too long: may not be more than 1048576 bytes, has 1048577"
            )),
            "{found}"
        );
    }
    let found = object("Secret", "data: {a: hush!}\n");
    assert!(found.contains("data.a: Invalid value: must be base64") && !found.contains("hush"), "{found}");
    for (fields, expected) in [
        ("stringData: hush\n", "stringData: invalid type: a string, expected a mapping of fields"),
        ("immutable: hush\n", "immutable: invalid type: a string, expected a boolean"),
        ("data: 4711\n", "data: invalid type: a number, expected a mapping of fields"),
    ] {
        let found = object("Secret", fields);
        assert!(found.ends_with(expected) && !found.contains("hush") && !found.contains("4711"), "{found}");
    }
    let found = object("Secret", "type: kubernetes.io/tls\nstringData: {tls.key: x}\n");
    assert!(found.contains("Required value") && found.contains("tls.crt"), "{found}");
}

/// The errors of a pod whose container has these fields.
fn container_errors(fields: &str) -> String {
    errors(&pod(&format!("{CONTAINER}{fields}")))
}

#[test]
fn mistakes_in_probes_and_hooks_are_named() {
    for (fields, expected) in [
        ("    livenessProbe: {}\n", "livenessProbe: Required value: must specify a handler type"),
        (
            "    livenessProbe: {tcpSocket: {port: 80}, grpc: {port: 80}}\n",
            "livenessProbe: Forbidden: may not specify more than 1 handler type",
        ),
        ("    startupProbe: {exec: {}}\n", "startupProbe.exec.command: Required value"),
        (
            "    livenessProbe: {tcpSocket: {port: 80}, successThreshold: 2}\n",
            "livenessProbe.successThreshold: Invalid value: \"2\": must be 1",
        ),
        (
            "    readinessProbe: {tcpSocket: {port: 80}, terminationGracePeriodSeconds: 2}\n",
            "terminationGracePeriodSeconds: Invalid value: \"2\": must not be set for readinessProbes",
        ),
        ("    readinessProbe: {httpGet: {port: web}}\n", "readinessProbe.httpGet.port: Not found: \"web\""),
        (
            "    readinessProbe: {tcpSocket: {port: 70000}}\n",
            "invalid value: integer `70000`, expected a port",
        ),
        ("    readinessProbe: {tcpSocket: {port: 80}, periodSeconds: -1}\n", "invalid value: integer `-1`"),
        (
            "    readinessProbe: {httpGet: {port: 80, httpHeaders: [{name: \"a b\"}]}}\n",
            "httpHeaders[0].name: Invalid value: \"a b\": must be a valid HTTP header name",
        ),
        (
            "    lifecycle: {preStop: {sleep: {seconds: 31}}}\n",
            "sleep.seconds: Invalid value: \"31\": must be non-negative and less than \
             terminationGracePeriodSeconds (30)",
        ),
        ("    lifecycle: {postStart: {sleeep: {seconds: 1}}}\n", "postStart.sleeep"),
        ("    restartPolicy: Always\n", "restartPolicy: Forbidden: may not be set for non-init containers"),
        ("  activeDeadlineSeconds: 0\n", "activeDeadlineSeconds: Invalid value: \"0\": must be between 1"),
        ("  readinessGates: [{conditionType: \"a b\"}]\n", "readinessGates[0].conditionType: Invalid value"),
    ] {
        let found = container_errors(fields);
        assert!(found.contains(expected), "{fields}: {found}");
    }
    let whole = "    ports: [{name: web, containerPort: 80, hostPort: 8080, hostIP: 127.0.0.1}]\n    \
                 readinessProbe: {httpGet: {port: web, path: /ready}, periodSeconds: 2}\n    \
                 lifecycle: {preStop: {exec: {command: [stop]}}}\n  activeDeadlineSeconds: 60\n";
    assert_eq!(container_errors(whole), "");
    assert_eq!(warnings(&pod(&format!("{CONTAINER}{whole}"))), "");
}

#[test]
fn a_pod_of_another_system_is_refused() {
    assert_eq!(container_errors("  os: {name: linux}\n"), "");
    let found = container_errors("  os: {name: windows}\n");
    assert!(
        found.contains("spec.os.name: Unsupported value: \"windows\": supported values: \"linux\""),
        "{found}"
    );
}

#[test]
fn a_claim_that_is_made_for_a_pod_has_no_name_of_its_own() {
    let volume = |metadata: &str| {
        format!(
            "  volumes:\n  - name: own\n    ephemeral:\n      volumeClaimTemplate:\n        \
             metadata: {{{metadata}}}\n        spec: {{accessModes: [ReadWriteOnce], resources: \
             {{requests: {{storage: 1Gi}}}}}}\n"
        )
    };
    assert_eq!(container_errors(&volume("labels: {app: shop}, creationTimestamp: null")), "");
    for field in ["name: x", "namespace: x", "uid: x", "ownerReferences: [{name: x}]"] {
        let (name, _) = field.split_once(':').unwrap();
        let expected = format!("spec.volumes[0].ephemeral.volumeClaimTemplate.metadata.{name}: Forbidden");
        let found = container_errors(&volume(field));
        assert!(found.contains(&expected), "{found}");
    }
}

#[test]
fn mistakes_in_init_containers_are_named() {
    let init = |fields: &str| format!("  initContainers:\n  - {{name: first, image: demo:1{fields}}}\n");
    assert_eq!(container_errors(&init("")), "");
    assert_eq!(
        container_errors(&init(", restartPolicy: Always, readinessProbe: {tcpSocket: {port: 80}}")),
        ""
    );
    for (fields, expected) in [
        (
            ", readinessProbe: {tcpSocket: {port: 80}}",
            "initContainers[0].readinessProbe: Forbidden: may not be set for init containers without",
        ),
        (", lifecycle: {}", "initContainers[0].lifecycle: Forbidden"),
        (
            ", restartPolicy: Never",
            "restartPolicy: Unsupported value: \"Never\": supported values: \"Always\"",
        ),
        (
            ", volumeDevices: [{name: x}]",
            "initContainers[0].volumeDevices: not supported: volumes are file systems",
        ),
    ] {
        let found = container_errors(&init(fields));
        assert!(found.contains(expected), "{fields}: {found}");
    }
    let same = container_errors("  initContainers:\n  - {name: c, image: demo:1}\n");
    assert!(same.contains("Duplicate value: \"c\""), "{same}");
}

#[test]
fn snapshots_and_data_sources_are_checked_field_by_field() {
    let snapshot = |spec: &str| {
        errors(&format!(
            "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshot\nmetadata: {{name: s}}\nspec: {spec}\n"
        ))
    };
    assert_eq!(snapshot("{source: {persistentVolumeClaimName: data}}"), "");
    assert!(snapshot("{source: {}}").contains("exactly one of persistentVolumeClaimName and"));
    assert!(snapshot("{source: {persistentVolumeClaimNam: data}}").contains("unknown field"));
    let content = |rest: &str| {
        errors(&format!(
            "apiVersion: snapshot.storage.k8s.io/v1\nkind: VolumeSnapshotContent\nmetadata: {{name: c}}\nspec: \
             {{driver: d.e, deletionPolicy: Retain, source: {{snapshotHandle: h}}, {rest}}}\n"
        ))
    };
    let named = "volumeSnapshotRef: {name: s, namespace: default, apiVersion: snapshot.storage.k8s.io/v1, \
                 resourceVersion: \"7\"}";
    assert_eq!(content(&format!("{named}, sourceVolumeMode: Filesystem")), "");
    assert!(content("volumeSnapshotRef: {name: s}").contains("volumeSnapshotRef.namespace: Required value"));
    let claim = |source: &str| {
        errors(&format!(
            "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: c}}\nspec: {{accessModes: [ReadWriteOnce], \
             resources: {{requests: {{storage: 1Gi}}}}, {source}}}\n"
        ))
    };
    assert_eq!(claim("dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: s}"), "");
    assert_eq!(claim("dataSourceRef: {kind: PersistentVolumeClaim, name: other}"), "");
    assert!(
        claim("dataSource: {kind: VolumeSnapshot, name: s}").contains("dataSource.kind: Unsupported value")
    );
    assert!(claim("dataSourceRef: {apiGroup: x.y, kind: Book, name: s}").contains("dataSourceRef.kind"));
    assert!(
        claim("dataSourceRef: {kind: PersistentVolumeClaim, name: other, namespace: theirs}")
            .contains("dataSourceRef.namespace: not supported")
    );
    assert!(
        claim("dataSource: {kind: PersistentVolumeClaim, name: a}, dataSourceRef: {kind: PersistentVolumeClaim, name: b}")
            .contains("must match dataSourceRef")
    );
}

#[test]
fn a_requirement_of_a_claims_selector_has_values_as_its_operator_takes_them() {
    let claim = |requirement: &str| {
        errors(&format!(
            "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {{name: x}}\nspec:\n  accessModes: [ReadWriteOnce]\n  \
             resources: {{requests: {{storage: 1Gi}}}}\n  selector:\n    matchExpressions:\n    - {requirement}\n"
        ))
    };
    assert_eq!(claim("{key: a, operator: In, values: [b]}"), "");
    let missing = claim("{key: a, operator: NotIn}");
    assert!(missing.contains("spec.selector.matchExpressions[0].values: Required value"), "{missing}");
    let needless = claim("{key: a, operator: Exists, values: [b]}");
    assert!(needless.contains("spec.selector.matchExpressions[0].values: Forbidden"), "{needless}");
}

#[test]
fn mistakes_in_volume_mounts_are_named() {
    let refused = |fields: &str| {
        let mount = format!("{{name: v, mountPath: /v, {fields}}}");
        errors(&format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web}}\nspec:\n  volumes: [{{name: v, emptyDir: {{}}}}]\n  \
             containers: [{{name: c, image: demo, volumeMounts: [{mount}]}}]\n"
        ))
    };
    for (fields, message) in [
        (
            "mountPropagation: Bidirectional",
            "mountPropagation: Forbidden: Bidirectional mount propagation is available only to privileged",
        ),
        (
            "recursiveReadOnly: Enabled",
            "recursiveReadOnly: Forbidden: may only be specified when readOnly is true",
        ),
        (
            "readOnly: true, mountPropagation: HostToContainer, recursiveReadOnly: IfPossible",
            "recursiveReadOnly: Forbidden: may only be specified when mountPropagation is None or not specified",
        ),
        ("recursiveReadOnly: always", "recursiveReadOnly: "),
        (
            "subPath: a, subPathExpr: b",
            "subPathExpr: Invalid value: \"b\": subPathExpr and subPath are mutually exclusive",
        ),
        ("subPath: a/../b", "subPath: Invalid value: \"a/../b\": must not contain '..'"),
    ] {
        let errors = refused(fields);
        assert!(errors.contains(message) && errors.lines().count() == 1, "{fields}: {errors}");
    }
    for fields in
        ["recursiveReadOnly: Disabled", "readOnly: true, mountPropagation: None, recursiveReadOnly: Enabled"]
    {
        assert_eq!(refused(fields), "", "{fields}");
    }
}

#[test]
fn a_host_port_is_taken_by_one_container_at_a_time() {
    let port = "ports: [{containerPort: 80, hostPort: 8080}]";
    let errors = |restarts: &str| {
        let init = format!("[{{name: i, image: demo, {restarts}{port}}}, {{name: j, image: demo, {port}}}]");
        container_errors(&format!("    {port}\n  initContainers: {init}\n"))
    };
    assert_eq!(errors(""), "");
    let found = errors("restartPolicy: Always, ");
    assert!(found.contains("spec.containers[0].ports[0].hostPort: Duplicate value"), "{found}");
}

#[test]
fn an_empty_dir_has_a_size_and_a_known_medium() {
    let volume = |source: &str| {
        errors(&pod(&format!("{CONTAINER}  volumes:\n  - name: v\n    emptyDir: {{{source}}}\n")))
    };
    assert_eq!(volume("sizeLimit: 0, medium: Memory"), "");
    let found = volume("sizeLimit: -1Mi");
    let expected =
        "spec.volumes[0].emptyDir.sizeLimit: Invalid value: \"-1Mi\": must be greater than or equal to 0";
    assert!(found.ends_with(expected), "{found}");
    let found = volume("medium: Disk");
    assert!(found.contains("spec.volumes[0].emptyDir.medium: Unsupported value: \"Disk\""), "{found}");
}
