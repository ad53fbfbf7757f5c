//! kill -9 before and after every effect of every call.

use anyhow::Result;
use tests::trace_steps::{Fault, Injection, Kind, Step};

use crate::injections::{
    call_with_fault, ensure_refused, go_on, inject_everywhere, inject_everywhere_with_quota_groups,
};
use crate::world::{Rpc, World};

pub(crate) fn kills(step: &Step) -> Vec<Fault> {
    match (step.kind, step.name) {
        (Kind::Sync | Kind::Look | Kind::Thread, _) => vec![],
        // To a daemon that has not ended by itself: it is not sent every time. A driver
        // that is dead before it was killed after the step before.
        (Kind::Effect, "pidfd_send_signal") => vec![],
        (Kind::Effect, "clone" | "clone3" | "vfork") => {
            vec![Fault::KillBefore, Fault::KillWithin, Fault::KillAfter]
        }
        (Kind::Effect, _) => vec![Fault::KillBefore, Fault::KillAfter],
    }
}

/// The same call again, as from kubelet.
fn retried(world: &mut World, injection: Injection, _number: usize) -> Result<bool> {
    let is_hit = killed(world, injection)?;
    go_on(world).map(|()| is_hit)
}

/// Nobody wants it any more: kubelet calls what undoes it.
fn undone(world: &mut World, injection: Injection, _number: usize) -> Result<bool> {
    let is_hit = killed(world, injection)?;
    world.end().map(|()| is_hit)
}

fn killed(world: &mut World, injection: Injection) -> Result<bool> {
    let (answer, is_hit) = call_with_fault(world, injection)?;
    if is_hit {
        ensure_refused(&answer)?;
        world.scene.restart_driver();
    } else {
        answer?;
    }
    Ok(is_hit)
}

fn survives(rpc: Rpc) {
    inject_everywhere(rpc, kills, retried);
    if rpc.is_undone_by_another() {
        let after = |step: &Step| kills(step).into_iter().filter(|kill| *kill == Fault::KillAfter).collect();
        inject_everywhere(rpc, after, undone);
    }
}

#[test]
fn create_volume_survives_kills() {
    survives(Rpc::CreateVolume);
}

#[test]
fn restore_survives_kills() {
    survives(Rpc::Restore);
}

#[test]
fn clone_survives_kills() {
    survives(Rpc::Clone);
}

#[test]
fn delete_volume_survives_kills() {
    survives(Rpc::DeleteVolume);
}

#[test]
fn create_snapshot_survives_kills() {
    survives(Rpc::CreateSnapshot);
}

#[test]
fn delete_snapshot_survives_kills() {
    survives(Rpc::DeleteSnapshot);
}

#[test]
fn controller_expand_survives_kills() {
    survives(Rpc::ControllerExpand);
}

#[test]
fn controller_publish_survives_kills() {
    survives(Rpc::ControllerPublish);
}

#[test]
fn controller_unpublish_survives_kills() {
    survives(Rpc::ControllerUnpublish);
}

#[test]
fn stage_survives_kills() {
    survives(Rpc::Stage);
}

#[test]
fn publish_survives_kills() {
    survives(Rpc::Publish);
}

#[test]
fn publish_read_only_survives_kills() {
    survives(Rpc::PublishReadOnly);
}

#[test]
fn publish_of_a_dead_volume_survives_kills() {
    survives(Rpc::Restage);
}

#[test]
fn publish_for_another_group_survives_kills() {
    survives(Rpc::Regroup);
}

#[test]
fn node_expand_survives_kills() {
    survives(Rpc::NodeExpand);
}

#[test]
fn unpublish_survives_kills() {
    survives(Rpc::Unpublish);
}

#[test]
fn unstage_survives_kills() {
    survives(Rpc::Unstage);
}

#[test]
fn restore_by_copy_survives_kills() {
    survives(Rpc::RestoreByCopy);
}

#[test]
fn copy_snapshot_survives_kills() {
    survives(Rpc::CopySnapshot);
}

#[test]
fn park_survives_kills() {
    survives(Rpc::Park);
}

#[test]
fn unpark_survives_kills() {
    survives(Rpc::Unpark);
}

#[test]
fn create_volume_of_a_subvolume_survives_kills() {
    inject_everywhere_with_quota_groups(Rpc::CreateVolume, kills, retried);
}

#[test]
fn restore_of_a_subvolume_survives_kills() {
    inject_everywhere_with_quota_groups(Rpc::Restore, kills, retried);
}

#[test]
fn clone_of_a_subvolume_survives_kills() {
    inject_everywhere_with_quota_groups(Rpc::Clone, kills, retried);
}

#[test]
fn delete_volume_of_a_subvolume_survives_kills() {
    inject_everywhere_with_quota_groups(Rpc::DeleteVolume, kills, retried);
}

#[test]
fn create_snapshot_of_a_subvolume_survives_kills() {
    inject_everywhere_with_quota_groups(Rpc::CreateSnapshot, kills, retried);
}

#[test]
fn delete_snapshot_of_a_subvolume_survives_kills() {
    inject_everywhere_with_quota_groups(Rpc::DeleteSnapshot, kills, retried);
}
