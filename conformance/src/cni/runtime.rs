//! A real runtime over our plugins: Debian's containerd with runc, started
//! privately, runs pods through CRI as a kubelet would, with the network
//! configuration that such nodes have (bridge and portmap, dual stack).

mod cri;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use ::tests::image::{Program, write_archive_with_arguments};
use ::tests::network_state::{Places, State};
use ::tests::{Network, Sandbox, binaries, eventually};
use anyhow::{Context, Result, anyhow, ensure};
use xtask::foreign::debian_program;
use xtask::progress::step;

use self::cri::{APP_IMAGE, Cri, PAUSE_IMAGE, Pod};
use super::Side;
use ::tests::containerd::{Containerd, Settings, hide_run_and_var_lib};

/// The directory that pods serve, in the sandbox.
const CONTENT: &str = "content";
const BRIDGE: &str = "cni0";
const GATEWAYS: [&str; 2] = ["10.99.0.1", "[fd00:99::1]"];
/// For what takes a fraction of a second on an idle machine.
const TIMEOUT: Duration = Duration::from_secs(30);

/// As administrators write it: nothing of ours in it but the absence of paths.
const CONFLIST: &str = r#"{
  "cniVersion": "1.0.0",
  "name": "containerd-net",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "cni0",
      "isGateway": true,
      "ipMasq": true,
      "promiscMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "10.99.0.0/16"}], [{"subnet": "fd00:99::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}"#;

pub(super) fn run(node: &super::Node) -> Result<()> {
    if !node.wants("runtime") {
        return Ok(());
    }
    debian_program("runc", "runc")?;
    let (daemon, ctr) = (debian_program("containerd", "containerd")?, debian_program("ctr", "containerd")?);
    let plugins = node.plugin_dir(Side::Ours).to_owned();
    // Entering a sandbox is for the thread's whole life.
    let node = thread::spawn(move || on_a_node(&plugins, &daemon, &ctr));
    node.join().map_err(|_| anyhow!("the thread of the node panicked"))?
}

fn on_a_node(plugins: &Path, daemon: &Path, ctr: &Path) -> Result<()> {
    let sandbox = Sandbox::enter(Network::Own)?;
    let containerd = step("start containerd", || {
        hide_run_and_var_lib()?;
        let network = &sandbox.make_dir("net")?;
        fs::write(network.join("10-containerd-net.conflist"), CONFLIST).context("write the conflist")?;
        let (pause_image, snapshotter, registries) = (PAUSE_IMAGE, "native", None);
        let settings = Settings { program: daemon, plugins, network, pause_image, snapshotter, registries };
        Containerd::start(&sandbox.make_dir("c")?, &settings)
    })?;
    let outcome = step("import images", || import_images(&sandbox, &containerd, ctr))
        .and_then(|()| Cri::connect(&containerd.socket(), sandbox.cgroup_root()))
        .and_then(|cri| pods(&sandbox, &containerd, &cri))
        .with_context(|| containerd.log_tail());
    containerd.stop()?;
    outcome
}

/// The image of the pods' own container and the one of what runs in them, both of one static program.
fn import_images(sandbox: &Sandbox, containerd: &Containerd, ctr: &Path) -> Result<()> {
    let program = binaries::find("demo-app")?;
    for (image, arguments) in [(PAUSE_IMAGE, &["sleep", "forever"][..]), (APP_IMAGE, &[])] {
        let archive = sandbox.path("image.tar");
        let program = Program { image, binary: &program, path: "demo-app", directories: &["data"] };
        write_archive_with_arguments(&program, arguments, &archive)?;
        containerd.import(ctr, &archive)?;
    }
    Ok(())
}

