//! The executable against the kernel: a fresh network namespace per test.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use linux::netns::{self, NetNs};
use serde_json::{Value, json};

struct Sandbox {
    dir: tempfile::TempDir,
    netns: NetNs,
}

impl Sandbox {
    fn new() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let netns = netns::create_persistent(&dir.path().join("netns")).unwrap();
        Self { dir, netns }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("netns")
    }

    fn call(&self, command: &str, conf: &Value) -> (Option<i32>, Value) {
        call(command, self.path().to_str().unwrap(), conf)
    }

    fn lo_is_up(&self) -> bool {
        self.netns
            .run(|| {
                let flags = Command::new("ip").args(["-j", "link", "show", "lo"]).output().unwrap();
                let links: Value = serde_json::from_slice(&flags.stdout).unwrap();
                links[0]["flags"].as_array().unwrap().contains(&json!("UP"))
            })
            .unwrap()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        netns::remove_persistent(&self.path()).unwrap();
    }
}

fn call(command: &str, netns: &str, conf: &Value) -> (Option<i32>, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_loopback"))
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", "c")
        .env("CNI_NETNS", netns)
        .env("CNI_IFNAME", "eth7")
        .env("CNI_PATH", "/dummy")
        .env("CNI_ARGS", "none")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let value =
        if output.stdout.is_empty() { Value::Null } else { serde_json::from_slice(&output.stdout).unwrap() };
    (output.status.code(), value)
}

fn conf(version: &str) -> Value {
    json!({"cniVersion": version, "name": "cni-loopback", "type": "loopback"})
}

#[test]
fn add_brings_lo_up_and_del_down_twice() {
    let sandbox = Sandbox::new();
    assert!(!sandbox.lo_is_up());
    assert_eq!(
        sandbox.call("CHECK", &conf("1.0.0")),
        (Some(1), json!({"code": 999, "msg": "loopback interface is down"}))
    );
    let expected = json!({
        "cniVersion": "1.0.0",
        "interfaces": [{"mac": "00:00:00:00:00:00", "name": "lo", "sandbox": sandbox.path()}],
        "ips": [{"address": "127.0.0.1/8", "interface": 0}, {"address": "::1/128", "interface": 0}],
    });
    for _ in 0..2 {
        assert_eq!(sandbox.call("ADD", &conf("1.0.0")), (Some(0), expected.clone()));
        assert!(sandbox.lo_is_up());
    }
    assert_eq!(sandbox.call("CHECK", &conf("1.0.0")), (Some(0), Value::Null));
    for _ in 0..2 {
        assert_eq!(sandbox.call("DEL", &conf("1.0.0")), (Some(0), Value::Null));
        assert!(!sandbox.lo_is_up());
    }
}

/// What a container sends to itself must not make routes: the kernel charges none of them to it.
#[test]
fn lo_takes_no_routes_from_routers() {
    let sandbox = Sandbox::new();
    let accept_ra =
        || sandbox.netns.run(|| linux::sysctl::read("net/ipv6/conf/lo/accept_ra").unwrap()).unwrap();
    assert_eq!(accept_ra(), "1");
    assert_eq!(sandbox.call("ADD", &conf("1.0.0")).0, Some(0));
    assert_eq!(accept_ra(), "0");
}

#[test]
fn each_version_gets_its_true_shape() {
    let sandbox = Sandbox::new();
    let (_, old) = sandbox.call("ADD", &conf("0.2.0"));
    let expected =
        json!({"cniVersion": "0.2.0", "ip4": {"ip": "127.0.0.1/8"}, "ip6": {"ip": "::1/128"}, "dns": {}});
    assert_eq!(old, expected);
    let (_, lists) = sandbox.call("ADD", &conf("0.3.1"));
    assert_eq!(lists["ips"][0], json!({"version": "4", "interface": 0, "address": "127.0.0.1/8"}));
    assert_eq!(lists["dns"], json!({}));
}

#[test]
fn a_previous_result_is_passed_on() {
    let sandbox = Sandbox::new();
    let mut conf = conf("0.4.0");
    let prev_result = json!({
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "eth0", "sandbox": "/x"}],
        "ips": [{"version": "4", "interface": 0, "address": "10.1.0.2/24", "gateway": "10.1.0.1"}],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dns": {},
    });
    conf["prevResult"] = prev_result.clone();
    assert_eq!(sandbox.call("ADD", &conf), (Some(0), prev_result));
    assert!(sandbox.lo_is_up());
}

#[test]
fn a_foreign_address_on_lo_is_refused() {
    let sandbox = Sandbox::new();
    let added =
        sandbox.netns.run(|| Command::new("ip").args(["addr", "add", "10.1.0.2/24", "dev", "lo"]).status());
    assert!(added.unwrap().unwrap().success());
    let (code, error) = sandbox.call("ADD", &conf("1.0.0"));
    assert_eq!(code, Some(1));
    assert_eq!(error["msg"], r#"loopback interface found with non-loopback address "10.1.0.2""#);
}

#[test]
fn a_namespace_that_is_gone_fails_add_and_not_del() {
    let (code, error) = call("ADD", "/gone/netns", &conf("1.0.0"));
    let msg = r#"failed to Statfs "/gone/netns": no such file or directory"#;
    assert_eq!((code, error), (Some(1), json!({"code": 999, "msg": msg})));
    assert_eq!(call("DEL", "/gone/netns", &conf("1.0.0")), (Some(0), Value::Null));
    assert_eq!(call("DEL", "", &conf("1.0.0")), (Some(0), Value::Null));
    let unmounted = tempfile::NamedTempFile::new().unwrap();
    assert_eq!(call("DEL", unmounted.path().to_str().unwrap(), &conf("1.0.0")), (Some(0), Value::Null));
}

#[test]
fn the_hosts_namespace_is_refused_untouched() {
    let (code, error) = call("DEL", "/proc/self/ns/net", &conf("1.0.0"));
    assert_eq!((code, &error["code"]), (Some(1), &json!(8)));
}
