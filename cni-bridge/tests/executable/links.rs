//! ADD and DEL of links, addresses and routes; what a failure leaves.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use serde_json::{Value, json};

use crate::sandbox::{DUAL, Sandbox, ip_not_utf_8, run_in};

#[test]
fn an_attachment_has_both_families_and_is_gone_after_del() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", DUAL);
    let result = attachment.add();
    let (host, container) = (&sandbox.host, &sandbox.netns("c1"));

    let [bridge, veth, eth0] = ["0", "1", "2"].map(|i| &result["interfaces"][i.parse::<usize>().unwrap()]);
    assert_eq!(bridge["name"], json!(sandbox.bridge));
    assert_eq!((&eth0["name"], &eth0["sandbox"]), (&json!("eth0"), &json!(attachment.netns)));
    assert_eq!(result["ips"][0], json!({"address": "10.1.0.2/24", "gateway": "10.1.0.1", "interface": 2}));
    assert_eq!(result["ips"][1], json!({"address": "fd00:1::2/64", "gateway": "fd00:1::1", "interface": 2}));
    let routes = json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}, {"dst": "::/0", "gw": "fd00:1::1"}]);
    assert_eq!(result["routes"], routes);

    let port = &Sandbox::ip(host, &format!("-d link show dev {}", veth["name"].as_str().unwrap()))[0];
    assert_eq!(port["address"], veth["mac"]);
    assert_eq!(port["master"], json!(sandbox.bridge));
    assert_eq!((&port["operstate"], &port["ifalias"]), (&json!("UP"), &json!("cni:net:c1:eth0")));
    assert_eq!(port["linkinfo"]["info_slave_data"]["state"], "forwarding");
    let inside = &Sandbox::ip(container, "addr show dev eth0")[0];
    assert_eq!(inside["address"], eth0["mac"]);
    // The link-local one the kernel settles by itself, a moment later.
    let given = inside["addr_info"].as_array().unwrap().iter().filter(|address| address["scope"] == "global");
    assert!(
        given.clone().count() == 2 && given.clone().all(|address| address["tentative"].is_null()),
        "{inside}"
    );
    assert!(inside.to_string().contains(r#""broadcast":"10.1.0.255""#), "{inside}");
    assert_eq!(Sandbox::addresses(container, "eth0"), ["10.1.0.2/24", "fd00:1::2/64"]);
    assert_eq!(Sandbox::ip(container, "route show default")[0]["gateway"], "10.1.0.1");
    assert_eq!(Sandbox::ip(container, "-6 route show default")[0]["gateway"], "fd00:1::1");

    assert_eq!(Sandbox::addresses(host, &sandbox.bridge), ["10.1.0.1/24", "fd00:1::1/64"]);
    assert_eq!(Sandbox::ip(host, &format!("link show dev {}", sandbox.bridge))[0]["address"], bridge["mac"]);
    for name in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
        assert_eq!(host.run(|| linux::sysctl::read(name).unwrap()).unwrap(), "1", "{name}");
    }

    attachment.del();
    sandbox.assert_detached();
    attachment.del();
    let bridge_after = &Sandbox::ip(host, &format!("link show dev {}", sandbox.bridge))[0];
    assert_eq!(bridge_after["address"], bridge["mac"], "the bridge keeps its MAC without ports");
}

#[test]
fn a_bridge_whose_alias_or_alternative_name_is_not_utf_8_is_used_as_any_other() {
    let sandbox = Sandbox::new().with_host_local();
    let name = &sandbox.bridge;
    for words in [format!("link set {name} alias TEXT"), format!("link property add dev {name} altname TEXT")]
    {
        run_in(&sandbox.host, &format!("ip link add {name} type bridge"));
        ip_not_utf_8(&sandbox.host, &words);
        let added = sandbox.attachment("c1", DUAL).added();
        added.is_fine("CHECK");
        added.del();
        run_in(&sandbox.host, &format!("ip link delete {name}"));
        sandbox.assert_untouched();
    }
}

#[test]
fn containers_and_the_host_reach_each_other_at_once() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let (first, second) = (sandbox.attachment("c1", DUAL), sandbox.attachment("c2", DUAL));
    first.add();
    second.add();
    for address in ["10.1.0.2:80", "[fd00:1::2]:80"] {
        let address: SocketAddr = address.parse().unwrap();
        let listener = sandbox.netns("c1").run(|| TcpListener::bind(address).unwrap()).unwrap();
        for client in [&sandbox.netns("c2"), &sandbox.host] {
            let mut stream = client
                .run(|| TcpStream::connect_timeout(&address, std::time::Duration::from_secs(5)).unwrap())
                .unwrap();
            stream.write_all(b"ship").unwrap();
            drop(stream);
            let mut text = String::new();
            listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
            assert_eq!(text, "ship");
        }
    }
    first.del();
    second.del();
    sandbox.assert_detached();
}

