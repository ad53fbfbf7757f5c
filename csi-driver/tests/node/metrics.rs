//! What the driver tells of itself.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use tests::csi::scene::{Flags, Scene, TIMEOUT, retried};

fn ask_for_metrics(scene: &Scene, request: &str) -> String {
    let mut stream = UnixStream::connect(scene.sandbox.path("run/prom.sock")).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

pub(crate) fn metrics(scene: &Scene) -> String {
    let answer = ask_for_metrics(scene, "GET /metrics HTTP/1.0\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200 OK\r\n"), "{head}");
    assert!(head.contains(&format!("content-length: {}", body.len())), "{head}");
    body.to_owned()
}

#[track_caller]
fn assert_shows(page: &str, lines: &[&str]) {
    for line in lines {
        assert!(page.lines().any(|l| l == *line), "{line}\n--- of\n{page}");
    }
}

#[test]
fn calls_are_counted_by_code_and_volumes_by_state() {
    let mut scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let ids = ["a", "b", "c"].map(|name| caller.create_named(name).unwrap());
    caller.stage(&ids[1]).unwrap();
    caller.stage(&ids[2]).unwrap();
    caller.publish(&ids[2], "one").unwrap();
    caller.publish(&ids[0], "two").expect_err("not staged");
    caller.stage("vol-unknown").expect_err("unknown");
    assert_shows(
        &metrics(&scene),
        &[
            "hawser_csi_calls_total{method=\"CreateVolume\",code=\"OK\"} 3",
            "hawser_csi_calls_total{method=\"NodeStageVolume\",code=\"NOT_FOUND\"} 1",
            "hawser_csi_calls_total{method=\"NodeStageVolume\",code=\"OK\"} 2",
            "hawser_csi_calls_total{method=\"NodePublishVolume\",code=\"FAILED_PRECONDITION\"} 1",
            "hawser_csi_call_seconds_count{method=\"NodeStageVolume\"} 3",
            "hawser_csi_volumes{state=\"unstaged\"} 1",
            "hawser_csi_volumes{state=\"staged\"} 1",
            "hawser_csi_volumes{state=\"published\"} 1",
            "hawser_csi_volumes{state=\"dead\"} 0",
            "hawser_csi_volumes{state=\"parked\"} 0",
            &format!(
                "hawser_csi_volume_policies{{volume_id=\"{}\",data_path=\"daemon\",capacity=\"daemon\"}} 1",
                ids[0]
            ),
            "hawser_csi_daemon_deaths_total 0",
            "hawser_csi_hung_daemons_total 0",
            "hawser_csi_disk_stalls_total 0",
            "hawser_csi_copied_bytes_total 0",
            "hawser_csi_pool_bytes{kind=\"capacity\"} 10737418240",
            "hawser_csi_pool_bytes{kind=\"committed\"} 3221225472",
            "hawser_csi_aborted_connections_total 0",
        ],
    );
    caller.unstage(&ids[1]).unwrap();
    scene.kill_daemon();
    tests::eventually("the death is counted", TIMEOUT, || {
        anyhow::ensure!(metrics(&scene).contains("\nhawser_csi_daemon_deaths_total 1\n"));
        Ok(())
    })
    .unwrap();
    assert_shows(&metrics(&scene), &["hawser_csi_volumes{state=\"dead\"} 1"]);

    // A driver that was killed leaves its socket, and the next takes its place.
    let torn = ["volumes/vol", "snapshots/snap"]
        .map(|kind| scene.sandbox.path(&format!("state/{kind}-{}.json", "0".repeat(32))));
    torn.iter().for_each(|path| std::fs::write(path, "{").unwrap());
    scene.restart_driver();
    assert_shows(
        &metrics(&scene),
        &[
            "hawser_csi_volumes{state=\"dead\"} 1",
            "hawser_csi_volumes{state=\"unreadable\"} 1",
            "hawser_csi_snapshots{state=\"unreadable\"} 1",
        ],
    );
    torn.iter().for_each(|path| std::fs::remove_file(path).unwrap());
    assert!(ask_for_metrics(&scene, "POST / HTTP/1.0\r\n\r\n").starts_with("HTTP/1.0 405 "));
    let mode = std::fs::metadata(scene.sandbox.path("run/prom.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "root's alone");

    caller.unstage("vol-unknown").unwrap();
    caller.unpublish(&ids[2], "one").unwrap();
    caller.unpublish(&ids[0], "two").unwrap();
    caller.unstage(&ids[2]).unwrap();
    caller.unstage(&ids[0]).unwrap();
    for id in &ids {
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
}

#[test]
fn every_metric_is_documented_and_every_documented_metric_exists() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("a").unwrap();
    let page = metrics(&scene);
    let kinds = |line: &str| line.strip_prefix("# TYPE ").map(str::to_owned);
    let shown: BTreeSet<String> = page.lines().filter_map(kinds).collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/METRICS.md");
    let text = std::fs::read_to_string(path).unwrap();
    let documented: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .filter(|(name, _)| name.starts_with("hawser_csi_"))
        .map(|(name, rest)| {
            let kind = rest.split(" |").next().unwrap();
            format!("{} {kind}", name.split('{').next().unwrap())
        })
        .collect();
    assert_eq!(shown, documented);
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn copies_and_the_pauses_for_them_are_counted() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let id = caller.create_named("a").unwrap();
    caller.stage(&id).unwrap();
    std::fs::write(caller.staging_path(&id).join("file"), vec![7; 300_000]).unwrap();
    let request = proto::csi::CreateSnapshotRequest {
        name: "s".into(),
        source_volume_id: id.clone(),
        parameters: [("snapshotMode".to_owned(), "blocking-copy".to_owned())].into(),
        ..Default::default()
    };
    let made = caller.controller(async |mut c| c.create_snapshot(request).await).unwrap().into_inner();
    tests::eventually("it is counted", TIMEOUT, || {
        let page = metrics(&scene);
        for line in [
            "hawser_csi_copied_bytes_total 300000",
            "hawser_csi_pauses_total 1",
            "hawser_csi_snapshots{state=\"ready\"} 1",
        ] {
            anyhow::ensure!(page.lines().any(|l| l == line), "{line} of {page}");
        }
        let paused = page.lines().find_map(|l| l.strip_prefix("hawser_csi_pause_seconds_total "));
        anyhow::ensure!(paused.is_some_and(|seconds| seconds.parse::<f64>().unwrap() > 0.0), "{paused:?}");
        anyhow::ensure!(!page.contains("hawser_csi_copy_bytes{"), "none is under way: {page}");
        Ok(())
    })
    .unwrap();
    let snapshot_id = made.snapshot.unwrap().snapshot_id;
    let request = proto::csi::DeleteSnapshotRequest { snapshot_id, ..Default::default() };
    caller.controller(async |mut c| c.delete_snapshot(request).await).unwrap();
    retried(&scene, "unstage", || caller.unstage(&id));
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}
