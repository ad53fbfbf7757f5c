//! Hundreds of pods on one node: how fast they come, and what they cost when they do nothing.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ::tests::manifests::Pod;
use ::tests::{Node, NodeOptions, Sandbox, eventually, examples};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use xtask::progress::step;

use crate::pod_start::{self, Kind};
use crate::rows::{Bar, Row, resident};
use crate::scene::on_new_disk;
use crate::statistics::median;

const FEW: usize = 30;
const HUNDRED: usize = 100;
const MANY: usize = 300;
/// So often there are many. Short turns, since the speed of a machine changes within minutes.
const TURNS: usize = 6;
/// Above `MANY`, with room for the pods that are measured.
const MAX_PODS: usize = 400;
/// Has that many addresses.
const SUBNET: &str = "10.244.4.0/22";
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long idle pods are watched: three periods of the kubelet's slowest loop.
const IDLE: Duration = Duration::from_secs(30);
/// Of /proc/PID/stat, fields 14 and 15: proc(5).
const TICKS_A_SECOND: f64 = 100.0;

pub(super) fn scene(sandbox: &Sandbox, runs: usize) -> Result<Vec<Row>> {
    let flags = vec!["--max-pods".to_owned(), MAX_PODS.to_string()];
    let options = on_new_disk(sandbox, NodeOptions { kubelet_flags: flags, ..NodeOptions::default() })?;
    let mut node = step("start hawser-kubelet", || {
        let mut node = Node::prepare(sandbox, options)?;
        node.write_conflist(&wide_conflist(node.disk())?)?;
        node.start_kubelet()?;
        Ok(node)
    })?;
    let took = step(&format!("{HUNDRED} pods, from empty to ready"), || {
        let took = start_idle(&node, "hundred", 0..HUNDRED)?;
        node.remove_all_manifests()?;
        node.wait_for_no_pods()?;
        Ok(took)
    })?;
    let mut rows = vec![Row::new(
        format!("{HUNDRED} pods from empty to ready"),
        "a second",
        vec![HUNDRED as f64 / took.as_secs_f64()],
        Some(Bar::AtLeast(40.0)),
    )];
    rows.extend(few_and_many(sandbox, &mut node, runs)?);
    node.stop()?;
    Ok(rows)
}

/// What the next pod of the node takes beside few others and beside many, in turn, `runs / 2` times in each turn; and
/// what many cost.
fn few_and_many(sandbox: &Sandbox, node: &mut Node<'_>, runs: usize) -> Result<Vec<Row>> {
    let title = |number: usize| format!("pod {number} of the node: manifest to first statement");
    let next = |node: &mut Node<'_>, number: usize| {
        step(&title(number), || {
            settle(node.kubelet()?.pid().as_raw())?;
            pod_start::measure(node, Kind::NoVolume, runs.div_ceil(2))
        })
    };
    start_idle(node, "few", 0..FEW - 1)?;
    let (mut few, mut many, mut away) = (next(node, FEW)?, Vec::new(), Vec::new());
    let mut idle_rows = Vec::new();
    for turn in 0..TURNS {
        start_idle(node, "rest", FEW - 1..MANY - 1)?;
        many.extend(next(node, MANY)?);
        if turn == 0 {
            start_idle(node, "last", MANY - 1..MANY)?;
            idle_rows = step(&format!("{MANY} idle pods"), || idle(sandbox, node))?;
            node.remove_manifest("last.yaml")?;
            node.wait_for_no_pod(&idle_name(MANY - 1))?;
        }
        away.push(step("most away again", || remove_rest(node))?);
        few.extend(next(node, FEW)?);
    }
    let ratio = median(&mut many.clone()) / median(&mut few.clone());
    let mut rows = vec![
        Row::new(title(FEW), "ms", few, None),
        Row::new(title(MANY), "ms", many, None),
        Row::new(format!("pod {MANY} beside pod {FEW}"), "ratio", vec![ratio], Some(Bar::AtMost(1.1))),
    ];
    rows.extend(idle_rows);
    rows.push(Row::new(format!("{} pods away again", MANY - FEW), "a second", away, None));
    Ok(rows)
}

/// Returns how many pods went in a second.
fn remove_rest(node: &Node<'_>) -> Result<f64> {
    let started = Instant::now();
    node.remove_manifest("rest.yaml")?;
    eventually("the rest is gone", TIMEOUT, || {
        let present = node.list("pods")?.len();
        ensure!(present < FEW, "{present} pods are left");
        Ok(())
    })?;
    Ok((MANY - FEW) as f64 / started.elapsed().as_secs_f64())
}

