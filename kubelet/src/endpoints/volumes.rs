//! The figures of volumes, in the shape of stats/v1alpha1 and as kubelet's metrics of claims
//! (kubernetes, pkg/kubelet/metrics/collectors/volume_stats.go).

use std::collections::HashSet;

use serde_json::{Value, json};

use super::exposition::{Exposition, Kind};
use super::object::object;
use crate::objects::Pod;
use crate::volumes::{Figures, Space, VolumeFigures};

/// A VolumeStats.
pub(super) fn of_volume(namespace: &str, volume: &VolumeFigures) -> Value {
    let VolumeFigures { name, claim, space, is_abnormal, time } = volume;
    object([
        ("time", Some(json!(time))),
        ("availableBytes", space.available.map(Value::from)),
        ("capacityBytes", space.capacity.map(Value::from)),
        ("usedBytes", space.used.map(Value::from)),
        ("inodesFree", space.inodes_free.map(Value::from)),
        ("inodes", space.inodes.map(Value::from)),
        ("inodesUsed", space.inodes_used.map(Value::from)),
        ("name", Some(json!(name))),
        ("pvcRef", claim.as_ref().map(|name| json!({ "name": name, "namespace": namespace }))),
        ("volumeHealthStats", is_abnormal.map(|abnormal| json!({ "abnormal": abnormal }))),
    ])
}

/// A metric and its figure.
type Gauge = (&'static str, &'static str, fn(&Space) -> Option<u64>);

const GAUGES: [Gauge; 6] = [
    ("kubelet_volume_stats_capacity_bytes", "Capacity in bytes of the volume", |space| space.capacity),
    ("kubelet_volume_stats_available_bytes", "Number of available bytes in the volume", |space| {
        space.available
    }),
    ("kubelet_volume_stats_used_bytes", "Number of used bytes in the volume", |space| space.used),
    ("kubelet_volume_stats_inodes", "Maximum number of inodes in the volume", |space| space.inodes),
    ("kubelet_volume_stats_inodes_free", "Number of free inodes in the volume", |space| space.inodes_free),
    ("kubelet_volume_stats_inodes_used", "Number of used inodes in the volume", |space| space.inodes_used),
];
const ABNORMAL: &str = "kubelet_volume_stats_health_status_abnormal";

/// A sample for each claim; several pods may have it.
pub(super) fn add_metrics(text: &mut Exposition, pods: &[impl AsRef<Pod>], figures: &Figures) {
    let mut seen = HashSet::new();
    let mut of_claims = Vec::new();
    for pod in pods.iter().map(AsRef::as_ref) {
        let namespace = pod.metadata.namespace.as_str();
        for volume in figures.get(&pod.metadata.uid).into_iter().flat_map(|volumes| volumes.iter()) {
            if let Some(claim) = &volume.claim
                && seen.insert((namespace, claim))
            {
                of_claims
                    .push(([("namespace", namespace), ("persistentvolumeclaim", claim.as_str())], volume));
            }
        }
    }
    for (name, help, figure) in GAUGES {
        let mut metric = text.metric(name, Kind::Gauge, help);
        for (labels, volume) in &of_claims {
            if let Some(figure) = figure(&volume.space) {
                metric.sample(labels, figure as f64, None);
            }
        }
    }
    let mut metric = text.metric(ABNORMAL, Kind::Gauge, "1 if the driver calls the volume abnormal, else 0");
    for (labels, volume) in &of_claims {
        if let Some(is_abnormal) = volume.is_abnormal {
            metric.sample(labels, f64::from(u8::from(is_abnormal)), None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn figures(claim: Option<&str>) -> VolumeFigures {
        VolumeFigures {
            name: "v".to_owned(),
            claim: claim.map(str::to_owned),
            space: Space { capacity: Some(1 << 30), used: Some(4096), inodes: Some(7), ..Space::default() },
            is_abnormal: Some(false),
            time: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    fn pod(name: &str) -> Arc<Pod> {
        let pod: Pod = serde_json::from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop", "uid": name},
            "spec": {"containers": []}
        }))
        .unwrap();
        Arc::new(pod)
    }

    #[test]
    fn a_volume_has_kubelets_fields_and_no_unknown_ones() {
        let expected = json!({
            "time": "1970-01-01T00:00:00Z", "capacityBytes": 1 << 30, "usedBytes": 4096, "inodes": 7, "name": "v",
            "pvcRef": {"name": "data", "namespace": "shop"}, "volumeHealthStats": {"abnormal": false},
        });
        assert_eq!(of_volume("shop", &figures(Some("data"))), expected);
        let own = VolumeFigures { is_abnormal: None, ..figures(None) };
        let shown = of_volume("shop", &own);
        assert!(shown.get("pvcRef").is_none() && shown.get("volumeHealthStats").is_none(), "{shown}");
    }

    #[test]
    fn a_claim_has_one_sample_of_each_metric() {
        let mut text = Exposition::default();
        let known = |claim: Option<&str>| -> Arc<[VolumeFigures]> { [figures(claim)].into() };
        let all = Figures::from([
            ("a".to_owned(), known(Some("data"))),
            ("b".to_owned(), known(Some("data"))),
            ("c".to_owned(), known(None)),
            ("gone".to_owned(), known(Some("other"))),
        ]);
        add_metrics(&mut text, &[pod("a"), pod("b"), pod("c")], &all);
        let text = text.into_text();
        let labels = "{namespace=\"shop\",persistentvolumeclaim=\"data\"}";
        let samples: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            samples,
            [
                format!("kubelet_volume_stats_capacity_bytes{labels} 1073741824"),
                format!("kubelet_volume_stats_used_bytes{labels} 4096"),
                format!("kubelet_volume_stats_inodes{labels} 7"),
                format!("kubelet_volume_stats_health_status_abnormal{labels} 0"),
            ]
        );
    }
}
