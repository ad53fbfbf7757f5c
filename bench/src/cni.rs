//! `bench cni`: our plugins and the reference's in turn, pair by pair, each in a
//! host namespace of its own, and a bare netlink program that does no more than
//! the kernel's part of the same call.
//!
//! A figure is the time from before the program is started to its end, stdout
//! read. What a pair needs beforehand (namespaces, the bridge's first port, the
//! bridge under portmap) is made outside of it.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ::tests::{Network, Sandbox};
use anyhow::{Context, Result, ensure};
use linux::mount::MountFlags;
use linux::netns::{self, NetNs};
use serde_json::{Value, json};
use xtask::build::{self, plugins, require_root};
use xtask::foreign::{REFERENCE_PLUGINS, debian_program, reference_plugins};
use xtask::progress::{part, say, step};

use super::observe::{Observed, observe};
use super::statistics::median;

/// Fewer say nothing about a median.
const RUNS_MIN: usize = 20;
const PARALLEL: usize = 50;
/// Of so many at once.
const PARALLEL_RUNS: usize = 5;
const STARTS: &str = "VERSION: nothing but the start";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// `only`: of cases whose title contains it.
pub(super) fn run(runs: usize, only: Option<&str>) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} pairs are needed");
    let is_wanted = |title: &str| only.is_none_or(|word| title.contains(word));
    let cases: Vec<Case> = cases().into_iter().filter(|case| is_wanted(&case.title)).collect();
    let parallel = format!("{PARALLEL} parallel ADDs, v4 + ipMasq");
    ensure!(
        !cases.is_empty() || [STARTS, &parallel].map(is_wanted) != [false; 2],
        "--only {only:?}: no case"
    );
    let ours = part("build the static plugins", plugins)?;
    let floor = part("build the bare netlink program", floor_program)?;
    let reference = part(&format!("reference CNI plugins {REFERENCE_PLUGINS}"), reference_plugins)?;
    // What the reference starts.
    debian_program("iptables", "iptables")?;
    debian_program("nft", "nftables")?;
    let sandbox = Sandbox::enter(Network::Own)?;
    // On a disk, ext4 looks at every inode that was removed in the last half minute before it
    // takes one: after the 20 000 leases, more than a millisecond of every call that makes a file.
    linux::mount::mount_fs("tmpfs", "bench", sandbox.dir(), MountFlags::default(), "mode=0700")?;
    let bench = Bench { sandbox: &sandbox, runs, ours, reference, floor };
    let mut rows = Vec::new();
    if is_wanted(STARTS) {
        rows.extend(step(STARTS, || bench.starts())?);
    }
    for case in cases {
        rows.extend(step(&case.title, || bench.measure(&case))?);
    }
    if is_wanted(&parallel) {
        rows.push(step(&parallel, || bench.parallel())?);
    }
    say(&table(&rows));
    say(&sizes(&bench)?);
    Ok(())
}

/// `netfilter/examples/netlink_floor.rs`, built as plugins are.
fn floor_program() -> Result<PathBuf> {
    let mut command = build::build_of_plugins();
    command.args(["-p", "netfilter", "--example", "netlink_floor"]);
    build::run(&mut command)?;
    Ok(build::plugin_dir().join("examples/netlink_floor"))
}

/// The kernel goes on with what a call has deferred (a deleted link's
/// namespaces and queues) after the call's end, and would hold up the next one.
/// Awake, and on the thread that calls: after a sleep the processor itself is slow
/// for the length of a call. Not by `spin_loop`: a virtual machine's processor is
/// taken away from who pauses for long.
fn let_deferred_work_end() {
    let started = Instant::now();
    while started.elapsed() < DEFERRED_WORK {}
}

const DEFERRED_WORK: Duration = Duration::from_millis(10);

/// What is timed.
#[derive(Debug, Clone)]
struct Case {
    title: String,
    plugin: &'static str,
    /// Ours, and the reference's where it needs another.
    conf: [Value; 2],
    setup: Setup,
    /// The arguments that make the bare program do the kernel's part of it.
    floor: Option<&'static [&'static str]>,
    add_bar: Option<f64>,
    del_bar: Option<Bar>,
}

