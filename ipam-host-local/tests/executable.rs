//! The executable as a plugin calls it: environment and stdin in, stdout, exit
//! code and files out.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// A network of its own in a temporary directory.
struct Network {
    dir: tempfile::TempDir,
    conf: Value,
    args: &'static str,
}

struct Answer {
    code: Option<i32>,
    stdout: String,
}

impl Network {
    /// `ipam` without type and dataDir, as a user writes it.
    fn new(version: &str, ipam: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut ipam: Value = serde_json::from_str(ipam).unwrap();
        ipam["type"] = json!("host-local");
        ipam["dataDir"] = json!(dir.path());
        let conf = json!({"cniVersion": version, "name": "net", "type": "bridge", "ipam": ipam});
        Self { dir, conf, args: "" }
    }

    fn call(&self, command: &str, id: &str) -> Answer {
        let mut child = self.command(command, id).spawn().unwrap();
        child.stdin.take().unwrap().write_all(self.conf.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        Answer { code: output.status.code(), stdout: String::from_utf8(output.stdout).unwrap() }
    }

    fn command(&self, command: &str, id: &str) -> Command {
        let mut process = Command::new(env!("CARGO_BIN_EXE_host-local"));
        process
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", id)
            .env("CNI_NETNS", "/dummy")
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/dummy")
            .env("CNI_ARGS", self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        process
    }

    fn add(&self, id: &str) -> Value {
        let answer = self.call("ADD", id);
        assert_eq!(answer.code, Some(0), "{}", answer.stdout);
        serde_json::from_str(&answer.stdout).unwrap()
    }

    fn refused(&self, id: &str) -> (i64, String) {
        let answer = self.call("ADD", id);
        assert_eq!(answer.code, Some(1), "{}", answer.stdout);
        let error: Value = serde_json::from_str(&answer.stdout).unwrap();
        (error["code"].as_i64().unwrap(), error["msg"].as_str().unwrap().to_owned())
    }

    fn del(&self, id: &str) {
        let answer = self.call("DEL", id);
        assert_eq!((answer.code, answer.stdout.as_str()), (Some(0), ""));
    }

    fn files(&self) -> Vec<String> {
        let dir: PathBuf = self.dir.path().join("net");
        let mut names: Vec<String> = std::fs::read_dir(dir)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

const DUAL: &str = r#"{
    "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]],
    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00:1::99", "mtu": 1300}]
}"#;

#[test]
fn each_version_gets_its_shape() {
    let text = |version: &str| Network::new(version, DUAL).call("ADD", "a").stdout;
    assert_eq!(
        text("0.3.1"),
        r#"{
    "cniVersion": "0.3.1",
    "ips": [
        {
            "version": "4",
            "address": "10.1.0.2/24",
            "gateway": "10.1.0.1"
        },
        {
            "version": "6",
            "address": "fd00:1::2/64",
            "gateway": "fd00:1::1"
        }
    ],
    "routes": [
        {
            "dst": "0.0.0.0/0"
        },
        {
            "dst": "::/0",
            "gw": "fd00:1::99",
            "mtu": 1300
        }
    ],
    "dns": {}
}"#
    );
    let old: Value = serde_json::from_str(&text("0.2.0")).unwrap();
    assert_eq!(
        old["ip4"],
        json!({"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]})
    );
    let new: Value = serde_json::from_str(&text("1.1.0")).unwrap();
    assert_eq!(new["ips"][1], json!({"address": "fd00:1::2/64", "gateway": "fd00:1::1"}));
    assert_eq!(new.get("dns"), None);
}

#[test]
fn addresses_go_round_and_come_back() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.1.0.0/29"}"#);
    let address = |id: &str| net.add(id)["ips"][0]["address"].as_str().unwrap().to_owned();
    assert_eq!(address("a"), "10.1.0.2/29");
    assert_eq!(address("b"), "10.1.0.3/29");
    net.del("a");
    net.del("a");
    assert_eq!(address("c"), "10.1.0.4/29", "a released address waits for its turn");
    assert_eq!(net.files(), ["10.1.0.3", "10.1.0.4", "last_reserved_ip.0", "lock"]);
}

#[test]
fn a_full_pool_and_a_second_add_are_refused_in_the_references_words() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.67.0.0/30"}"#);
    net.add("a");
    let (code, msg) = net.refused("a");
    assert_eq!(code, 999);
    assert_eq!(
        msg,
        "failed to allocate for range 0: 10.67.0.2 has been allocated to a, duplicate allocation is not allowed"
    );
    let (_, msg) = net.refused("b");
    assert_eq!(
        msg,
        "failed to allocate for range 0: no IP addresses available in range set: 10.67.0.1-10.67.0.2"
    );
}

#[test]
fn a_failure_in_the_second_range_gives_back_the_first() {
    let net =
        Network::new("1.0.0", r#"{"ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.67.0.0/30"}]]}"#);
    net.add("a");
    net.refused("b");
    assert_eq!(net.files(), ["10.1.0.2", "10.67.0.2", "last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
}

#[test]
fn addresses_are_requested_in_three_ways() {
    let mut net = Network::new("1.0.0", DUAL);
    net.args = "IP=10.1.0.9/24;IgnoreUnknown=1;K8S_POD_NAME=x";
    net.conf["runtimeConfig"] = json!({"ips": ["fd00:1::9/64"]});
    let ips = &net.add("a")["ips"];
    assert_eq!((&ips[0]["address"], &ips[1]["address"]), (&json!("10.1.0.9/24"), &json!("fd00:1::9/64")));

    net.args = "";
    net.conf["runtimeConfig"] = json!({});
    net.conf["args"] = json!({"cni": {"ips": ["10.1.0.9"]}});
    let taken = "failed to allocate for range 0: requested IP address 10.1.0.9 is not available in range set 10.1.0.1-10.1.0.254";
    assert_eq!(net.refused("b"), (999, taken.to_owned()));

    net.conf["args"] = json!({"cni": {"ips": ["10.9.9.9"]}});
    assert_eq!(net.refused("b").1, "failed to allocate all requested IPs: 10.9.9.9");
    net.conf["args"] = json!({"cni": {"ips": ["10.1.0.1"]}});
    assert_eq!(
        net.refused("b").1,
        "failed to allocate for range 0: requested ip 10.1.0.1 is subnet's gateway"
    );
    net.conf["args"] = json!({"cni": {"ips": ["nonsense"]}});
    assert_eq!(net.refused("b"), (999, "invalid IP address nonsense".to_owned()));
    net.conf["args"] = json!({});
    net.args = "IP=10.1.0.8;MAC=02:00:00:00:00:01";
    assert_eq!(net.refused("b").1, r#"ARGS: unknown args ["MAC=02:00:00:00:00:01"]"#);
    assert_eq!(net.files().len(), 5, "the refused ones left nothing: {:?}", net.files());
}

#[test]
fn the_runtimes_ranges_come_first_and_resolv_conf_is_read() {
    let mut net = Network::new("0.4.0", r#"{"subnet": "10.1.0.0/24", "resolvConf": ""}"#);
    let resolv_conf: &Path = &net.dir.path().join("resolv.conf");
    std::fs::write(resolv_conf, "nameserver 10.1.0.53\nsearch a.example b.example\noptions ndots:5\n")
        .unwrap();
    net.conf["ipam"]["resolvConf"] = json!(resolv_conf);
    net.conf["runtimeConfig"] = json!({"ipRanges": [[{"subnet": "10.5.0.0/24", "rangeStart": "10.5.0.7"}]]});
    let result = net.add("a");
    assert_eq!(result["ips"][0]["address"], "10.5.0.7/24");
    assert_eq!(result["ips"][1]["address"], "10.1.0.2/24");
    let dns =
        json!({"nameservers": ["10.1.0.53"], "search": ["a.example", "b.example"], "options": ["ndots:5"]});
    assert_eq!(result["dns"], dns);
}

#[test]
fn wrong_configurations_are_refused_in_the_references_words() {
    let msg = |version: &str, ipam: &str| Network::new(version, ipam).refused("a");
    assert_eq!(msg("1.0.0", "{}"), (999, "no IP ranges specified".to_owned()));
    assert_eq!(
        msg("1.0.0", r#"{"subnet": "10.1.0.9/24"}"#).1,
        "invalid range set 0: Network has host bits set. For a subnet mask of length 24 the network address is 10.1.0.0"
    );
    let twice = r#"{"ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.1.0.0/16"}]]}"#;
    assert_eq!(msg("1.0.0", twice).1, "range set 0 overlaps with 1");
    assert_eq!(msg("0.2.0", twice).1, "CNI version 0.2.0 does not support more than 1 address per family");
    assert_eq!(
        msg("1.0.0", r#"{"ranges": [[{"subnet": "10.1.0.0/33"}]]}"#),
        (999, "invalid CIDR address: 10.1.0.0/33".to_owned())
    );
    let mut net = Network::new("1.0.0", "{}");
    net.conf.as_object_mut().unwrap().remove("ipam");
    assert_eq!(net.refused("a").1, "IPAM config missing 'ipam' key");
}

#[test]
fn parallel_adds_get_different_addresses() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.1.0.0/24"}"#);
    let mut addresses: Vec<String> = std::thread::scope(|scope| {
        let net = &net;
        let calls: Vec<_> = (0..20).map(|i| scope.spawn(move || net.add(&format!("c{i}")))).collect();
        calls.into_iter().map(|call| call.join().unwrap()["ips"][0]["address"].to_string()).collect()
    });
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), 20);
}

#[test]
fn check_says_whether_an_address_is_held() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.1.0.0/24"}"#);
    net.add("a");
    assert_eq!(net.call("CHECK", "a").code, Some(0));
    let answer = net.call("CHECK", "b");
    assert_eq!(answer.code, Some(1));
    assert!(answer.stdout.contains("host-local: Failed to find address added by container b"));
}

#[test]
fn called_by_a_person_it_says_what_it_is() {
    let output = Command::new(env!("CARGO_BIN_EXE_host-local")).env_remove("CNI_COMMAND").output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty());
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("CNI host-local plugin "));
}
