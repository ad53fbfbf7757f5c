//! A machine of its own: a host with a bridge, two pods on it, and a neighbour
//! of the host that knows nothing of the pods.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use linux::netns::{self, NetNs};
use serde_json::{Value, json};
use tests::trace_calls::{self, Injection, Run};

/// The host towards the outside; the outside.
pub(crate) const HOST: &str = "192.0.2.1";
pub(crate) const HOST_V6: &str = "fd00:9::1";
pub(crate) const OUTSIDE: &str = "192.0.2.2";
pub(crate) const OUTSIDE_V6: &str = "fd00:9::2";
/// The host's second address on the same link.
pub(crate) const HOST_SECOND: &str = "192.0.2.7";

/// Addresses of the pods `a` and `b` with their network's prefix lengths.
pub(crate) const A: Pod = Pod { name: "a", v4: "10.7.2.4/24", v6: "fd00:7::4/64" };
pub(crate) const B: Pod = Pod { name: "b", v4: "10.7.2.5/24", v6: "fd00:7::5/64" };

#[derive(Clone, Copy)]
pub(crate) struct Pod {
    pub(crate) name: &'static str,
    pub(crate) v4: &'static str,
    pub(crate) v6: &'static str,
}

impl Pod {
    pub(crate) fn ip(&self) -> IpAddr {
        self.v4.split_once('/').unwrap().0.parse().unwrap()
    }
}

pub(crate) struct Sandbox {
    dir: tempfile::TempDir,
    pub(crate) host: NetNs,
    pub(crate) outside: NetNs,
}

impl Sandbox {
    /// Namespaces without any link but `lo`.
    pub(crate) fn bare() -> Self {
        assert!(nix::unistd::geteuid().is_root(), "this test makes network namespaces: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let netns = netns::create_persistent(&dir.path().join(name)).unwrap();
            // A link-local address is of use at once, not a second later.
            netns.run(|| linux::sysctl::write("net/ipv6/conf/default/accept_dad", "0").unwrap()).unwrap();
            netns
        };
        let (host, outside) = (make("host"), make("outside"));
        make(A.name);
        make(B.name);
        Self { dir, host, outside }
    }

    /// With links, addresses and routes.
    pub(crate) fn connected() -> Self {
        let sandbox = Self::bare();
        let path = |name: &str| sandbox.dir.path().join(name).display().to_string();
        let host = &sandbox.host;
        ip(host, "link set lo up");
        ip(host, "link add br0 type bridge");
        for address in ["10.7.2.1/24", "fd00:7::1/64"] {
            ip(host, &format!("addr add {address} dev br0 nodad"));
        }
        ip(host, "link set br0 up");
        sandbox
            .host
            .run(|| {
                for setting in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
                    linux::sysctl::write(setting, "1").unwrap();
                }
            })
            .unwrap();
        for pod in [A, B] {
            let veth = format!("veth{}", pod.name);
            ip(host, &format!("link add {veth} type veth peer name eth0 netns {}", path(pod.name)));
            ip(host, &format!("link set {veth} master br0 up"));
            // So that an answer can go back through the port that it came from.
            ip(host, &format!("link set {veth} type bridge_slave hairpin on"));
            sandbox.configure(&sandbox.pod(pod), "eth0", &[pod.v4, pod.v6], Some(("10.7.2.1", "fd00:7::1")));
        }
        ip(host, &format!("link add ext0 type veth peer name eth0 netns {}", path("outside")));
        let own = [HOST, HOST_SECOND].map(|ip| format!("{ip}/24"));
        sandbox.configure(host, "ext0", &[&own[0], &own[1], &format!("{HOST_V6}/64")], None);
        let outside = [format!("{OUTSIDE}/24"), format!("{OUTSIDE_V6}/64")];
        sandbox.configure(&sandbox.outside, "eth0", &[&outside[0], &outside[1]], None);
        sandbox
    }

    fn configure(&self, netns: &NetNs, link: &str, addresses: &[&str], gateways: Option<(&str, &str)>) {
        ip(netns, "link set lo up");
        for address in addresses {
            let nodad = if address.contains(':') { "nodad" } else { "" };
            ip(netns, &format!("addr add {address} dev {link} {nodad}"));
        }
        ip(netns, &format!("link set {link} up"));
        if let Some((v4, v6)) = gateways {
            ip(netns, &format!("route add default via {v4}"));
            ip(netns, &format!("-6 route add default via {v6}"));
        }
    }

    pub(crate) fn pod(&self, pod: Pod) -> NetNs {
        NetNs::open(&self.dir.path().join(pod.name)).unwrap()
    }

    /// An attachment of the container `id` with both addresses of `pod`.
    pub(crate) fn attachment(&self, id: &str, pod: Pod, conf: &str) -> Attachment<'_> {
        let netns = self.dir.path().join(pod.name).display().to_string();
        let mut conf: Value = serde_json::from_str(conf).unwrap();
        conf["name"] = json!("net");
        conf["type"] = json!("portmap");
        conf["cniVersion"] = json!("1.1.0");
        conf["prevResult"] = json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "br0"}, {"name": "eth0", "sandbox": netns}],
            "ips": [{"address": pod.v4, "interface": 1}, {"address": pod.v6, "interface": 1}]
        });
        let ifname = "eth0".to_owned();
        Attachment { sandbox: self, conf, id: id.to_owned(), netns, ifname, programs: None }
    }

    /// What `program` prints in the host's namespace.
    pub(crate) fn host_output(&self, program: &str, words: &str) -> String {
        output(&self.host, program, words)
    }

    /// Feeds `rules` to nft in the host's namespace.
    pub(crate) fn nft(&self, rules: &str) {
        let file = self.dir.path().join("rules.nft");
        std::fs::write(&file, rules).unwrap();
        self.host_output("nft", &format!("-f {}", file.display()));
    }

    /// All rules of nf_tables, as nft shows them, without counters.
    pub(crate) fn ruleset(&self) -> String {
        self.host_output("nft", "--stateless list ruleset")
    }

    pub(crate) fn assert_no_rules_of(&self, id: &str) {
        let ruleset = self.host_output("nft", "list ruleset");
        assert!(!ruleset.contains(id), "{ruleset}");
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for name in ["host", "outside", A.name, B.name] {
            netns::remove_persistent(&self.dir.path().join(name)).unwrap();
        }
    }
}

