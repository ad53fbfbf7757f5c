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
        self.run(&mut Command::new(env!("CARGO_BIN_EXE_host-local")), command, id)
    }

    fn run(&self, process: &mut Command, command: &str, id: &str) -> Answer {
        self.run_as(process, command, id, "eth0")
    }

    fn run_as(&self, process: &mut Command, command: &str, id: &str, ifname: &str) -> Answer {
        let mut child = self.prepare(process, command, id).env("CNI_IFNAME", ifname).spawn().unwrap();
        // What refuses its environment may be gone by now.
        drop(child.stdin.take().unwrap().write_all(self.conf.to_string().as_bytes()));
        let output = child.wait_with_output().unwrap();
        Answer { code: output.status.code(), stdout: String::from_utf8(output.stdout).unwrap() }
    }

    fn prepare<'c>(&self, process: &'c mut Command, command: &str, id: &str) -> &'c mut Command {
        process
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", id)
            .env("CNI_NETNS", "/dummy")
            .env("CNI_PATH", "/dummy")
            .env("CNI_ARGS", self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
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
fn calls_in_parallel_never_share_an_address() {
    let net =
        Network::new("1.0.0", r#"{"ranges": [[{"subnet": "10.1.0.0/26"}], [{"subnet": "fd00::/122"}]]}"#);
    // Eight at a time, each with two addresses of 61 and 62; who holds one finds it held by nobody else.
    std::thread::scope(|scope| {
        for worker in 0..8 {
            let net = &net;
            scope.spawn(move || {
                for round in 0..8 {
                    let id = format!("w{worker}-{round}");
                    let result = net.add(&id);
                    for ip in result["ips"].as_array().unwrap() {
                        let ip = ip["address"].as_str().unwrap().split('/').next().unwrap();
                        let lease = std::fs::read_to_string(net.dir.path().join("net").join(ip)).unwrap();
                        assert_eq!(lease, format!("{id}\r\neth0"));
                    }
                    assert_eq!(net.call("CHECK", &id).code, Some(0));
                    if round % 2 == 0 {
                        net.del(&id);
                    }
                }
            });
        }
    });
    let leases = net.files().iter().filter(|name| name.parse::<std::net::IpAddr>().is_ok()).count();
    assert_eq!(leases, 8 * 4 * 2);
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
fn check_compares_what_is_held_with_what_was_given() {
    let mut net = Network::new("1.0.0", DUAL);
    let result = net.add("a");
    net.conf["prevResult"] = result.clone();
    assert_eq!(net.call("CHECK", "a").code, Some(0));
    // An address of another plugin's ranges is none of ours.
    net.conf["prevResult"]["ips"][0]["address"] = json!("192.0.2.7/24");
    assert_eq!(net.call("CHECK", "a").code, Some(0));
    net.conf["prevResult"]["ips"][0]["address"] = json!("10.1.0.3/24");
    let answer = net.call("CHECK", "a");
    let error: Value = serde_json::from_str(&answer.stdout).unwrap();
    assert_eq!(error["msg"], "host-local: Failed to find address added by container a");
    assert_eq!(error["details"], "prevResult has 10.1.0.3, which it does not hold");
    net.conf["prevResult"] = result;
    std::fs::remove_file(net.dir.path().join("net/fd00:1::2")).unwrap();
    assert_eq!(net.call("CHECK", "a").code, Some(1));
}

#[test]
fn del_finds_a_lease_that_was_overwritten_in_place() {
    let mut net = Network::new("1.0.0", r#"{"subnet": "10.1.0.0/24"}"#);
    net.conf["prevResult"] = net.add("a");
    net.add("b");
    std::fs::write(net.dir.path().join("net/10.1.0.2"), "c\r\neth0").unwrap();
    net.del("c");
    assert_eq!(net.files(), ["10.1.0.3", "last_reserved_ip.0", "lock"]);
}

#[test]
fn status_says_when_a_range_set_is_exhausted() {
    let two = r#"{"ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "10.67.0.0/30"}]]}"#;
    let net = Network::new("1.1.0", two);
    let ready = |net: &Network| {
        let answer = net.call("STATUS", "");
        (answer.code, answer.stdout)
    };
    assert_eq!(ready(&net), (Some(0), String::new()));
    assert!(!net.dir.path().join("net").exists(), "a question makes nothing");
    net.add("a");
    let exhausted = "{\n    \"code\": 50,\n    \"msg\": \"no IP addresses available in range set: 10.67.0.1-10.67.0.2\"\n}";
    assert_eq!(ready(&net), (Some(1), exhausted.to_owned()));
    // Nobody has to wait for the lock to learn that.
    let held = linux::lock::FileLock::exclusive(&net.dir.path().join("net/lock"), 0o750).unwrap();
    assert_eq!(ready(&net).0, Some(1));
    drop(held);
    net.del("a");
    assert_eq!(ready(&net), (Some(0), String::new()));
    let wrong = Network::new("1.1.0", "{}").call("STATUS", "");
    assert!(wrong.stdout.contains(r#""msg": "no IP ranges specified""#), "{}", wrong.stdout);
}

/// libcni gives STATUS and GC no `runtimeConfig`.
#[test]
fn status_and_gc_work_where_all_ranges_are_the_runtimes() {
    let mut net = Network::new("1.1.0", "{}");
    net.conf["capabilities"] = json!({"ipRanges": true});
    let call = |net: &Network, command: &str| {
        let answer = net.call(command, "");
        (answer.code, answer.stdout)
    };
    let fine = (Some(0), String::new());
    assert_eq!(call(&net, "STATUS"), fine);
    net.conf["runtimeConfig"] = json!({"ipRanges": [[{"subnet": "10.67.0.0/30"}]]});
    net.add("a");
    // A runtime that gives the ranges gets the answer.
    assert!(call(&net, "STATUS").1.contains("no IP addresses available in range set"));
    net.conf["runtimeConfig"] = json!({"ips": []});
    assert!(call(&net, "STATUS").1.contains("no IP ranges specified"));
    net.conf.as_object_mut().unwrap().remove("runtimeConfig");
    assert_eq!(call(&net, "STATUS"), fine);
    net.conf["cni.dev/valid-attachments"] = json!([{"containerID": "a", "ifname": "eth0"}]);
    assert_eq!(call(&net, "GC"), fine);
    assert!(net.files().contains(&"10.67.0.2".to_owned()));
    net.conf["cni.dev/valid-attachments"] = json!([]);
    assert_eq!(call(&net, "GC"), fine);
    assert_eq!(net.files(), ["last_reserved_ip.0", "lock"]);

    // Ranges of the configuration itself are still checked.
    net.conf["ipam"]["subnet"] = json!("10.67.0.0/30");
    net.add("b");
    assert!(call(&net, "STATUS").1.contains("no IP addresses available in range set"));
    net.conf["ipam"].as_object_mut().unwrap().remove("subnet");
    net.conf["capabilities"] = json!({"ipRanges": false});
    assert!(call(&net, "STATUS").1.contains("no IP ranges specified"));
    assert_eq!(call(&net, "GC"), fine, "it needs no ranges");
    assert_eq!(net.files(), ["last_reserved_ip.0", "lock"]);
}

#[test]
fn gc_removes_what_is_not_in_the_list_and_nothing_else() {
    let mut net = Network::new("1.1.0", r#"{"subnet": "10.1.0.0/24"}"#);
    let gc = |net: &Network| net.call("GC", "");
    net.conf["cni.dev/valid-attachments"] = json!([]);
    assert_eq!((gc(&net).code, net.dir.path().join("net").exists()), (Some(0), false));
    for id in ["a", "b", "c"] {
        net.add(id);
    }
    let dir = net.dir.path().join("net");
    for (name, content) in [
        ("10.1.0.5", "a\r\neth1"),
        ("10.1.0.6", "a"),
        ("10.1.0.7", "gone"),
        ("10.1.0.8", ""),
        ("10.1.0.9", "kept for the printer"),
        ("notes", "gone\r\neth0"),
    ] {
        std::fs::write(dir.join(name), content).unwrap();
    }
    std::fs::create_dir(dir.join("10.1.0.10")).unwrap();

    net.conf.as_object_mut().unwrap().remove("cni.dev/valid-attachments");
    assert_eq!(gc(&net).code, Some(1), "a missing list is no empty list");
    net.conf["cni.dev/valid-attachments"] =
        json!([{"containerID": "a", "ifname": "eth0"}, {"containerID": "c", "ifname": "eth0"}]);
    assert_eq!(gc(&net).stdout, "");
    let rest =
        ["10.1.0.10", "10.1.0.2", "10.1.0.4", "10.1.0.6", "10.1.0.9", "last_reserved_ip.0", "lock", "notes"];
    assert_eq!(net.files(), rest);
    assert_eq!(net.add("d")["ips"][0]["address"], "10.1.0.5/24");
}

#[test]
fn a_lease_that_cannot_be_read_stops_no_other() {
    let mut net = Network::new("1.1.0", r#"{"subnet": "10.1.0.0/29"}"#);
    net.add("a");
    let dir = net.dir.path().join("net");
    // What a bad block is to read(2), these are to open(2): ELOOP and ENXIO.
    std::os::unix::fs::symlink("10.1.0.3", dir.join("10.1.0.3")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(dir.join("10.1.0.4")).unwrap();
    std::fs::write(dir.join("10.1.0.5"), b"\xa5\xa5\xa5").unwrap();
    std::fs::write(dir.join("last_reserved_ip.0"), b"\xa5\xa5\xa5").unwrap();
    // Without the index every lease is read.
    let forget = |net: &Network| std::fs::remove_dir_all(net.dir.path().join(".hawser")).unwrap();
    forget(&net);
    assert_eq!(net.add("b")["ips"][0]["address"], "10.1.0.6/29", "unreadable addresses are taken");
    forget(&net);
    let refusal = net.refused("c").1;
    assert!(refusal.starts_with("failed to allocate for range 0: read "), "{refusal}");
    forget(&net);
    net.del("a");
    forget(&net);
    net.del("nobody");
    net.conf["cni.dev/valid-attachments"] = json!([{"containerID": "b", "ifname": "eth0"}]);
    net.add("a");
    forget(&net);
    let gc = net.call("GC", "");
    assert_eq!((gc.code, gc.stdout.as_str()), (Some(0), ""));
    let rest = ["10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6", "last_reserved_ip.0", "lock"];
    assert_eq!(net.files(), rest, "kept, so that the cause can be found");
    let status = net.call("STATUS", "");
    assert_eq!((status.code, status.stdout.as_str()), (Some(0), ""));
}

/// host-local on a machine of its own, as far as it can see: `/etc` and the
/// kernel's boot id are files of `dir`, in a mount namespace of the call's own.
fn on_machine(dir: &Path, machine_id: Option<&str>, boot_id: &str) -> Command {
    let etc = dir.join("etc");
    std::fs::create_dir_all(&etc).unwrap();
    drop(std::fs::remove_file(etc.join("machine-id")));
    if let Some(id) = machine_id {
        std::fs::write(etc.join("machine-id"), id).unwrap();
    }
    std::fs::write(dir.join("boot_id"), boot_id).unwrap();
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c"]);
    command.arg("mount --bind \"$0/boot_id\" /proc/sys/kernel/random/boot_id && mount --bind \"$0/etc\" /etc && exec \"$1\"");
    command.arg(dir).arg(env!("CARGO_BIN_EXE_host-local"));
    command
}

const MACHINE: &str = "11111111111111111111111111111111\n";
const OTHER_MACHINE: &str = "22222222222222222222222222222222\n";
const BOOT: &str = "11111111-2222-3333-4444-555555555555\n";
const NEXT_BOOT: &str = "66666666-7777-8888-9999-000000000000\n";

#[test]
fn a_reboots_leases_make_room() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.67.0.0/29"}"#);
    let node = tempfile::tempdir().unwrap();
    let add = |boot_id: &str, id: &str| {
        net.run(&mut on_machine(node.path(), Some(MACHINE), boot_id), "ADD", id).stdout
    };
    for id in ["a", "b", "c", "d", "e"] {
        assert!(add(BOOT, id).contains(r#""ips""#), "{id}");
    }
    assert!(add(BOOT, "f").contains("no IP addresses available"));
    for (id, ip) in [("f", "10.67.0.2"), ("g", "10.67.0.3")] {
        let answer = add(NEXT_BOOT, id);
        assert!(answer.contains(ip), "{answer}");
    }
    assert_eq!(net.files(), ["10.67.0.2", "10.67.0.3", "last_reserved_ip.0", "lock"]);
}

#[test]
fn another_machines_leases_make_no_room() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.67.0.0/29"}"#);
    let node = tempfile::tempdir().unwrap();
    for (id, machine_id) in [("a", Some(MACHINE)), ("b", Some(OTHER_MACHINE)), ("c", None), ("d", Some(""))] {
        let answer = net.run(&mut on_machine(node.path(), machine_id, BOOT), "ADD", id);
        assert_eq!(answer.code, Some(0), "{}", answer.stdout);
    }
    std::fs::write(net.dir.path().join("net/10.67.0.6"), "of the reference\r\neth0").unwrap();
    let before = net.files();
    for machine_id in [None, Some(""), Some("uninitialized\n"), Some("33333333333333333333333333333333\n")] {
        let answer = net.run(&mut on_machine(node.path(), machine_id, NEXT_BOOT), "ADD", "late");
        assert!(answer.stdout.contains("no IP addresses available"), "{machine_id:?}: {}", answer.stdout);
    }
    assert_eq!(net.files(), before);
    // The first one is rebooted: its own lease, and no other.
    let answer = net.run(&mut on_machine(node.path(), Some(MACHINE), NEXT_BOOT), "ADD", "late");
    assert!(answer.stdout.contains("10.67.0.2"), "{}", answer.stdout);
    assert_eq!(net.files(), before);
    assert_eq!(std::fs::read(net.dir.path().join("net/10.67.0.2")).unwrap(), b"late\r\neth0");
}

#[test]
fn a_container_id_may_be_as_long_as_linux_passes_one() {
    let mut net = Network::new("1.1.0", r#"{"subnet": "10.1.0.0/24"}"#);
    // Beside `CNI_CONTAINERID=` and the final zero.
    for length in [1008, 1100, 128 * 1024 - 17] {
        let id = "a".repeat(length);
        net.add(&id);
        assert_eq!(net.call("CHECK", &id).code, Some(0), "{length}");
        assert!(net.refused(&id).1.ends_with("duplicate allocation is not allowed"), "{length}");
        net.del(&id);
        net.del(&id);
        assert_eq!(net.files(), ["last_reserved_ip.0", "lock"], "{length}");
    }
    let id = "a".repeat(1100);
    net.add(&id);
    net.conf["cni.dev/valid-attachments"] = json!([{"containerID": id, "ifname": "eth0"}]);
    assert_eq!((net.call("GC", "").code, net.files().len()), (Some(0), 3));
    net.conf["cni.dev/valid-attachments"] = json!([]);
    assert_eq!((net.call("GC", "").code, net.files().len()), (Some(0), 2));
}

#[test]
fn a_template_of_names_gets_no_address_and_gives_one_back() {
    let net = Network::new("1.0.0", r#"{"subnet": "10.1.0.0/24"}"#);
    let call = |verb: &str| {
        let mut process = Command::new(env!("CARGO_BIN_EXE_host-local"));
        net.run_as(&mut process, verb, "a", "eth%d")
    };
    assert_eq!(
        call("ADD").stdout,
        "{\n    \"code\": 4,\n    \"msg\": \"interface name contains %\",\n    \"details\": \"CNI_IFNAME: the kernel would take \\\"eth%d\\\" for a template of names\"\n}"
    );
    assert!(!net.dir.path().join("net").exists());
    // The reference takes it.
    net.add("b");
    std::fs::write(net.dir.path().join("net/10.1.0.9"), "a\r\neth%d").unwrap();
    assert_eq!((call("DEL").code, net.files().len()), (Some(0), 3));
}

#[test]
fn called_by_a_person_it_says_what_it_is() {
    let output = Command::new(env!("CARGO_BIN_EXE_host-local")).env_remove("CNI_COMMAND").output().unwrap();
    assert!(output.status.success() && output.stdout.is_empty());
    assert!(String::from_utf8(output.stderr).unwrap().starts_with("CNI host-local plugin "));
}
