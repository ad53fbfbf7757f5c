//! A plugin with a fault at every step: kill -9, or an error in the place of a system
//! call's result. A killed ADD or DEL is followed by DEL, and the node is as it
//! was; a failed ADD has taken everything back by itself; and ADD works again.
//!
//! A finding names process and call (`process 0 call 17: sendto(..)`) as
//! [`tests::trace_calls`] counts them, and what was left.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use linux::mount::MountFlags;
use linux::netns;
use nix::errno::Errno;
use nix::libc;
use serde_json::{Value, json};
use tests::cni::{Answer, Attachment, Network};
use tests::network_state::{Places, State};
use tests::trace_calls::{self, Call, Fault, Injection, Run};
use tests::{Sandbox, binaries, eventually};

/// Before an injection counts as missed.
const INJECTION_ATTEMPTS: usize = 3;
const RECORDINGS: usize = 5;
const NET: &str = "crash";
const BRIDGE: &str = "crash0";
/// The kernel takes a namespace apart in its own time.
const DISMANTLING: Duration = Duration::from_secs(10);

/// Which plugin of the chain gets the fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Target {
    Bridge,
    HostLocal,
    Loopback,
    Portmap,
}

/// Whether another container is attached to the network already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Host {
    /// No bridge, no table of nf_tables.
    Virgin,
    /// Bridge and tables in use by a neighbour.
    InUse,
}

/// A node for one test: a host, a neighbour, a container.
struct World {
    sandbox: Sandbox,
    target: Target,
    host: Host,
    network: Network,
    container: Attachment,
    /// What the plugins before the target have answered.
    prev_result: Option<Value>,
    before: State,
    /// The call at which the last traced run got a fault.
    injected: Option<Call>,
}

