//! `hawser-csi volumes`, `snapshots` and `mounts`, beside a driver that runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use proto::csi::CreateSnapshotRequest;
use serde_json::Value;
use tests::csi::scene::{Flags, Scene, TIMEOUT, create_request, retried};
use tests::csi::snapshots::{data, scene_with_quota_groups, with};
use tests::eventually;

/// What the command prints, which must succeed.
fn shown(scene: &Scene, view: &str, output: &str) -> String {
    String::from_utf8(run(scene, view, output).stdout).unwrap()
}

fn run(scene: &Scene, view: &str, output: &str) -> Output {
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args([view, "-o", output, "--state-dir"]).arg(scene.sandbox.path("state"));
    command.arg("--run-dir").arg(scene.sandbox.path("run"));
    let done = command.output().unwrap();
    assert!(done.status.success(), "{done:?}");
    done
}

fn json(scene: &Scene, view: &str) -> Vec<Value> {
    serde_json::from_str(&shown(scene, view, "json")).unwrap()
}

fn row<'a>(rows: &'a [Value], key: &str, value: &str) -> &'a Value {
    rows.iter().find(|row| row[key] == value).unwrap_or_else(|| panic!("{key} {value} in {rows:?}"))
}

#[test]
fn views_show_volumes_and_their_mounts_and_a_daemon_that_is_dead() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let [used, unused] = ["pvc-used", "pvc-unused"].map(|name| caller.create_named(name).unwrap());
    caller.stage(&used).unwrap();
    caller.publish(&used, "one").unwrap();
    let [staged, target] = [caller.staging_path(&used), caller.target_path("one")];

    let volumes = json(&scene, "volumes");
    let published = row(&volumes, "id", &used);
    assert_eq!((&published["state"], &published["name"]), (&"published".into(), &"pvc-used".into()));
    assert_eq!(published["daemon_pid"], scene.daemons()[0]);
    assert_eq!(published["targets"], Value::from(vec![target.to_str().unwrap()]));
    assert_eq!(row(&volumes, "id", &unused)["state"], "unstaged");
    assert_eq!(
        (&published["data_path"], &published["capacity_policy"]),
        (&"daemon".into(), &"daemon".into())
    );
    let mounts = json(&scene, "mounts");
    for (path, state) in [(&staged, "staged"), (&target, "published")] {
        let mount = row(&mounts, "path", path.to_str().unwrap());
        assert_eq!((&mount["state"], &mount["volume"]), (&state.into(), &used.as_str().into()));
        assert_eq!((&mount["data_path"], &mount["capacity_policy"]), (&"daemon".into(), &"daemon".into()));
    }
    let table = shown(&scene, "mounts", "table");
    assert!(table.lines().next().unwrap().contains("MODE  DATA PATH  LIMITED BY  CONNECTION"), "{table}");
    let table = shown(&scene, "volumes", "table");
    assert!(
        table.starts_with("ID ") && table.contains(&format!("{unused}  pvc-unused  unstaged")),
        "{table}"
    );

    // kubelet's mount of a part of the volume, for the same pod.
    fs::create_dir(target.join("dir")).unwrap();
    let part = scene.sandbox.make_dir("k/pods/one/volume-subpaths/pv/main/0").unwrap();
    linux::mount::bind(&target.join("dir"), &part).unwrap();
    let seen = json(&scene, "mounts");
    let mount = row(&seen, "path", part.to_str().unwrap());
    assert_eq!((&mount["state"], &mount["daemon"]), (&"subpath".into(), &"serves".into()));
    linux::mount::unmount(&part, linux::mount::UnmountMode::Plain).unwrap();
    fs::remove_dir_all(scene.sandbox.path("k/pods/one/volume-subpaths")).unwrap();

    // Somebody else's, by its looks ours.
    let stranger = scene.sandbox.make_dir("stranger").unwrap();
    linux::mount::bind(&staged, &stranger).unwrap();
    let seen = json(&scene, "mounts");
    assert_eq!(row(&seen, "path", stranger.to_str().unwrap())["state"], "unknown");
    linux::mount::unmount(&stranger, linux::mount::UnmountMode::Plain).unwrap();
    fs::remove_dir(&stranger).unwrap();

    scene.kill_daemon();
    assert_eq!(row(&json(&scene, "volumes"), "id", &used)["state"], "dead");
    let torn = scene.journal_path("vol-0123456789abcdef0123456789abcdef");
    fs::write(&torn, "{").unwrap();
    let unreadable = json(&scene, "volumes");
    let unreadable = row(&unreadable, "state", "unreadable");
    assert!(unreadable["error"].as_str().unwrap().contains(torn.to_str().unwrap()), "{unreadable}");
    fs::remove_file(&torn).unwrap();

    caller.unpublish(&used, "one").unwrap();
    caller.unstage(&used).unwrap();
    for id in [used, unused] {
        caller.delete(&id).unwrap();
    }
    scene.assert_nothing_left();
    assert_eq!(shown(&scene, "mounts", "json"), "[]\n");
}