fn idle_name(number: usize) -> String {
    format!("idle-{number}")
}

/// The example's, with a range of addresses for more pods.
fn wide_conflist(disk: &Path) -> Result<String> {
    let text = examples::conflist(&disk.join("lease"))?;
    let mut conflist: Value = serde_json::from_str(&text).context("the conflist")?;
    let ranges = conflist.pointer_mut("/plugins/0/ipam/ranges/0").context("a range of the conflist")?;
    *ranges = json!([{ "subnet": SUBNET }]);
    Ok(conflist.to_string())
}

/// Pods whose program sleeps, described in one file. Returns how long it took until all were ready.
fn start_idle(node: &Node<'_>, file: &str, numbers: std::ops::Range<usize>) -> Result<Duration> {
    let names: Vec<String> = numbers.map(idle_name).collect();
    let documents: Vec<String> =
        names.iter().map(|name| Pod::new(name, &["sleep", "forever"]).yaml()).collect();
    let started = Instant::now();
    node.put_manifest(&format!("{file}.yaml"), &documents.join("---\n"))?;
    eventually("all are ready", TIMEOUT, || {
        let table = node.client(&["get", "pods"])?;
        let is_ready = |line: &&str| {
            let mut words = line.split_whitespace();
            names.iter().any(|name| words.clone().next() == Some(name)) && words.nth(1) == Some("1/1")
        };
        let ready = table.lines().filter(is_ready).count();
        ensure!(ready == names.len(), "{ready} of {} pods are ready\n{table}", names.len());
        Ok(())
    })?;
    Ok(started.elapsed())
}

fn idle(sandbox: &Sandbox, node: &mut Node<'_>) -> Result<Vec<Row>> {
    let kubelet = node.kubelet()?.pid().as_raw();
    settle(kubelet)?;
    let share = share_of_processor(kubelet, IDLE)?;
    let (kubelet_mib, _) = resident(kubelet)?;
    let (mut own, mut shims) = (0.0, 0);
    for process in sandbox.tag().processes()? {
        // A process of each pod: its shim, or the program of its container.
        if process.pid != kubelet && process.name != "hawser-csi" {
            own += resident(process.pid)?.1;
            shims += usize::from(process.name != "demo-app");
        }
    }
    ensure!(shims >= MANY, "{shims} processes beside the programs of {MANY} pods");
    Ok(vec![
        Row::new(
            format!("kubelet, {MANY} idle pods: resident"),
            "MiB",
            vec![kubelet_mib],
            Some(Bar::AtMost(40.0)),
        ),
        Row::new(
            format!("kubelet, {MANY} idle pods: of a processor, for {} s", IDLE.as_secs()),
            "%",
            vec![share * 100.0],
            Some(Bar::AtMost(1.0)),
        ),
        Row::new(
            "an idle pod, its program included (Pss)",
            "MiB",
            vec![own / MANY as f64],
            Some(Bar::AtMost(1.5)),
        ),
    ])
}

/// Until what the starts of pods have left to do is done. The kernel repeats the multicast reports of a new interface
/// within a second.
fn settle(kubelet: i32) -> Result<()> {
    eventually("the kubelet has nothing to do", TIMEOUT, || {
        let share = share_of_processor(kubelet, Duration::from_secs(2))?;
        ensure!(share < 0.05, "it used {share} of a processor");
        Ok(())
    })
}

/// How much of a processor a process uses for so long.
#[expect(clippy::disallowed_methods, reason = "a share needs a span of time")]
fn share_of_processor(pid: i32, span: Duration) -> Result<f64> {
    let (before, began) = (processor_seconds(pid)?, Instant::now());
    std::thread::sleep(span);
    Ok((processor_seconds(pid)? - before) / began.elapsed().as_secs_f64())
}

/// User and system time that a process has used.
fn processor_seconds(pid: i32) -> Result<f64> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).context(path.clone())?;
    let fields = text.rsplit_once(')').context("no name in it").context(path.clone())?.1;
    let ticks = |index: usize| -> Result<f64> {
        // The third field comes first after the name.
        fields.split_whitespace().nth(index - 3).context("too few fields")?.parse().context(path.clone())
    };
    Ok((ticks(14)? + ticks(15)?) / TICKS_A_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_works_uses_time() {
        let own = std::process::id().cast_signed();
        let (before, began) = (processor_seconds(own).unwrap(), Instant::now());
        while processor_seconds(own).unwrap() - before < 0.05 {
            assert!(began.elapsed() < Duration::from_secs(60), "no time was used");
        }
        assert!(began.elapsed() >= Duration::from_millis(20), "{:?}", began.elapsed());
    }
}
