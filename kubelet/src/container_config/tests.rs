use proto::cri::security_profile::ProfileType;
use serde_json::json;

use super::*;
use crate::store::Store;
use crate::volumes::Mounted;

/// A pod of which every field that the runtime gets asks for something.
fn pod(spec: serde_json::Value) -> Pod {
    let metadata = json!({
        "name": "web", "namespace": "shop", "uid": "u",
        "labels": {"app": "shop"}, "annotations": {"example.com/note": "text"},
    });
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec});
    serde_json::from_value(pod).expect("a pod")
}

fn node<'a>(hierarchies: &'a Hierarchies) -> Node<'a> {
    Node {
        name: "here",
        root_dir: Path::new("/var/lib/kubelet"),
        log_dir: Path::new("/var/log/pods"),
        cgroup_root: "",
        hierarchies,
        seccomp_default: false,
        recursive_read_only: true,
    }
}

fn profile(name: &str) -> cri::SecurityProfile {
    cri::SecurityProfile {
        profile_type: ProfileType::Localhost.into(),
        localhost_ref: format!("/var/lib/kubelet/seccomp/{name}"),
    }
}

fn number(value: i64) -> Option<cri::Int64Value> {
    Some(cri::Int64Value { value })
}

/// What the runtime gets for the pod's first container.
fn container_of(pod: &Pod) -> cri::ContainerConfig {
    container_with(pod, |node| node).expect("a configuration")
}