/// A cell of a table's row, by its heading.
fn cell<'a>(table: &'a str, heading: &str, is_row: impl Fn(&str) -> bool) -> &'a str {
    let mut lines = table.lines();
    let at = lines.next().unwrap().find(heading).unwrap_or_else(|| panic!("{heading} in {table}"));
    let row = lines.find(|line| is_row(line)).unwrap_or_else(|| panic!("the row in {table}"));
    row[at..].split("  ").next().unwrap()
}

#[test]
fn views_show_data_path_and_capacity_policy_of_volumes_that_pass_through() {
    let mut scene = scene_with_quota_groups(Flags::process_with_keeper());
    let caller = scene.caller();
    let unlimited = with(create_request("pvc-2"), &[("dataPath", "passthrough"), ("capacity", "none")]);
    let counted = with(create_request("pvc-3"), &[("dataPath", "daemon"), ("capacity", "daemon")]);
    let cached = with(create_request("pvc-4"), &[("writebackCache", "true"), ("capacity", "daemon")]);
    let volumes: Vec<_> = [
        (create_request("pvc-1"), "one", ("passthrough", "kernel", false), "passthrough"),
        (unlimited, "two", ("passthrough", "none", false), "passthrough"),
        (counted, "three", ("daemon", "daemon", false), "daemon"),
        (cached, "four", ("daemon", "daemon", true), "daemon (writeback cache)"),
    ]
    .into_iter()
    .map(|(request, pod, policies, in_table)| {
        let id = caller.create(request).unwrap().volume_id;
        caller.stage(&id).unwrap();
        caller.publish(&id, pod).unwrap();
        fs::write(caller.target_path(pod).join("file"), "content").unwrap();
        (id, pod, policies, in_table)
    })
    .collect();
    // Without a driver, the command reads the journal itself.
    for is_running in [true, false] {
        if !is_running {
            scene.kill_driver();
        }
        let said = String::from_utf8(run(&scene, "volumes", "table").stderr).unwrap();
        assert_eq!(said.contains("no driver with --state-dir"), !is_running, "{said}");
        let (listed, mounts) = (json(&scene, "volumes"), json(&scene, "mounts"));
        let table = shown(&scene, "mounts", "table");
        for (id, pod, (data_path, policy, has_cache), in_table) in &volumes {
            let assert_policies = |row: &Value| {
                let shown = ["data_path", "capacity_policy", "writeback_cache"].map(|field| &row[field]);
                let wanted = [&Value::from(*data_path), &Value::from(*policy), &Value::from(*has_cache)];
                assert_eq!(shown, wanted, "{row}");
            };
            assert_policies(row(&listed, "id", id));
            for path in [caller.staging_path(id), caller.target_path(pod)] {
                let path = path.to_str().unwrap();
                assert_policies(row(&mounts, "path", path));
                let cell = |heading| cell(&table, heading, |line| line.ends_with(path));
                assert_eq!([cell("DATA PATH"), cell("LIMITED BY")], [*in_table, *policy], "{table}");
            }
        }
    }
    scene.start_driver();
    for (id, pod, ..) in &volumes {
        retried(&scene, "unpublish", || caller.unpublish(id, pod));
        caller.unstage(id).unwrap();
        caller.delete(id).unwrap();
    }
    scene.assert_nothing_left();
    scene.end_keeper();
}

#[test]
fn views_show_snapshots() {
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let volume = caller.create_named("pvc-1").unwrap();
    let request = CreateSnapshotRequest {
        name: "nightly".into(),
        source_volume_id: volume.clone(),
        parameters: [("snapshotMode".to_owned(), "blocking-copy".to_owned())].into(),
        ..Default::default()
    };
    let made = caller.controller(async |mut c| c.create_snapshot(request).await).unwrap();
    let id = made.into_inner().snapshot.unwrap().snapshot_id;
    tests::eventually("it is ready", TIMEOUT, || {
        let rows = json(&scene, "snapshots");
        anyhow::ensure!(row(&rows, "id", &id)["state"] == "ready", "{rows:?}");
        Ok(())
    })
    .unwrap();
    let rows = json(&scene, "snapshots");
    let shown = row(&rows, "name", "nightly");
    assert_eq!(shown["source"], volume.as_str());
    assert_eq!(shown["pause_us"], 0);
    let request = proto::csi::DeleteSnapshotRequest { snapshot_id: id, ..Default::default() };
    caller.controller(async |mut c| c.delete_snapshot(request).await).unwrap();
    // The copy has its lock until it has told that it is ready.
    retried(&scene, "delete", || caller.delete(&volume));
    scene.assert_nothing_left();
}

