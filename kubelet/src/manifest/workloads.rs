//! Kinds that controllers of a cluster turn into pods, and how to write these pods.

/// What to write instead of an object of this kind; `None` for all other kinds.
pub fn instead_of_workload(kind: &str) -> Option<&'static str> {
    let instead = match kind {
        "Deployment" | "ReplicaSet" | "ReplicationController" => {
            "nothing here makes pods from a template: write metadata and spec of spec.template as a kind: Pod \
             (apiVersion: v1) with a metadata.name, once for each replica; restartPolicy: Always is the default"
        }
        "StatefulSet" => {
            "nothing here makes pods from a template: write metadata and spec of spec.template as a kind: Pod \
             (apiVersion: v1) for each replica, named NAME-0, NAME-1 and so on, and each of spec.volumeClaimTemplates as a \
             kind: PersistentVolumeClaim that the pod names in spec.volumes"
        }
        "DaemonSet" => {
            "there is one node: write metadata and spec of spec.template as one kind: Pod (apiVersion: v1) with a \
             metadata.name"
        }
        "Job" => {
            "nothing here makes pods from a template: write metadata and spec of spec.template as a kind: Pod \
             (apiVersion: v1) with a metadata.name and restartPolicy: OnFailure or Never"
        }
        "CronJob" => {
            "nothing here runs by the clock: write metadata and spec of spec.jobTemplate.spec.template as a kind: Pod \
             (apiVersion: v1) with restartPolicy: Never, and let cron or a systemd timer delete and apply it"
        }
        "Service" => {
            "there are no addresses of services: give a container of the kind: Pod a ports[].hostPort, use the pod's own \
             address (status.podIP), or the command port-forward"
        }
        "Ingress" => {
            "there is no ingress controller: run a proxy as a kind: Pod (apiVersion: v1) with a ports[].hostPort"
        }
        "Namespace" => "a namespace needs no object: metadata.namespace of the others, or -n, is enough",
        "ServiceAccount" => "pods have no service account here: leave it out",
        _ => return None,
    };
    Some(instead)
}

#[cfg(test)]
mod tests {
    use super::super::parse;

    #[test]
    fn the_error_says_how_to_write_the_pod() {
        for (kind, words) in [
            ("Deployment", "once for each replica"),
            ("ReplicaSet", "once for each replica"),
            ("StatefulSet", "named NAME-0"),
            ("DaemonSet", "one kind: Pod"),
            ("Job", "restartPolicy: OnFailure or Never"),
            ("CronJob", "systemd timer"),
            ("Service", "hostPort"),
            ("Ingress", "a proxy"),
        ] {
            let text = format!("apiVersion: apps/v1\nkind: {kind}\nmetadata: {{name: web}}\n");
            let error = parse(text.as_bytes(), "f").errors.remove(0).to_string();
            let begin = format!("f:2:7: kind: Unsupported value: {kind:?}: ");
            assert!(error.starts_with(&begin) && error.contains(words), "{error}");
            assert!(error.contains("kind: Pod"), "{error}");
        }
        for (kind, words) in [("Namespace", "needs no object"), ("ServiceAccount", "leave it out")] {
            let text = format!("apiVersion: v1\nkind: {kind}\nmetadata: {{name: web}}\n");
            let error = parse(text.as_bytes(), "f").errors.remove(0).to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