/// The same on a node that `differs`.
fn container_with(
    pod: &Pod,
    differs: impl FnOnce(Node<'_>) -> Node<'_>,
) -> Result<cri::ContainerConfig, Error> {
    let root = tempfile::tempdir().expect("a directory");
    let store = Store::open(root.path(), "here").expect("a store");
    let hierarchies = Hierarchies::mounted().expect("the kernel answers");
    let mounted = |path: &str| Mounted { host_path: path.into(), read_only: false, is_configuration: false };
    let instance = Instance {
        pod,
        container: &pod.spec.containers[0],
        restart_count: 2,
        image: &cri::Image { id: "sha256:1".to_owned(), ..cri::Image::default() },
        volumes: &[("scratch".to_owned(), mounted("/volumes/scratch"))].into(),
        sub_paths: &[(1, "/parts/1".into())].into(),
        facts: &PodFacts::default(),
        store: &store,
        etc_hosts: Path::new("/hosts"),
        termination_log: Path::new("/last"),
    };
    container(&instance, differs(node(&hierarchies)))
}

#[test]
fn the_runtime_limits_every_size_of_huge_pages() {
    let limits = json!({"memory": "1Gi", "hugepages-2Mi": "4Mi"});
    let containers = json!([{"name": "main", "image": "i", "resources": {"limits": limits}}]);
    let config = container_of(&pod(json!({"containers": containers})));
    let limits = config.linux.and_then(|linux| linux.resources).expect("resources").hugepage_limits;
    let limit = |page_size: &u64| if *page_size == 2 << 20 { 4 << 20 } else { 0 };
    let expected: Vec<u64> = crate::pod::huge_pages::pools().keys().map(limit).collect();
    assert!(!expected.is_empty(), "this test needs a kernel with huge pages");
    assert_eq!(limits.iter().map(|limit| limit.limit).collect::<Vec<_>>(), expected);
}

#[test]
fn a_path_in_a_container_begins_at_its_root() {
    let paths = |mount_path: &str, message_path: &str| {
        let config = container_of(&pod(json!({
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [{
                "name": "main", "image": "i", "terminationMessagePath": message_path,
                "volumeMounts": [{"name": "scratch", "mountPath": mount_path}],
            }],
        })));
        config.mounts.into_iter().map(|mount| mount.container_path).collect::<Vec<_>>()
    };
    assert_eq!(paths("data", "dev/last"), ["/data", "/etc/hosts", "/dev/last"]);
    assert_eq!(paths("/data", "/dev/last"), ["/data", "/etc/hosts", "/dev/last"]);
    assert_eq!(paths("etc/hosts", "/dev/last"), ["/etc/hosts", "/dev/last"]);
}

#[test]
fn a_runtime_without_recursive_read_only_mounts_gets_none_and_refuses_what_must_be_one() {
    let with = |mode: &str| {
        let mount =
            json!({"name": "scratch", "mountPath": "/s", "readOnly": true, "recursiveReadOnly": mode});
        let pod = pod(json!({
            "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [{"name": "main", "image": "example.com/shop:1", "volumeMounts": [mount]}],
        }));
        container_with(&pod, |node| Node { recursive_read_only: false, ..node })
    };
    assert!(!with("IfPossible").expect("a configuration").mounts[0].recursive_read_only);
    let refused = with("Enabled").expect_err("it cannot be one").to_string();
    assert!(refused.contains("scratch: recursiveReadOnly Enabled is not supported"), "{refused}");
}

#[test]
fn the_runtime_gets_what_a_container_asks_for() {
    let config = container_of(&pod(json!({
        "securityContext": {
            "runAsUser": 1000, "runAsGroup": 1001, "runAsNonRoot": true, "fsGroup": 2000,
            "supplementalGroups": [3000], "supplementalGroupsPolicy": "Strict",
            "seccompProfile": {"type": "Localhost", "localhostProfile": "pod.json"},
        },
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "containers": [{
            "name": "main", "image": "example.com/shop:1", "command": ["/shop", "$(COLOR)"], "args": ["--open"],
            "workingDir": "/srv/$(COLOR)", "env": [{"name": "COLOR", "value": "blue"}],
            "stdin": true, "stdinOnce": true, "tty": true,
            "terminationMessagePath": "/tmp/last", "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "scratch", "mountPath": "/scratch", "readOnly": true, "mountPropagation": "HostToContainer"},
                {"name": "scratch", "mountPath": "/part", "subPath": "a"},
                {"name": "scratch", "mountPath": "/all", "readOnly": true, "recursiveReadOnly": "IfPossible"},
            ],
            "securityContext": {
                "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]}, "readOnlyRootFilesystem": true,
                "allowPrivilegeEscalation": false, "runAsUser": 1002,
            },
        }],
    })));
    assert_eq!(config.metadata, Some(cri::ContainerMetadata { name: "main".to_owned(), attempt: 2 }));
    let image = config.image.expect("an image");
    assert_eq!(
        (image.image.as_str(), image.user_specified_image.as_str()),
        ("sha256:1", "example.com/shop:1")
    );
    assert_eq!(
        (config.command, config.args),
        (vec!["/shop".into(), "blue".into()], vec!["--open".to_owned()])
    );
    assert_eq!((config.working_dir.as_str(), config.log_path.as_str()), ("/srv/$(COLOR)", "main/2.log"));
    assert_eq!(config.envs, [cri::KeyValue { key: "COLOR".to_owned(), value: b"blue".to_vec() }]);
    assert_eq!((config.stdin, config.stdin_once, config.tty), (true, true, true));
    let policy = &config.annotations["io.kubernetes.container.terminationMessagePolicy"];
    assert_eq!(policy, "FallbackToLogsOnError");
    let mount = |container_path: &str, host_path: &str| cri::Mount {
        container_path: container_path.to_owned(),
        host_path: host_path.to_owned(),
        ..cri::Mount::default()
    };
    let first = cri::Mount {
        readonly: true,
        propagation: cri::MountPropagation::PropagationHostToContainer.into(),
        ..mount("/scratch", "/volumes/scratch")
    };
    let all = cri::Mount { readonly: true, recursive_read_only: true, ..mount("/all", "/volumes/scratch") };
    let rest = [mount("/part", "/parts/1"), all, mount("/etc/hosts", "/hosts"), mount("/tmp/last", "/last")];
    assert_eq!(config.mounts[0], first);
    assert_eq!(config.mounts[1..], rest);

    let security = config.linux.and_then(|linux| linux.security_context).expect("a security context");
    assert_eq!((security.run_as_user, security.run_as_group), (number(1002), number(1001)));
    assert_eq!(security.supplemental_groups, [2000, 3000]);
    assert_eq!(security.supplemental_groups_policy(), cri::SupplementalGroupsPolicy::Strict);
    let capabilities = security.capabilities.clone().expect("capabilities");
    assert_eq!(
        (capabilities.add_capabilities, capabilities.drop_capabilities),
        (vec!["NET_ADMIN".to_owned()], vec!["ALL".to_owned()])
    );
    assert!(security.readonly_rootfs && security.no_new_privs && !security.privileged);
    assert!(security.masked_paths.iter().any(|path| path == "/proc/kcore"));
    assert_eq!(security.seccomp, Some(profile("pod.json")));
}

