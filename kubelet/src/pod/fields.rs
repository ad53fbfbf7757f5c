//! Values of the pod itself, for variables of the environment and for files of downwardAPI volumes
//! (kubernetes, pkg/fieldpath and pkg/api/v1/resource).

use std::collections::BTreeMap;

use crate::objects::{Container, Pod, Quantity, ResourceFieldSelector};
use crate::pod::huge_pages;

/// The values that are not in the pod's object.
#[derive(Debug, Clone, Default)]
pub(crate) struct PodFacts {
    pub(crate) node_name: String,
    pub(crate) host_ip: String,
    pub(crate) pod_ips: Vec<String>,
}

/// What a container without a limit may use: the node's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Capacity {
    pub(crate) milli_cpu: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) ephemeral_storage_bytes: u64,
}

/// `valueFrom.fieldRef` of a variable; `None` for an unknown field.
pub(crate) fn of_variable(path: &str, pod: &Pod, facts: &PodFacts) -> Option<String> {
    Some(match path {
        "spec.nodeName" => facts.node_name.clone(),
        "spec.serviceAccountName" => pod.spec.service_account_name.clone(),
        // One address is known: that of the default route.
        "status.hostIP" | "status.hostIPs" => facts.host_ip.clone(),
        "status.podIP" => facts.pod_ips.first().cloned().unwrap_or_default(),
        "status.podIPs" => facts.pod_ips.join(","),
        _ => return of_metadata(path, pod),
    })
}

/// `fieldRef` of a file; `None` for an unknown field.
pub(crate) fn of_file(path: &str, pod: &Pod) -> Option<String> {
    match path {
        "metadata.labels" => Some(lines(&pod.metadata.labels)),
        "metadata.annotations" => Some(lines(&pod.metadata.annotations)),
        _ => of_metadata(path, pod),
    }
}

fn of_metadata(path: &str, pod: &Pod) -> Option<String> {
    let metadata = &pod.metadata;
    let entry = |map: &BTreeMap<String, String>, key: &str| Some(map.get(key).cloned().unwrap_or_default());
    match path {
        "metadata.name" => Some(metadata.name.clone()),
        "metadata.namespace" => Some(metadata.namespace.clone()),
        "metadata.uid" => Some(metadata.uid.clone()),
        _ => match subscript(path)? {
            ("metadata.labels", key) => entry(&metadata.labels, key),
            ("metadata.annotations", key) => entry(&metadata.annotations, key),
            _ => None,
        },
    }
}

/// Splits `a.b['key']` into (`a.b`, `key`).
fn subscript(path: &str) -> Option<(&str, &str)> {
    let (base, rest) = path.split_once("['")?;
    Some((base, rest.strip_suffix("']")?))
}

/// `key="value"`, one a line, in order (kubernetes, `FormatMap`).
fn lines(map: &BTreeMap<String, String>) -> String {
    let lines: Vec<String> = map.iter().map(|(key, value)| format!("{key}={}", quoted(value))).collect();
    lines.join("\n")
}

/// As Go's `%q` writes a string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{7}' => out.push_str("\\a"),
            '\u{8}' => out.push_str("\\b"),
            '\u{b}' => out.push_str("\\v"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' | '\u{7f}' => out.push_str(&format!("\\x{:02x}", u32::from(letter))),
            _ if is_printed(letter) => out.push(letter),
            '\u{1_0000}'.. => out.push_str(&format!("\\U{:08x}", u32::from(letter))),
            _ => out.push_str(&format!("\\u{:04x}", u32::from(letter))),
        }
    }
    out.push('"');
    out
}

/// Behind another letter, so that combining marks count as printed.
fn is_printed(letter: char) -> bool {
    letter == '\'' || format!("a{letter}").escape_debug().count() == 2
}

