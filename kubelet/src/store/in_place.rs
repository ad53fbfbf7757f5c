//! Which changes of a manifest apply to a running pod (kubernetes, apis/core/validation:
//! ValidatePodUpdate and ValidatePodResize). No I/O.

use serde_json::Value;

use crate::objects::{Container, Pod, Resources};
use crate::pod::resources;

/// Resources that a running container can get more or less of.
const RESIZABLE: [&str; 2] = ["cpu", "memory"];
/// The longest value in an error.
const MOST_SHOWN_BYTES: usize = 64;

/// A field that cannot change while its pod runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FixedField {
    pub(super) field: String,
    pub(super) before: String,
    pub(super) after: String,
}

/// The pod with the changes of `wanted`, or the first field that only another pod can have.
pub(super) fn changed(known: &Pod, wanted: &Pod) -> Result<Pod, FixedField> {
    let mut pod = known.clone();
    pod.metadata.labels.clone_from(&wanted.metadata.labels);
    pod.metadata.annotations.clone_from(&wanted.metadata.annotations);
    for (own, wanted) in pod.spec.init_containers.iter_mut().zip(&wanted.spec.init_containers) {
        // Its resources count while it runs, and it runs once.
        let is_resizable = own.is_sidecar();
        take_changes(own, wanted, is_resizable);
    }
    for (own, wanted) in pod.spec.containers.iter_mut().zip(&wanted.spec.containers) {
        take_changes(own, wanted, true);
    }
    let deadlines = (pod.spec.active_deadline_seconds, wanted.spec.active_deadline_seconds);
    if matches!(deadlines, (None, Some(_))) || matches!(deadlines, (Some(own), Some(wanted)) if wanted < own)
    {
        pod.spec.active_deadline_seconds = wanted.spec.active_deadline_seconds;
    }
    let json = |spec| serde_json::to_value(spec).expect("objects have string keys only");
    let mut wanted_spec = wanted.spec.clone();
    if wanted_spec.node_name.is_empty() {
        wanted_spec.node_name.clone_from(&known.spec.node_name);
    }
    // The specs compare quantities by value, their JSON by spelling.
    if pod.spec != wanted_spec
        && let Some(fixed) = difference("spec", Some(&json(&pod.spec)), Some(&json(&wanted_spec)))
    {
        return Err(fixed);
    }
    let (before, after) = (resources::qos_class(known), resources::qos_class(&pod));
    if before != after {
        let field = "status.qosClass".to_owned();
        return Err(FixedField { field, before: format!("{before:?}"), after: format!("{after:?}") });
    }
    let has_ended = known.status.phase.has_ended();
    if has_ended
        && known.spec != pod.spec
        && let Some(fixed) = difference("spec", Some(&json(&known.spec)), Some(&json(&pod.spec)))
    {
        return Err(fixed);
    }
    pod.metadata.generation += u64::from(pod.spec != known.spec);
    Ok(pod)
}

fn take_changes(own: &mut Container, wanted: &Container, is_resizable: bool) {
    if own.name != wanted.name {
        return;
    }
    own.image.clone_from(&wanted.image);
    // Where a manifest names none, it follows from the image.
    own.image_pull_policy = wanted.image_pull_policy;
    if is_resizable {
        take_amounts(&mut own.resources.limits, &wanted.resources.limits);
        take_amounts(&mut own.resources.requests, &wanted.resources.requests);
    }
}

/// What a container has cannot be taken from it: the kernel's limits would stay.
fn take_amounts(own: &mut Resources, wanted: &Resources) {
    for name in RESIZABLE {
        if let Some(amount) = wanted.get(name) {
            own.insert(name.to_owned(), amount.clone());
        }
    }
}

/// The first field, in the order of the object, that is not the same.
fn difference(path: &str, before: Option<&Value>, after: Option<&Value>) -> Option<FixedField> {
    if before == after {
        return None;
    }
    match (before, after) {
        (Some(Value::Object(before)), Some(Value::Object(after))) => {
            let added = after.keys().filter(|key| !before.contains_key(*key));
            let mut keys = before.keys().chain(added);
            keys.find_map(|key| difference(&format!("{path}.{key}"), before.get(key), after.get(key)))
        }
        (Some(Value::Array(before)), Some(Value::Array(after))) if before.len() == after.len() => {
            let mut pairs = before.iter().zip(after).enumerate();
            pairs.find_map(|(at, (before, after))| {
                difference(&format!("{path}[{at}]"), Some(before), Some(after))
            })
        }
        _ => Some(FixedField { field: path.to_owned(), before: shown(before), after: shown(after) }),
    }
}

