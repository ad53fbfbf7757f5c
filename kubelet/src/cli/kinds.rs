//! Resource names on the command line.

use super::Error;
use crate::manifest::instead_of_workload;
use crate::objects::Kind;

/// Any of kubectl's names: `po`, `pod`, `pods`, `Pod`, and with version or group `pods.v1.`,
/// `storageclasses.storage.k8s.io`, `storageclasses.v1.storage.k8s.io`.
pub(super) fn parse(word: &str) -> Result<Kind, Error> {
    let Some((name, suffix)) = word.split_once('.') else { return parse_name(word) };
    let unknown = || Error::UnknownKind { kind: word.to_owned() };
    let kind = match parse_name(name) {
        Err(Error::UnknownKind { .. }) => return Err(unknown()),
        parsed => parsed?,
    };
    let (group, version) = kind.api_version().split_once('/').unwrap_or(("", kind.api_version()));
    let is_its_own = suffix == group
        || suffix.strip_prefix(version).and_then(|rest| rest.strip_prefix('.')) == Some(group);
    if is_its_own { Ok(kind) } else { Err(unknown()) }
}

/// The name in `POD` or `pod/NAME`.
pub(super) fn pod_name(word: &str) -> Result<&str, Error> {
    let Some((kind, name)) = word.split_once('/') else { return Ok(word) };
    match parse(kind)? {
        Kind::Pod if name.is_empty() => Err(Error::Usage("resource name may not be empty")),
        Kind::Pod => Ok(name),
        _ => Err(Error::Usage("expected POD or pod/NAME: no other kind has containers")),
    }
}

fn parse_name(word: &str) -> Result<Kind, Error> {
    let kind = match word.to_lowercase().as_str() {
        // kubectl's `all` has no other kind of these.
        "po" | "pod" | "pods" | "all" => Kind::Pod,
        "pvc" | "persistentvolumeclaim" | "persistentvolumeclaims" => Kind::PersistentVolumeClaim,
        "pv" | "persistentvolume" | "persistentvolumes" => Kind::PersistentVolume,
        "sc" | "storageclass" | "storageclasses" => Kind::StorageClass,
        "csidriver" | "csidrivers" => Kind::CsiDriver,
        "vs" | "volumesnapshot" | "volumesnapshots" => Kind::VolumeSnapshot,
        "vsclass" | "vsclasses" | "volumesnapshotclass" | "volumesnapshotclasses" => {
            Kind::VolumeSnapshotClass
        }
        "vsc" | "vscs" | "volumesnapshotcontent" | "volumesnapshotcontents" => Kind::VolumeSnapshotContent,
        "cm" | "configmap" | "configmaps" => Kind::ConfigMap,
        "secret" | "secrets" => Kind::Secret,
        "ev" | "event" | "events" => Kind::Event,
        "no" | "node" | "nodes" => Kind::Node,
        other => {
            let kind = word.to_owned();
            return Err(match workload(other).and_then(instead_of_workload) {
                Some(instead) => Error::Workload { kind, instead },
                None => Error::UnknownKind { kind },
            });
        }
    };
    Ok(kind)
}

/// Kinds of a cluster that this kubelet does not have.
fn workload(word: &str) -> Option<&'static str> {
    let kind = match word {
        "deploy" | "deployment" | "deployments" => "Deployment",
        "rs" | "replicaset" | "replicasets" => "ReplicaSet",
        "rc" | "replicationcontroller" | "replicationcontrollers" => "ReplicationController",
        "sts" | "statefulset" | "statefulsets" => "StatefulSet",
        "ds" | "daemonset" | "daemonsets" => "DaemonSet",
        "job" | "jobs" => "Job",
        "cj" | "cronjob" | "cronjobs" => "CronJob",
        "svc" | "service" | "services" => "Service",
        "ing" | "ingress" | "ingresses" => "Ingress",
        "ns" | "namespace" | "namespaces" => "Namespace",
        "sa" | "serviceaccount" | "serviceaccounts" => "ServiceAccount",
        _ => return None,
    };
    Some(kind)
}

/// The kinds and names of `KIND[,KIND] [NAME…]` or `KIND/NAME`. No name is empty: that would mean every
/// object to the kubelet.
pub(super) fn select(kind: &str, names: &[String]) -> Result<Vec<(Kind, Vec<String>)>, Error> {
    let selected = split(kind, names)?;
    if selected.iter().flat_map(|(_, names)| names).any(String::is_empty) {
        return Err(Error::Usage("resource name may not be empty"));
    }
    Ok(selected)
}

fn split(kind: &str, names: &[String]) -> Result<Vec<(Kind, Vec<String>)>, Error> {
    if let Some((kind, name)) = kind.split_once('/') {
        let mut selected = vec![(parse(kind)?, vec![name.to_owned()])];
        for other in names {
            let Some((kind, name)) = other.split_once('/') else {
                return Err(Error::Usage(
                    "there is no need to specify a resource type as a separate argument when passing arguments in resource/name form",
                ));
            };
            let kind = parse(kind)?;
            match selected.last_mut() {
                Some((last, names)) if *last == kind => names.push(name.to_owned()),
                _ => selected.push((kind, vec![name.to_owned()])),
            }
        }
        return Ok(selected);
    }
    kind.split(',').map(|word| Ok((parse(word)?, names.to_vec()))).collect()
}

/// `pods/web`, as errors of kubectl name an object.
pub(super) fn subject(kind: Kind, name: &str) -> String {
    let resource = resource(kind);
    let (singular, group) =
        resource.split_once('.').map_or((resource.as_str(), ""), |(one, group)| (one, group));
    let plural = if singular.ends_with('s') { "es" } else { "s" };
    let dot = if group.is_empty() { "" } else { "." };
    format!("{singular}{plural}{dot}{group}/{name}")
}

/// The name in `-o name`, with the group where there is one.
pub(super) fn resource(kind: Kind) -> String {
    let name = kind.as_str().to_lowercase();
    match kind.api_version().split_once('/') {
        Some((group, _)) => format!("{name}.{group}"),
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_read_by_every_name_that_is_printed() {
        for kind in Kind::ALL {
            assert_eq!(parse(&resource(kind)).unwrap(), kind);
        }
        assert_eq!(parse("pods.v1.").unwrap(), Kind::Pod);
        assert_eq!(parse("storageclasses.v1.storage.k8s.io").unwrap(), Kind::StorageClass);
        for unknown in ["pod.apps", "storageclass.k8s.io", "pods.v2.", "frog.v1."] {
            let error = parse(unknown).unwrap_err();
            assert!(matches!(&error, Error::UnknownKind { kind } if kind == unknown), "{error}");
        }
        assert!(matches!(parse("deployments.apps").unwrap_err(), Error::Workload { .. }));
    }
}