#[test]
fn a_journal_that_is_not_there_is_named() {
    let scene = Scene::start(Flags::process());
    let flags = ["--state-dir", "/nonexistent"];
    let doctors = ["--node-id", "n", "--pool", "/p", "--launcher", "process", "--volume-binary", "/v"];
    for arguments in [&["volumes"][..], &["snapshots"], &["mounts"], &[&["doctor"][..], &doctors].concat()] {
        let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
        let done = command.args(arguments).args(flags).output().unwrap();
        assert!(!done.status.success() && done.stdout.is_empty());
        assert_eq!(
            String::from_utf8_lossy(&done.stderr),
            "hawser-csi: no journal is in /nonexistent: /nonexistent/volumes is missing: pass the driver's --state-dir\n"
        );
    }
}

#[test]
fn a_view_of_another_state_directory_shows_nothing_of_the_driver_that_runs() {
    let scene = Scene::start(Flags::process());
    let id = scene.caller().create_named("pvc-1").unwrap();
    for dir in ["other/volumes", "other/snapshots"] {
        scene.sandbox.make_dir(dir).unwrap();
    }
    let mut command = scene.sandbox.command(Path::new(env!("CARGO_BIN_EXE_hawser-csi")));
    command.args(["volumes", "-o", "json", "--state-dir"]).arg(scene.sandbox.path("other"));
    let done = command.arg("--run-dir").arg(scene.sandbox.path("run")).output().unwrap();
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "[]\n");
    fs::remove_dir_all(scene.sandbox.path("other")).unwrap();
    scene.caller().delete(&id).unwrap();
    scene.assert_nothing_left();
}

/// The daemon has a tenth of a processor, so that the count takes long enough to be seen.
#[test]
fn mounts_shows_how_many_files_a_daemon_has_counted_while_it_counts() {
    const FILES: u32 = 30_000;
    const LONGER_THAN_A_COUNT: Duration = Duration::from_secs(10);
    let scene = Scene::start(Flags::process());
    let caller = scene.caller();
    let slow = with(create_request("pvc-1"), &[("mountPodCpuRequest", "10m"), ("mountPodCpuLimit", "100m")]);
    let id = caller.create(slow).unwrap().volume_id;
    let root = data(&scene, &id);
    for number in 0..FILES {
        fs::write(root.join(number.to_string()), "").unwrap();
    }
    caller.stage(&id).unwrap();
    let path = caller.staging_path(&id);
    let counted = || {
        let mounts = json(&scene, "mounts");
        row(&mounts, "path", path.to_str().unwrap())["counted_files"].as_u64()
    };
    let mut seen = String::new();
    // The count may be over before both views have shown it: then that of another daemon.
    let met = (0..20).any(|_| {
        // Both views may need several looks: a daemon with so little of a processor may answer late.
        let (mut figures, mut cells) = (BTreeSet::new(), Vec::new());
        let shown = eventually("two figures and the table's", LONGER_THAN_A_COUNT, || {
            figures.extend(counted());
            let table = shown(&scene, "mounts", "table");
            cells.push(cell(&table, "DAEMON", |line| line.ends_with(path.to_str().unwrap())).to_owned());
            let has_count = |cell: &String| cell.contains("(counts: ") && cell.contains(" files so far)");
            anyhow::ensure!(figures.len() >= 2 && cells.iter().any(has_count), "{figures:?}, {cells:?}");
            Ok(())
        });
        shown.is_ok() || {
            seen = format!("{shown:?}");
            scene.kill_daemon();
            retried(&scene, "stage", || caller.stage(&id));
            false
        }
    });
    assert!(met, "{seen}\n{}", scene.log());
    eventually("the count ends", TIMEOUT, || {
        let now = counted();
        anyhow::ensure!(now.is_none(), "{now:?}");
        Ok(())
    })
    .unwrap();
    caller.unstage(&id).unwrap();
    caller.delete(&id).unwrap();
    scene.assert_nothing_left();
}
