//! Part mixed: the reference's plugins and ours on one node, over one state:
//! what one made, the other checks, collects and removes; both at the same time;
//! one put in the other's place.
//!
//! What "nothing is left" means: everything observable is as it was before the
//! attachments, on a node where each side has had one attachment come and go.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use xtask::progress::{say, step};

use super::attach::{self, Answer, Results};
use super::names::Names;
use super::observe::{Observation, observe};
use super::scenario::{Call, PrevResult, Verb};
use super::world::{BIN_DIR, World};
use super::{Node, Side, crew, scenarios};

/// A network that both sides serve.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) name: &'static str,
    pub(super) network: Value,
    pub(super) filters: super::world::Filters,
    /// Whether each container has a host port of its own.
    pub(super) ports: bool,
    /// Whether CHECK of the reference, or on a bridge of the reference, passes.
    pub(super) reference_checks: bool,
}

/// How many at once.
const CROWD: usize = 16;

struct Scenario {
    name: String,
    /// Who makes the attachments.
    first: Side,
    run: Run,
}

type Run = fn(&mut Stage<'_, '_>) -> Result<()>;

pub(super) fn run(node: &Node) -> Result<()> {
    let (mut count, mut failed) = (0, 0);
    for shared in scenarios::shared() {
        let mut of_network: Vec<Scenario> = Vec::new();
        for first in [Side::Reference, Side::Ours] {
            let (made, removed) = (first.name(), first.other().name());
            let mut scenario = |what: String, run: Run| {
                of_network.push(Scenario { name: format!("{}: {what}", shared.name), first, run });
            };
            scenario(format!("ADD by {made}, CHECK, STATUS and DEL by {removed}"), check_and_delete);
            scenario(format!("ADD by {made}, GC by {removed}"), collect);
            scenario(format!("made by {made}, {removed} put in its place"), switch_in_place);
            if first == Side::Reference {
                scenario(
                    format!("ADD by {made}, DEL by {removed} without a namespace and a result"),
                    delete_blindly,
                );
                scenario(format!("ADD by {made}, the container vanishes, DEL by {removed}"), delete_vanished);
                scenario(format!("{CROWD} at once by both, DEL crosswise"), crowd);
            }
        }
        of_network.retain(|one| node.only.as_ref().is_none_or(|only| one.name.contains(only.as_str())));
        if of_network.is_empty() {
            continue;
        }
        count += of_network.len();
        let done = step(&format!("{}: {} scenarios", shared.name, of_network.len()), || {
            Ok(crew::each(&of_network, |Scenario { first, run, .. }| {
                World::with(node, *first, shared.filters, |world| {
                    run(&mut Stage::new(node, world, &shared, *first)?)
                })
            }))
        })?;
        for (Scenario { name, .. }, done) in of_network.iter().zip(done) {
            if let Err(error) = done {
                failed += 1;
                say(&format!("FAILED {name}\n  {}", format!("{error:#}").replace('\n', "\n  ")));
            }
        }
    }
    say(&format!("mixed: {count} scenarios, {} passed, {failed} failed", count - failed));
    ensure!(failed == 0, "{failed} scenarios of the mixed suite failed");
    Ok(())
}

/// A node on which both sides have been, with nothing attached.
struct Stage<'s, 'n> {
    node: &'s Node,
    world: &'s mut World<'n>,
    shared: &'s Shared,
    /// Who makes the attachments.
    first: Side,
    results: Results,
    names: Names,
    before: Observation,
}

impl<'s, 'n> Stage<'s, 'n> {
    fn new(node: &'s Node, world: &'s mut World<'n>, shared: &'s Shared, first: Side) -> Result<Self> {
        world.container(&container(0))?;
        let (results, names) = (Results::default(), Names::default());
        let mut stage = Self { node, world, shared, first, results, names, before: Observation::new() };
        // The one who makes the attachments made the bridge too.
        for side in [first, first.other()] {
            stage.call(side, Verb::Add, 0)?;
            stage.call(side, Verb::Del, 0)?;
        }
        stage.before = stage.look()?;
        Ok(stage)
    }

    fn look(&mut self) -> Result<Observation> {
        let mut seen = observe(self.world, &mut self.names, "")?;
        // Containers come in the course of a scenario; one without a link is as good as none.
        seen.retain(|place, _| !is_of_an_idle_container(place));
        // Where the next search for an address begins, and notes about all that.
        seen.retain(|place, _| !place.contains("/last_reserved_ip.") && !place.contains("/.hawser/"));
        Ok(seen)
    }

    fn second(&self) -> Side {
        self.first.other()
    }

    fn to_call(&self, verb: Verb, number: usize) -> Call {
        let call = Call::new(verb, container(number));
        if !self.shared.ports {
            return call;
        }
        let mapping =
            |protocol: &str| json!({ "hostPort": 8000 + number, "containerPort": 80, "protocol": protocol });
        call.runtime(json!({ "portMappings": [mapping("tcp"), mapping("udp")] }))
    }

