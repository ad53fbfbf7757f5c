//! Which container a command means.

use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use serde_json::Value;
use tonic::Code;
use tonic::transport::Channel;

use super::{Error, client};
use crate::objects::Kind;

/// (kubernetes, kubectl/pkg/cmd/util/podcmd)
const DEFAULT_ANNOTATION: &str = "kubectl.kubernetes.io/default-container";

/// The container of a pod, if `wanted` is empty: that of the annotation, or the first one. Stderr gets a
/// line if there are others.
///
/// Empty if the pod does not exist: the call that follows says so.
pub(super) async fn one(
    kubelet: &mut KubeletClient<Channel>,
    namespace: &str,
    pod: &str,
    wanted: &str,
) -> Result<String, Error> {
    if !wanted.is_empty() {
        return Ok(wanted.to_owned());
    }
    match client::get::<Value>(kubelet, Kind::Pod, namespace, pod).await {
        Ok(pods) => Ok(pods.first().map(default_of).unwrap_or_default()),
        Err(Error::Refused(status)) if status.code() == Code::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Like [`one`], for a pod that was read already.
pub(super) fn default_of(pod: &Value) -> String {
    let (main, init) = (names(pod, "containers"), names(pod, "initContainers"));
    let annotated = pod["metadata"]["annotations"][DEFAULT_ANNOTATION].as_str();
    if let Some(name) = annotated.filter(|name| main.iter().any(|one| one == name)) {
        return (*name).to_owned();
    }
    let first = main.first().cloned().unwrap_or_default();
    if main.len() + init.len() > 1 {
        let init = init.into_iter().map(|name| format!("{name} (init)"));
        let all: Vec<String> = main.into_iter().chain(init).collect();
        let _no_reader = writeln!(io::stderr(), "Defaulted container {first:?} out of: {}", all.join(", "));
    }
    first
}

/// Init containers first, in the order of the pod.
pub(super) fn all_of(pod: &Value) -> Vec<String> {
    [names(pod, "initContainers"), names(pod, "containers")].concat()
}

fn names(pod: &Value, list: &str) -> Vec<String> {
    let containers = pod["spec"][list].as_array().into_iter().flatten();
    containers.filter_map(|container| Some(container["name"].as_str()?.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_annotation_names_the_container_or_it_is_the_first() {
        let mut pod = json!({"metadata": {}, "spec": {
            "initContainers": [{"name": "i"}], "containers": [{"name": "a"}, {"name": "b"}]}});
        assert_eq!(default_of(&pod), "a");
        assert_eq!(all_of(&pod), ["i", "a", "b"]);
        pod["metadata"] = json!({"annotations": {DEFAULT_ANNOTATION: "b"}});
        assert_eq!(default_of(&pod), "b");
        pod["metadata"] = json!({"annotations": {DEFAULT_ANNOTATION: "none"}});
        assert_eq!(default_of(&pod), "a");
    }
}
