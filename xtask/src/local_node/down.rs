//! `down`: removes the node, in any state.
//!
//! Pods and volumes get a chance to end by themselves first. What is left then is removed without the
//! help of any process of the node.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use linux::mount::{UnmountMode, unmount};
use linux::{mountinfo, process};
use xtask::build::require_root;
use xtask::progress::{say, step};

use super::Directory;
use super::place::Place;
use super::record::Record;
use super::{network, network_claim, processes};

/// How long pods may take to end by themselves, altogether.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);
/// The grace period of each pod, in seconds.
const GRACE_SECONDS: &str = "5";
/// Mounts may be stacked; each round unmounts the visible ones.
const UNMOUNT_ROUNDS: usize = 16;

pub(crate) fn down(directory: &Directory) -> Result<()> {
    require_root("down")?;
    let place = Place::new(&directory.path)?;
    let Some(_lock) = place.lock()? else {
        say(&format!("there is no node in {}: nothing to remove", place.dir().display()));
        return Ok(());
    };
    let Some(record) = Record::read(&place)? else {
        return step("remove the directory of an interrupted up", || place.remove_unused());
    };
    if !record.is_claimed {
        return step("remove the directory of an interrupted up", || {
            processes::remove_empty_group(&record.cgroup)?;
            network_claim::release(&place)?;
            place.remove_unclaimed()
        });
    }
    if processes::of_program(&place, "hawser-kubelet")?.is_empty() {
        say("the kubelet does not run: its pods are killed");
    } else {
        // If it fails, the steps below do without it.
        let _may_fail = step("stop the pods", || stop_pods(&place));
    }
    step("end the processes, and remove the control groups", || processes::end_all(&place, &record.cgroup))?;
    step("unmount the volumes", || unmount_all(&place))?;
    step("remove the bridge, its routes and the nftables rules", || network::remove(&place, &record))?;
    network_claim::release(&place)?;
    step(&format!("remove {}", place.dir().display()), || place.remove())?;
    say("nothing is left");
    Ok(())
}

/// Has the kubelet stop every pod. An error if it takes too long.
fn stop_pods(place: &Place) -> Result<()> {
    let mut command = Command::new(place.program("hawser-kubelet"));
    command.args(["stop", "--pods", "--grace-period", GRACE_SECONDS, "--root-dir"]).arg(place.kubelet());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().context("start hawser-kubelet stop")?;
    let pidfd = process::open_pidfd(child.id().cast_signed())?.context("hawser-kubelet stop is gone")?;
    if !process::wait_for_end(&pidfd, STOP_TIMEOUT)? {
        child.kill().context("end hawser-kubelet stop")?;
    }
    let status = child.wait().context("wait for hawser-kubelet stop")?;
    ensure!(status.success(), "hawser-kubelet stop: {status}");
    Ok(())
}

/// Unmounts everything below the directory.
fn unmount_all(place: &Place) -> Result<()> {
    for _ in 0..UNMOUNT_ROUNDS {
        let points = mount_points(place)?;
        if points.is_empty() {
            return Ok(());
        }
        // The last ones first: they may be mounted on others.
        for point in points.iter().rev() {
            // A mount of a peer group goes together with its peer.
            let _gone = unmount(point, UnmountMode::Detach);
        }
    }
    let left = mount_points(place)?;
    ensure!(left.is_empty(), "still mounted: {left:?}");
    Ok(())
}

fn mount_points(place: &Place) -> Result<Vec<PathBuf>> {
    let mounts = mountinfo::read().context("list the mounts")?;
    Ok(mounts.into_iter().map(|m| m.mount_point).filter(|point| point.starts_with(place.dir())).collect())
}