/// What has to be there before the first pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Setup {
    Nothing,
    /// So many leases of others.
    Leases(usize),
    /// And another program's lease made and released before each of our calls.
    ForeignWrites(usize),
    /// A bridge with its gateway, its rules and a first port.
    Bridge,
    /// An attached container, for portmap.
    Attachment,
}

#[derive(Debug, Clone, Copy)]
enum Bar {
    /// Ours by the reference's, at most.
    Ratio(f64),
    /// Ours less the floor's, ms, at most.
    OverFloor(f64),
    /// Ours by the floor's, at most.
    TimesFloor(f64),
}

fn bridge_conf(families: &[&str], more: &Value) -> Value {
    let ranges: Vec<Value> = families.iter().map(|subnet| json!([{ "subnet": subnet }])).collect();
    let mut conf = json!({
        "cniVersion": "1.0.0", "name": "bench", "type": "bridge", "bridge": "bench0",
        "isGateway": true, "ipam": { "type": "host-local", "ranges": ranges,
            "routes": [{ "dst": "0.0.0.0/0" }] },
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        conf[key.as_str()] = value.clone();
    }
    conf
}

const V4: &[&str] = &["10.77.0.0/16"];
const DUAL: &[&str] = &["10.77.0.0/16", "fd77::/64"];

fn cases() -> Vec<Case> {
    let same = |conf: Value| [conf.clone(), conf];
    let mut cases = vec![Case {
        title: "loopback".to_owned(),
        plugin: "loopback",
        conf: same(json!({ "cniVersion": "1.0.0", "name": "cni-loopback", "type": "loopback" })),
        setup: Setup::Nothing,
        floor: None,
        add_bar: Some(0.30),
        del_bar: None,
    }];
    for setup in [
        Setup::Leases(0),
        Setup::Leases(2_000),
        Setup::Leases(20_000),
        Setup::ForeignWrites(2_000),
        Setup::ForeignWrites(20_000),
    ] {
        let title = match setup {
            Setup::ForeignWrites(leases) => format!("host-local, {leases} leases, after a foreign write"),
            Setup::Leases(leases) => format!("host-local, {leases} leases"),
            _ => continue,
        };
        cases.push(Case {
            title,
            plugin: "host-local",
            conf: same(json!({ "cniVersion": "1.0.0", "name": "bench", "type": "none",
                "ipam": { "type": "host-local", "subnet": "10.64.0.0/12" } })),
            setup,
            floor: None,
            add_bar: (setup == Setup::Leases(20_000)).then_some(0.02),
            del_bar: (setup == Setup::Leases(20_000)).then_some(Bar::Ratio(0.02)),
        });
    }
    let plain = bridge_conf(V4, &json!({}));
    let masq = bridge_conf(V4, &json!({ "ipMasq": true }));
    let masq_nft = bridge_conf(V4, &json!({ "ipMasq": true, "ipMasqBackend": "nftables" }));
    let dual = bridge_conf(DUAL, &json!({ "ipMasq": true }));
    let dual_nft = bridge_conf(DUAL, &json!({ "ipMasq": true, "ipMasqBackend": "nftables" }));
    let bridge = |title: &str, conf: [Value; 2], floor, add_bar, del_bar: f64| Case {
        title: title.to_owned(),
        plugin: "bridge",
        conf,
        setup: Setup::Bridge,
        floor: Some(floor),
        add_bar,
        del_bar: Some(Bar::OverFloor(del_bar)),
    };
    cases.push(bridge("bridge v4", same(plain), &["v4"], Some(0.25), 3.0));
    cases.push(bridge(
        "bridge v4 + ipMasq (reference: iptables)",
        same(masq.clone()),
        &["v4", "nft"],
        Some(0.10),
        8.0,
    ));
    cases.push(bridge(
        "bridge v4 + ipMasq (reference: nftables)",
        [masq, masq_nft],
        &["v4", "nft"],
        None,
        8.0,
    ));
    cases.push(bridge(
        "bridge dual + ipMasq (reference: iptables)",
        same(dual.clone()),
        &["v4", "v6", "nft"],
        Some(0.10),
        8.0,
    ));
    cases.push(bridge(
        "bridge dual + ipMasq (reference: nftables)",
        [dual, dual_nft],
        &["v4", "v6", "nft"],
        None,
        8.0,
    ));
    for (ports, add_bar) in [(1, Some(0.15)), (0, None)] {
        let mappings: Vec<Value> = (0..ports)
            .map(|port| json!({ "hostPort": 8000 + port, "containerPort": 80, "protocol": "tcp" }))
            .collect();
        let conf = json!({ "cniVersion": "1.0.0", "name": "bench", "type": "portmap",
            "capabilities": { "portMappings": true }, "runtimeConfig": { "portMappings": mappings } });
        cases.push(Case {
            title: format!("portmap, {ports} port(s)"),
            plugin: "portmap",
            conf: same(conf),
            setup: Setup::Attachment,
            floor: None,
            add_bar,
            del_bar: None,
        });
    }
    cases
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Ours,
    Reference,
    Floor,
}

struct Bench<'a> {
    sandbox: &'a Sandbox,
    runs: usize,
    ours: PathBuf,
    reference: PathBuf,
    floor: PathBuf,
}