    fn call(&mut self, side: Side, verb: Verb, number: usize) -> Result<()> {
        self.make(side, &self.to_call(verb, number))
    }

    /// A call that must succeed.
    fn make(&mut self, side: Side, call: &Call) -> Result<()> {
        if call.verb == Verb::Add {
            self.world.container(&call.container)?;
        }
        succeed(side, call, attach::call(&self.bin_dir(side), &self.shared.network, call, &mut self.results)?)
    }

    fn bin_dir(&self, side: Side) -> PathBuf {
        self.node.plugin_dir(side).to_owned()
    }

    /// CHECK by `side`, where that is of use.
    fn check(&mut self, side: Side, number: usize) -> Result<()> {
        if self.checks(side) { self.call(side, Verb::Check, number) } else { Ok(()) }
    }

    fn checks(&self, side: Side) -> bool {
        self.shared.reference_checks || (side == Side::Ours && self.first == Side::Ours)
    }

    /// Everything is as it was.
    fn nothing_is_left(&mut self) -> Result<()> {
        let after = self.look()?;
        let changed = difference(&self.before, &after);
        ensure!(changed.is_empty(), "left behind or missing afterwards:\n{}", changed.join("\n"));
        Ok(())
    }
}

/// `lo` of a container, and sysctls that ADD sets and DEL leaves, in a namespace that
/// dies with the container.
fn is_of_an_idle_container(place: &str) -> bool {
    let of_container = place.split_once('/').filter(|(netns, _)| is_container(netns));
    of_container.is_some_and(|(_, what)| {
        what.starts_with("sysctl/")
            || what == "link/lo"
            || what.starts_with("link/lo/")
            || what.contains("lo ::1/128")
    })
}

fn is_container(name: &str) -> bool {
    name.strip_prefix('c').is_some_and(|number| number.parse::<usize>().is_ok())
}

fn container(number: usize) -> String {
    format!("c{number}")
}

fn succeed(side: Side, call: &Call, answers: Vec<Answer>) -> Result<()> {
    match answers.into_iter().find(|answer| !answer.success) {
        None => Ok(()),
        Some(answer) => bail!(
            "{} of {} by {}: {} {}: {} {}",
            call.verb.word(),
            call.container,
            side.name(),
            answer.plugin,
            answer.exit,
            answer.stdout,
            answer.stderr.trim_end()
        ),
    }
}

fn difference(before: &Observation, after: &Observation) -> Vec<String> {
    let places: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let changed = places.into_iter().filter(|place| before.get(*place) != after.get(*place));
    let line = |text: Option<&String>| {
        text.map_or_else(|| "(nothing)".to_owned(), |text| text.replace('\n', "\n           "))
    };
    changed
        .map(|place| {
            format!(
                "  {place}\n    before {}\n    after  {}",
                line(before.get(place)),
                line(after.get(place))
            )
        })
        .collect()
}

fn check_and_delete(stage: &mut Stage<'_, '_>) -> Result<()> {
    let (first, second) = (stage.first, stage.second());
    stage.call(first, Verb::Add, 1)?;
    stage.call(first, Verb::Add, 2)?;
    stage.check(second, 1)?;
    stage.call(second, Verb::Status, 1)?;
    stage.call(second, Verb::Del, 1)?;
    stage.check(first, 2)?;
    stage.check(second, 2)?;
    stage.call(second, Verb::Del, 2)?;
    stage.call(second, Verb::Del, 2)?;
    stage.call(first, Verb::Del, 2)?;
    stage.nothing_is_left()
}

/// GC by the other side leaves what is in use, and of the rest at most the link.
fn collect(stage: &mut Stage<'_, '_>) -> Result<()> {
    let (first, second) = (stage.first, stage.second());
    stage.call(first, Verb::Add, 1)?;
    let with_one = stage.look()?;
    stage.call(first, Verb::Add, 2)?;
    let with_two = stage.look()?;
    let valid = json!([{ "containerID": container(1), "ifname": "eth0" }]);
    let gc = stage.to_call(Verb::Gc, 1).valid(valid);
    stage.make(second, &gc)?;
    let after = stage.look()?;
    match second {
        // The reference's plugins know no GC.
        Side::Reference => {
            ensure!(after == with_two, "GC changed:\n{}", difference(&with_two, &after).join("\n"));
        }
        // A link is known by our alias alone; all else of the second container is gone.
        Side::Ours => {
            let mut left = difference(&with_one, &after);
            left.retain(|line| !line.contains("c2"));
            ensure!(left.is_empty(), "GC left or removed:\n{}", left.join("\n"));
        }
    }
    stage.check(first, 1)?;
    stage.check(second, 1)?;
    stage.call(second, Verb::Del, 2)?;
    stage.call(second, Verb::Del, 1)?;
    stage.nothing_is_left()
}