fn shown(value: Option<&Value>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| trace::shortened(value.to_string(), MOST_SHOWN_BYTES))
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::objects::{PodPhase, QosClass};

    fn pod() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "uid": "u", "labels": {"a": "1"}},
            "spec": {
                "nodeName": "node",
                "activeDeadlineSeconds": 100,
                "initContainers": [
                    {"name": "first", "image": "i:1", "resources": {"requests": {"cpu": "1"}}},
                    {"name": "side", "image": "s:1", "restartPolicy": "Always"},
                ],
                "containers": [
                    {"name": "c", "image": "c:1", "command": ["run"], "resources": {"limits": {"memory": "1Mi"}}},
                    {"name": "d", "image": "d:1"},
                ],
            },
        })
    }

    /// What a change of one field does: the pod, or `field: before, after`.
    fn change(pointer: &str, value: Value) -> Result<Pod, String> {
        let mut wanted = pod();
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = wanted.pointer_mut(parent).unwrap();
        match (parent, value) {
            (Value::Object(fields), Value::Null) => drop(fields.remove(key)),
            (Value::Object(fields), value) => drop(fields.insert(key.to_owned(), value)),
            (Value::Array(items), Value::Null) => drop(items.remove(key.parse().unwrap())),
            (parent, _) => panic!("{parent}"),
        }
        changed(&from_value(pod()).unwrap(), &from_value(wanted).unwrap())
            .map_err(|FixedField { field, before, after }| format!("{field}: {before}, {after}"))
    }

    #[test]
    fn images_labels_resources_and_earlier_deadlines_change_in_place() {
        let changed = change("/spec/containers/1/image", json!("d:2")).unwrap();
        assert_eq!((changed.spec.containers[1].image.as_str(), changed.metadata.uid.as_str()), ("d:2", "u"));
        assert_eq!(changed.spec.containers[0].image, "c:1");
        assert_eq!(
            change("/spec/initContainers/0/image", json!("i:2")).unwrap().spec.init_containers[0].image,
            "i:2"
        );
        let changed = change("/metadata/labels", json!({"b": "2"})).unwrap();
        assert_eq!(
            changed.metadata.labels.into_iter().collect::<Vec<_>>(),
            [("b".to_owned(), "2".to_owned())]
        );
        let changed = change("/metadata/annotations", json!({"b": "2"})).unwrap();
        assert_eq!(changed.metadata.annotations.len(), 1);
        let changed = change("/spec/containers/0/resources/limits/memory", json!("2Mi")).unwrap();
        assert_eq!(changed.spec.containers[0].resources.limits["memory"].value(), 2 << 20);
        change("/spec/containers/0/resources/requests", json!({"cpu": "1", "memory": "1Mi"})).unwrap();
        change("/spec/initContainers/1/resources", json!({"limits": {"cpu": "1"}})).unwrap();
        assert_eq!(
            change("/spec/activeDeadlineSeconds", json!(99)).unwrap().spec.active_deadline_seconds,
            Some(99)
        );
        change("/spec/nodeName", Value::Null).unwrap();
    }

    #[test]
    fn every_other_change_is_named_with_both_values() {
        for (pointer, value, said) in [
            (
                "/spec/containers/0/command",
                json!(["run", "fast"]),
                "spec.containers[0].command: [\"run\"], [\"run\",\"fast\"]",
            ),
            ("/spec/containers/0/name", json!("x"), "spec.containers[0].name: \"c\", \"x\""),
            (
                "/spec/containers/0/env",
                json!([{"name": "A", "value": "b"}]),
                "spec.containers[0].env: none, [{\"name\":\"A\",\"value\":\"b\"}]",
            ),
            ("/spec/hostNetwork", json!(true), "spec.hostNetwork: none, true"),
            ("/spec/terminationGracePeriodSeconds", json!(1), "spec.terminationGracePeriodSeconds: 30, 1"),
            ("/spec/activeDeadlineSeconds", json!(101), "spec.activeDeadlineSeconds: 100, 101"),
            ("/spec/activeDeadlineSeconds", Value::Null, "spec.activeDeadlineSeconds: 100, none"),
            ("/spec/nodeName", json!("other"), "spec.nodeName: \"node\", \"other\""),
            (
                "/spec/containers/0/resources/limits",
                json!({"memory": "1Mi", "ephemeral-storage": "1Mi"}),
                "spec.containers[0].resources.limits.ephemeral-storage: none, \"1Mi\"",
            ),
            (
                "/spec/containers/0/resources/limits",
                json!({"cpu": "1"}),
                "spec.containers[0].resources.limits.memory: \"1Mi\", none",
            ),
            (
                "/spec/initContainers/0/resources",
                json!({"requests": {"cpu": "2"}}),
                "spec.initContainers[0].resources.requests.cpu: \"1\", \"2\"",
            ),
        ] {
            assert_eq!(change(pointer, value).unwrap_err(), said);
        }
        let fewer = change("/spec/containers/1", Value::Null).unwrap_err();
        assert!(fewer.starts_with("spec.containers: [{") && fewer.len() < 200, "{fewer}");
    }

    #[test]
    fn another_spelling_of_a_quantity_is_no_change() {
        let limited = |limits: Value| -> Pod {
            from_value(json!({
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
                "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]},
            }))
            .unwrap()
        };
        let mut known = limited(json!({"cpu": "1", "ephemeral-storage": "1Gi"}));
        let wanted = limited(json!({"cpu": "1000m", "ephemeral-storage": "1024Mi"}));
        changed(&known, &wanted).unwrap();
        known.status.phase = PodPhase::Succeeded;
        changed(&known, &wanted).unwrap();
    }

    #[test]
    fn the_class_of_a_running_pod_stays() {
        let known: Pod = from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
            "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "1", "memory": "1Mi"}}}]},
        }))
        .unwrap();
        let mut wanted = known.clone();
        wanted.spec.containers[0].resources.requests.insert("cpu".to_owned(), "500m".parse().unwrap());
        assert_eq!(resources::qos_class(&wanted), QosClass::Burstable);
        let fixed = changed(&known, &wanted).unwrap_err();
        assert_eq!(
            (fixed.field.as_str(), fixed.before.as_str(), fixed.after.as_str()),
            ("status.qosClass", "Guaranteed", "Burstable")
        );
    }

    #[test]
    fn a_pod_that_has_ended_keeps_all_but_its_labels() {
        let mut known: Pod = from_value(pod()).unwrap();
        known.status.phase = PodPhase::Succeeded;
        let mut wanted = known.clone();
        wanted.metadata.labels.clear();
        changed(&known, &wanted).unwrap();
        wanted.spec.containers[0].image = "c:2".to_owned();
        assert_eq!(changed(&known, &wanted).unwrap_err().field, "spec.containers[0].image");
    }
}
