//! A driver that was killed in a call, and whose successor is killed at every
//! step of its repair, and of its start.

use std::fs;

use anyhow::{Context, Result, ensure};
use tests::trace_steps::{Fault, Injection, Kind, Step};

use crate::injections::{call_with_fault, go_on, inject_all};
use crate::kills::kills;
use crate::world::{Rpc, World};

/// Where the first driver is killed: after the last effect of this name, if it has one,
/// on an object that ends so.
#[derive(Debug, Clone, Copy)]
struct FirstFault {
    rpc: Rpc,
    name: &'static str,
    object: &'static str,
}

impl FirstFault {
    fn of(self, steps: &[Step]) -> Injection {
        let is_it = |step: &&Step| {
            step.kind == Kind::Effect
                && step.name.starts_with(self.name)
                && step.object.ends_with(self.object)
        };
        let step = steps.iter().rfind(is_it).unwrap_or_else(|| panic!("{self:?} is none of {steps:#?}"));
        Injection { step: step.clone(), fault: Fault::KillAfter }
    }
}

/// Brings the driver to its death, by the first fault.
fn die(world: &mut World, first: &Injection) -> Result<()> {
    let (answer, is_hit) = call_with_fault(world, first.clone())?;
    ensure!(is_hit && answer.is_err(), "the first fault was not injected: {answer:?}");
    world.scene.kill_driver();
    Ok(())
}

fn repaired(world: &mut World, first: &Injection, second: Injection) -> Result<bool> {
    die(world, first)?;
    let is_hit = world.start_traced(Some(second)).context("the second start")?.is_injected;
    if is_hit {
        world.scene.restart_driver();
    }
    go_on(world).map(|()| is_hit)
}

fn survives(fault: FirstFault) {
    let mut world = World::new(fault.rpc);
    let calls = crate::injections::record(&mut world).expect("an undisturbed call");
    let first = fault.of(&calls);
    let undisturbed = |world: &mut World| {
        die(world, &first)?;
        let steps = world.start_traced(None).context("an undisturbed repair")?.steps;
        go_on(world).context("after an undisturbed repair")?;
        Ok(steps)
    };
    inject_all(world, undisturbed, kills, |world, injection, _| repaired(world, &first, injection));
}

/// The first of all starts, on an empty pool.
#[test]
fn first_start_survives_kills() {
    let world = World::new(Rpc::CreateVolume);
    let started = |world: &mut World, injection: Option<Injection>| {
        world.scene.kill_driver();
        for dir in ["state", "run", "pool"] {
            fs::remove_dir_all(world.scene.sandbox.path(dir)).context(dir)?;
        }
        fs::create_dir(world.scene.sandbox.path("pool")).context("pool")?;
        world.start_traced(injection)
    };
    let undisturbed = |world: &mut World| {
        let steps = started(world, None).context("an undisturbed start")?.steps;
        go_on(world).context("after an undisturbed start")?;
        Ok(steps)
    };
    inject_all(world, undisturbed, kills, |world, injection, _| {
        let is_hit = started(world, Some(injection))?.is_injected;
        if is_hit {
            world.scene.restart_driver();
        }
        go_on(world).map(|()| is_hit)
    });
}

#[test]
fn repair_of_a_stage_survives_kills() {
    survives(FirstFault { rpc: Rpc::Stage, name: "sendmsg", object: "" });
}

#[test]
fn repair_of_a_publish_survives_kills() {
    survives(FirstFault { rpc: Rpc::Publish, name: "", object: "/mount" });
}

#[test]
fn repair_of_an_unstage_survives_kills() {
    survives(FirstFault { rpc: Rpc::Unstage, name: "umount2", object: "/globalmount" });
}

#[test]
fn repair_of_a_deletion_survives_kills() {
    survives(FirstFault { rpc: Rpc::DeleteVolume, name: "unlinkat", object: "/dir/other" });
}

#[test]
fn repair_of_a_snapshot_survives_kills() {
    survives(FirstFault { rpc: Rpc::CreateSnapshot, name: "ioctl", object: "/file" });
}

#[test]
fn repair_of_a_blocking_copy_survives_kills() {
    survives(FirstFault { rpc: Rpc::CopySnapshot, name: "pwrite64", object: "/file" });
}

#[test]
fn repair_of_a_restore_survives_kills() {
    survives(FirstFault { rpc: Rpc::Restore, name: "ioctl", object: "/file" });
}