fn delete_blindly(stage: &mut Stage<'_, '_>) -> Result<()> {
    let (first, second) = (stage.first, stage.second());
    stage.call(first, Verb::Add, 1)?;
    let call = stage.to_call(Verb::Del, 1).netns("").prev_result(PrevResult::Missing);
    stage.make(second, &call)?;
    // The link stays until its namespace ends.
    let after = stage.look()?;
    let mut left = difference(&stage.before, &after);
    left.retain(|line| !line.contains("c1.eth0") && !line.trim_start().starts_with("c1/"));
    ensure!(left.is_empty(), "left behind:\n{}", left.join("\n"));
    stage.call(second, Verb::Del, 1)?;
    stage.nothing_is_left()
}

fn delete_vanished(stage: &mut Stage<'_, '_>) -> Result<()> {
    let (first, second) = (stage.first, stage.second());
    stage.call(first, Verb::Add, 1)?;
    stage.world.remove_container(&container(1))?;
    stage.call(second, Verb::Del, 1)?;
    stage.call(second, Verb::Del, 1)?;
    stage.nothing_is_left()
}

/// The directory that the runtime looks into changes its plugins.
fn switch_in_place(stage: &mut Stage<'_, '_>) -> Result<()> {
    let (first, second) = (stage.first, stage.second());
    let in_place = |stage: &mut Stage<'_, '_>, side: Side, verb: Verb, number: usize| -> Result<()> {
        if verb == Verb::Check && !stage.checks(side) {
            return Ok(());
        }
        let call = stage.to_call(verb, number);
        if verb == Verb::Add {
            stage.world.container(&call.container)?;
        }
        let answers = attach::call(Path::new(BIN_DIR), &stage.shared.network, &call, &mut stage.results)?;
        succeed(side, &call, answers)
    };
    stage.world.install(first)?;
    (1..=4).try_for_each(|number| in_place(stage, first, Verb::Add, number))?;
    stage.world.install(second)?;
    (1..=4).try_for_each(|number| in_place(stage, second, Verb::Check, number))?;
    (1..=2).try_for_each(|number| in_place(stage, second, Verb::Del, number))?;
    (5..=6).try_for_each(|number| in_place(stage, second, Verb::Add, number))?;
    // And back.
    stage.world.install(first)?;
    (3..=6).try_for_each(|number| in_place(stage, first, Verb::Check, number))?;
    (3..=6).try_for_each(|number| in_place(stage, first, Verb::Del, number))?;
    stage.nothing_is_left()
}

/// Both sides add at once, then each deletes what the other added.
fn crowd(stage: &mut Stage<'_, '_>) -> Result<()> {
    for number in 1..=CROWD {
        stage.world.container(&container(number))?;
    }
    let side_of = |number: usize| if number.is_multiple_of(2) { Side::Reference } else { Side::Ours };
    let results = at_once(stage, Verb::Add, side_of)?;
    let mut addresses: Vec<IpAddr> = Vec::new();
    for (number, result) in (1..).zip(&results) {
        let result = result.of(&container(number), "eth0").context("a result")?;
        for ip in result["ips"].as_array().into_iter().flatten() {
            let address =
                ip["address"].as_str().and_then(|text| text.split('/').next()).context("an address")?;
            addresses.push(address.parse()?);
        }
    }
    let distinct: BTreeSet<&IpAddr> = addresses.iter().collect();
    ensure!(distinct.len() == addresses.len(), "addresses were given twice: {addresses:?}");
    for (number, result) in (1..).zip(results) {
        stage.results.take(result);
        stage.check(side_of(number).other(), number)?;
    }
    at_once(stage, Verb::Del, |number| side_of(number).other())?;
    stage.nothing_is_left()
}

/// The verb for every container of the crowd at the same time; what each has in its cache then.
fn at_once(
    stage: &Stage<'_, '_>,
    verb: Verb,
    side_of: impl Fn(usize) -> Side + Sync,
) -> Result<Vec<Results>> {
    let one = |number: usize| -> Result<Results> {
        let (side, call) = (side_of(number), stage.to_call(verb, number));
        let mut results = stage.results.clone();
        let answers = attach::call(&stage.bin_dir(side), &stage.shared.network, &call, &mut results)?;
        succeed(side, &call, answers)?;
        Ok(results)
    };
    // Threads of this world's thread are in this world.
    std::thread::scope(|scope| {
        let one = &one;
        let calls: Vec<_> = (1..=CROWD).map(|number| scope.spawn(move || one(number))).collect();
        let ended = calls
            .into_iter()
            .map(|call| call.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        ended.collect()
    })
}
