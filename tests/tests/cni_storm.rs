//! Many pods at once, as after a node's restart: the chain bridge, host-local,
//! portmap as a runtime runs it, and loopback beside it.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use linux::mount::MountFlags;
use linux::netns;
use serde_json::{Value, json};
use tests::cni::{Attachment, Network, addresses};
use tests::network_state::{Difference, Places, State};
use tests::{Sandbox, binaries, eventually, netlink};

/// Plugins at once; each may start one more.
const AT_ONCE: usize = 50;
const NETWORKS: usize = 3;

struct World {
    sandbox: Sandbox,
    networks: Vec<Network>,
}

impl World {
    fn new() -> Self {
        let sandbox = Sandbox::new();
        // Lock files of the plugins lie in /run, which is the machine's.
        linux::mount::mount_fs("tmpfs", "run", Path::new("/run"), MountFlags::default(), "").unwrap();
        let leases = sandbox.make_dir("leases").unwrap();
        sandbox.make_dir("ns").unwrap();
        let networks = (0..NETWORKS).map(|number| network(number, &leases)).collect();
        Self { sandbox, networks }
    }

    /// Attachments of containers `<prefix>-<number>`, each with a namespace and a host port of its own.
    fn attachments(&self, prefix: &str, first_port: usize, count: usize) -> Vec<(&Network, Attachment)> {
        let attachment = |number: usize| {
            let name = format!("{prefix}-{number}");
            let path = self.sandbox.path("ns").join(&name);
            netns::create_persistent(&path).expect("a network namespace");
            let mapping = json!([{"hostPort": first_port + number, "containerPort": 80, "protocol": "tcp"}]);
            (
                &self.networks[number % self.networks.len()],
                Attachment::new(&name, &path).with_port_mappings(mapping),
            )
        };
        (0..count).map(attachment).collect()
    }

    fn state(&self) -> State {
        let leases = self.sandbox.path("leases");
        let changing = self.networks.iter().flat_map(|network| {
            ["lock", "last_reserved_ip.0", "last_reserved_ip.1"]
                .map(|name| leases.join(&network.name).join(name))
        });
        let places = Places {
            containers: Vec::new(),
            changing: changing.chain([leases.join(".hawser")]).collect(),
            directories: vec![leases.clone(), PathBuf::from("/run")],
        };
        State::take(&places).expect("the kernel answers")
    }

    fn leases(&self) -> Vec<String> {
        let directories = self.networks.iter().map(|network| self.sandbox.path("leases").join(&network.name));
        // A network that was never used has no directory.
        let entries = directories.filter_map(|dir| std::fs::read_dir(dir).ok()).flatten();
        let names = entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"));
        names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect()
    }
}

