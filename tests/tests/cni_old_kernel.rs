//! The default backend on kernels whose nf_tables lacks a part (inet NAT before
//! Linux 5.2, `masq` and `fib` where they were left out of the build): what a
//! plugin asks of the kernel is altered on its way to something that no kernel
//! has, so the refusal is the kernel's own.

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use linux::mount::MountFlags;
use linux::netns;
use serde_json::{Value, json};
use tests::cni::{Attachment, Call, Network};
use tests::trace_calls::{self, Fault, Injection, Point, Run, ensure_injected};
use tests::{Sandbox, binaries};

/// A part as it stands in a netlink message, and one that no kernel has.
type Part = (&'static str, &'static str);

const MASQ: Part = ("masq\0", "mosq\0");
const FIB: Part = ("fib\0", "fob\0");
/// `NFTA_CHAIN_TYPE`: tables may be called `nat`, too.
const NAT_CHAIN: Part = ("\x08\0\x07\0nat\0", "\x08\0\x07\0not\0");

struct World {
    sandbox: Sandbox,
    network: Network,
    container: Attachment,
    /// Where the plugins look for programs.
    path: String,
}

impl World {
    fn new(bridge: &Value, portmap: &Value) -> Result<Self> {
        let sandbox = Sandbox::new();
        linux::mount::mount_fs("tmpfs", "run", Path::new("/run"), MountFlags::default(), "")?;
        sandbox.make_dir("ns")?;
        let netns = sandbox.path("ns/pod");
        netns::create_persistent(&netns)?;
        let mut plugins = [
            json!({
                "type": "bridge", "bridge": "old0", "isGateway": true,
                "ipam": {
                    "type": "host-local", "dataDir": sandbox.make_dir("leases")?,
                    "ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
                },
            }),
            json!({"type": "portmap", "capabilities": {"portMappings": true}}),
        ];
        for (plugin, keys) in plugins.iter_mut().zip([bridge, portmap]) {
            for (key, value) in keys.as_object().context("keys")? {
                plugin[key] = value.clone();
            }
        }
        let network = Network {
            bin_dir: binaries::find("bridge")?.parent().context("a directory")?.to_path_buf(),
            name: "old".to_owned(),
            cni_version: "1.1.0".to_owned(),
            plugins: plugins.to_vec(),
        };
        let mappings = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
        let container = Attachment::new("pod", &netns).with_port_mappings(mappings);
        Ok(Self { sandbox, network, container, path: "/usr/sbin:/usr/bin".to_owned() })
    }

    /// The programs `iptables` and `ip6tables` are those of the old tables from now on.
    fn use_legacy(&mut self) -> Result<()> {
        let dir = self.sandbox.make_dir("legacy")?;
        for name in ["iptables", "ip6tables"] {
            for part in ["", "-restore"] {
                let program = format!("/usr/sbin/{name}-legacy{part}");
                std::os::unix::fs::symlink(&program, dir.join(format!("{name}{part}"))).context(program)?;
            }
        }
        self.path = format!("{}:{}", dir.display(), self.path);
        Ok(())
    }

    fn call(&self, plugin: usize, verb: &str, result: Option<&Value>) -> Call {
        let mut call = self.network.call(plugin, verb, &self.container, result);
        call.command.env("PATH", &self.path);
        call
    }

    /// ADD of a plugin whose kernel lacks `part`.
    fn add_without(&self, plugin: usize, part: Part, result: Option<&Value>) -> Result<Run> {
        let call = self.call(plugin, "ADD", result);
        let point = Point { process: 0, call: 0 };
        let injection = Injection { point, name: "sendto", fault: Fault::Alter(part.0, part.1) };
        let run = trace_calls::run(&call.command, &call.stdin, Some(injection))?;
        ensure_injected(&run)?;
        Ok(run)
    }

    fn add(&self, plugin: usize, result: Option<&Value>) -> Result<Value> {
        self.call(plugin, "ADD", result).run()?.result()
    }

    fn check(&self, plugin: usize, result: &Value) -> Result<()> {
        self.call(plugin, "CHECK", Some(result)).run()?.silence()
    }
}

/// As nft and iptables show the host's rules.
fn rules() -> Result<[String; 2]> {
    Ok([output("nft", &["list", "ruleset"])?, output("iptables", &["-t", "nat", "-S"])?])
}