/// One line of the table.
struct Row {
    title: String,
    verb: &'static str,
    ours: f64,
    reference: f64,
    floor: Option<f64>,
    /// Median over the runs of ours less the floor's of the same run.
    over_floor: Option<f64>,
    bars: Vec<Bar>,
    observed: Option<[Observed; 2]>,
}

/// One side's machine: a host namespace, a container's, and a lease directory.
struct World<'a> {
    side: Side,
    dir: PathBuf,
    host: NetNs,
    bench: &'a Bench<'a>,
}

impl Bench<'_> {
    fn measure(&self, case: &Case) -> Result<Vec<Row>> {
        let sides = if case.floor.is_some() {
            vec![Side::Ours, Side::Reference, Side::Floor]
        } else {
            vec![Side::Ours, Side::Reference]
        };
        let worlds: Vec<World<'_>> =
            sides.iter().map(|side| World::new(self, *side, case)).collect::<Result<_>>()?;
        let mut samples = vec![[Vec::new(), Vec::new()]; worlds.len()];
        for run in 0..=self.runs {
            // Who goes first alternates.
            let mut order: Vec<usize> = (0..worlds.len()).collect();
            if run % 2 == 1 {
                order.reverse();
            }
            for verb in [0, 1] {
                for at in &order {
                    let took = worlds[*at].one(case, run, ["ADD", "DEL"][verb])?;
                    // The first pair fills caches.
                    if run > 0 {
                        samples[*at][verb].push(took);
                    }
                }
            }
        }
        let observed = [worlds[0].observe(case)?, worlds[1].observe(case)?];
        worlds.into_iter().try_for_each(World::remove)?;
        let rows = ["ADD", "DEL"].into_iter().enumerate().map(|(verb, name)| {
            let over_floor = samples.get(2).map(|floor| {
                let pairs = samples[0][verb].iter().zip(&floor[verb]);
                median(&mut pairs.map(|(ours, floor)| ours - floor).collect::<Vec<_>>())
            });
            let mut bars: Vec<Bar> = Vec::new();
            match verb {
                0 => bars.extend(case.add_bar.map(Bar::Ratio)),
                _ => bars.extend(case.del_bar),
            }
            if case.title == "bridge v4" && verb == 0 {
                bars.push(Bar::TimesFloor(2.5));
            }
            Row {
                title: case.title.clone(),
                verb: name,
                ours: median(&mut samples[0][verb].clone()),
                reference: median(&mut samples[1][verb].clone()),
                floor: samples.get(2).map(|floor| median(&mut floor[verb].clone())),
                over_floor,
                bars,
                observed: (verb == 0).then_some(observed),
            }
        });
        Ok(rows.collect())
    }

    /// What a call takes that does nothing.
    fn starts(&self) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for (_package, plugin) in ::tests::binaries::CNI_PLUGINS {
            let case = Case {
                title: format!("{plugin}, nothing but the start"),
                plugin,
                conf: [json!({}), json!({})],
                setup: Setup::Nothing,
                floor: None,
                add_bar: None,
                del_bar: None,
            };
            let worlds = [World::new(self, Side::Ours, &case)?, World::new(self, Side::Reference, &case)?];
            let mut samples = [Vec::new(), Vec::new()];
            for run in 0..=self.runs {
                for at in if run % 2 == 0 { [0, 1] } else { [1, 0] } {
                    let (took, _) = worlds[at].plugin(&case, "VERSION", "start", "container", None)?;
                    if run > 0 {
                        samples[at].push(took);
                    }
                }
            }
            worlds.into_iter().try_for_each(World::remove)?;
            let [mut ours, mut reference] = samples;
            rows.push(Row {
                title: case.title,
                verb: "VERSION",
                ours: median(&mut ours),
                reference: median(&mut reference),
                floor: None,
                over_floor: None,
                bars: Vec::new(),
                observed: None,
            });
        }
        Ok(rows)
    }

    /// All at once, until the last has ended.
    fn parallel(&self) -> Result<Row> {
        let conf = bridge_conf(V4, &json!({ "ipMasq": true }));
        let case = Case {
            title: String::new(),
            plugin: "bridge",
            conf: [conf.clone(), conf],
            setup: Setup::Bridge,
            floor: None,
            add_bar: None,
            del_bar: None,
        };
        let mut samples = [Vec::new(), Vec::new()];
        let sides = [Side::Ours, Side::Reference];
        for run in 0..PARALLEL_RUNS {
            // Who goes first alternates.
            for at in if run % 2 == 0 { [0, 1] } else { [1, 0] } {
                let world = World::new(self, sides[at], &case)?;
                samples[at].push(world.all_at_once(&case, run)?);
                world.remove()?;
            }
        }
        let [mut ours, mut reference] = samples;
        Ok(Row {
            title: format!("{PARALLEL} parallel ADDs, v4 + ipMasq (reference: iptables)"),
            verb: "ADD",
            ours: median(&mut ours),
            reference: median(&mut reference),
            floor: None,
            over_floor: None,
            bars: vec![Bar::Ratio(0.15)],
            observed: None,
        })
    }
}

