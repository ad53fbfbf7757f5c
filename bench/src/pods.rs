//! `bench pods`: the life of pods under `hawser-kubelet`, from their manifests to their deletion, alone and among
//! hundreds.

mod crowd;
mod exec;
mod image;

use std::time::Instant;

use ::tests::manifests::Pod;
use ::tests::{Keeper, Node, NodeOptions, Sandbox};
use anyhow::{Result, ensure};
use xtask::build::{products, require_root};
use xtask::foreign::debian_program;
use xtask::progress::{part, step};

use super::pod_start::{self, Kind};
use super::rows::{Bar, Row, milliseconds};
use super::scene::{self, Scene};

/// Fewer say nothing about a median.
const RUNS_MIN: usize = 10;

/// `only`: of the scenes whose name contains it.
pub(super) fn run(runs: usize, only: Option<&str>) -> Result<()> {
    require_root("bench")?;
    ensure!(runs >= RUNS_MIN, "--runs {runs}: at least {RUNS_MIN} are needed");
    let all: [(&str, Scene); 5] = [
        ("start", start),
        ("deletion", deletion),
        ("exec", exec::scene),
        ("many pods", crowd::scene),
        ("image", image::scene),
    ];
    let wanted = scene::named(&all, only)?;
    part("build the static binaries", products)?;
    debian_program("crun", "crun")?;
    debian_program("containerd", "containerd")?;
    debian_program("docker-registry", "docker-registry")?;
    scene::run(&wanted, runs)
}

/// From the manifest's rename to the first statement of the pod's program.
fn start(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    // As the driver has them by default.
    let options = NodeOptions { keeper: Keeper::Process, warm_daemons: 1, ..NodeOptions::default() };
    let options = scene::on_new_disk(sandbox, options)?;
    let node = step("start hawser-csi and hawser-kubelet", || Node::start(sandbox, options))?;
    node.put_class()?;
    let mut rows = Vec::new();
    for (kind, most) in Kind::ALL.into_iter().zip([15.0, 20.0, 35.0]) {
        let samples = step(kind.title(), || pod_start::measure(&node, kind, runs))?;
        let title = format!("manifest to first statement: {}", kind.title());
        rows.push(Row::new(title, "ms", samples, Some(Bar::AtMost(most))));
    }
    node.stop()?;
    Ok(rows)
}

/// `hawser-kubelet delete` of a pod whose program has ended: from the start of that command to its end.
fn deletion(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let options = scene::on_new_disk(sandbox, NodeOptions::default())?;
    let node = step("start hawser-kubelet", || Node::start(sandbox, options))?;
    let samples = step("delete pods whose program has ended", || {
        let mut samples = Vec::new();
        for run in 0..=runs {
            let name = format!("ended-{run}");
            let file = sandbox.path("pod.yaml");
            std::fs::write(&file, Pod::new(&name, &["exit", "0"]).yaml())?;
            node.client(&["apply", "-f", &file.display().to_string()])?;
            node.wait_for_phase(&name, "Succeeded")?;
            let started = Instant::now();
            node.client(&["delete", "pod", &name])?;
            if run > 0 {
                samples.push(milliseconds(started.elapsed()));
            }
        }
        Ok(samples)
    })?;
    node.stop()?;
    Ok(vec![Row::new("deletion by client, its program has ended", "ms", samples, Some(Bar::AtMost(40.0)))])
}