#[test]
fn a_privileged_container_has_a_profile_of_its_own_and_no_masks() {
    let config = container_of(&pod(json!({
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "main", "securityContext": {
            "privileged": true, "allowPrivilegeEscalation": true,
            "seccompProfile": {"type": "Localhost", "localhostProfile": "main.json"},
        }}],
    })));
    let security = config.linux.and_then(|linux| linux.security_context).expect("a security context");
    assert!(security.privileged && !security.no_new_privs && security.masked_paths.is_empty());
    assert_eq!(security.seccomp, Some(profile("main.json")));
}

#[test]
fn the_runtime_gets_what_a_pod_asks_for() {
    let hierarchies = Hierarchies::mounted().expect("the kernel answers");
    let config_of = |spec| sandbox(&pod(spec), 1, node(&hierarchies)).expect("a configuration");
    let config = config_of(json!({
        "hostIPC": true, "shareProcessNamespace": true, "hostname": "counter",
        "dnsPolicy": "None",
        "dnsConfig": {
            "nameservers": ["192.0.2.53"], "searches": ["example.com"], "options": [{"name": "ndots", "value": "2"}],
        },
        "securityContext": {"sysctls": [{"name": "net/ipv4/tcp_fin_timeout", "value": "30"}]},
        "initContainers": [{"name": "first", "ports": [{"containerPort": 80, "hostPort": 80}]}],
        "containers": [{"name": "main", "ports": [
            {"name": "web", "containerPort": 80, "hostPort": 8080, "hostIP": "192.0.2.1", "protocol": "UDP"},
        ]}],
    }));
    assert_eq!((config.hostname.as_str(), config.labels["app"].as_str()), ("counter", "shop"));
    assert_eq!(config.annotations["example.com/note"], "text");
    let dns = config.dns_config.expect("a resolver");
    assert_eq!((dns.servers, dns.searches), (vec!["192.0.2.53".to_owned()], vec!["example.com".to_owned()]));
    assert_eq!(dns.options, ["ndots:2"]);
    let port = cri::PortMapping {
        protocol: cri::Protocol::Udp.into(),
        container_port: 80,
        host_port: 8080,
        host_ip: "192.0.2.1".to_owned(),
    };
    assert_eq!(config.port_mappings, [port]);
    let linux = config.linux.expect("a part for Linux");
    assert_eq!(linux.sysctls["net.ipv4.tcp_fin_timeout"], "30");
    let namespaces = |linux: &cri::LinuxPodSandboxConfig| {
        let context = linux.security_context.as_ref().expect("a security context");
        let options = context.namespace_options.clone().expect("namespaces");
        (options.network(), options.pid(), options.ipc())
    };
    use cri::NamespaceMode::{Container, Node, Pod};
    assert_eq!(namespaces(&linux), (Pod, Pod, Node));

    let config = config_of(json!({"hostNetwork": true, "hostPID": true, "containers": [
        {"name": "main", "ports": [{"containerPort": 80, "hostPort": 80}]},
    ]}));
    assert_eq!(config.hostname, "", "a uts namespace of the host keeps its name");
    assert_eq!(config.port_mappings, [], "the pod opens the ports of the host itself");
    assert_eq!(namespaces(&config.linux.expect("a part for Linux")), (Node, Node, Pod));
    let config = config_of(json!({"containers": []}));
    assert_eq!(namespaces(&config.linux.expect("a part for Linux")), (Pod, Container, Pod));
}
