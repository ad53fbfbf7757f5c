//! The executable against the kernel: every test has two fresh network
//! namespaces, one in the host's place, one in the container's.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use linux::netns::{self, NetNs};
use serde_json::{Value, json};

/// A machine of its own: host namespace, containers, plugin directory, leases.
struct Sandbox {
    dir: tempfile::TempDir,
    host: NetNs,
    /// Of this test alone: the bridge's lock file is the machine's.
    bridge: String,
    containers: Vec<&'static str>,
}

struct Attachment<'a> {
    sandbox: &'a Sandbox,
    conf: Value,
    id: String,
    netns: String,
    args: &'static str,
}

impl Sandbox {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let host = netns::create_persistent(&dir.path().join("host")).unwrap();
        let bridge = format!("t{}x{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        std::fs::create_dir(dir.path().join("bin")).unwrap();
        let mut sandbox = Self { dir, host, bridge, containers: Vec::new() };
        sandbox.add_container("c1");
        sandbox
    }

    fn add_container(&mut self, id: &'static str) {
        netns::create_persistent(&self.dir.path().join(id)).unwrap();
        self.containers.push(id);
    }

    fn remove_container(&mut self, id: &'static str) {
        netns::remove_persistent(&self.dir.path().join(id)).unwrap();
        self.containers.retain(|other| *other != id);
    }

    fn netns(&self, id: &str) -> NetNs {
        NetNs::open(&self.dir.path().join(id)).unwrap()
    }

    /// `host-local` beside our own executable.
    fn with_host_local(self) -> Self {
        let host_local = Path::new(env!("CARGO_BIN_EXE_bridge")).with_file_name("host-local");
        assert!(
            host_local.is_file(),
            "{} is missing: run cargo build -p ipam-host-local first",
            host_local.display()
        );
        std::os::unix::fs::symlink(host_local, self.dir.path().join("bin/host-local")).unwrap();
        self
    }