pub(crate) fn ip(netns: &NetNs, words: &str) {
    output(netns, "ip", words);
}

pub(crate) fn output(netns: &NetNs, program: &str, words: &str) -> String {
    let output =
        netns.run(|| Command::new(program).args(words.split_whitespace()).output().unwrap()).unwrap();
    assert!(output.status.success(), "{program} {words}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) struct Attachment<'a> {
    sandbox: &'a Sandbox,
    pub(crate) conf: Value,
    id: String,
    pub(crate) netns: String,
    pub(crate) ifname: String,
    /// Where programs are looked for before all other places.
    programs: Option<PathBuf>,
}

impl Attachment<'_> {
    /// The same with some keys changed; `null` removes.
    pub(crate) fn with(mut self, changes: Value) -> Self {
        for (key, value) in changes.as_object().unwrap() {
            self.conf[key] = value.clone();
        }
        self.conf.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        self
    }

    /// With `iptables` of the legacy variant, whichever the host's own is.
    pub(crate) fn legacy_iptables(mut self) -> Self {
        let dir = self.sandbox.dir.path().join("legacy");
        std::fs::create_dir_all(&dir).unwrap();
        for family in ["iptables", "ip6tables"] {
            for tool in ["", "-restore"] {
                let link = dir.join(format!("{family}{tool}"));
                if !link.exists() {
                    let program = output(&self.sandbox.host, "which", &format!("{family}-legacy{tool}"));
                    symlink(program.trim_end(), link).unwrap();
                }
            }
        }
        self.programs = Some(dir);
        self
    }

    fn process(&self, command: &str) -> Command {
        let mut process = Command::new(env!("CARGO_BIN_EXE_portmap"));
        process
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", &self.id)
            .env("CNI_NETNS", &self.netns)
            .env("CNI_IFNAME", &self.ifname)
            .env("CNI_PATH", "/nowhere");
        if let Some(programs) = &self.programs {
            process.env("PATH", programs);
        }
        process
    }

    /// A call with a fault of one system call.
    pub(crate) fn traced(&self, command: &str, injection: Option<Injection>) -> Run {
        let (process, conf) = (self.process(command), self.conf.to_string());
        let run = || trace_calls::run(&process, conf.as_bytes(), injection).unwrap();
        self.sandbox.host.run(run).unwrap()
    }

    pub(crate) fn spawn(&self, command: &str) -> Child {
        let mut process = self.process(command);
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
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

    pub(crate) fn succeeds(&self, command: &str) {
        assert_eq!(self.call(command), (Some(0), Value::Null), "{command}");
    }

    pub(crate) fn del(&self) {
        self.succeeds("DEL");
    }

    /// Code and message of a refusal.
    pub(crate) fn refused(&self, command: &str) -> (i64, String) {
        let (code, error) = self.call(command);
        assert_eq!(code, Some(1), "{error}");
        assert!(!error.to_string().contains("not rolled back"), "{error}");
        (error["code"].as_i64().unwrap(), error["msg"].as_str().unwrap().to_owned())
    }
}

/// A TCP server of both families in a pod.
pub(crate) struct Server(TcpListener);

impl Server {
    pub(crate) fn start(netns: &NetNs, port: u16) -> Self {
        let any: SocketAddr = ("::".parse::<IpAddr>().unwrap(), port).into();
        Self(netns.run(|| TcpListener::bind(any).unwrap()).unwrap())
    }

    /// Whom the server sees when `client` connects to `address`; the bytes go
    /// both ways.
    pub(crate) fn peer_of(&self, client: &NetNs, address: &str) -> IpAddr {
        let mut stream = connect(client, address).unwrap_or_else(|e| panic!("connect to {address}: {e}"));
        let (mut accepted, peer) = self.0.accept().unwrap();
        let mut heard = [0; 4];
        stream.write_all(b"ping").unwrap();
        accepted.read_exact(&mut heard).unwrap();
        accepted.write_all(&heard).unwrap();
        stream.read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"ping");
        peer.ip().to_canonical()
    }
}

pub(crate) fn connect(client: &NetNs, address: &str) -> std::io::Result<TcpStream> {
    let address: SocketAddr = address.parse().unwrap();
    let stream = client.run(|| TcpStream::connect_timeout(&address, Duration::from_secs(5))).unwrap()?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    Ok(stream)
}

/// The host answers itself where nothing is mapped.
pub(crate) fn assert_refused(client: &NetNs, address: &str) {
    let error = connect(client, address).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused, "{address}: {error}");
}

pub(crate) fn udp(netns: &NetNs, address: &str) -> UdpSocket {
    let socket = netns.run(|| UdpSocket::bind(address).unwrap()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}
