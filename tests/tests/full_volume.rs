//! PostgreSQL in a volume that becomes full, and is expanded while a client waits: the client goes on, no
//! committed row is lost, and pg_checksums finds nothing.
//!
//! The server may end meanwhile. Where the write-ahead log cannot grow, PostgreSQL panics and recovers,
//! and where the recovery finds no space either, the server ends. Then it is started again, as kubelet
//! starts a container.

#![expect(clippy::unwrap_used, reason = "a test's helpers are the test: what fails in them fails it")]
#![expect(clippy::print_stderr, reason = "how often the server was refused is the report")]

use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use proto::csi::{CapacityRange, ControllerExpandVolumeRequest, NodeExpandVolumeRequest};
use tests::csi::scene::{Caller, Flags, Scene, create_request, text};
use tests::csi::snapshots::{of_size, with};
use tests::loop_device::{FileSystem, LoopMount};
use tests::postgres::{Cluster, Programs};
use tests::{Sandbox, eventually, subvolume};

const MI: i64 = 1 << 20;
const POOL_BYTES: u64 = 1 << 30;
/// An empty cluster has 25 MiB.
const SMALL: i64 = 80 * MI;
const LARGE: i64 = 288 * MI;
const POD: &str = "database";

/// Segments of 1 MiB, so that the log grows often.
const INITDB: [&str; 2] = ["--wal-segsize=1", "--no-sync"];
/// Without autovacuum, what a refused transaction has left in a table takes space until the end.
const SETTINGS: [&str; 4] =
    ["shared_buffers=16MB", "min_wal_size=2MB", "max_wal_size=16MB", "autovacuum=off"];
/// Rows of one transaction, each a little less than 2 KiB.
const ROWS: u64 = 256;
const CONTENT: &str = "repeat(md5(batch || '-' || number), 60)";
/// Transactions that fit into the small volume at the least, and that follow its expansion.
const FIT: u64 = 10;
const MORE: u64 = 40;
/// More than what fits into the large volume.
const MOST: u64 = 600;

/// What the application does after a refusal.
const RETRY: Duration = Duration::from_millis(100);
/// In a row: then the client waits for space.
const REFUSALS: u64 = 8;
/// Before a server that has ended is started again.
const BACK_OFF: Duration = Duration::from_millis(500);
/// For each phase, and for one program.
const TIMEOUT: Duration = Duration::from_secs(120);

const ENOSPC: &str = "No space left on device";
const EDQUOT: &str = "Disk quota exceeded";
/// PostgreSQL's words for a write that was refused in part.
const SHORT: &str = "wrote only ";
/// What a server answers and logs while it recovers, and psql while there is none.
const RECOVERING: [&str; 7] = [
    "the database system is starting up",
    "the database system is in recovery mode",
    "the database system is not yet accepting connections",
    "the database system is shutting down",
    "server closed the connection unexpectedly",
    "terminating connection because of crash of another server process",
    "Is the server running locally and accepting connections on that socket?",
];

#[test]
fn postgres_goes_on_in_an_expanded_volume_whose_data_passes_through_to_btrfs() {
    let sandbox = Sandbox::new();
    let pool = LoopMount::new(&sandbox, "pool", FileSystem::Btrfs, POOL_BYTES).unwrap();
    subvolume::enable_quotas(pool.dir()).unwrap();
    let parameters = [("dataPath", "passthrough"), ("capacity", "kernel")];
    // The daemon creates and truncates: what the quota refuses there is ENOSPC.
    goes_on(sandbox, &parameters, &[EDQUOT, ENOSPC, SHORT]);
}

#[test]
fn postgres_goes_on_in_an_expanded_volume_whose_daemon_writes_to_ext4() {
    let sandbox = Sandbox::new();
    LoopMount::new(&sandbox, "pool", FileSystem::Ext4, POOL_BYTES).unwrap();
    goes_on(sandbox, &[("dataPath", "daemon"), ("capacity", "daemon")], &[ENOSPC, SHORT]);
}

