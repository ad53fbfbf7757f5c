use super::*;
use crate::objects::PodPhase;

fn admission() -> Admission {
    let capacity = Capacity {
        cpu_millis: 2000,
        memory_bytes: 1 << 30,
        huge_pages: Pools::from([(2 << 20, 8 << 20)]),
        storage_bytes: 1 << 30,
        pods: 3,
    };
    Admission::new("demo", capacity, NodePressure::default())
}

fn pod(uid: &str, spec: serde_json::Value) -> Pod {
    let mut whole = serde_json::json!({"containers": [{"name": "c"}]});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": uid, "uid": uid}, "spec": whole
    }))
    .unwrap()
}

fn requesting(uid: &str, resource: &str, amount: &str) -> Pod {
    let resources = serde_json::json!({"requests": {resource: amount}});
    pod(uid, serde_json::json!({"containers": [{"name": "c", "resources": resources}]}))
}

#[test]
fn a_pod_is_rejected_in_kubelets_words_where_there_is_no_room() {
    let admission = admission();
    let first = admission.admit(&requesting("a", "cpu", "1500m"), false).unwrap();
    let second = requesting("b", "cpu", "600m");
    let rejection = admission.admit(&second, false).unwrap_err();
    assert_eq!(rejection.reason, "OutOfcpu");
    let message = "Node didn't have enough resource: cpu, requested: 600, used: 1500, capacity: 2000";
    assert_eq!(rejection.message, message);
    assert_eq!(rejection.missing, [Missing { resource: Resource::Cpu, amount: 100 }]);
    drop(first);
    let _second = admission.admit(&second, false).unwrap();
    let memory = requesting("c", "memory", "2Gi");
    assert_eq!(admission.admit(&memory, false).unwrap_err().reason, "OutOfmemory");
    let _adopted = admission.admit(&memory, true).unwrap();
    let storage = requesting("d", "ephemeral-storage", "2Gi");
    assert_eq!(admission.admit(&storage, false).unwrap_err().reason, "OutOfephemeral-storage");
    let _without_requests = admission.admit(&pod("e", serde_json::json!({})), false).unwrap();
    assert_eq!(admission.admit(&pod("f", serde_json::json!({})), false).unwrap_err().reason, "OutOfpods");
    let labels = BTreeMap::from([(proto::mount_pod::ROLE_LABEL.into(), proto::mount_pod::ROLE.into())]);
    let mut mount_pod = pod("g", serde_json::json!({}));
    mount_pod.metadata.labels = labels;
    let _served = admission.admit(&mount_pod, false).unwrap();
}

#[test]
fn huge_pages_count_by_their_size_and_what_the_node_lacks_is_refused_by_name() {
    let admission = admission();
    let first = admission.admit(&requesting("a", "hugepages-2Mi", "6Mi"), false).unwrap();
    let second = requesting("b", "hugepages-2Mi", "4Mi");
    let rejection = admission.admit(&second, false).unwrap_err();
    assert_eq!(rejection.reason, "OutOfhugepages-2Mi");
    assert!(rejection.message.ends_with("requested: 4194304, used: 6291456, capacity: 8388608"));
    let missing = Missing { resource: Resource::Scalar("hugepages-2Mi".to_owned()), amount: 2 << 20 };
    assert_eq!(rejection.missing, [missing]);
    drop(first);
    let _second = admission.admit(&second, false).unwrap();
    for unknown in ["hugepages-1Gi", "example.com/gpu"] {
        let refused = admission.admit(&requesting("c", unknown, "1Gi"), false).unwrap_err();
        assert_eq!(refused.reason, format!("OutOf{unknown}"));
    }
    drop(admission.admit(&requesting("c", "example.com/gpu", "0"), false).unwrap());
    // Their memory is none for other uses.
    let memory = format!("{}", (1 << 30) - (7 << 20));
    assert_eq!(
        admission.admit(&requesting("c", "memory", &memory), false).unwrap_err().reason,
        "OutOfmemory"
    );
}

