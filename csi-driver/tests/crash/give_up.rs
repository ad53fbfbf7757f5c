//! A caller that gives up at every effect of every call, and calls again at once.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use tests::trace_steps::{Fault, Injection, Kind, Step};
use tokio::sync::Notify;
use tonic::Code;

use crate::injections::{go_on, inject_everywhere};
use crate::world::{Rpc, World};

fn holds(step: &Step) -> Vec<Fault> {
    if step.kind == Kind::Effect { vec![Fault::Hold] } else { vec![] }
}

fn given_up(world: &mut World, injection: Injection, number: usize) -> Result<bool> {
    world.prepare().context("before the call")?;
    let gives_up = Arc::new(Notify::new());
    let mut hasty = world.scene.caller();
    hasty.gives_up = Some(gives_up.clone());
    let tracing = world.trace(Some(injection), move || gives_up.notify_one())?;
    let answer = world.call(&hasty);
    match answer.as_ref().map_err(tonic::Status::code) {
        Ok(()) => {}
        Err(Code::Cancelled) => {
            // The first goes on without its caller, and nothing else may meanwhile.
            let second = world.call(&world.scene.caller());
            let code = second.as_ref().err().map(tonic::Status::code);
            ensure!(code == Some(Code::Aborted), "while the first is under way: {second:?}");
            tracing.release();
        }
        Err(_) => bail!("{answer:?}"),
    }
    let is_undone = world.rpc.is_undone_by_another() && number % 2 == 1;
    let ended = if is_undone { world.end() } else { go_on(world) };
    let is_hit = tracing.finish()?.is_injected;
    ended.map(|()| is_hit)
}

fn survives(rpc: Rpc) {
    inject_everywhere(rpc, holds, given_up);
}

#[test]
fn create_volume_survives_a_caller_that_gives_up() {
    survives(Rpc::CreateVolume);
}

#[test]
fn restore_survives_a_caller_that_gives_up() {
    survives(Rpc::Restore);
}

#[test]
fn clone_survives_a_caller_that_gives_up() {
    survives(Rpc::Clone);
}

#[test]
fn delete_volume_survives_a_caller_that_gives_up() {
    survives(Rpc::DeleteVolume);
}

#[test]
fn create_snapshot_survives_a_caller_that_gives_up() {
    survives(Rpc::CreateSnapshot);
}

#[test]
fn delete_snapshot_survives_a_caller_that_gives_up() {
    survives(Rpc::DeleteSnapshot);
}

#[test]
fn controller_expand_survives_a_caller_that_gives_up() {
    survives(Rpc::ControllerExpand);
}

#[test]
fn controller_publish_survives_a_caller_that_gives_up() {
    survives(Rpc::ControllerPublish);
}

#[test]
fn controller_unpublish_survives_a_caller_that_gives_up() {
    survives(Rpc::ControllerUnpublish);
}

#[test]
fn stage_survives_a_caller_that_gives_up() {
    survives(Rpc::Stage);
}

#[test]
fn publish_survives_a_caller_that_gives_up() {
    survives(Rpc::Publish);
}

#[test]
fn publish_read_only_survives_a_caller_that_gives_up() {
    survives(Rpc::PublishReadOnly);
}

#[test]
fn publish_of_a_dead_volume_survives_a_caller_that_gives_up() {
    survives(Rpc::Restage);
}

#[test]
fn publish_for_another_group_survives_a_caller_that_gives_up() {
    survives(Rpc::Regroup);
}

#[test]
fn node_expand_survives_a_caller_that_gives_up() {
    survives(Rpc::NodeExpand);
}

#[test]
fn unpublish_survives_a_caller_that_gives_up() {
    survives(Rpc::Unpublish);
}

#[test]
fn unstage_survives_a_caller_that_gives_up() {
    survives(Rpc::Unstage);
}

#[test]
fn restore_by_copy_survives_a_caller_that_gives_up() {
    survives(Rpc::RestoreByCopy);
}

#[test]
fn park_survives_a_caller_that_gives_up() {
    survives(Rpc::Park);
}

#[test]
fn unpark_survives_a_caller_that_gives_up() {
    survives(Rpc::Unpark);
}
