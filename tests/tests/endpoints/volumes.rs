//! The figures of pods' volumes.

use anyhow::{Context, ensure};
use serde_json::Value;
use tests::manifests::{Pod, claim};
use tests::node::TIMEOUT;
use tests::{Node, NodeOptions, Sandbox, eventually};

use super::get;

#[test]
fn volumes_of_a_running_pod_are_measured_by_their_driver_or_by_the_kubelet() {
    let sandbox = Sandbox::new();
    let node = Node::start(&sandbox, NodeOptions::default()).expect("the node starts");
    let idle = node.leak_check().expect("the kernel answers");
    node.put_class().expect("put");
    node.put_manifest("data.yaml", &claim("data", "64Mi")).expect("put");
    let pod = Pod::new("web", &["sleep", "forever"]).with_claim("data").yaml();
    let pod = pod.replace("volumes: [", "volumes: [{name: scratch, emptyDir: {}}, ");
    node.put_manifest("web.yaml", &pod).expect("put");
    node.wait_for_phase("web", "Running").expect("it runs");
    let (data, scratch) = eventually("both volumes are measured", TIMEOUT, || {
        let summary: Value = serde_json::from_slice(&get(&node, "/stats/summary").body)?;
        let pods = summary["pods"].as_array().context("a list")?;
        let web = pods.iter().find(|pod| pod["podRef"]["name"] == "web").context("the pod")?;
        let volume = |name: &str| {
            let volumes = web["volume"].as_array().into_iter().flatten();
            volumes.into_iter().find(|volume| volume["name"] == name).cloned().context(web.to_string())
        };
        Ok((volume("data")?, volume("scratch")?))
    })
    .expect("they are");
    assert_eq!(data["pvcRef"], serde_json::json!({"name": "data", "namespace": "default"}));
    assert_eq!(data["volumeHealthStats"]["abnormal"], false, "{data}");
    assert_eq!(data["capacityBytes"], 64 << 20, "{data}");
    for figure in ["availableBytes", "usedBytes", "inodes", "inodesFree", "inodesUsed", "time"] {
        assert!(!data[figure].is_null() && !scratch[figure].is_null(), "{figure}: {data} {scratch}");
    }
    assert!(scratch["pvcRef"].is_null() && scratch["capacityBytes"].as_u64() > scratch["usedBytes"].as_u64());

    let metrics = get(&node, "/metrics").text();
    let labels = "{namespace=\"default\",persistentvolumeclaim=\"data\"}";
    for line in [
        format!("kubelet_volume_stats_capacity_bytes{labels} {}\n", 64 << 20),
        format!("kubelet_volume_stats_health_status_abnormal{labels} 0\n"),
    ] {
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    node.remove_manifest("web.yaml").expect("removed");
    eventually("no figure is left", TIMEOUT, || {
        let metrics = get(&node, "/metrics").text();
        ensure!(!metrics.contains("persistentvolumeclaim="), "{metrics}");
        Ok(())
    })
    .expect("none is");
    node.finish(&idle).expect("nothing is left");
}
