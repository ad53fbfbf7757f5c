//! `bench pod-start`: from the moment a manifest is renamed into place to the
//! first statement of the business program, which prints CLOCK_MONOTONIC.

use std::time::{Duration, Instant};

use ::tests::manifests::{self, Pod};
use ::tests::{Network, Node, NodeOptions, Sandbox};
use anyhow::{Context, Result, bail, ensure};
use trace::monotonic_ns;
use xtask::build::{products, require_root};
use xtask::progress::{part, say, step};

use super::pod_watch::PodWatch;
use super::scene::on_new_disk;
use super::statistics::median;

/// How long the node may take to come to rest before a pod is measured, and how long it is looked at.
const REST: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(100);

/// What a pod waits for before it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    NoVolume,
    StagedVolume,
    FirstUse,
}

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::NoVolume, Self::StagedVolume, Self::FirstUse];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::NoVolume => "(a) no volume",
            Self::StagedVolume => "(b) volume already staged on the node",
            Self::FirstUse => "(c) first use of a claim",
        }
    }

    /// What the figure is to reach, in ms.
    fn to_reach(self) -> u32 {
        match self {
            Self::NoVolume => 40,
            Self::StagedVolume => 60,
            Self::FirstUse => 150,
        }
    }
}

pub(super) fn run(runs: usize) -> Result<()> {
    require_root("bench")?;
    ensure!(runs > 0, "--runs 0 measures nothing");
    part("build the static binaries", products)?;
    let sandbox = Sandbox::enter(Network::Own)?;
    let options = on_new_disk(&sandbox, NodeOptions::default())?;
    let node = step("start hawser-csi and hawser-kubelet", || Node::start(&sandbox, options))?;
    node.put_class()?;
    let mut rows = Vec::new();
    for kind in Kind::ALL {
        rows.push((kind, step(kind.title(), || measure(&node, kind, runs))?));
    }
    node.stop()?;
    say(&table(&rows));
    Ok(())
}

/// Milliseconds of each run, sorted; a first run that fills caches is not counted.
pub(super) fn measure(node: &Node<'_>, kind: Kind, runs: usize) -> Result<Vec<f64>> {
    if kind == Kind::StagedVolume {
        node.put_manifest(
            "holder.yaml",
            &with_claim(&Pod::new("holder", &["sleep", "forever"]).with_claim("held")),
        )?;
        node.wait_for_phase("holder", "Running")?;
    }
    let watch = PodWatch::start(node)?;
    let mut samples = Vec::new();
    for run in 0..=runs {
        let sample = one_run(node, &watch, kind, run)?;
        if run > 0 {
            samples.push(sample);
        }
    }
    if kind == Kind::StagedVolume {
        remove(node, "holder", Some("held"))?;
    }
    samples.sort_by(f64::total_cmp);
    Ok(samples)
}

fn one_run(node: &Node<'_>, watch: &PodWatch, kind: Kind, run: usize) -> Result<f64> {
    let name = format!("run-{run}");
    let pod = Pod::new(&name, &["monotonic"]);
    let manifest = match kind {
        Kind::NoVolume => pod.yaml(),
        Kind::StagedVolume => pod.with_claim("held").yaml(),
        Kind::FirstUse => with_claim(&pod.with_claim(&name)),
    };
    rest()?;
    let start_ns = monotonic_ns();
    node.put_manifest(&format!("{name}.yaml"), &manifest)?;
    watch.wait_until_completed(&name)?;
    let log = node.logs(&name)?;
    let first_statement_ns: u64 =
        log.trim().parse().with_context(|| format!("the log of {name}: {log:?}"))?;
    remove(node, &name, (kind == Kind::FirstUse).then_some(name.as_str()))?;
    let took_ns = first_statement_ns.checked_sub(start_ns).context("the program ran before its manifest")?;
    Ok(Duration::from_nanos(took_ns).as_secs_f64() * 1000.0)
}

/// Waits for a look in which the processors do nothing, since the kernel takes the last pod's network namespace away
/// in the background. On a machine that does more than this bench it waits for [`REST`].
#[expect(clippy::disallowed_methods, reason = "a share of the processors needs a span of time")]
fn rest() -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < REST {
        let before = busy_ticks()?;
        std::thread::sleep(LOOK);
        if busy_ticks()? - before <= 1 {
            break;
        }
    }
    Ok(())
}

/// What all processors have done, without idling: proc(5), /proc/stat.
fn busy_ticks() -> Result<u64> {
    const STAT: &str = "/proc/stat";
    let text = std::fs::read_to_string(STAT).context(STAT)?;
    let line = text.lines().next().context("empty").context(STAT)?;
    let ticks: Vec<u64> = line.split_whitespace().skip(1).map_while(|word| word.parse().ok()).collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = ticks[..] else {
        bail!("{STAT}: {line:?}");
    };
    Ok(user + nice + system + irq + softirq)
}

/// The pod and the claim that it names, in one file.
fn with_claim(pod: &Pod<'_>) -> String {
    format!("{}---\n{}", manifests::claim(pod.claim.unwrap_or_default(), CLAIM_SIZE), pod.yaml())
}

fn remove(node: &Node<'_>, name: &str, claim: Option<&str>) -> Result<()> {
    node.remove_manifest(&format!("{name}.yaml"))?;
    // One client: a list of all pods for each look would be read just before the next start.
    node.client(&["wait", "--for=delete", &format!("pod/{name}"), "--timeout=60s"])?;
    claim.map_or(Ok(()), |claim| node.delete("pvc", claim))
}

/// Small, so that a thousand fit the pool.
const CLAIM_SIZE: &str = "64Mi";

/// A Markdown table, as docs/BENCHMARKS.md takes it.
fn table(rows: &[(Kind, Vec<f64>)]) -> String {
    let mut text =
        "\n| manifest renamed into place -> first statement | runs | median ms | min..max ms | to reach ms |
|---|---|---|---|---|"
            .to_owned();
    for (kind, samples) in rows {
        let (min, max) = (samples.first().copied().unwrap_or(0.0), samples.last().copied().unwrap_or(0.0));
        let row = format!(
            "\n| {} | {} | {:.1} | {min:.1}..{max:.1} | {} |",
            kind.title(),
            samples.len(),
            median(&mut samples.clone()),
            kind.to_reach()
        );
        text.push_str(&row);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_of_figures_for_each_kind() {
        let text = table(&[(Kind::NoVolume, vec![10.0, 20.0, 90.0])]);
        assert!(text.ends_with("\n| (a) no volume | 3 | 20.0 | 10.0..90.0 | 40 |"), "{text}");
    }
}
