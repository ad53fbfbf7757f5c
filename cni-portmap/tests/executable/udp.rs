//! UDP flows that connection tracking remembers from before.

use std::net::UdpSocket;

use nix::errno::Errno;
use serde_json::json;
use tests::trace_calls::{Call, Fault, Injection};

use crate::sandbox::{A, B, HOST, OUTSIDE, Sandbox, udp};

const DNS: &str = r#"{"runtimeConfig": {"portMappings": [
    {"hostPort": 53, "containerPort": 5353, "protocol": "udp"}
]}}"#;

fn hears(pod: &UdpSocket, client: &UdpSocket, text: &str) {
    client.send(text.as_bytes()).unwrap();
    let mut buffer = [0; 64];
    let (length, sender) = pod.recv_from(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], text.as_bytes());
    assert_eq!(sender.ip().to_string(), OUTSIDE);
    pod.send_to(b"yes", sender).unwrap();
    let length = client.recv(&mut buffer).unwrap();
    assert_eq!(&buffer[..length], b"yes");
}

/// The client keeps its port: for the kernel it is one flow all the time.
fn client(sandbox: &Sandbox) -> UdpSocket {
    let client = udp(&sandbox.outside, &format!("{OUTSIDE}:40000"));
    client.connect(format!("{HOST}:53")).unwrap();
    client
}

fn tracked(sandbox: &Sandbox) -> String {
    sandbox.host_output("conntrack", "-L -p udp")
}

#[test]
fn a_flow_from_before_the_pod_reaches_it() {
    let sandbox = Sandbox::connected();
    // Something has to be tracked: rules of another pod switch tracking on.
    sandbox.attachment("other", B, &DNS.replace("53,", "54,")).add();
    let (client, pod) = (client(&sandbox), udp(&sandbox.pod(A), "0.0.0.0:5353"));
    client.send(b"too early").unwrap();
    assert!(client.recv(&mut [0; 8]).is_err(), "the host refuses");
    assert!(tracked(&sandbox).contains("dport=53 "), "{}", tracked(&sandbox));
    sandbox.attachment("cid", A, DNS).add();
    hears(&pod, &client, "in time");
}

#[test]
fn a_flow_of_a_pod_that_was_replaced_reaches_the_new_one() {
    let sandbox = Sandbox::connected();
    let [old, new] = [A, B].map(|pod| udp(&sandbox.pod(pod), "0.0.0.0:5353"));
    let client = client(&sandbox);
    let first = sandbox.attachment("cida", A, DNS);
    first.add();
    hears(&old, &client, "old");
    first.del();
    assert!(!tracked(&sandbox).contains("10.7.2.4"), "DEL forgets: {}", tracked(&sandbox));
    sandbox.attachment("cidb", B, DNS).add();
    hears(&new, &client, "new");
}

#[test]
fn a_flow_of_a_pod_that_vanished_without_del_reaches_the_new_one() {
    let sandbox = Sandbox::connected();
    let [old, new] = [A, B].map(|pod| udp(&sandbox.pod(pod), "0.0.0.0:5353"));
    let client = client(&sandbox);
    sandbox.attachment("cida", A, DNS).add();
    hears(&old, &client, "old");
    sandbox.host_output("nft", "flush chain ip cni_hostport hostports");
    sandbox.attachment("cidb", B, DNS).add();
    hears(&new, &client, "new");
}

#[test]
fn a_neighbours_datagram_comes_from_the_host_and_its_answer_returns() {
    let sandbox = Sandbox::connected();
    sandbox.attachment("cid", A, DNS).add();
    let (pod, client) = (udp(&sandbox.pod(A), "0.0.0.0:5353"), udp(&sandbox.pod(B), "0.0.0.0:41000"));
    client.connect(format!("{HOST}:53")).unwrap();
    client.send(b"question").unwrap();
    let (_, sender) = pod.recv_from(&mut [0; 16]).unwrap();
    assert_eq!(sender.ip().to_string(), "10.7.2.1");
    pod.send_to(b"answer", sender).unwrap();
    assert_eq!(client.recv(&mut [0; 16]).unwrap(), 6);
}

#[test]
fn a_del_that_knows_nothing_but_the_id_forgets_the_flows_too() {
    for backend in ["nftables", "iptables"] {
        let sandbox = Sandbox::connected();
        let pod = udp(&sandbox.pod(A), "0.0.0.0:5353");
        let client = client(&sandbox);
        sandbox.attachment("cid", A, DNS).with(json!({"backend": backend})).add();
        hears(&pod, &client, "hello");
        sandbox.attachment("cid", A, "{}").with(json!({"prevResult": null})).del();
        assert!(!tracked(&sandbox).contains("10.7.2.4"), "{backend}: {}", tracked(&sandbox));
    }
}

/// `IPCTNL_MSG_CT_GET_STATS`: the first question to connection tracking.
const COUNT_FLOWS: u16 = 0x105;

#[test]
fn a_connection_tracking_that_refuses_keeps_neither_del_nor_gc_from_success() {
    let sandbox = Sandbox::bare();
    let nothing_valid = json!({"cni.dev/valid-attachments": []});
    for verb in ["DEL", "GC"] {
        let call = sandbox.attachment("cid", A, DNS).with(nothing_valid.clone());
        call.add();
        let undisturbed = call.traced(verb, None);
        let counts = |call: &&Call| call.netlink_type == Some(COUNT_FLOWS);
        let Call { point, name, .. } = *undisturbed.calls.iter().find(counts).expect("the flows are counted");

        call.add();
        let run = call.traced(verb, Some(Injection { point, name, fault: Fault::Fail(Errno::EPERM) }));
        assert!(run.injected.is_some_and(|call| call.netlink_type == Some(COUNT_FLOWS)), "{verb}");
        assert_eq!((run.code, run.stdout.as_str()), (Some(0), ""), "{verb}");
        let warning = "failed to delete UDP conntrack entries of the container: ";
        assert!(run.stderr.contains(warning), "{verb}: {}", run.stderr);
        sandbox.assert_no_rules_of("cid");
    }
}

#[test]
fn flows_of_other_hosts_and_other_pods_go_on() {
    let sandbox = Sandbox::connected();
    let (resolver, asking) =
        (udp(&sandbox.outside, &format!("{OUTSIDE}:53")), udp(&sandbox.pod(B), "0.0.0.0:41000"));
    // From pod to outside, forwarded: the same port, but not of this host.
    crate::sandbox::ip(&sandbox.outside, &format!("route add 10.7.2.0/24 via {HOST}"));
    sandbox.attachment("other", B, &DNS.replace("53,", "54,")).add();
    asking.send_to(b"question", format!("{OUTSIDE}:53")).unwrap();
    resolver.recv_from(&mut [0; 16]).unwrap();
    let attachment = sandbox.attachment("cid", A, DNS);
    let forwarded = |when: &str| {
        let tracked = tracked(&sandbox);
        assert!(tracked.contains("src=10.7.2.5"), "{when}: {tracked}");
    };
    forwarded("before");
    attachment.add();
    forwarded("after ADD");
    attachment.del();
    forwarded("after DEL");
}
