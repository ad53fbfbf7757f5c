//! `demo --chaos`: a pod streams blocks and keeps a database in a volume, while the volume's mount pod,
//! the keeper and the driver are killed. Each pause that the pod saw is shown.

use std::fs;
use std::thread;
use std::time::Duration;

use ::tests::examples::{self, CHAOS_IMAGE};
use ::tests::image::{layer_of_host_programs, write_archive_of_layer};
use ::tests::node::{TIMEOUT, has_connection};
use ::tests::{Node, Sandbox, binaries, eventually};
use anyhow::{Context, Result, ensure};
use trace::monotonic_ns;
use xtask::foreign::{debian_program, libraries};
use xtask::progress::{say, step};

/// Steps of the pod between two kills.
const PAUSE: Duration = Duration::from_millis(500);
/// After a kill: until the pod's next reports have what it saw.
const SEEN: Duration = Duration::from_millis(300);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    MountPod,
    Keeper,
    Driver,
    DriverAndMountPod,
}

const KILLS: [Victim; 10] = [
    Victim::MountPod,
    Victim::Keeper,
    Victim::Driver,
    Victim::MountPod,
    Victim::DriverAndMountPod,
    Victim::Keeper,
    Victim::MountPod,
    Victim::Driver,
    Victim::DriverAndMountPod,
    Victim::MountPod,
];

impl Victim {
    fn title(self) -> &'static str {
        match self {
            Self::MountPod => "the volume's daemon",
            Self::Keeper => "the keeper",
            Self::Driver => "the driver",
            Self::DriverAndMountPod => "the driver and the daemon",
        }
    }
}

/// Makes the image of the pod: the programs, and the libraries that sqlite3 loads.
pub(super) fn write_image(sandbox: &Sandbox) -> Result<()> {
    let sqlite = debian_program("sqlite3", "sqlite3")?;
    let demo_app = binaries::find("demo-app")?;
    let programs = [(&*demo_app, "demo-app"), (&*sqlite, "sqlite3")];
    let layer = layer_of_host_programs(&programs, &libraries(&sqlite)?)?;
    write_archive_of_layer(CHAOS_IMAGE, &layer, "demo-app", &[], &sandbox.path("i/chaos.tar"))
}

/// The pod's longest steps, in milliseconds.
#[derive(Debug)]
struct Seen {
    stream: f64,
    database: f64,
}

pub(super) fn kill_again_and_again(node: &mut Node<'_>) -> Result<()> {
    step("examples/chaos/pod.yaml: it streams blocks and keeps a database in the volume", || {
        node.put_manifest("pod-chaos.yaml", &examples::read("chaos/pod.yaml")?)?;
        node.wait_for_phase("chaos", "Running")?;
        eventually("it reports steps of both", TIMEOUT, || {
            let last = reports(node)?.last().copied().context("no report")?;
            ensure!(last.stream_steps > 0 && last.database_steps > 0, "{last:?}");
            Ok(())
        })
        .with_context(|| node.outputs())
    })?;
    step("the driver starts anew: a daemon waits for the next takeover", || node.set_warm_daemons(1))?;
    let before = without_a_kill(node).with_context(|| node.outputs())?;
    say(&format!(
        "without a kill:  {:26} the stream waited {:7.1} ms, the database {:7.1} ms",
        "the longest steps", before.stream, before.database
    ));
    for (number, victim) in KILLS.into_iter().enumerate() {
        let Seen { stream, database } = kill(node, victim).with_context(|| node.outputs())?;
        let (number, of, what) = (number + 1, KILLS.len(), victim.title());
        say(&format!(
            "kill {number:2} of {of}: {what:26} the stream waited {stream:7.1} ms, the database {database:7.1} ms"
        ));
    }
    let verified = step("the pod is asked to stop: it verifies its blocks and its database", || {
        let stop = node.volume_path("chaos")?.join("stop");
        fs::write(&stop, []).with_context(|| stop.display().to_string())?;
        node.wait_for_phase("chaos", "Succeeded")?;
        let log = node.logs("chaos")?;
        let verified: Vec<String> =
            log.lines().filter(|line| line.starts_with("verified")).map(str::to_owned).collect();
        ensure!(verified.len() == 2, "its log: {log}");
        Ok(verified)
    })?;
    for line in verified {
        say(&format!("         {line}"));
    }
    step("the pod's file is removed: the volume is unmounted", || {
        node.remove_manifest("pod-chaos.yaml")?;
        node.wait_for_no_pod("chaos")
    })?;
    step("the driver starts anew: no daemon waits", || node.set_warm_daemons(0))
}