    fn with_scripted_ipam(self, result: &Value) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugins/scripted-ipam");
        std::os::unix::fs::symlink(script, self.dir.path().join("bin/scripted-ipam")).unwrap();
        std::fs::write(self.dir.path().join("bin/result"), result.to_string()).unwrap();
        self
    }

    fn ipam_calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.dir.path().join("bin/calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }

    /// A configuration as a user writes it, plus this sandbox's names.
    fn attachment(&self, id: &str, conf: &str) -> Attachment<'_> {
        let mut conf: Value = serde_json::from_str(conf).unwrap();
        conf["name"] = json!("net");
        conf["type"] = json!("bridge");
        conf["bridge"] = json!(self.bridge);
        if conf["cniVersion"].is_null() {
            conf["cniVersion"] = json!("1.0.0");
        }
        if conf["ipam"]["type"] == "host-local" {
            conf["ipam"]["dataDir"] = json!(self.dir.path().join("leases"));
        }
        let netns = self.dir.path().join(id).to_str().unwrap().to_owned();
        Attachment { sandbox: self, conf, id: id.to_owned(), netns, args: "" }
    }

    /// `ip -j` with `words` in `netns`.
    fn ip(netns: &NetNs, words: &str) -> Vec<Value> {
        let output = netns
            .run(|| Command::new("ip").arg("-j").args(words.split_whitespace()).output().unwrap())
            .unwrap();
        assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
        if output.stdout.is_empty() { Vec::new() } else { serde_json::from_slice(&output.stdout).unwrap() }
    }

    fn links(netns: &NetNs) -> Vec<String> {
        let mut names: Vec<String> =
            Self::ip(netns, "link show").iter().map(|l| l["ifname"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    /// `address/prefix` of a link, link-local ones left out.
    fn addresses(netns: &NetNs, link: &str) -> Vec<String> {
        let found = Self::ip(netns, &format!("addr show dev {link}"));
        let all = found[0]["addr_info"].as_array().unwrap();
        let global = all.iter().filter(|a| a["scope"] == "global");
        global.map(|a| format!("{}/{}", a["local"].as_str().unwrap(), a["prefixlen"])).collect()
    }

    fn leases(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.dir.path().join("leases/net")) else { return Vec::new() };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect()
    }

    /// Nothing of any attachment is left; the bridge may be.
    fn assert_detached(&self) {
        let links = Self::links(&self.host);
        assert!(links.iter().all(|link| *link == self.bridge || link == "lo"), "host: {links:?}");
        for id in &self.containers {
            assert_eq!(Self::links(&self.netns(id)), ["lo"], "container {id}");
        }
        assert_eq!(self.leases(), [""; 0]);
        let lock = format!("/run/hawser-bridge-{}.lock", self.bridge);
        assert!(!Path::new(&lock).exists(), "{lock} is left");
    }

    /// And no bridge either.
    fn assert_untouched(&self) {
        self.assert_detached();
        assert_eq!(Self::links(&self.host), ["lo"]);
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for name in self.containers.iter().copied().chain(["host"]) {
            netns::remove_persistent(&self.dir.path().join(name)).unwrap();
        }
    }
}

impl Attachment<'_> {
    fn spawn(&self, command: &str) -> Child {
        let mut process = Command::new(env!("CARGO_BIN_EXE_bridge"));
        process
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", &self.id)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", self.sandbox.dir.path().join("bin"))
            .env("CNI_ARGS", self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = self.sandbox.host.run(|| process.spawn().unwrap()).unwrap();
        child.stdin.take().unwrap().write_all(self.conf.to_string().as_bytes()).unwrap();
        child
    }

    fn call(&self, command: &str) -> (Option<i32>, Value) {
        let output = self.spawn(command).wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let value = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() };
        (output.status.code(), value)
    }

    fn add(&self) -> Value {
        let (code, result) = self.call("ADD");
        assert_eq!(code, Some(0), "{result}");
        result
    }

    /// Code and message of a refused ADD.
    fn refused(&self) -> (i64, String) {
        let (code, error) = self.call("ADD");
        assert_eq!(code, Some(1), "{error}");
        assert!(!error.to_string().contains("not rolled back"), "{error}");
        (error["code"].as_i64().unwrap(), error["msg"].as_str().unwrap().to_owned())
    }

    fn del(&self) {
        assert_eq!(self.call("DEL"), (Some(0), Value::Null));
    }
}

const DUAL: &str = r#"{
    "isDefaultGateway": true,
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]}
}"#;

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
    assert!(!inside.to_string().contains("tentative"), "{inside}");
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

#[test]
fn a_full_pool_leaves_nothing_and_heals() {
    let mut sandbox = Sandbox::new().with_host_local();
    sandbox.add_container("c2");
    let conf = r#"{"isGateway": true, "ipam": {"type": "host-local", "subnet": "10.67.0.0/30"}}"#;
    let (first, second) = (sandbox.attachment("c1", conf), sandbox.attachment("c2", conf));
    first.add();
    let full = "failed to allocate for range 0: no IP addresses available in range set: 10.67.0.1-10.67.0.2";
    assert_eq!(second.refused(), (999, full.to_owned()));
    assert_eq!(Sandbox::links(&sandbox.netns("c2")), ["lo"]);
    assert_eq!(Sandbox::links(&sandbox.host).len(), 3, "lo, the bridge and the first one's port");
    assert_eq!(Sandbox::addresses(&sandbox.host, &sandbox.bridge), ["10.67.0.1/30"]);
    first.del();
    second.add();
    second.del();
    sandbox.assert_detached();
}