#[test]
fn parallel_first_adds_share_one_bridge() {
    let mut sandbox = Sandbox::new().with_host_local();
    let ids = ["c2", "c3", "c4", "c5", "c6", "c7", "c8"];
    ids.into_iter().for_each(|id| sandbox.add_container(id));
    let results: Vec<Value> = std::thread::scope(|scope| {
        let sandbox = &sandbox;
        let calls: Vec<_> = sandbox
            .containers
            .iter()
            .map(|id| scope.spawn(move || sandbox.attachment(id, DUAL).add()))
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    let distinct = |pick: fn(&Value) -> &Value| {
        let mut values: Vec<String> = results.iter().map(|r| pick(r).to_string()).collect();
        values.sort();
        values.dedup();
        values.len()
    };
    assert_eq!(distinct(|r| &r["interfaces"][0]["mac"]), 1, "{results:?}");
    assert_eq!(distinct(|r| &r["interfaces"][1]["name"]), 8);
    assert_eq!(distinct(|r| &r["ips"][1]["address"]), 8);
    for id in &sandbox.containers {
        sandbox.attachment(id, DUAL).del();
    }
    sandbox.assert_detached();
}

/// A bridge whose MAC is set in the request that makes it has no carrier, and
/// without a carrier no such address.
#[test]
fn a_new_bridge_has_a_link_local_address_before_any_port_is_up() {
    let sandbox = Sandbox::new();
    let attachment = sandbox.attachment("c1", r#"{"disableContainerInterface": true}"#);
    attachment.add();
    let addresses =
        &Sandbox::ip(&sandbox.host, &format!("-6 addr show dev {}", sandbox.bridge))[0]["addr_info"];
    assert_eq!(addresses[0]["scope"], "link", "{addresses}");
    attachment.del();
}

#[test]
fn layer_2_needs_no_ipam() {
    let sandbox = Sandbox::new();
    let mut attachment = sandbox.attachment("c1", r#"{"mtu": 1400, "hairpinMode": true}"#);
    let result = attachment.add();
    assert_eq!(result.get("ips"), None);
    let port = &Sandbox::ip(&sandbox.host, "-d link show type veth")[0];
    assert_eq!((&port["mtu"], &port["linkinfo"]["info_slave_data"]["hairpin"]), (&json!(1400), &json!(true)));
    let eth0 = &Sandbox::ip(&sandbox.netns("c1"), "addr show dev eth0")[0];
    assert_eq!((&eth0["operstate"], &eth0["mtu"]), (&json!("UP"), &json!(1400)));
    assert_eq!(Sandbox::addresses(&sandbox.netns("c1"), "eth0"), [""; 0]);
    assert_eq!(Sandbox::ip(&sandbox.host, &format!("link show dev {}", sandbox.bridge))[0]["mtu"], 1400);
    attachment.del();

    attachment.conf["disableContainerInterface"] = json!(true);
    attachment.add();
    assert_eq!(Sandbox::ip(&sandbox.netns("c1"), "link show dev eth0")[0]["operstate"], "DOWN");
    attachment.del();
    attachment.conf["cniVersion"] = json!("0.2.0");
    assert_eq!(attachment.refused().1, "cannot convert: no valid IP addresses");
    sandbox.assert_detached();
}

#[test]
fn routes_keep_their_attributes() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["ipam"]["routes"] = json!([
        {"dst": "10.7.0.0/16", "mtu": 1300, "advmss": 1200, "priority": 77},
        {"dst": "10.8.0.0/16", "gw": "10.1.0.9", "table": 1234},
        {"dst": "fd00:7::/48", "mtu": 1290},
    ]);
    let result = attachment.add();
    assert_eq!(
        result["routes"][0],
        json!({"dst": "10.7.0.0/16", "mtu": 1300, "advmss": 1200, "priority": 77})
    );
    let container = &sandbox.netns("c1");
    let route = &Sandbox::ip(container, "route show 10.7.0.0/16")[0];
    assert_eq!((&route["gateway"], &route["metric"]), (&json!("10.1.0.1"), &json!(77)));
    assert_eq!(route["metrics"][0], json!({"mtu": 1300, "advmss": 1200}));
    assert_eq!(Sandbox::ip(container, "route show table 1234")[0]["gateway"], "10.1.0.9");
    assert_eq!(Sandbox::ip(container, "-6 route show fd00:7::/48")[0]["metrics"][0]["mtu"], 1290);
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn duplicate_detection_is_waited_for_when_asked() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["enabledad"] = json!(true);
    attachment.add();
    let eth0 = &Sandbox::ip(&sandbox.netns("c1"), "addr show dev eth0")[0];
    assert!(!eth0.to_string().contains("tentative"), "{eth0}");
    assert!(!eth0.to_string().contains("nodad"), "{eth0}");
    attachment.del();
    sandbox.assert_detached();
}