#[test]
fn a_running_pod_grows_only_into_room_that_is_free() {
    let capacity = admission().capacity;
    let known = requesting("a", "cpu", "500m");
    let pods = [Arc::new(known.clone()), Arc::new(requesting("b", "cpu", "1"))];
    let fits = |amount| fits_resized(&capacity, &pods, &known, &requesting("a", "cpu", amount));
    fits("1").unwrap();
    let message = "Node didn't have enough resource: cpu, requested: 1001, used: 1000, capacity: 2000";
    assert_eq!(fits("1001m").unwrap_err().message, message);
    // On a node with too many pods already, a pod can still shrink.
    let full = [Arc::new(known.clone()), Arc::new(requesting("b", "cpu", "3"))];
    fits_resized(&capacity, &full, &known, &requesting("a", "cpu", "100m")).unwrap();
}

#[test]
fn each_critical_pod_has_another_pod_make_room_and_waits_for_those_that_end() {
    let capacity = Capacity { pods: 2, ..admission().capacity };
    let admission = Admission::new("demo", capacity, NodePressure::default());
    let critical = |uid| pod(uid, serde_json::json!({"priorityClassName": "system-node-critical"}));
    let mut node = vec![pod("a", serde_json::json!({})), pod("b", serde_json::json!({}))];
    let mut shares: Vec<Room> =
        node.iter().map(|ordinary| admission.admit(ordinary, false).unwrap()).collect();
    let preempt = |node: &mut Vec<Pod>, pod: &Pod| {
        let mut ended = Vec::new();
        let known = node.iter().cloned().map(Arc::new).collect();
        let room = admission.preempt(pod, || known, |victim| ended.push(victim.metadata.uid.clone()))?;
        for failed in node.iter_mut().filter(|known| ended.contains(&known.metadata.uid)) {
            failed.status.phase = PodPhase::Failed;
        }
        node.push(pod.clone());
        Ok::<_, Rejection>((room, ended))
    };
    let (first, mut ended) = preempt(&mut node, &critical("first")).unwrap();
    assert_eq!(ended.len(), 1);
    assert_eq!(first.awaited.iter().collect::<Vec<_>>(), ended.iter().collect::<Vec<_>>());
    // The first victim still holds its share.
    let (second, others) = preempt(&mut node, &critical("second")).unwrap();
    assert_eq!((others.len(), second.awaited.len()), (1, 2));
    ended.extend(others);
    ended.sort();
    assert_eq!(ended, ["a", "b"]);
    assert_eq!(preempt(&mut node, &critical("third")).unwrap_err().reason, "OutOfpods");
    // A pod that ends by itself makes room, and no other pod must go.
    shares.clear();
    drop(second);
    node.retain(|known| known.metadata.uid == "first");
    let mut succeeded = pod("c", serde_json::json!({}));
    let _succeeded = admission.admit(&succeeded, false).unwrap();
    succeeded.status.phase = PodPhase::Succeeded;
    node.push(succeeded);
    let (third, ended) = preempt(&mut node, &critical("third")).unwrap();
    assert_eq!((third.awaited, ended), (BTreeSet::from(["c".to_owned()]), vec![]));
}

#[test]
fn pods_of_an_earlier_kubelet_count_from_the_start() {
    let admission = admission();
    let running = requesting("a", "cpu", "1500m");
    admission.expect(&running);
    let waiting = requesting("b", "cpu", "600m");
    assert_eq!(admission.admit(&waiting, false).unwrap_err().reason, "OutOfcpu");
    drop(admission.admit(&running, true).unwrap());
    drop(admission.admit(&waiting, false).unwrap());
}

#[test]
fn host_ports_and_node_names_are_checked() {
    let admission = admission();
    let with_port = |uid, port: serde_json::Value| {
        pod(uid, serde_json::json!({"containers": [{"name": "c", "ports": [port]}]}))
    };
    let web = serde_json::json!({"containerPort": 80, "hostPort": 8080});
    let _web = admission.admit(&with_port("a", web.clone()), false).unwrap();
    let rejection = admission.admit(&with_port("b", web), false).unwrap_err();
    assert_eq!((rejection.reason.as_str(), rejection.missing.len()), ("NodePorts", 0));
    assert!(rejection.message.starts_with("Predicate NodePorts failed: node(s) didn't have free ports"));
    let udp = serde_json::json!({"containerPort": 80, "hostPort": 8080, "protocol": "UDP"});
    drop(admission.admit(&with_port("c", udp), false).unwrap());
    let port = serde_json::json!({"containerPort": 80, "hostPort": 8080});
    let init = serde_json::json!({"initContainers": [{"name": "i", "ports": [port]}], "containers": []});
    drop(admission.admit(&pod("i", init), false).unwrap());
    let mut on_host = with_port("d", serde_json::json!({"containerPort": 8080}));
    drop(admission.admit(&on_host, false).unwrap());
    on_host.spec.host_network = true;
    assert_eq!(admission.admit(&on_host, false).unwrap_err().reason, "NodePorts");
    let elsewhere = pod("e", serde_json::json!({"nodeName": "other"}));
    assert_eq!(admission.admit(&elsewhere, false).unwrap_err().reason, "NodeName");
}