impl<'a> World<'a> {
    fn new(bench: &'a Bench<'a>, side: Side, case: &Case) -> Result<Self> {
        let dir = bench.sandbox.make_dir(&format!("{side:?}"))?;
        let host = netns::create_persistent(&dir.join("host"))?;
        netns::create_persistent(&dir.join("container"))?;
        let world = Self { side, dir, host, bench };
        match case.setup {
            Setup::Nothing => {}
            Setup::Leases(leases) | Setup::ForeignWrites(leases) => world.fill(leases)?,
            Setup::Bridge => {
                netns::create_persistent(&world.dir.join("first"))?;
                match (side, case.floor) {
                    (Side::Floor, Some(words)) => drop(world.floor("prepare", words, "first")?),
                    _ => drop(world.plugin(case, "ADD", "first", "first", None)?),
                }
            }
            Setup::Attachment => {
                let bridge = Case {
                    plugin: "bridge",
                    conf: case.conf.clone().map(|_| bridge_conf(V4, &json!({}))),
                    ..case.clone()
                };
                let (_, result) = world.plugin(&bridge, "ADD", "attached", "container", None)?;
                fs::write(world.dir.join("prev-result"), result.to_string())?;
            }
        }
        Ok(world)
    }

    fn remove(self) -> Result<()> {
        for name in ["host", "container", "first"] {
            netns::remove_persistent(&self.dir.join(name))?;
        }
        fs::remove_dir_all(&self.dir).with_context(|| self.dir.display().to_string())
    }

