//! An error in the place of every step of every call.

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use tests::csi::scene::is_uncertain;
use tests::trace_steps::{Fault, Injection, Kind, Step};
use tonic::Code;

use crate::injections::{go_on, inject_everywhere};
use crate::world::{ENDING, Rpc, World};

fn errors(step: &Step) -> Vec<Fault> {
    let errors: &[Errno] = match (step.kind, step.name) {
        (Kind::Look, "read" | "getdents64") => &[Errno::EIO],
        (Kind::Look, _) => &[Errno::ENOMEM],
        (Kind::Thread, _) => &[Errno::EAGAIN],
        (Kind::Sync, _) => &[Errno::EIO],
        (Kind::Effect, "mount" | "umount2" | "fsmount" | "move_mount" | "mount_setattr" | "open_tree") => {
            &[Errno::ENOMEM]
        }
        (Kind::Effect, "clone" | "clone3" | "vfork") => &[Errno::ENOMEM],
        (Kind::Effect, "sendmsg") => &[Errno::ENOMEM],
        // It cannot fail so: who signals has the process in hand.
        (Kind::Effect, "pidfd_send_signal") => &[],
        (
            Kind::Effect,
            "unlink" | "unlinkat" | "rmdir" | "chmod" | "fchmod" | "fchmodat" | "fchown" | "fchownat"
            | "utimensat",
        ) => &[Errno::EIO],
        (Kind::Effect, _) => &[Errno::ENOSPC, Errno::EIO],
    };
    errors.iter().map(|errno| Fault::Fail(*errno)).collect()
}

/// The codes that the table has for what the machine refuses.
const CODES: [Code; 3] = [Code::Internal, Code::Aborted, Code::Unavailable];

fn failed(world: &mut World, injection: Injection, _number: usize) -> Result<bool> {
    world.prepare().context("before the call")?;
    let ground = world.ground();
    let is_dial = injection.step.name == "recvmsg";
    let tracing = world.trace(Some(injection), || {})?;
    let answer = world.call(&world.scene.caller());
    let is_hit = tracing.finish()?.is_injected;
    match &answer {
        Ok(()) => world.ensure_as_asked().context("answered OK")?,
        Err(status) => {
            ensure!(CODES.contains(&status.code()), "{status:?}");
            // Who dials and cannot be heard is turned away, as any stranger: the log says why.
            let is_said = is_dial || status.message().contains("(os error ");
            ensure!(is_said, "{status:?}");
            if world.rpc.fails_without_a_trace() && !is_uncertain(status) {
                ground.verify(&world.scene.sandbox, ENDING).with_context(|| format!("{status:?}"))?;
            }
        }
    }
    go_on(world).map(|()| is_hit)
}

fn survives(rpc: Rpc) {
    inject_everywhere(rpc, errors, failed);
}

#[test]
fn create_volume_survives_errors() {
    survives(Rpc::CreateVolume);
}

#[test]
fn restore_survives_errors() {
    survives(Rpc::Restore);
}

#[test]
fn clone_survives_errors() {
    survives(Rpc::Clone);
}

#[test]
fn delete_volume_survives_errors() {
    survives(Rpc::DeleteVolume);
}

#[test]
fn create_snapshot_survives_errors() {
    survives(Rpc::CreateSnapshot);
}

#[test]
fn delete_snapshot_survives_errors() {
    survives(Rpc::DeleteSnapshot);
}

#[test]
fn controller_expand_survives_errors() {
    survives(Rpc::ControllerExpand);
}

#[test]
fn controller_publish_survives_errors() {
    survives(Rpc::ControllerPublish);
}

#[test]
fn controller_unpublish_survives_errors() {
    survives(Rpc::ControllerUnpublish);
}

#[test]
fn stage_survives_errors() {
    survives(Rpc::Stage);
}

#[test]
fn publish_survives_errors() {
    survives(Rpc::Publish);
}

#[test]
fn publish_read_only_survives_errors() {
    survives(Rpc::PublishReadOnly);
}

#[test]
fn publish_of_a_dead_volume_survives_errors() {
    survives(Rpc::Restage);
}

#[test]
fn publish_for_another_group_survives_errors() {
    survives(Rpc::Regroup);
}

#[test]
fn node_expand_survives_errors() {
    survives(Rpc::NodeExpand);
}

#[test]
fn unpublish_survives_errors() {
    survives(Rpc::Unpublish);
}

#[test]
fn unstage_survives_errors() {
    survives(Rpc::Unstage);
}

#[test]
fn restore_by_copy_survives_errors() {
    survives(Rpc::RestoreByCopy);
}

#[test]
fn copy_snapshot_survives_errors() {
    survives(Rpc::CopySnapshot);
}

#[test]
fn park_survives_errors() {
    survives(Rpc::Park);
}

#[test]
fn unpark_survives_errors() {
    survives(Rpc::Unpark);
}