#[test]
fn a_critical_pod_waits_for_the_host_port_of_a_preempted_pod_and_is_refused_that_of_others() {
    let capacity = Capacity { pods: 2, ..admission().capacity };
    let admission = Admission::new("demo", capacity, NodePressure::default());
    let serving = |uid: &str, class: &str| {
        let port = serde_json::json!({"containerPort": 80, "hostPort": 8080});
        let containers = serde_json::json!([{"name": "c", "ports": [port]}]);
        pod(uid, serde_json::json!({"containers": containers, "priorityClassName": class}))
    };
    let holder = serving("holder", "");
    let held = admission.admit(&holder, false).unwrap();
    let web = serving("web", "system-node-critical");
    let refused = |result: Result<Room, Rejection>| {
        let rejection = result.unwrap_err();
        assert_eq!((rejection.reason.as_str(), rejection.missing.len()), ("NodePorts", 0));
    };
    // As with kubelet, also while the holder is stopped after its deletion: no pod goes for a port.
    refused(admission.admit(&web, false));
    let mut deleted = holder.clone();
    deleted.metadata.deletion_timestamp = Some(crate::objects::now());
    refused(admission.preempt(&web, || vec![Arc::new(deleted)], |_| panic!("no pod goes")));
    let _other = admission.admit(&serving_nothing("other"), false).unwrap();
    // The node is full as well: the port is what counts.
    refused(admission.admit(&web, false));

    let important = pod("important", serde_json::json!({"priorityClassName": "system-node-critical"}));
    let pods = || vec![Arc::new(holder.clone()), Arc::new(serving_nothing("other"))];
    let mut ended = Vec::new();
    let _room =
        admission.preempt(&important, pods, |victim| ended.push(victim.metadata.uid.clone())).unwrap();
    assert_eq!(ended, ["holder"]);
    // kubelet judges the next pod when the preempted one has ended.
    let pods = || {
        let mut failed = holder.clone();
        failed.status.phase = PodPhase::Failed;
        vec![Arc::new(failed), Arc::new(serving_nothing("other")), Arc::new(important.clone())]
    };
    let room = admission.preempt(&web, pods, |victim| ended.push(victim.metadata.uid.clone())).unwrap();
    assert_eq!(ended, ["holder", "other"]);
    assert_eq!(room.awaited, BTreeSet::from(["holder".to_owned(), "other".to_owned()]));
    drop(held);
    assert!(!admission.holders().contains("holder"));
}

#[test]
fn an_ordinary_pod_gets_what_a_preempted_one_frees_besides() {
    let admission = admission();
    let victim = requesting("victim", "cpu", "2");
    let held = admission.admit(&victim, false).unwrap();
    let mut important = requesting("important", "cpu", "1");
    important.spec.priority_class_name = "system-node-critical".to_owned();
    let _room = admission.preempt(&important, || vec![Arc::new(victim.clone())], |_| {}).unwrap();
    let too_large = admission.admit(&requesting("large", "cpu", "1500m"), false).unwrap_err();
    assert_eq!(
        too_large.message,
        "Node didn't have enough resource: cpu, requested: 1500, used: 1000, capacity: 2000"
    );
    let room = admission.admit(&requesting("small", "cpu", "1"), false).unwrap();
    assert_eq!(room.awaited, BTreeSet::from(["victim".to_owned()]));
    drop(held);
    assert!(admission.admit(&requesting("none", "cpu", "0"), false).unwrap().awaited.is_empty());
}

fn serving_nothing(uid: &str) -> Pod {
    pod(uid, serde_json::json!({}))
}
