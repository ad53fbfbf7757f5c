//! A machine of its own for each test: a network namespace in the host's place,
//! one for each container, a plugin directory, leases.

use std::ffi::OsStr;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use linux::netlink::{Netlink, VethSpec};
use linux::netns::{self, NetNs};
use serde_json::{Value, json};

pub(crate) const DUAL: &str = r#"{
    "isDefaultGateway": true,
    "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]}
}"#;

pub(crate) struct Sandbox {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) host: NetNs,
    /// Of this test alone: the bridge's lock file is the machine's.
    pub(crate) bridge: String,
    pub(crate) containers: Vec<&'static str>,
}

/// What the plugin is called with.
#[derive(Clone)]
pub(crate) struct Attachment<'a> {
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) conf: Value,
    pub(crate) id: String,
    pub(crate) ifname: String,
    pub(crate) netns: String,
    pub(crate) args: &'static str,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
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

    pub(crate) fn add_container(&mut self, id: &'static str) {
        netns::create_persistent(&self.dir.path().join(id)).unwrap();
        self.containers.push(id);
    }

    pub(crate) fn remove_container(&mut self, id: &'static str) {
        netns::remove_persistent(&self.dir.path().join(id)).unwrap();
        self.containers.retain(|other| *other != id);
    }

    pub(crate) fn netns(&self, id: &str) -> NetNs {
        NetNs::open(&self.dir.path().join(id)).unwrap()
    }

    /// `host-local` beside our own executable.
    pub(crate) fn with_host_local(self) -> Self {
        let host_local = Path::new(env!("CARGO_BIN_EXE_bridge")).with_file_name("host-local");
        assert!(
            host_local.is_file(),
            "{} is missing: run cargo build -p ipam-host-local first",
            host_local.display()
        );
        std::os::unix::fs::symlink(host_local, self.dir.path().join("bin/host-local")).unwrap();
        self
    }

    pub(crate) fn with_scripted_ipam(self, result: &Value) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugins/scripted-ipam");
        std::os::unix::fs::symlink(script, self.dir.path().join("bin/scripted-ipam")).unwrap();
        self.script(result);
        self
    }

    /// What `scripted-ipam` answers.
    pub(crate) fn script(&self, result: &Value) {
        std::fs::write(self.bin().join("result"), result.to_string()).unwrap();
    }

    /// A program beside the plugins.
    pub(crate) fn add_plugin(&self, name: &str, script: &str) {
        let path = self.bin().join(name);
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }

    pub(crate) fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    /// Where plugins search for programs before all other places.
    pub(crate) fn programs(&self) -> PathBuf {
        self.dir.path().join("programs")
    }

    /// A program that does `what` in the shell: a link to a script that is never written (ETXTBSY).
    pub(crate) fn add_program(&self, name: &str, what: &str) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../netfilter/tests/programs/scripted");
        let programs = self.programs();
        std::fs::create_dir_all(&programs).unwrap();
        std::fs::write(programs.join(format!("{name}.says")), what).unwrap();
        std::os::unix::fs::symlink(script, programs.join(name)).unwrap();
    }

    pub(crate) fn ipam_calls(&self) -> Vec<String> {
        let calls = std::fs::read_to_string(self.bin().join("calls")).unwrap_or_default();
        calls.lines().map(str::to_owned).collect()
    }

    /// A configuration as a user writes it, plus this sandbox's names.
    pub(crate) fn attachment(&self, id: &str, conf: &str) -> Attachment<'_> {
        let mut conf: Value = serde_json::from_str(conf).unwrap();
        conf["type"] = json!("bridge");
        conf["bridge"] = json!(self.bridge);
        for (key, default) in [("name", "net"), ("cniVersion", "1.0.0")] {
            if conf[key].is_null() {
                conf[key] = json!(default);
            }
        }
        if conf["ipam"]["type"] == "host-local" {
            conf["ipam"]["dataDir"] = json!(self.dir.path().join("leases"));
        }
        let netns = self.dir.path().join(id).to_str().unwrap().to_owned();
        Attachment { sandbox: self, conf, id: id.to_owned(), ifname: "eth0".to_owned(), netns, args: "" }
    }

    /// A network namespace beyond the host: the host is 198.51.100.1 and
    /// 2001:db8::1 there, itself 198.51.100.2 and 2001:db8::2.
    pub(crate) fn with_world(mut self) -> Self {
        self.add_container("world");
        let world = self.netns("world");
        // ip(8) finds namespaces in /run/netns only.
        let spec = VethSpec {
            name: "up0",
            master: 0,
            mtu: None,
            peer_name: "up1",
            peer_mac: None,
            peer_netns: world.as_fd(),
        };
        self.host.run(|| drop(Netlink::open().unwrap().create_veth(&spec).unwrap())).unwrap();
        for (netns, name, v4, v6) in [
            (&self.host, "up0", "198.51.100.1/24", "2001:db8::1/64"),
            (&world, "up1", "198.51.100.2/24", "2001:db8::2/64"),
        ] {
            run_in(netns, &format!("ip addr add {v4} dev {name}"));
            run_in(netns, &format!("ip addr add {v6} dev {name} nodad"));
            run_in(netns, &format!("ip link set {name} up"));
        }
        self
    }

    /// `ip -j` with `words` in `netns`.
    pub(crate) fn ip(netns: &NetNs, words: &str) -> Vec<Value> {
        let stdout = run_in(netns, &format!("ip -j {words}"));
        if stdout.is_empty() { Vec::new() } else { serde_json::from_str(&stdout).unwrap() }
    }

    pub(crate) fn links(netns: &NetNs) -> Vec<String> {
        let mut names: Vec<String> =
            Self::ip(netns, "link show").iter().map(|l| l["ifname"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    /// `address/prefix` of a link, link-local ones left out.
    pub(crate) fn addresses(netns: &NetNs, link: &str) -> Vec<String> {
        let found = Self::ip(netns, &format!("addr show dev {link}"));
        let all = found[0]["addr_info"].as_array().unwrap();
        let global = all.iter().filter(|a| a["scope"] == "global");
        global.map(|a| format!("{}/{}", a["local"].as_str().unwrap(), a["prefixlen"])).collect()
    }

    /// The host's rule set as nft writes it, a line each, without indentation.
    pub(crate) fn rules(&self) -> Vec<String> {
        let text = run_in(&self.host, "nft -s list ruleset");
        text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
    }

    /// Of them the ones with `part`.
    pub(crate) fn rules_with(&self, part: &str) -> Vec<String> {
        self.rules().into_iter().filter(|line| line.contains(part)).collect()
    }

    /// Feeds `rules` to nft in the host's namespace.
    pub(crate) fn nft(&self, rules: &str) {
        let file = self.dir.path().join("rules.nft");
        std::fs::write(&file, rules).unwrap();
        run_in(&self.host, &format!("nft -f {}", file.display()));
    }

    pub(crate) fn leases(&self) -> Vec<String> {
        let Ok(networks) = std::fs::read_dir(self.dir.path().join("leases")) else { return Vec::new() };
        let files = networks.flat_map(|network| std::fs::read_dir(network.unwrap().path()).unwrap());
        let names = files.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect()
    }

    /// Nothing of any attachment is left; the bridge and empty tables may be.
    pub(crate) fn assert_detached(&self) {
        let links = Self::links(&self.host);
        let stays = |link: &&String| !["lo", "up0", &self.bridge].contains(&link.as_str());
        assert_eq!(links.iter().find(stays), None, "host: {links:?}");
        for id in self.containers.iter().filter(|id| **id != "world") {
            assert_eq!(Self::links(&self.netns(id)), ["lo"], "container {id}");
        }
        assert_eq!(self.leases(), [""; 0]);
        let rules = self.rules();
        let ours = |line: &&String| ["net: ", "cni-br-iface", "CNI-"].iter().any(|part| line.contains(part));
        assert_eq!(rules.iter().find(ours), None, "{rules:#?}");
        let lock = format!("/run/hawser-bridge-{}.lock", self.bridge);
        assert!(!Path::new(&lock).exists(), "{lock} is left");
    }

    /// And no bridge either.
    pub(crate) fn assert_untouched(&self) {
        self.assert_detached();
        assert!(!Self::links(&self.host).contains(&self.bridge), "the bridge is left");
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for name in self.containers.iter().copied().chain(["host"]) {
            netns::remove_persistent(&self.dir.path().join(name)).unwrap();
        }
    }
}

/// A text that is not UTF-8; the kernel accepts it as alias, altname and name of a link.
const NOT_UTF_8: &[u8] = b"B\xfcro";

/// Gives a link of `netns` [`NOT_UTF_8`] in place of `TEXT` in these words of ip(8).
pub(crate) fn ip_not_utf_8(netns: &NetNs, words: &str) {
    let text = |word| if word == "TEXT" { OsStr::from_bytes(NOT_UTF_8) } else { OsStr::new(word) };
    let words = words.split(' ').map(text);
    let output = netns.run(|| Command::new("ip").args(words).output().unwrap()).unwrap();
    assert!(output.status.success(), "{output:?}");
}

/// Runs a command in `netns`; what it printed.
pub(crate) fn run_in(netns: &NetNs, command: &str) -> String {
    let Output { status, stdout, stderr } = try_run_in(netns, command);
    assert!(status.success(), "{command}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

pub(crate) fn try_run_in(netns: &NetNs, command: &str) -> Output {
    let mut words = command.split_whitespace();
    let program = words.next().unwrap();
    netns.run(|| Command::new(program).args(words).output().unwrap()).unwrap()
}

impl Attachment<'_> {
    pub(crate) fn spawn(&self, command: &str) -> Child {
        let mut process = Command::new(env!("CARGO_BIN_EXE_bridge"));
        let path = std::env::var("PATH").unwrap_or_default();
        process
            .env("PATH", format!("{}:{path}", self.sandbox.programs().display()))
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", &self.id)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", &self.ifname)
            .env("CNI_PATH", self.sandbox.bin())
            .env("CNI_ARGS", self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = self.sandbox.host.run(|| process.spawn().unwrap()).unwrap();
        child.stdin.take().unwrap().write_all(self.conf.to_string().as_bytes()).unwrap();
        child
    }

    pub(crate) fn call(&self, command: &str) -> (Option<i32>, Value) {
        let output = self.spawn(command).wait_with_output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let value = if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() };
        (output.status.code(), value)
    }

    pub(crate) fn add(&self) -> Value {
        let (code, result) = self.call("ADD");
        assert_eq!(code, Some(0), "{result}");
        result
    }

    /// ADD, and the attachment as the runtime knows it afterwards: with the result.
    pub(crate) fn added(mut self) -> Self {
        self.conf["prevResult"] = self.add();
        self
    }

    /// Code and message of a refused ADD.
    pub(crate) fn refused(&self) -> (i64, String) {
        let (code, msg) = self.fails("ADD");
        (code, msg)
    }

    /// Code and message of a call that fails.
    pub(crate) fn fails(&self, command: &str) -> (i64, String) {
        let (code, error) = self.call(command);
        assert_eq!(code, Some(1), "{error}");
        assert!(!error.to_string().contains("not rolled back"), "{error}");
        (error["code"].as_i64().unwrap(), error["msg"].as_str().unwrap().to_owned())
    }

    /// CHECK's complaint.
    pub(crate) fn complaint(&self) -> String {
        self.fails("CHECK").1
    }

    /// CHECK, STATUS, GC: silent when all is well.
    pub(crate) fn is_fine(&self, command: &str) {
        assert_eq!(self.call(command), (Some(0), Value::Null), "{command}");
    }

    pub(crate) fn del(&self) {
        self.is_fine("DEL");
    }

    /// Name of the host's end.
    pub(crate) fn host_veth(&self) -> String {
        self.conf["prevResult"]["interfaces"][1]["name"].as_str().unwrap().to_owned()
    }

    /// GC of the network that keeps `valid` container ids.
    pub(crate) fn collect(&self, valid: &[(&str, &str)]) {
        let mut gc = self.clone();
        let list: Vec<Value> =
            valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname})).collect();
        gc.conf["cniVersion"] = json!("1.1.0");
        gc.conf["cni.dev/valid-attachments"] = json!(list);
        gc.is_fine("GC");
    }
}