fn output(program: &str, words: &[&str]) -> Result<String> {
    let output = Command::new(program).args(words).output().context(program.to_owned())?;
    ensure!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

fn json_of(run: &Run) -> Result<Value> {
    serde_json::from_str(&run.stdout).with_context(|| format!("{run:?}"))
}

fn addresses(result: &Value) -> Vec<IpAddr> {
    tests::cni::addresses(result).iter().filter_map(|address| address.parse().ok()).collect()
}

#[test]
fn bridge_masquerades_by_iptables_where_nf_tables_cannot() {
    masquerades_by_iptables().expect("bridge");
}

fn masquerades_by_iptables() -> Result<()> {
    for part in [MASQ, NAT_CHAIN] {
        for spoof_check in [false, true] {
            let bridge = json!({"ipMasq": true, "macspoofchk": spoof_check});
            let world = World::new(&bridge, &json!({}))?;
            let run = world.add_without(0, part, None)?;
            ensure!(run.code == Some(0), "{part:?}: {}", run.stdout);
            let result = json_of(&run)?;
            let [nft, iptables] = rules()?;
            ensure!(!nft.contains("cni_plugins_masquerade"), "{nft}");
            ensure!(nft.contains("macspoofchk-pod-eth0") == spoof_check, "{nft}");
            let v4 = addresses(&result)[0];
            ensure!(iptables.contains(&format!("-A POSTROUTING -s {v4}/32 ")), "{iptables}");
            world.check(0, &result)?;
            world.network.del(&world.container, None)?;
            let left = rules()?.concat();
            ensure!(!left.contains("CNI-") && !left.contains("pod"), "{left}");
        }
    }
    Ok(())
}

#[test]
fn portmap_maps_by_iptables_where_nf_tables_cannot() {
    maps_by_iptables().expect("portmap");
}

fn maps_by_iptables() -> Result<()> {
    for part in [FIB, MASQ, NAT_CHAIN] {
        let world = World::new(&json!({}), &json!({}))?;
        let result = world.add(0, None)?;
        let run = world.add_without(1, part, Some(&result))?;
        ensure!(run.code == Some(0), "{part:?}: {}", run.stdout);
        let [nft, iptables] = rules()?;
        ensure!(!nft.contains("cni_hostport"), "{nft}");
        ensure!(iptables.contains("-p tcp -m tcp --dport 8080 -j DNAT"), "{iptables}");
        world.check(1, &result)?;
        world.network.del(&world.container, Some(&result))?;
        let left = rules()?.concat();
        ensure!(!left.contains("CNI-DN-"), "{left}");
    }
    Ok(())
}

#[test]
fn check_finds_ports_that_are_mapped_in_tables_of_iptables_legacy() {
    finds_legacy_tables().expect("portmap");
}

fn finds_legacy_tables() -> Result<()> {
    let mut world = World::new(&json!({}), &json!({}))?;
    world.use_legacy()?;
    let result = world.add(0, None)?;
    let run = world.add_without(1, FIB, Some(&result))?;
    ensure!(run.code == Some(0), "{}", run.stdout);
    let legacy = |words: &[&str]| output("iptables-legacy", &[&["-t", "nat"], words].concat());
    let rules = legacy(&["-S"])?;
    ensure!(rules.contains("-p tcp -m tcp --dport 8080 -j DNAT"), "{rules}");
    world.check(1, &result)?;
    legacy(&["-F", "CNI-HOSTPORT-DNAT"])?;
    let error = world.call(1, "CHECK", Some(&result)).run()?.error()?.1;
    ensure!(error.starts_with("missing hostport rules in \"hostports\" chain"), "{error}");
    world.call(1, "DEL", Some(&result)).run()?.silence()?;
    let rules = legacy(&["-S"])?;
    ensure!(!rules.contains("CNI-DN-"), "{rules}");
    Ok(())
}

#[test]
fn a_backend_that_is_named_is_used_or_refused_with_what_the_kernel_lacks() {
    named_backends().expect("both plugins");
}

fn named_backends() -> Result<()> {
    let bridge = json!({"ipMasq": true, "ipMasqBackend": "nftables"});
    let world = World::new(&bridge, &json!({"backend": "nftables"}))?;
    let lacks = |part: &str| format!("this kernel's nf_tables lacks {part}");
    let error = json_of(&world.add_without(0, NAT_CHAIN, None)?)?;
    let msg = error["msg"].as_str().unwrap_or_default();
    ensure!(msg.ends_with(&lacks("chains of type nat in family inet")), "{error}");
    ensure!(error["details"].to_string().contains("ipMasqBackend"), "{error}");
    let result = world.add(0, None)?;
    let error = json_of(&world.add_without(1, FIB, Some(&result))?)?;
    let msg = error["msg"].as_str().unwrap_or_default();
    ensure!(msg.ends_with(&lacks("expression fib in family ip")), "{error}");
    ensure!(error["details"].to_string().contains("backend"), "{error}");
    Ok(())
}