fn without_a_kill(node: &mut Node<'_>) -> Result<Seen> {
    wait_until_whole(node)?;
    let since_ns = monotonic_ns();
    thread::park_timeout(PAUSE + SEEN);
    seen(node, since_ns)
}

fn kill(node: &mut Node<'_>, victim: Victim) -> Result<Seen> {
    wait_until_whole(node)?;
    thread::park_timeout(PAUSE);
    let killed_ns = monotonic_ns();
    match victim {
        Victim::MountPod => node.kill(daemon(node)?)?,
        Victim::Keeper => node.kill(keeper(node)?)?,
        Victim::Driver => {
            node.driver()?.kill()?;
            node.start_driver()?;
        }
        Victim::DriverAndMountPod => {
            let daemon = daemon(node)?;
            node.driver()?.kill()?;
            node.kill(daemon)?;
            node.start_driver()?;
        }
    }
    wait_until_whole(node)?;
    thread::park_timeout(SEEN);
    seen(node, killed_ns)
}

fn seen(node: &Node<'_>, since_ns: u64) -> Result<Seen> {
    let mut seen = Seen { stream: 0.0, database: 0.0 };
    for report in reports(node)?.into_iter().filter(|report| report.at_ns > since_ns) {
        seen.stream = seen.stream.max(report.stream_longest_ms);
        seen.database = seen.database.max(report.database_longest_ms);
    }
    Ok(seen)
}

/// Until the volume is served, the keeper holds it, the driver serves, and a daemon waits for the next
/// takeover.
fn wait_until_whole(node: &mut Node<'_>) -> Result<()> {
    eventually("the volume is served and held", TIMEOUT, || {
        ensure!(has_connection(keeper(node)?), "the keeper does not hold it");
        daemon(node)?;
        ensure!(!node.waiting_daemons()?.is_empty(), "no daemon waits for a volume");
        let pod = node.get("pod", "chaos")?;
        ensure!(pod["status"]["phase"] == "Running", "{}", pod["status"]);
        Ok(())
    })?;
    node.wait_until_registered()
}

fn daemon(node: &Node<'_>) -> Result<i32> {
    let daemons = node.serving_daemons()?;
    let [daemon] = daemons[..] else { anyhow::bail!("one daemon serves: {daemons:?}") };
    Ok(daemon)
}

fn keeper(node: &Node<'_>) -> Result<i32> {
    let keepers = node.processes("hawser-keeper")?;
    let [keeper] = keepers[..] else { anyhow::bail!("one keeper: {keepers:?}") };
    Ok(keeper)
}

/// A line of the pod (`demo-app chaos`).
#[derive(Debug, Clone, Copy)]
struct Report {
    at_ns: u64,
    stream_steps: u64,
    stream_longest_ms: f64,
    database_steps: u64,
    database_longest_ms: f64,
}

fn reports(node: &Node<'_>) -> Result<Vec<Report>> {
    let log = node.logs("chaos")?;
    let reports = log.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    // The last line may still be written.
    Ok(reports.filter_map(Report::parse).collect())
}

impl Report {
    fn parse(line: &str) -> Option<Self> {
        let numbers: Option<Vec<u64>> = line.split(' ').map(|number| number.parse().ok()).collect();
        let [at_ns, stream_steps, stream_us, database_steps, database_us] = numbers?[..] else { return None };
        let ms = |us: u64| Duration::from_micros(us).as_secs_f64() * 1000.0;
        let (stream_longest_ms, database_longest_ms) = (ms(stream_us), ms(database_us));
        Some(Self { at_ns, stream_steps, stream_longest_ms, database_steps, database_longest_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_five_numbers() {
        let report = Report::parse("4711 12 1500 7 20000").unwrap();
        assert_eq!((report.at_ns, report.stream_steps, report.database_steps), (4711, 12, 7));
        assert_eq!(format!("{} {}", report.stream_longest_ms, report.database_longest_ms), "1.5 20");
        assert!(Report::parse("4711 12 1500 7").is_none());
        assert!(Report::parse("verified 7 blocks").is_none());
    }
}