fn plugins(target: Target, leases: &Path) -> Vec<Value> {
    let ipam = json!({
        "type": "host-local",
        "dataDir": leases,
        "ranges": [[{"subnet": "10.88.0.0/24"}], [{"subnet": "fd00:88::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    });
    let bridge = json!({
        "type": "bridge", "bridge": BRIDGE, "isGateway": true, "ipMasq": true,
        "ipMasqBackend": "nftables", "macspoofchk": true, "hairpinMode": true, "ipam": ipam,
    });
    match target {
        Target::Bridge => vec![bridge],
        Target::HostLocal => vec![json!({"type": "host-local", "ipam": ipam})],
        Target::Loopback => vec![json!({"type": "loopback"})],
        Target::Portmap => vec![
            bridge,
            json!({"type": "portmap", "backend": "nftables", "snat": true, "capabilities": {"portMappings": true}}),
        ],
    }
}

impl World {
    fn new(target: Target, host: Host) -> Result<Self> {
        let sandbox = Sandbox::new();
        // Lock files of the plugins lie in /run, which is the machine's.
        linux::mount::mount_fs("tmpfs", "run", Path::new("/run"), MountFlags::default(), "")?;
        let leases = sandbox.make_dir("leases")?;
        sandbox.make_dir("ns")?;
        let network = Network {
            bin_dir: binaries::find("bridge")?.parent().context("a directory")?.to_path_buf(),
            name: NET.to_owned(),
            cni_version: "1.1.0".to_owned(),
            plugins: plugins(target, &leases),
        };
        for name in ["neighbour", "pod"] {
            netns::create_persistent(&sandbox.path("ns").join(name))?;
        }
        let mappings = json!([
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
            {"hostPort": 5353, "containerPort": 53, "protocol": "udp"},
        ]);
        let container = Attachment::new("pod", &sandbox.path("ns/pod")).with_port_mappings(mappings);
        let mut world = Self {
            sandbox,
            target,
            host,
            network,
            container,
            prev_result: None,
            before: State::default(),
            injected: None,
        };
        // Directories of leases stay; after this they are there.
        world
            .network
            .add(&world.container)
            .and_then(|result| world.network.del(&world.container, Some(&result)))?;
        if host == Host::InUse {
            let mappings = json!([{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}]);
            let neighbour = Attachment::new("neighbour", &world.sandbox.path("ns/neighbour"));
            world.network.add(&neighbour.with_port_mappings(mappings))?;
        }
        world.renew()?;
        Ok(world)
    }

    /// Makes the host a virgin again, if it is to be one; what is there now is how it has to be later.
    fn renew(&mut self) -> Result<()> {
        if self.host == Host::Virgin {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).context("unshare the network")?;
            tests::netlink::set_loopback_up()?;
        }
        self.before = self.state()?;
        Ok(())
    }

    fn state(&self) -> Result<State> {
        let leases = self.sandbox.path("leases");
        let changing = ["lock", "last_reserved_ip.0", "last_reserved_ip.1"];
        let changing = changing.map(|name| leases.join(NET).join(name));
        // Our own index: whether it fits the leases, the next ADDs show.
        let changing = changing.into_iter().chain([leases.join(".hawser")]).collect();
        let ns = self.sandbox.path("ns");
        let containers = [ns.join("neighbour"), ns.join("pod")].into_iter().filter(|path| path.exists());
        State::take(&Places {
            containers: containers.collect(),
            directories: vec![leases, PathBuf::from("/run")],
            changing,
        })
    }

    /// The node is as it was, but for what `allowed` accepts.
    fn ensure_as_before(&self, allowed: impl Fn(&str) -> bool) -> Result<()> {
        let mut difference = self.before.difference(&self.state()?);
        difference.0.retain(|line| !is_loopbacks(line) && !allowed(line));
        ensure!(difference.0.is_empty(), "{difference}");
        let processes = self.sandbox.tag().processes()?;
        ensure!(processes.is_empty(), "processes are left: {processes:?}");
        Ok(())
    }

    /// After a DEL: nothing of the attachment; what the node has one of stays.
    fn ensure_clean(&self) -> Result<()> {
        self.ensure_as_before(|line| self.host == Host::Virgin && is_the_nodes(line))
    }

    fn index(&self) -> usize {
        if self.target == Target::Portmap { 1 } else { 0 }
    }

    fn call(&self, verb: &str, container: &Attachment, result: Option<&Value>) -> tests::cni::Call {
        self.network.call(self.index(), verb, container, result)
    }

    /// The plugins before the target, so that it can be called.
    fn prepare(&mut self) -> Result<()> {
        if self.target == Target::Portmap {
            let answer = self.network.call(0, "ADD", &self.container, None).run()?;
            self.prev_result = Some(answer.result()?);
        }
        Ok(())
    }

    fn traced(&mut self, verb: &str, result: Option<&Value>, injection: Option<Injection>) -> Result<Run> {
        let call = self.call(verb, &self.container, result);
        let run = trace_calls::run(&call.command, &call.stdin, injection)?;
        ensure!(!run.hung, "it hung");
        self.injected.clone_from(&run.injected);
        Ok(run)
    }

    /// Every call of an undisturbed `verb`.
    fn record(&mut self, verb: &str) -> Result<Vec<Call>> {
        self.prepare()?;
        let prev = self.prev_result.clone();
        let run = if verb == "ADD" {
            self.traced("ADD", prev.as_ref(), None)?
        } else {
            let result = self.call("ADD", &self.container, prev.as_ref()).run()?.result()?;
            self.traced(verb, Some(&result), None)?
        };
        answer(&run).silence().or_else(|_| answer(&run).result().map(drop))?;
        self.network.del(&self.container, None)?;
        self.ensure_clean().context("an undisturbed ADD and DEL")?;
        self.renew()?;
        Ok(run.calls)
    }

    /// DEL of the whole chain as runtimes do it: with the namespace; after it
    /// has vanished, with its path; and without.
    fn del(&self, way: usize) -> Result<()> {
        if way.is_multiple_of(3) {
            return self.network.del(&self.container, None);
        }
        netns::remove_persistent(&self.container.netns)?;
        let container = if way % 3 == 1 { self.container.clone() } else { self.container.without_netns() };
        let deleted = self.network.del(&container, None);
        netns::create_persistent(&self.container.netns)?;
        deleted
    }

    fn add_with_fault(&mut self, injection: Injection, way: usize) -> Result<()> {
        self.prepare()?;
        let prepared = self.state()?;
        let prev = self.prev_result.clone();
        let run = self.traced("ADD", prev.as_ref(), Some(injection))?;
        let answer = answer(&run);
        let killed = injection.point.process == 0 && !matches!(injection.fault, Fault::Fail(_));
        if killed && run.injected.is_some() {
            ensure!(run.code.is_none(), "it outlived its kill: {answer:?}");
        } else if run.code == Some(0) {
            let result = answer.result().context("ADD")?;
            let checked = self.call("CHECK", &self.container, Some(&result)).run()?;
            checked.silence().context("ADD succeeded, but CHECK says")?;
        } else {
            // A failed write of the answer leaves no answer.
            let is_answer = |call: &Call| call.point.process == 0 && call.object == "stdout";
            let lost = run.injected.as_ref().is_some_and(is_answer);
            if !lost {
                answer.error().context("ADD failed without an error object")?;
            }
            let mut difference = prepared.difference(&self.state()?);
            // An ADD that was done is undone by DEL, which never removes a bridge.
            let stays: fn(&str) -> bool = if lost { is_the_nodes } else { is_skeleton };
            difference.0.retain(|line| !(is_loopbacks(line) || self.host == Host::Virgin && stays(line)));
            ensure!(difference.0.is_empty(), "ADD failed and left: {difference}");
        }
        self.del(way).context("DEL after it")?;
        self.ensure_deleted(way)
    }

    fn del_with_fault(&mut self, injection: Injection, way: usize) -> Result<()> {
        self.prepare()?;
        let prev = self.prev_result.clone();
        let result = self.call("ADD", &self.container, prev.as_ref()).run()?.result()?;
        let run = self.traced("DEL", Some(&result), Some(injection))?;
        let answer = answer(&run);
        if run.code == Some(0) {
            answer.silence()?;
        } else if run.code.is_some() {
            answer.error().context("DEL failed without an error object")?;
        }
        // After a success the runtime calls it no more; of the chain only the target was deleted.
        if run.code != Some(0) || self.index() > 0 {
            let remaining = Network {
                plugins: self.network.plugins[..=self.index() - usize::from(run.code == Some(0))].to_vec(),
                ..self.network.clone()
            };
            let whole = std::mem::replace(&mut self.network, remaining);
            let deleted = self.del(way);
            self.network = whole;
            deleted.context("DEL after it")?;
        }
        self.ensure_deleted(way)
    }

    /// DEL left nothing, and ADD and DEL work again.
    fn ensure_deleted(&mut self, way: usize) -> Result<()> {
        let timeout = if way.is_multiple_of(3) { Duration::ZERO } else { DISMANTLING };
        eventually("DEL left", timeout, || {
            self.ensure_as_before(|line| {
                // A lock file outlives its holder until the next one.
                line.starts_with("+ file /run/hawser-") || self.host == Host::Virgin && is_the_nodes(line)
            })
        })?;
        self.prepare().context("ADD again, of the plugins before")?;
        let prev = self.prev_result.clone();
        let again = self.call("ADD", &self.container, prev.as_ref()).run()?.result().context("ADD again")?;
        self.network.del(&self.container, Some(&again)).context("DEL of the second ADD")?;
        self.ensure_clean().context("after a second ADD and DEL")?;
        self.renew()
    }
}

fn answer(run: &Run) -> Answer {
    Answer { code: run.code, stdout: run.stdout.clone(), stderr: run.stderr.clone() }
}

/// Of which a node has one, whatever the number of its containers: the bridge,
/// its addresses and routes, and tables without rules of an attachment.
fn is_the_nodes(line: &str) -> bool {
    let of_bridge =
        line.contains(&format!(" dev {BRIDGE}")) || line.contains(&format!("host: link {BRIDGE} "));
    of_bridge || is_skeleton(line)
}

/// The kernel gives lo its addresses when it first comes up, and leaves IPv4's when it goes down.
fn is_loopbacks(line: &str) -> bool {
    line.ends_with(" dev lo")
}

/// Tables and chains that no attachment owns; an owner's name is in the chain's
/// name or in the rule's comment.
fn is_skeleton(line: &str) -> bool {
    line.starts_with("+ host: nft ") && !line.contains("pod")
}

/// kill -9 after every call that changed something, and before the first.
fn kills(calls: &[Call]) -> Vec<Injection> {
    let mut injections = Vec::new();
    let mut seen = Vec::new();
    for call in calls.iter().filter(|call| changes_something(call)) {
        if !seen.contains(&call.point.process) {
            seen.push(call.point.process);
            injections.push(Injection { point: call.point, name: call.name, fault: Fault::KillBefore });
        }
        injections.push(Injection { point: call.point, name: call.name, fault: Fault::KillAfter });
    }
    injections
}

/// Each error that a call may have.
fn errors(calls: &[Call]) -> Vec<Injection> {
    let injection = |call: &Call, errno: &Errno| Injection {
        point: call.point,
        name: call.name,
        fault: Fault::Fail(*errno),
    };
    calls.iter().flat_map(|call| errors_of(call).iter().map(move |errno| injection(call, errno))).collect()
}

/// An error of each call that makes something or brings the kernel's answer.
fn errors_in_the_making(calls: &[Call]) -> Vec<Injection> {
    let makes = |call: &&Call| changes_something(call) || call.name == "recvfrom" || call.name == "setns";
    let calls: Vec<Call> = calls.iter().filter(makes).cloned().collect();
    let mut injections = errors(&calls);
    injections.dedup_by_key(|injection| injection.point);
    injections
}

const CREATING: u64 = (libc::O_CREAT | libc::O_TRUNC | libc::O_WRONLY | libc::O_RDWR) as u64;

fn open_flags(call: &Call) -> u64 {
    if call.name == "open" { call.arguments[1] } else { call.arguments[2] }
}

fn changes_something(call: &Call) -> bool {
    match call.name {
        "sendto" => !call.netlink_type.is_some_and(asks_only),
        "open" | "openat" => open_flags(call) & CREATING != 0,
        "write" | "pwrite64" | "writev" | "sendmsg" | "mkdir" | "mkdirat" | "rmdir" | "link" | "linkat"
        | "symlinkat" | "unlink" | "unlinkat" | "rename" | "renameat" | "renameat2" | "ftruncate"
        | "flock" | "clone" | "clone3" | "vfork" | "execve" | "wait4" | "waitid" | "mount" | "umount2" => {
            true
        }
        _ => false,
    }
}

/// RTM_GET* (linux/rtnetlink.h: the third of four), NFT_MSG_GET* and CTNETLINK's get.
fn asks_only(message: u16) -> bool {
    match message >> 8 {
        0 => message % 4 == 2,
        10 => matches!(message & 0xff, 1 | 4 | 7 | 10 | 13 | 16 | 19 | 21 | 23),
        _ => message & 0xff == 1,
    }
}

fn errors_of(call: &Call) -> &'static [Errno] {
    match call.name {
        "read" | "pread64" | "readv" => &[Errno::EIO, Errno::EINTR],
        "write" | "pwrite64" | "writev" => &[Errno::ENOSPC, Errno::EINTR],
        "open" | "openat" if open_flags(call) & CREATING != 0 => &[Errno::ENOSPC, Errno::EINTR],
        "open" | "openat" | "openat2" => &[Errno::EMFILE, Errno::EIO],
        "mkdir" | "mkdirat" | "link" | "linkat" | "symlinkat" => &[Errno::ENOSPC, Errno::EEXIST],
        "rename" | "renameat" | "renameat2" | "ftruncate" | "fallocate" => &[Errno::ENOSPC, Errno::EIO],
        "unlink" | "unlinkat" | "rmdir" | "fsync" | "fdatasync" | "getdents64" | "fchmod" => &[Errno::EIO],
        "flock" => &[Errno::EINTR, Errno::ENOLCK],
        "stat" | "lstat" | "statx" | "newfstatat" | "statfs" | "fstatfs" => &[Errno::ENOMEM],
        "socket" | "setns" | "unshare" | "mount" | "execve" => &[Errno::ENOMEM],
        "bind" | "setsockopt" => &[Errno::ENOMEM],
        "sendto" | "sendmsg" => &[Errno::ENOMEM, Errno::EINTR],
        "recvfrom" | "recvmsg" => &[Errno::ENOBUFS, Errno::EINTR],
        "poll" | "ppoll" | "wait4" | "waitid" | "dup2" => &[Errno::EINTR],
        "clone" | "clone3" | "vfork" => &[Errno::EAGAIN, Errno::ENOMEM],
        "pipe2" => &[Errno::EMFILE],
        _ => &[],
    }
}

/// Without reads that only go on with one, and of what the bridge starts, which
/// has a suite of its own, only what the bridge notices.
fn worth_a_fault(target: Target, calls: &[Call]) -> Vec<Call> {
    let goes_on = |at: usize, call: &Call| {
        let before = at.checked_sub(1).and_then(|before| calls.get(before));
        let after = calls.get(at + 1);
        let same = |other: Option<&Call>| {
            other.is_some_and(|other| (other.name, &other.object) == (call.name, &call.object))
        };
        call.name == "read" && same(before) && same(after)
    };
    let noticed = |call: &Call| {
        target == Target::HostLocal
            || call.point.process == 0
            || matches!(call.name, "execve" | "linkat" | "unlink")
            || call.object == "stdout"
    };
    let chosen = calls.iter().enumerate().filter(|(at, call)| noticed(call) && !goes_on(*at, call));
    chosen.map(|(_, call)| call.clone()).collect()
}

/// Injects faults at every point of `verb` that `choose` picks from an undisturbed run.
fn inject_everywhere(target: Target, host: Host, verb: &str, choose: fn(&[Call]) -> Vec<Injection>) {
    let mut world = World::new(target, host).expect("a world");
    // Waiting for others makes some runs longer: the shortest has what every run comes to.
    let recorded = (0..RECORDINGS).map(|_| world.record(verb).expect("an undisturbed run"));
    let calls = recorded.min_by_key(Vec::len).expect("recorded");
    let injections = choose(&worth_a_fault(target, &calls));
    let mut findings = Vec::new();
    let mut missed = 0;
    for (number, injection) in injections.iter().enumerate() {
        // A failed ADD has taken all back by itself, whatever the way of DEL.
        let is_error = matches!(injection.fault, Fault::Fail(_));
        let way = if is_error && !number.is_multiple_of(4) { 0 } else { number };
        let mut outcome = Ok(());
        // Two processes do not make their calls in the same order every time.
        for _ in 0..INJECTION_ATTEMPTS {
            world.injected = None;
            outcome = match verb {
                "ADD" => world.add_with_fault(*injection, way),
                _ => world.del_with_fault(*injection, way),
            };
            if world.injected.is_some() || outcome.is_err() {
                break;
            }
        }
        missed += usize::from(world.injected.is_none());
        if let Err(finding) = outcome {
            let call = world.injected.take().map_or("nothing".to_owned(), |call| call.to_string());
            findings.push(format!("{call}, {:?}, way {}: {finding:#}", injection.fault, way % 3));
            drop(world);
            world = World::new(target, host).expect("a new world");
        }
    }
    let count = injections.len();
    let title =
        format!("{target:?} {verb} {host:?}: {} calls, {count} injections, {missed} missed", calls.len());
    assert!(findings.is_empty(), "{title}, {} findings:\n{}", findings.len(), findings.join("\n"));
    assert!(count > 1 && missed * 10 <= count, "{title}");
}

#[test]
fn loopback_add_survives_errors() {
    inject_everywhere(Target::Loopback, Host::InUse, "ADD", errors);
}

#[test]
fn loopback_add_survives_kills() {
    inject_everywhere(Target::Loopback, Host::InUse, "ADD", kills);
}

#[test]
fn loopback_del_survives_errors_and_kills() {
    inject_everywhere(Target::Loopback, Host::InUse, "DEL", errors);
    inject_everywhere(Target::Loopback, Host::InUse, "DEL", kills);
}

#[test]
fn host_local_add_survives_errors() {
    inject_everywhere(Target::HostLocal, Host::InUse, "ADD", errors);
}

#[test]
fn host_local_add_survives_kills() {
    inject_everywhere(Target::HostLocal, Host::InUse, "ADD", kills);
}

#[test]
fn host_local_del_survives_errors_and_kills() {
    inject_everywhere(Target::HostLocal, Host::InUse, "DEL", errors);
    inject_everywhere(Target::HostLocal, Host::InUse, "DEL", kills);
}

#[test]
fn bridge_add_survives_errors() {
    inject_everywhere(Target::Bridge, Host::InUse, "ADD", errors);
}

#[test]
fn bridge_add_survives_errors_on_a_virgin_host() {
    inject_everywhere(Target::Bridge, Host::Virgin, "ADD", errors_in_the_making);
}

#[test]
fn bridge_add_survives_kills() {
    inject_everywhere(Target::Bridge, Host::InUse, "ADD", kills);
}

#[test]
fn bridge_add_survives_kills_on_a_virgin_host() {
    inject_everywhere(Target::Bridge, Host::Virgin, "ADD", kills);
}

#[test]
fn bridge_del_survives_errors() {
    inject_everywhere(Target::Bridge, Host::InUse, "DEL", errors);
}

#[test]
fn bridge_del_survives_kills() {
    inject_everywhere(Target::Bridge, Host::InUse, "DEL", kills);
}

#[test]
fn portmap_add_survives_errors() {
    inject_everywhere(Target::Portmap, Host::InUse, "ADD", errors);
}

#[test]
fn portmap_add_survives_kills() {
    inject_everywhere(Target::Portmap, Host::Virgin, "ADD", kills);
}

#[test]
fn portmap_del_survives_errors_and_kills() {
    inject_everywhere(Target::Portmap, Host::InUse, "DEL", errors);
    inject_everywhere(Target::Portmap, Host::InUse, "DEL", kills);
}
