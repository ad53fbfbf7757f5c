//! Which faults are injected at each step of an undisturbed call, and the count of those that took effect.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, anyhow, ensure};
use tests::trace_steps::{Fault, Injection, Step};

use crate::world::{Pool, Rpc, World};

/// Threads make some of their calls in another order, or not at all, the next time.
const ATTEMPTS: usize = 10;
/// How often a step whose fault was never injected is looked for in an undisturbed call; if it
/// is there, the injection is tried again. The machine's load decides how often some steps
/// are made, such as reads of a log: each look has an attempt of the same moment beside it.
const SECOND_ROUNDS: usize = 5;

/// Every step of an undisturbed call.
pub(crate) fn record(world: &mut World) -> Result<Vec<Step>> {
    world.prepare()?;
    let tracing = world.trace(None, || {})?;
    let answer = world.call(&world.scene.caller());
    let trace = tracing.finish()?;
    answer?;
    world.ensure_as_asked()?;
    world.live_on()?;
    world.end()?;
    Ok(trace.steps)
}

/// Injects faults at every step of an undisturbed call.
pub(crate) fn inject_everywhere(
    rpc: Rpc,
    choose: impl Fn(&Step) -> Vec<Fault>,
    inject: impl Fn(&mut World, Injection, usize) -> Result<bool>,
) {
    inject_all(World::new(rpc), record, choose, inject);
}

/// The same on a Btrfs with quota groups.
pub(crate) fn inject_everywhere_with_quota_groups(
    rpc: Rpc,
    choose: impl Fn(&Step) -> Vec<Fault>,
    inject: impl Fn(&mut World, Injection, usize) -> Result<bool>,
) {
    inject_all(World::on(rpc, Pool::QuotaGroups), record, choose, inject);
}

/// Injects every fault that `choose` has for a step of an undisturbed `run` until it takes effect;
/// `inject` says whether it did, and what was not as it should be. Its number is the fault's.
pub(crate) fn inject_all(
    mut world: World,
    run: impl Fn(&mut World) -> Result<Vec<Step>>,
    choose: impl Fn(&Step) -> Vec<Fault>,
    inject: impl Fn(&mut World, Injection, usize) -> Result<bool>,
) {
    let (rpc, pool) = (world.rpc, world.pool);
    let steps = run(&mut world).expect("undisturbed");
    let injections: Vec<Injection> = steps
        .iter()
        .flat_map(|step| choose(step).into_iter().map(|fault| Injection { step: step.clone(), fault }))
        .collect();
    let mut findings = Vec::new();
    let mut attempt = |world: &mut World, number: usize| {
        let injection = &injections[number];
        let outcome = catch_unwind(AssertUnwindSafe(|| inject(world, injection.clone(), number)))
            .unwrap_or_else(|_| Err(anyhow!("a panic, above")));
        outcome.unwrap_or_else(|finding| {
            findings.push(format!("{}, {:?}: {finding:#}", injection.step, injection.fault));
            *world = World::on(rpc, pool);
            true
        })
    };
    let mut missed: Vec<usize> = (0..injections.len()).collect();
    missed.retain(|&number| !(0..ATTEMPTS).any(|_| attempt(&mut world, number)));
    for _ in 0..SECOND_ROUNDS {
        if missed.is_empty() {
            break;
        }
        let steps = run(&mut world).expect("undisturbed, again");
        missed.retain(|&number| steps.contains(&injections[number].step) && !attempt(&mut world, number));
    }
    let missed = missed.into_iter().map(|number| &injections[number]);
    let missed: Vec<_> = missed.filter(|injection| !is_beside_calls(&injection.step)).collect();
    let title = format!("{rpc:?}: {} steps, {} injections", steps.len(), injections.len());
    assert!(findings.is_empty(), "{title}, {} findings:\n{}", findings.len(), findings.join("\n"));
    assert!(missed.is_empty(), "{title}, never hit: {missed:#?}");
    assert!(!injections.is_empty(), "{title}");
}

/// Whether a task of its own makes the step, so that it is chance which call it falls into: the
/// driver copies a daemon's log beside its calls.
fn is_beside_calls(step: &Step) -> bool {
    step.object.ends_with("/daemon.fifo")
}

/// The call with the fault; the answer, and whether the fault took effect.
pub(crate) fn call_with_fault(
    world: &mut World,
    injection: Injection,
) -> Result<(Result<(), tonic::Status>, bool)> {
    world.prepare().context("before the call")?;
    let tracing = world.trace(Some(injection), || {})?;
    let answer = world.call(&world.scene.caller());
    let trace = tracing.finish()?;
    Ok((answer, trace.is_injected))
}

/// The retry brings what was asked for; it can be used, and goes without a trace.
pub(crate) fn go_on(world: &mut World) -> Result<()> {
    world.retry()?;
    world.ensure_as_asked().context("after the retry")?;
    world.retry().context("once more")?;
    world.ensure_as_asked().context("after one more")?;
    world.live_on().context("later")?;
    world.end()
}

pub(crate) fn ensure_refused(answer: &Result<(), tonic::Status>) -> Result<()> {
    ensure!(answer.is_err(), "the killed driver answered");
    Ok(())
}