#[test]
fn a_bridge_address_in_the_way_is_refused_and_replaced_by_force() {
    let sandbox = Sandbox::new().with_host_local();
    Sandbox::ip(&sandbox.host, &format!("link add {} type bridge", sandbox.bridge));
    Sandbox::ip(&sandbox.host, &format!("addr add 10.9.0.1/24 dev {}", sandbox.bridge));
    let mut attachment = sandbox.attachment("c1", DUAL);
    let (code, error) = attachment.call("ADD");
    assert_eq!((code, &error["code"]), (Some(1), &json!(999)));
    let name = &sandbox.bridge;
    assert_eq!(
        error["msg"],
        json!(format!(
            "failed to set bridge addr: {name:?} already has an IP address different from 10.1.0.1/24"
        ))
    );
    assert_eq!(
        error["details"],
        json!(format!("{name} has 10.9.0.1/24; remove it or set \"forceAddress\": true"))
    );
    sandbox.assert_detached();
    assert_eq!(
        Sandbox::addresses(&sandbox.host, name),
        ["10.9.0.1/24"],
        "a bridge of others stays as it was"
    );

    attachment.conf["forceAddress"] = json!(true);
    attachment.add();
    assert_eq!(Sandbox::addresses(&sandbox.host, name), ["10.1.0.1/24", "fd00:1::1/64"]);
    let pinned = Sandbox::ip(&sandbox.host, &format!("link show dev {name}"))[0]["address"].clone();
    attachment.del();
    assert_eq!(Sandbox::ip(&sandbox.host, &format!("link show dev {name}"))[0]["address"], pinned);
    sandbox.assert_detached();
}