fn network(number: usize, leases: &Path) -> Network {
    let ipam = json!({
        "type": "host-local",
        "dataDir": leases,
        "ranges": [
            [{"subnet": format!("10.9{number}.0.0/24")}],
            [{"subnet": format!("fd00:9{number}::/64")}],
        ],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
    });
    let bridge = json!({
        "type": "bridge", "bridge": format!("storm{number}"), "isGateway": true,
        "ipMasq": true, "ipMasqBackend": "nftables", "hairpinMode": true, "ipam": ipam,
    });
    let portmap = json!({"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}});
    Network {
        bin_dir: binaries::find("bridge").unwrap().parent().expect("a directory").to_path_buf(),
        name: format!("storm-{number}"),
        cni_version: "1.1.0".to_owned(),
        plugins: vec![bridge, portmap],
    }
}

/// Does all of `work`, `at_once` at a time, and returns the outcomes in its order.
fn at_once<W: Sync, T: Send>(at_once: usize, work: &[W], run: impl Fn(&W) -> T + Sync) -> Vec<T> {
    let queue = Mutex::new(work.iter().enumerate());
    let mut done: Vec<(usize, T)> = thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let next = queue.lock().expect("no worker panics with the queue").next();
                let Some((index, item)) = next else { return done };
                done.push((index, run(item)));
            }
        };
        let workers: Vec<_> = (0..at_once).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a worker")).collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

fn all<T>(outcomes: Vec<Result<T>>) -> Vec<T> {
    let failed: Vec<String> =
        outcomes.iter().filter_map(|outcome| Some(format!("{:#}", outcome.as_ref().err()?))).collect();
    assert!(failed.is_empty(), "{} of {} failed:\n{}", failed.len(), outcomes.len(), failed.join("\n"));
    outcomes.into_iter().flatten().collect()
}

fn assert_same(before: &State, after: &State) {
    assert_eq!(before.difference(after), Difference(Vec::new()));
}

fn unique(results: &[Value]) -> BTreeSet<String> {
    let all: Vec<String> = results.iter().flat_map(addresses).collect();
    let set: BTreeSet<String> = all.iter().cloned().collect();
    assert_eq!(set.len(), all.len(), "an address was given twice: {all:?}");
    assert_eq!(set.len(), 2 * results.len(), "an address of each family");
    set
}

#[test]
fn two_hundred_pods_come_and_go_at_once() {
    let world = World::new();
    // One pod of each network before, so that bridges and tables are there, and they stay.
    let residents = world.attachments("resident", 9000, NETWORKS);
    let add = |(network, attachment): &(&Network, Attachment)| network.add(attachment);
    let kept = all(at_once(AT_ONCE, &residents, add));
    let before = world.state();

    let first = world.attachments("first", 10_000, 100);
    let results = all(at_once(AT_ONCE, &first, add));
    let given = unique(&[results.clone(), kept.clone()].concat());
    assert_eq!(world.leases().into_iter().collect::<BTreeSet<_>>(), given);

    // A hundred more come while the first hundred go, some of them without their namespace.
    let second = world.attachments("second", 11_000, 100);
    let both: Vec<_> = first.iter().zip(&results).zip(&second).collect();
    let results = all(at_once(AT_ONCE / 2, &both, |(((network, leaves), result), comes)| {
        thread::scope(|scope| {
            let coming = scope.spawn(|| add(comes));
            let leaves =
                if leaves.container_id.ends_with('7') { leaves.without_netns() } else { leaves.clone() };
            network.del(&leaves, Some(result))?;
            coming.join().expect("an ADD")
        })
    }));
    let given = unique(&[results.clone(), kept].concat());
    assert_eq!(world.leases().into_iter().collect::<BTreeSet<_>>(), given);
    let checked = second.iter().zip(&results).collect::<Vec<_>>();
    all(at_once(AT_ONCE, &checked, |((network, attachment), result)| network.check(attachment, result)));

    let leaving: Vec<_> = second.iter().zip(&results).collect();
    all(at_once(AT_ONCE, &leaving, |((network, attachment), result)| network.del(attachment, Some(result))));
    assert_same(&before, &world.state());
    assert_eq!(world.sandbox.tag().processes().unwrap(), []);
}

#[test]
fn the_first_twenty_pods_of_a_node_race_for_its_bridge() {
    let world = World::new();
    let pods: Vec<_> =
        world.attachments("pod", 10_000, 20).into_iter().map(|(_, pod)| (&world.networks[0], pod)).collect();
    let results = all(at_once(pods.len(), &pods, |(network, pod)| network.add(pod)));
    unique(&results);
    let bridges: BTreeSet<String> =
        results.iter().map(|result| result["interfaces"][0]["mac"].to_string()).collect();
    assert_eq!(bridges.len(), 1, "the bridge's MAC changed: {bridges:?}");
    let links = netlink::links().unwrap();
    let bridge = links.iter().find(|link| link.name == "storm0").expect("the bridge");
    let gateways: Vec<String> = netlink::addresses()
        .unwrap()
        .into_iter()
        .filter(|(index, _)| *index == bridge.index)
        .map(|(_, address)| address)
        .collect();
    assert_eq!(gateways, ["10.90.0.1/24", "fd00:90::1/64"]);
    assert_eq!(links.iter().filter(|link| link.master == Some(bridge.index)).count(), pods.len());
    all(at_once(pods.len(), &pods, |(network, pod)| network.del(pod, None)));
    assert_eq!(world.leases(), [""; 0]);
    let left: Vec<String> =
        netlink::links().unwrap().into_iter().map(|link| link.name).filter(|name| name != "lo").collect();
    assert_eq!(left, ["storm0"]);
    let rules = netlink::nft_chains_and_rules().unwrap();
    assert!(rules.iter().all(|rule| !rule.comment.contains("pod-")), "{rules:?}");
}

#[test]
fn loopback_and_interface_of_a_pod_come_at_the_same_time() {
    let world = World::new();
    let mut loopback = world.networks[0].clone();
    // As containerd asks: its own list, in this version, with this name.
    loopback.plugins = vec![json!({"type": "loopback"})];
    loopback.name = "cni-loopback".to_owned();
    loopback.cni_version = "0.3.1".to_owned();
    let pods = world.attachments("pod", 10_000, 20);
    all(at_once(10, &pods, |(network, pod)| {
        let lo = Attachment { ifname: "lo".to_owned(), ..pod.clone() };
        let result = thread::scope(|scope| {
            let lo_comes = scope.spawn(|| loopback.add(&lo));
            let result = network.add(pod)?;
            lo_comes.join().expect("an ADD")?;
            anyhow::Ok(result)
        })?;
        let inside = netns::NetNs::open(&pod.netns)?.run(netlink::links)??;
        ensure!(inside.iter().all(|link| link.is_up), "{inside:?}");
        thread::scope(|scope| {
            let lo_goes = scope.spawn(|| loopback.del(&lo, None));
            network.del(pod, Some(&result))?;
            lo_goes.join().expect("a DEL")
        })
    }));
    assert_eq!(world.leases(), [""; 0]);
}

#[test]
fn one_attachment_is_deleted_many_times_at_once() {
    let world = World::new();
    let neighbours = world.attachments("neighbour", 9000, NETWORKS);
    let results = all(at_once(AT_ONCE, &neighbours, |(network, pod)| network.add(pod)));
    let before = world.state();
    let pods = world.attachments("pod", 10_000, 5);
    for (network, pod) in &pods {
        let result = network.add(pod).unwrap();
        let ways = [pod.clone(), pod.without_netns(), pod.clone(), pod.clone()];
        let ways: Vec<_> = ways.iter().flat_map(|pod| [(pod, Some(&result)), (pod, None)]).collect();
        all(at_once(ways.len(), &ways, |(pod, result)| network.del(pod, *result)));
        assert_same(&before, &world.state());
    }
    let still_there: Vec<_> = neighbours.iter().zip(&results).collect();
    all(at_once(AT_ONCE, &still_there, |((network, pod), result)| network.check(pod, result)));
}

#[test]
fn a_container_that_comes_back_under_its_name_finds_nothing_of_the_one_before() {
    let world = World::new();
    let pods = world.attachments("pod", 10_000, 6);
    all(at_once(pods.len(), &pods, |(network, pod)| {
        for round in 0..5 {
            let result = network.add(pod).with_context(|| format!("round {round}"))?;
            netns::remove_persistent(&pod.netns)?;
            network.del(&pod.without_netns(), Some(&result)).with_context(|| format!("round {round}"))?;
            netns::create_persistent(&pod.netns)?;
        }
        Ok(())
    }));
    eventually("the kernel takes the namespaces apart", Duration::from_secs(10), || {
        let links = netlink::links()?;
        ensure!(links.iter().all(|link| !link.name.starts_with("veth")), "{links:?}");
        Ok(())
    })
    .unwrap();
    assert_eq!(world.leases(), [""; 0]);
}