fn goes_on(sandbox: Sandbox, parameters: &[(&str, &str)], refusals: &'static [&'static str]) {
    // A commit of the pool's file system may take longer than the guard waits.
    sandbox.switch_fuse_guard_off();
    let scene = Scene::start_in(sandbox, Flags::process_with_keeper());
    let caller = scene.caller();
    let request = with(of_size(create_request("pvc-1"), SMALL, 0), parameters);
    let volume = caller.create(request).unwrap().volume_id;
    caller.stage(&volume).unwrap();
    caller.publish(&volume, POD).unwrap();

    let outside = scene.sandbox.make_dir("postgres").unwrap();
    let data = caller.target_path(POD).join("cluster");
    let cluster = Arc::new(Cluster::create(Programs::find().unwrap(), data, &outside).unwrap());
    let mut initdb = cluster.initdb();
    initdb.args(INITDB);
    run(initdb);
    let server = cluster.start(&SETTINGS, TIMEOUT).unwrap();
    run(cluster.psql("CREATE TABLE kept (batch int, number int, content text, PRIMARY KEY (batch, number))"));
    let client = Client::start(&cluster, refusals);
    let mut database = Database { cluster, server, ended_at: None, ends: 0, client, refusals };

    database.run_until("the client waits for space", |client| {
        client.has_ended() || client.refused.load(SeqCst) >= REFUSALS
    });
    assert!(!database.client.has_ended(), "{:?}", database.client.end());
    let fitted = database.client.committed.load(SeqCst);
    assert!(fitted >= FIT, "{fitted} transactions fit");
    let full = database.faults();
    assert!(full.iter().any(|line| is_any(line, &[EDQUOT, ENOSPC, SHORT])), "no lack of space in {full:?}");
    let used = caller.stats(&volume, &caller.target_path(POD)).unwrap().usage[0].used;
    assert!((SMALL / 4 * 3..=SMALL).contains(&used), "{used} bytes used: {full:?}");
    expand(&caller, &volume);
    database.client.target.store(fitted + MORE, SeqCst);
    database.run_until("the client goes on", Client::has_ended);

    database.verify(fitted);
    caller.take_down(&volume, &[POD]).unwrap();
    std::fs::remove_dir_all(outside).unwrap();
    scene.assert_nothing_left();
    scene.end_keeper();
}

fn expand(caller: &Caller, volume_id: &str) {
    let capacity_range = Some(CapacityRange { required_bytes: LARGE, limit_bytes: 0 });
    let request =
        ControllerExpandVolumeRequest { volume_id: volume_id.into(), capacity_range, ..Default::default() };
    let grown = caller.controller(async |mut c| c.controller_expand_volume(request).await).unwrap();
    assert_eq!(grown.into_inner().capacity_bytes, LARGE);
    let path = caller.target_path(POD);
    let request = NodeExpandVolumeRequest {
        volume_id: volume_id.into(),
        volume_path: text(&path),
        capacity_range,
        ..Default::default()
    };
    let grown = caller.node(async |mut n| n.node_expand_volume(request).await).unwrap();
    assert_eq!(grown.into_inner().capacity_bytes, LARGE);
    assert_eq!(caller.stats(volume_id, &path).unwrap().usage[0].total, LARGE);
}

/// The server that was started last, and its client.
struct Database {
    cluster: Arc<Cluster>,
    server: Child,
    /// Since when there is no server.
    ended_at: Option<Instant>,
    /// How often the server ended.
    ends: u64,
    client: Client,
    refusals: &'static [&'static str],
}