    /// Leases as they are after a while: one block, the last one given last.
    fn fill(&self, leases: usize) -> Result<()> {
        let network = self.dir.join("leases/bench");
        fs::create_dir_all(&network)?;
        let mut last = String::new();
        for number in 0..leases {
            let number = u32::try_from(number + 2).context("leases")?;
            last = std::net::Ipv4Addr::from(u32::from_be_bytes([10, 64, 0, 0]) + number).to_string();
            fs::write(network.join(&last), format!("lease-{number}\r\neth0"))?;
        }
        if leases > 0 {
            fs::write(network.join("last_reserved_ip.0"), last)?;
        }
        Ok(())
    }

    /// One timed call, ms.
    fn one(&self, case: &Case, run: usize, command: &str) -> Result<f64> {
        if let (Side::Floor, Some(words)) = (self.side, case.floor) {
            return self.floor(if command == "ADD" { "add" } else { "del" }, words, "container");
        }
        if let Setup::ForeignWrites(_) = case.setup {
            let foreign = self.dir.join("leases/bench/10.79.255.1");
            fs::write(&foreign, "foreign\r\neth0")?;
            fs::remove_file(&foreign)?;
        }
        let id = if case.setup == Setup::Attachment { "attached".to_owned() } else { format!("c{run}") };
        Ok(self.plugin(case, command, &id, "container", self.prev_result()?)?.0)
    }

    fn prev_result(&self) -> Result<Option<Value>> {
        match fs::read(self.dir.join("prev-result")) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(_none_in_this_case) => Ok(None),
        }
    }

    fn plugin(
        &self,
        case: &Case,
        command: &str,
        id: &str,
        container: &str,
        prev_result: Option<Value>,
    ) -> Result<(f64, Value)> {
        let (call, stdin) = self.call(case, command, id, container, prev_result);
        let (took, stdout) = self.host.run(move || {
            let_deferred_work_end();
            timed(call, &stdin)
        })??;
        let result = if stdout.is_empty() { Value::Null } else { serde_json::from_slice(&stdout)? };
        Ok((took, result))
    }

    fn call(
        &self,
        case: &Case,
        command: &str,
        id: &str,
        container: &str,
        prev_result: Option<Value>,
    ) -> (Command, Vec<u8>) {
        let (dir, mut conf) = match self.side {
            Side::Ours | Side::Floor => (&self.bench.ours, case.conf[0].clone()),
            Side::Reference => (&self.bench.reference, case.conf[1].clone()),
        };
        if conf.get("ipam").is_some() {
            conf["ipam"]["dataDir"] = json!(self.dir.join("leases"));
        }
        if let Some(prev_result) = prev_result {
            conf["prevResult"] = prev_result;
        }
        let mut call = Command::new(dir.join(case.plugin));
        call.env_clear().env("PATH", PATH);
        call.env("CNI_COMMAND", command).env("CNI_CONTAINERID", id).env("CNI_IFNAME", "eth0");
        call.env("CNI_NETNS", self.dir.join(container)).env("CNI_PATH", dir);
        (call, conf.to_string().into_bytes())
    }

    fn floor(&self, verb: &str, words: &[&str], container: &str) -> Result<f64> {
        let mut call = Command::new(&self.bench.floor);
        call.arg(verb).arg(self.dir.join(container)).args(words).env_clear();
        let timed = move || {
            let_deferred_work_end();
            timed(call, b"")
        };
        Ok(self.host.run(timed)??.0)
    }

    /// The programs and the memory of one more ADD.
    fn observe(&self, case: &Case) -> Result<Observed> {
        let id = if case.setup == Setup::Attachment { "attached" } else { "observed" };
        let (call, stdin) = self.call(case, "ADD", id, "container", self.prev_result()?);
        let observed = self.host.run(move || observe(&call, &stdin))??;
        self.plugin(case, "DEL", id, "container", self.prev_result()?)?;
        Ok(observed)
    }

    fn all_at_once(&self, case: &Case, run: usize) -> Result<f64> {
        let names: Vec<String> = (0..PARALLEL).map(|number| format!("parallel-{number}")).collect();
        for name in &names {
            netns::create_persistent(&self.dir.join(name))?;
        }
        let calls: Vec<_> =
            names.iter().map(|name| self.call(case, "ADD", &format!("{name}-{run}"), name, None)).collect();
        let took = self.host.run(move || -> Result<f64> {
            let began = Instant::now();
            let mut children = Vec::new();
            for (mut call, stdin) in calls {
                children.push(start(&mut call, &stdin)?);
            }
            for child in children {
                let output = child.wait_with_output()?;
                ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
            }
            Ok(began.elapsed().as_secs_f64() * 1000.0)
        })??;
        for name in &names {
            self.plugin(case, "DEL", &format!("{name}-{run}"), name, None)?;
            netns::remove_persistent(&self.dir.join(name))?;
        }
        Ok(took)
    }
}