#[test]
fn a_late_failure_takes_everything_back_and_a_retry_works() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["ipam"]["routes"] = json!([{"dst": "192.168.0.0/16", "gw": "172.31.0.1"}]);
    let (code, msg) = attachment.refused();
    assert_eq!(code, 999);
    assert!(msg.starts_with("failed to add route '192.168.0.0/16 via 172.31.0.1 dev eth0'"), "{msg}");
    sandbox.assert_untouched();
    attachment.conf["ipam"]["routes"] = json!([]);
    attachment.add();
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn a_gateway_that_cannot_be_set_takes_the_first_ones_address_back() {
    // The second IPv4 gateway contradicts the first, which this ADD has set.
    let result = json!({"cniVersion": "1.0.0", "ips": [
        {"address": "10.1.0.2/24", "gateway": "10.1.0.1"}, {"address": "10.2.0.2/24", "gateway": "10.2.0.1"}]});
    let sandbox = Sandbox::new().with_scripted_ipam(&result);
    Sandbox::ip(&sandbox.host, &format!("link add {} type bridge", sandbox.bridge));
    let attachment = sandbox.attachment("c1", r#"{"isGateway": true, "ipam": {"type": "scripted-ipam"}}"#);
    assert!(attachment.refused().1.ends_with("already has an IP address different from 10.2.0.1/24"));
    sandbox.assert_detached();
    assert_eq!(Sandbox::addresses(&sandbox.host, &sandbox.bridge), [""; 0]);
    assert_eq!(sandbox.ipam_calls(), ["ADD", "DEL"]);
}

#[test]
fn a_repeated_add_is_refused_and_costs_the_first_nothing() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", DUAL);
    attachment.add();
    let (code, msg) = attachment.refused();
    assert_eq!(code, 999);
    assert!(msg.starts_with(r#"container veth name ("eth0") peer provided ("veth"#), "{msg}");
    assert!(msg.ends_with(r#"already exists"#), "{msg}");
    assert_eq!(Sandbox::addresses(&sandbox.netns("c1"), "eth0"), ["10.1.0.2/24", "fd00:1::2/64"]);
    assert_eq!(sandbox.leases().len(), 2);
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn a_failing_ipam_plugin_is_quoted_and_told_to_release() {
    let error = json!({"cniVersion": "1.0.0", "code": 11, "msg": "come back later", "details": "busy"});
    let sandbox = Sandbox::new().with_scripted_ipam(&error);
    std::fs::write(sandbox.dir.path().join("bin/fail"), "").unwrap();
    let attachment = sandbox.attachment("c1", r#"{"ipam": {"type": "scripted-ipam"}}"#);
    let (code, answer) = attachment.call("ADD");
    assert_eq!((code, answer), (Some(1), json!({"code": 11, "msg": "come back later", "details": "busy"})));
    assert_eq!(sandbox.ipam_calls(), ["ADD", "DEL"]);
    sandbox.assert_untouched();
}

#[test]
fn ipam_plugins_that_are_missing_or_give_nothing_are_refused() {
    let sandbox = Sandbox::new().with_scripted_ipam(&json!({"cniVersion": "1.0.0"}));
    let bin: PathBuf = sandbox.dir.path().join("bin");
    let missing = sandbox.attachment("c1", r#"{"ipam": {"type": "no-such-ipam"}}"#);
    let msg = format!("failed to find plugin \"no-such-ipam\" in path [{}]", bin.display());
    assert_eq!(missing.refused(), (999, msg));
    let empty = sandbox.attachment("c1", r#"{"ipam": {"type": "scripted-ipam"}}"#);
    assert_eq!(empty.refused(), (999, "IPAM plugin returned missing IP config".to_owned()));
    sandbox.assert_untouched();
}

#[test]
fn a_range_that_the_ipam_plugin_refuses_is_named_once() {
    let sandbox = Sandbox::new().with_host_local();
    let attachment = sandbox.attachment("c1", r#"{"ipam": {"type": "host-local", "subnet": "10.1.0.0/31"}}"#);
    let msg = "invalid range set 0: Network 10.1.0.0/31 too small to allocate from";
    assert_eq!(attachment.call("ADD"), (Some(1), json!({"code": 999, "msg": msg})));
    sandbox.assert_untouched();
}

#[test]
fn del_copes_with_a_namespace_that_is_gone() {
    for netns in ["", "/gone/netns", "/etc/hostname"] {
        let mut sandbox = Sandbox::new().with_host_local();
        sandbox.attachment("c1", DUAL).add();
        sandbox.remove_container("c1");
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.netns = netns.to_owned();
        attachment.del();
        attachment.del();
        assert_eq!(sandbox.leases(), [""; 0], "CNI_NETNS={netns:?}");
    }
}

#[test]
fn del_without_the_path_of_a_living_namespace_still_removes_the_veth() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.add();
    attachment.netns = String::new();
    attachment.del();
    sandbox.assert_detached();
}

#[test]
fn del_and_a_retry_heal_after_kill_9_in_the_middle_of_add() {
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.0.2/24"}]});
    let sandbox = Sandbox::new().with_scripted_ipam(&result);
    let gate = sandbox.dir.path().join("bin/gate");
    nix::unistd::mkfifo(&gate, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    let attachment = sandbox.attachment("c1", r#"{"isGateway": true, "ipam": {"type": "scripted-ipam"}}"#);
    let mut killed = attachment.spawn("ADD");
    // Opening returns when the IPAM plugin reads: the links are made meanwhile.
    let open_gate = std::fs::OpenOptions::new().write(true).open(&gate).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    drop(open_gate);
    std::fs::remove_file(&gate).unwrap();
    attachment.del();
    attachment.add();
    attachment.del();
    sandbox.assert_detached();
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
fn the_runtimes_mac_wins() {
    let sandbox = Sandbox::new();
    let mut attachment = sandbox.attachment("c1", r#"{"promiscMode": true}"#);
    attachment.args = "MAC=02:00:00:00:00:01;IgnoreUnknown=1;FOO=BAR";
    let mac = |attachment: &Attachment<'_>| {
        let mac = attachment.add()["interfaces"][2]["mac"].clone();
        assert_eq!(Sandbox::ip(&sandbox.netns("c1"), "link show dev eth0")[0]["address"], mac);
        attachment.del();
        mac
    };
    assert_eq!(mac(&attachment), "02:00:00:00:00:01");
    attachment.conf["args"] = json!({"cni": {"mac": "02:00:00:00:00:02"}});
    assert_eq!(mac(&attachment), "02:00:00:00:00:02");
    attachment.conf["runtimeConfig"] = json!({"mac": "02:00:00:00:00:03"});
    assert_eq!(mac(&attachment), "02:00:00:00:00:03");
    let bridge = &Sandbox::ip(&sandbox.host, &format!("link show dev {}", sandbox.bridge))[0];
    assert!(bridge["flags"].as_array().unwrap().contains(&json!("PROMISC")));

    attachment.conf["runtimeConfig"] = json!({"mac": "nonsense"});
    let msg = r#"runtimeConfig.mac: expected a MAC address of 6 bytes, found "nonsense""#;
    assert_eq!(attachment.refused(), (7, msg.to_owned()));
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

#[test]
fn older_versions_get_their_shapes() {
    let sandbox = Sandbox::new().with_host_local();
    let mut attachment = sandbox.attachment("c1", DUAL);
    attachment.conf["cniVersion"] = json!("0.2.0");
    let result = attachment.add();
    assert_eq!(result["ip4"]["routes"], json!([{"dst": "0.0.0.0/0", "gw": "10.1.0.1"}]));
    assert_eq!(result["ip6"]["ip"], "fd00:1::2/64");
    attachment.del();
    attachment.conf["cniVersion"] = json!("0.3.1");
    attachment.conf["dns"] = json!({"nameservers": ["10.1.0.53"]});
    let result = attachment.add();
    assert_eq!(result["ips"][0]["version"], "4");
    assert_eq!(result["dns"], json!({"nameservers": ["10.1.0.53"]}));
    attachment.del();
}

#[test]
fn what_is_not_supported_is_named_and_nothing_is_made() {
    let sandbox = Sandbox::new().with_host_local();
    let supported = sandbox.attachment("c1", DUAL);
    for (key, value) in [
        ("ipMasq", json!(true)),
        ("macspoofchk", json!(true)),
        ("vlan", json!(7)),
        ("vlanTrunk", json!([{"id": 7}])),
    ] {
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.conf[key] = value.clone();
        let msg = format!("{key}: {value} is not supported by this version of the bridge plugin");
        assert_eq!(attachment.refused(), (7, msg));
        sandbox.assert_untouched();
        attachment.del();
    }
    let mut attachment = sandbox.attachment("c1", DUAL);
    for (key, value) in [("ipMasq", json!(false)), ("macspoofchk", json!(false)), ("vlan", json!(0))] {
        attachment.conf[key] = value;
    }
    attachment.add();
    supported.del();
    sandbox.assert_detached();
}

#[test]
fn wrong_configurations_are_named_and_nothing_is_made() {
    let sandbox = Sandbox::new().with_host_local();
    let refused = |key: &str, value: Value| {
        let mut attachment = sandbox.attachment("c1", DUAL);
        attachment.conf[key] = value;
        let refused = attachment.refused();
        sandbox.assert_untouched();
        refused
    };
    let text = |code: i64, msg: &str| (code, msg.to_owned());
    assert_eq!(
        refused("mtu", json!("big")),
        text(7, r#"mtu: expected a number from 0 to 4294967295, found "big""#)
    );
    assert_eq!(refused("isGateway", json!(1)), text(7, "isGateway: expected true or false, found 1"));
    assert_eq!(
        refused("bridge", json!("../x")),
        text(7, r#"bridge: expected an interface name, found "../x""#)
    );
    assert_eq!(refused("vlan", json!(5000)), text(999, "invalid VLAN ID 5000 (must be between 0 and 4094)"));
    assert_eq!(
        refused("disableContainerInterface", json!(true)),
        text(999, "cannot use IPAM when DisableContainerInterface flag is set")
    );
    let mut both = sandbox.attachment("c1", r#"{"hairpinMode": true, "promiscMode": true}"#);
    assert_eq!(both.refused().1, "cannot set hairpin mode and promiscuous mode at the same time");
    both = sandbox.attachment("c1", DUAL);
    both.netns = "/gone/netns".to_owned();
    let msg =
        r#"failed to open netns "/gone/netns": failed to Statfs "/gone/netns": no such file or directory"#;
    assert_eq!(both.refused(), text(999, msg));

    let msg = r#"failed to create bridge "lo": "lo" already exists but is not a bridge"#;
    assert_eq!(refused("bridge", json!("lo")), text(999, msg));
    assert_eq!(sandbox.leases(), [""; 0]);
}