impl Database {
    fn run_until(&mut self, what: &str, mut is_so: impl FnMut(&Client) -> bool) {
        let begun = Instant::now();
        while !is_so(&self.client) {
            assert!(begun.elapsed() < TIMEOUT, "{what}: not within {TIMEOUT:?}: {}", self.explain());
            self.start_again_if_ended();
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    fn start_again_if_ended(&mut self) {
        match self.ended_at {
            Some(ended_at) if ended_at.elapsed() >= BACK_OFF => {
                self.server = self.cluster.spawn(&SETTINGS).unwrap();
                self.ended_at = None;
            }
            None if self.server.try_wait().unwrap().is_some() => {
                self.ended_at = Some(Instant::now());
                self.ends += 1;
            }
            _ => {}
        }
    }

    fn explain(&self) -> String {
        let client = &self.client;
        format!(
            "{} committed, then {} refusals; the server ended {} times; its log:\n{}",
            client.committed.load(SeqCst),
            client.refused.load(SeqCst),
            self.ends,
            self.cluster.log()
        )
    }

    /// Lines of the server's log about errors.
    fn faults(&self) -> Vec<String> {
        let log = self.cluster.log();
        log.lines().filter(|line| is_any(line, &["ERROR:", "FATAL:", "PANIC:"])).map(str::to_owned).collect()
    }

    /// Everything that was committed is there, and nothing else; blocks and indexes are right; and the
    /// server had no fault but those of a full volume.
    fn verify(mut self, fitted: u64) {
        let committed = self.client.end().unwrap();
        assert_eq!(committed, fitted + MORE);
        let kept = format!(
            "SELECT count(*), count(*) FILTER (WHERE content = {CONTENT}), count(DISTINCT batch), min(batch), \
             max(batch), max(number) FROM kept"
        );
        let (rows, last) = (committed * ROWS, committed - 1);
        assert_eq!(
            run(self.cluster.psql(&kept)).trim(),
            format!("{rows}|{rows}|{committed}|0|{last}|{ROWS}")
        );
        let mut amcheck = self.cluster.command("pg_amcheck");
        amcheck.args(["--install-missing", "--heapallindexed", "--database=postgres"]);
        run(amcheck);
        self.cluster.stop(&mut self.server, TIMEOUT).unwrap();
        run(self.cluster.pg_checksums());

        let faults = self.faults();
        let is_explained = |line: &&String| is_any(line, self.refusals) || is_any(line, &RECOVERING);
        let other: Vec<&String> = faults.iter().filter(|line| !is_explained(line)).collect();
        assert!(other.is_empty(), "{other:?} in\n{}", self.cluster.log());
        let count = |word: &str| faults.iter().filter(|line| line.contains(word)).count();
        eprintln!(
            "{fitted} transactions fitted, {committed} at the end; {} times ERROR, {} FATAL, {} PANIC; {} ends \
             of the server; first: {}",
            count("ERROR:"),
            count("FATAL:"),
            count("PANIC:"),
            self.ends,
            faults.iter().find(|line| is_any(line, &[EDQUOT, ENOSPC, SHORT])).unwrap()
        );
    }
}

/// Inserts batch after batch, each in a transaction of its own, and again until it is committed.
struct Client {
    committed: Arc<AtomicU64>,
    /// Since the last commit.
    refused: Arc<AtomicU64>,
    /// Ends with so many batches.
    target: Arc<AtomicU64>,
    thread: Option<JoinHandle<Result<u64>>>,
}

impl Client {
    fn start(cluster: &Arc<Cluster>, refusals: &'static [&'static str]) -> Self {
        let [committed, refused, target] = [0, 0, MOST].map(|number| Arc::new(AtomicU64::new(number)));
        let shared = (committed.clone(), refused.clone(), target.clone(), cluster.clone());
        let thread = std::thread::spawn(move || {
            let (committed, refused, target, cluster) = shared;
            let mut batch = 0;
            while batch < target.load(SeqCst) {
                let output = output(cluster.psql(&insert(batch)))?;
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                if output.status.success() {
                    batch += 1;
                    committed.store(batch, SeqCst);
                    refused.store(0, SeqCst);
                } else {
                    ensure!(is_any(&said, refusals) || is_any(&said, &RECOVERING), "batch {batch}: {said}");
                    refused.fetch_add(1, SeqCst);
                    std::thread::park_timeout(RETRY);
                }
            }
            ensure!(batch < MOST, "the volume takes {batch} batches");
            Ok(batch)
        });
        Self { committed, refused, target, thread: Some(thread) }
    }

    fn has_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// How many batches it has committed.
    fn end(&mut self) -> Result<u64> {
        self.thread.take().unwrap().join().unwrap()
    }
}

/// A client that lost its connection does not know whether its rows were committed.
fn insert(batch: u64) -> String {
    format!(
        "INSERT INTO kept SELECT batch, number, {CONTENT} FROM (SELECT {batch} AS batch) AS this, \
         generate_series(1, {ROWS}) AS number ON CONFLICT DO NOTHING"
    )
}

fn is_any(text: &str, parts: &[&str]) -> bool {
    parts.iter().any(|part| text.contains(part))
}

/// A program's end, within a time.
fn output(mut command: Command) -> Result<Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {command:?}"))?;
    let ended = eventually("it ends", TIMEOUT, || child.try_wait()?.context("it runs"));
    if ended.is_err() {
        child.kill().context("kill")?;
    }
    // Short: a pipe takes all of it.
    let output = child.wait_with_output().context("its output")?;
    ended.with_context(|| format!("{command:?}: {output:?}"))?;
    Ok(output)
}

/// What a program prints, which must succeed.
#[track_caller]
fn run(command: Command) -> String {
    let line = format!("{command:?}");
    let output = output(command).unwrap();
    assert!(output.status.success(), "{line}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}