fn start(call: &mut Command, stdin: &[u8]) -> Result<std::process::Child> {
    let mut child = call
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| Path::new(call.get_program()).display().to_string())?;
    let mut pipe = child.stdin.take().context("a piped stdin")?;
    match pipe.write_all(stdin) {
        // A program may end without having read it.
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(e.into()),
        _ => Ok(child),
    }
}

/// Milliseconds, and stdout. An exit code other than 0 is an error.
fn timed(mut call: Command, stdin: &[u8]) -> Result<(f64, Vec<u8>)> {
    let began = Instant::now();
    let mut child = start(&mut call, stdin)?;
    let mut stdout = Vec::new();
    child.stdout.take().context("a piped stdout")?.read_to_end(&mut stdout)?;
    let status = child.wait()?;
    let took = began.elapsed().as_secs_f64() * 1000.0;
    ensure!(status.success(), "{}: {status}: {}", build::words(&call), String::from_utf8_lossy(&stdout));
    Ok((took, stdout))
}

/// A Markdown table, as docs/BENCHMARKS.md takes it.
fn table(rows: &[Row]) -> String {
    let mut text = "\n| case | verb | ours ms | reference ms | ratio | floor ms | ours - floor ms | bar | programs ours/ref | peak RSS KiB ours/ref |\n|---|---|---|---|---|---|---|---|---|---|".to_owned();
    for row in rows {
        let optional = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.2}"));
        let bars: Vec<String> = row.bars.iter().map(|bar| bar.judged(row)).collect();
        let (programs, rss) = row.observed.map_or((String::new(), String::new()), |[ours, reference]| {
            (
                format!("{}/{}", ours.programs, reference.programs),
                format!("{}/{}", ours.peak_rss, reference.peak_rss),
            )
        });
        text.push_str(&format!(
            "\n| {} | {} | {:.2} | {:.2} | {:.3} | {} | {} | {} | {programs} | {rss} |",
            row.title,
            row.verb,
            row.ours,
            row.reference,
            row.ours / row.reference,
            optional(row.floor),
            optional(row.over_floor),
            bars.join(", "),
        ));
    }
    text
}

impl Bar {
    fn judged(self, row: &Row) -> String {
        let mark = |met: bool| if met { "met" } else { "MISSED" };
        match self {
            Self::Ratio(bar) => format!("ratio <= {bar}: {}", mark(row.ours / row.reference <= bar)),
            Self::OverFloor(bar) => {
                format!("over floor <= {bar} ms: {}", mark(row.over_floor.is_some_and(|over| over <= bar)))
            }
            Self::TimesFloor(bar) => {
                let met = row.floor.is_some_and(|floor| row.ours <= bar * floor);
                format!("<= {bar} x floor: {}", mark(met))
            }
        }
    }
}

fn sizes(bench: &Bench<'_>) -> Result<String> {
    let mut text = "\n| plugin | ours MiB | reference MiB |\n|---|---|---|".to_owned();
    for (_package, plugin) in ::tests::binaries::CNI_PLUGINS {
        let mib = |dir: &Path| -> Result<f64> {
            let bytes = fs::metadata(dir.join(plugin)).with_context(|| plugin.to_owned())?.len();
            #[expect(clippy::cast_precision_loss, reason = "a size of a few MiB")]
            Ok(bytes as f64 / (1024.0 * 1024.0))
        };
        text.push_str(&format!("\n| {plugin} | {:.2} | {:.2} |", mib(&bench.ours)?, mib(&bench.reference)?));
    }
    Ok(text)
}