/// `resourceFieldRef`; `None` for an unknown container or resource. `own` is the container of the
/// variable.
pub(crate) fn of_resource(
    selector: &ResourceFieldSelector,
    own: Option<&Container>,
    pod: &Pod,
    node: Capacity,
) -> Option<String> {
    let container = match (selector.container_name.as_str(), own) {
        ("", own) => own?,
        (name, _) => pod.spec.all_containers().find(|container| container.name == name)?,
    };
    let resources = &container.resources;
    let (amounts, name, is_limit) = match selector.resource.split_once('.')? {
        ("limits", name) => (&resources.limits, name, true),
        ("requests", name) => (&resources.requests, name, false),
        _ => return None,
    };
    let (amount, of_node) = match name {
        "cpu" => (amounts.get(name).map(Quantity::milli_value), node.milli_cpu),
        "memory" => (amounts.get(name).map(Quantity::value), node.memory_bytes),
        "ephemeral-storage" => (amounts.get(name).map(Quantity::value), node.ephemeral_storage_bytes),
        _ if name.starts_with(huge_pages::PREFIX) => (amounts.get(name).map(Quantity::value), 0),
        _ => return None,
    };
    let amount = amount.filter(|amount| *amount > 0).unwrap_or(if is_limit { of_node } else { 0 });
    let divisor = selector.divisor.as_ref().filter(|divisor| divisor.milli_value() > 0);
    let divisor = match name {
        "cpu" => divisor.map_or(1000, Quantity::milli_value),
        _ => divisor.map_or(1, Quantity::value),
    };
    Some(amount.div_ceil(divisor).to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn pod() -> Pod {
        from_value(json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "web", "namespace": "shop", "uid": "u", "labels": {"b": "2", "a": "1"},
                "annotations": {"odd": "a\"\\\n\u{200b}é\u{301}\u{1}'"},
            },
            "spec": {"serviceAccountName": "robot", "containers": [
                {"name": "c", "resources": {"limits": {"cpu": "1500m", "memory": "100M"}, "requests": {"cpu": "1m"}}},
                {"name": "free"},
            ]}
        }))
        .unwrap()
    }

    #[test]
    fn whole_maps_are_lines_with_quoted_values() {
        let pod = pod();
        assert_eq!(of_file("metadata.labels", &pod).unwrap(), "a=\"1\"\nb=\"2\"");
        assert_eq!(
            of_file("metadata.annotations", &pod).unwrap(),
            "odd=\"a\\\"\\\\\\n\\u200bé\u{301}\\x01'\""
        );
        assert_eq!(of_file("metadata.labels['b']", &pod).unwrap(), "2");
        assert_eq!(of_file("status.podIP", &pod), None);
    }

    #[test]
    fn variables_see_the_node_and_the_addresses() {
        let (host_ip, pod_ips) = ("10.0.0.1".to_owned(), vec!["10.1.0.2".to_owned(), "fd00::2".to_owned()]);
        let facts = PodFacts { node_name: "n".to_owned(), host_ip, pod_ips };
        for (path, value) in [
            ("spec.nodeName", "n"),
            ("spec.serviceAccountName", "robot"),
            ("status.hostIP", "10.0.0.1"),
            ("status.hostIPs", "10.0.0.1"),
            ("status.podIP", "10.1.0.2"),
            ("status.podIPs", "10.1.0.2,fd00::2"),
            ("metadata.uid", "u"),
            ("metadata.labels['none']", ""),
        ] {
            assert_eq!(of_variable(path, &pod(), &facts).as_deref(), Some(value), "{path}");
        }
        assert_eq!(of_variable("metadata.labels", &pod(), &facts), None);
    }

    #[test]
    fn resources_are_divided_and_rounded_up() {
        let pod = pod();
        let node = Capacity { milli_cpu: 4000, memory_bytes: 1 << 30, ephemeral_storage_bytes: 7 };
        let value = |container: &str, resource: &str, divisor: Option<&str>| {
            let divisor = divisor.map(|divisor| divisor.parse().unwrap());
            let selector = ResourceFieldSelector {
                container_name: container.to_owned(),
                resource: resource.to_owned(),
                divisor,
            };
            of_resource(&selector, pod.spec.containers.first(), &pod, node)
        };
        for (container, resource, divisor, expected) in [
            ("", "limits.cpu", None, "2"),
            ("", "limits.cpu", Some("1m"), "1500"),
            ("", "requests.cpu", None, "1"),
            ("", "requests.memory", None, "0"),
            ("c", "limits.memory", Some("1Mi"), "96"),
            ("c", "limits.memory", Some("0"), "100000000"),
            ("free", "limits.cpu", None, "4"),
            ("free", "limits.memory", Some("1Gi"), "1"),
            ("free", "limits.ephemeral-storage", None, "7"),
            ("free", "limits.hugepages-2Mi", None, "0"),
        ] {
            assert_eq!(
                value(container, resource, divisor).as_deref(),
                Some(expected),
                "{container} {resource}"
            );
        }
        assert_eq!(value("other", "limits.cpu", None), None);
        assert_eq!(value("", "limits.color", None), None);
    }
}