fn pods(sandbox: &Sandbox, containerd: &Containerd, cri: &Cri) -> Result<()> {
    step("the runtime reports that its network is ready", || {
        eventually("NetworkReady", TIMEOUT, || cri.ensure_network_ready())
    })?;
    let content = sandbox.make_dir(CONTENT)?;
    fs::write(content.join("name"), "served").context("write what is served")?;
    let virgin = Node::look()?;

    let first = step("a first pod, on a host without a bridge", || {
        let pod = start(sandbox, cri, "first", 8080)?;
        stop_and_remove(cri, &pod)?;
        let idle = Node::look()?;
        let left = virgin.left_since(&idle);
        let left: Vec<&String> = left.iter().filter(|line| !is_the_nodes(line)).collect();
        ensure!(left.is_empty(), "left: {left:?}");
        Ok(idle)
    })?;

    let (one, two) = step("two pods, with addresses of both families", || {
        Ok((start(sandbox, cri, "one", 8081)?, start(sandbox, cri, "two", 8082)?))
    })?;
    ensure!(one.ips != two.ips, "both have {:?}", one.ips);
    step("a container is reached by its addresses and by its host port", || reach(&one, 8081))?;
    step("a pod reaches another's host port by the host's addresses", || {
        for gateway in GATEWAYS {
            let url = format!("http://{gateway}:8082/name");
            cri.run_to_end(&one, &format!("ask-{}", gateway.len()), &["fetch", &url, "10"])
                .with_context(|| format!("from pod one: {url}"))?;
        }
        Ok(())
    })?;
    step("StopPodSandbox twice, RemovePodSandbox", || {
        stop_and_remove(cri, &one)?;
        reach(&two, 8082).context("the other pod, meanwhile")?;
        stop_and_remove(cri, &two)
    })?;
    step("nothing is left", || {
        eventually("as before the pods", TIMEOUT, || {
            let left = first.left_since(&Node::look()?);
            ensure!(left.is_empty(), "{left:?}");
            let processes = sandbox.tag().processes()?;
            let strangers: Vec<_> = processes.iter().filter(|p| p.pid != containerd.pid()).collect();
            ensure!(strangers.is_empty(), "processes: {strangers:?}");
            Ok(())
        })
    })
}

fn start(sandbox: &Sandbox, cri: &Cri, name: &str, host_port: i32) -> Result<Pod> {
    let pod = cri.run_pod(name, host_port)?;
    ensure!(pod.ips.len() == 2, "pod {name} has {:?} instead of an address of each family", pod.ips);
    cri.start_server(&pod, &sandbox.path(CONTENT))?;
    Ok(pod)
}

/// As kubelet does: it repeats the stop until it is content.
fn stop_and_remove(cri: &Cri, pod: &Pod) -> Result<()> {
    cri.stop_pod(pod)?;
    cri.stop_pod(pod).context("once more")?;
    cri.remove_pod(pod)
}

fn reach(pod: &Pod, host_port: u16) -> Result<()> {
    let direct = pod.ips.iter().map(|ip| SocketAddr::new(*ip, 80));
    let host = ["127.0.0.1", GATEWAYS[0], GATEWAYS[1]].map(|host| format!("{host}:{host_port}"));
    let mapped = host.iter().map(|address| address.parse().context(address.clone()));
    for address in direct.map(Ok).chain(mapped) {
        let address = address?;
        eventually(&format!("GET http://{address}/name"), TIMEOUT, || fetch(address))?;
    }
    Ok(())
}

fn fetch(address: SocketAddr) -> Result<()> {
    let timeout = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, timeout).context("connect")?;
    stream.set_read_timeout(Some(timeout)).context("set a time limit")?;
    stream.write_all(b"GET /name HTTP/1.0\r\n\r\n").context("ask")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).context("read")?;
    ensure!(answer.ends_with("served"), "{answer:?}");
    Ok(())
}

/// What pods can leave on the node.
struct Node {
    network: State,
    mounts: Vec<String>,
}

impl Node {
    fn look() -> Result<Self> {
        let leases = PathBuf::from("/var/lib/cni/networks/containerd-net");
        let changing = ["lock", "last_reserved_ip.0", "last_reserved_ip.1"].map(|name| leases.join(name));
        let changing = changing.into_iter().chain([PathBuf::from("/var/lib/cni/networks/.hawser")]);
        let network = State::take(&Places {
            containers: Vec::new(),
            directories: ["/var/lib/cni", "/run"].map(PathBuf::from).to_vec(),
            changing: changing.chain([PathBuf::from("/run/containerd")]).collect(),
        })?;
        let mounts = ::tests::mounts()?.iter().map(|m| m.mount_point.display().to_string()).collect();
        Ok(Self { network, mounts })
    }

    fn left_since(&self, after: &Self) -> Vec<String> {
        let mut left = self.network.difference(&after.network).0;
        left.extend(after.mounts.iter().filter(|m| !self.mounts.contains(m)).map(|m| format!("+ mount {m}")));
        left
    }
}

/// Of which a node has one, whatever the number of its pods: the bridge, tables
/// and chains without a container's name, the runtime's own directories.
fn is_the_nodes(line: &str) -> bool {
    line.contains(&format!("link {BRIDGE} "))
        || line.ends_with(&format!(" dev {BRIDGE}"))
        || line.starts_with("+ directory /var/lib/cni")
        || line == "+ directory /run/netns"
        || line == "+ mount /run/netns"
        || (line.contains(" nft ") && !line.contains("containerd-net"))
}
