//! Part `reference pair`: every scenario runs once with the reference's plugins and once with ours,
//! each in a new world. What both did must be the same, except for the differences that the
//! scenario declares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xtask::progress::{say, step};

use super::attach::{self, Answer, Results};
use super::differences::{self, Difference};
use super::names::Names;
use super::observe::{flatten, observe, plain, whole_of};
use super::scenario::{Scenario, Step, Verb};
use super::world::{self, BIN_DIR, World};
use super::{Node, Side, crew, scenarios};

/// What one side did, by place; what it wrote to stderr beside it.
#[derive(Debug, Default)]
struct Record {
    seen: BTreeMap<String, String>,
    stderr: String,
}

/// How both sides compare.
#[derive(Debug, Default)]
struct Comparison {
    /// Undeclared differences, and declared ones that did not appear.
    complaints: Vec<String>,
    /// Rows of the table that were met.
    met: BTreeSet<&'static str>,
    /// Which of the differences that show everywhere were met.
    met_everywhere: BTreeSet<usize>,
}

pub(super) fn run(node: &Node) -> Result<()> {
    let everywhere = scenarios::everywhere();
    let (mut count, mut failed) = (0, 0);
    let (mut met, mut met_everywhere) = (BTreeSet::new(), BTreeSet::new());
    for (group, scenarios) in scenarios::groups(node.only.as_deref()) {
        let comparisons = step(&format!("{group}: {} scenarios", scenarios.len()), || {
            Ok(crew::each(&scenarios, |scenario| compare_sides(node, scenario, &everywhere)))
        })?;
        for (scenario, comparison) in scenarios.iter().zip(comparisons) {
            count += 1;
            let comparison = comparison.unwrap_or_else(|error| Comparison {
                complaints: vec![format!("  {error:#}")],
                ..Comparison::default()
            });
            met.extend(comparison.met);
            met_everywhere.extend(comparison.met_everywhere);
            if !comparison.complaints.is_empty() {
                failed += 1;
                say(&format!("FAILED {}", scenario.name));
                comparison.complaints.iter().for_each(|complaint| say(complaint));
            }
        }
    }
    say(&format!("reference pair: {count} scenarios, {} passed, {failed} failed", count - failed));
    ensure!(failed == 0, "{failed} scenarios of the reference pair failed");
    // Part of the list says nothing about all of the table.
    if node.only.is_none() {
        check_table(&met)?;
        let dead = everywhere.iter().enumerate().find(|(index, _)| !met_everywhere.contains(index));
        ensure!(dead.is_none(), "no scenario meets the difference {:?}", dead.map(|(_, dead)| dead));
    }
    Ok(())
}

/// Every row is exercised, and every difference has a row.
fn check_table(met: &BTreeSet<&'static str>) -> Result<()> {
    let table = differences::table()?;
    let met: BTreeSet<String> = met.iter().map(|id| (*id).to_owned()).collect();
    let without_row: Vec<&String> = met.difference(&table).collect();
    let without_scenario: Vec<&String> = table.difference(&met).collect();
    ensure!(without_row.is_empty(), "differences that docs/CNI.md has no row for: {without_row:?}");
    ensure!(without_scenario.is_empty(), "rows of docs/CNI.md that no scenario meets: {without_scenario:?}");
    Ok(())
}

fn compare_sides(node: &Node, scenario: &Scenario, everywhere: &[Difference]) -> Result<Comparison> {
    let on = |side| {
        move || {
            World::with(node, side, scenario.filters, |world| play(world, scenario))
                .with_context(|| format!("{side:?}"))
        }
    };
    let (reference, ours) = std::thread::scope(|scope| {
        let reference = scope.spawn(on(Side::Reference));
        let ours = on(Side::Ours)();
        (reference.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), ours)
    });
    Ok(compare(scenario, &reference?, &ours?, everywhere))
}

fn compare(scenario: &Scenario, reference: &Record, ours: &Record, everywhere: &[Difference]) -> Comparison {
    let mut comparison = Comparison::default();
    let mut declared: Vec<(&Difference, bool)> = scenario.differences.iter().map(|d| (d, false)).collect();
    // A difference that appears again after later steps is reported once.
    let mut undeclared: BTreeMap<_, Vec<&str>> = BTreeMap::new();
    let places: BTreeSet<&String> = reference.seen.keys().chain(ours.seen.keys()).collect();
    for at in places {
        let (theirs, own) =
            (reference.seen.get(at).map(String::as_str), ours.seen.get(at).map(String::as_str));
        if theirs == own || is_part_of_another(at, reference, ours) {
            continue;
        }
        if let Some((difference, found)) = declared.iter_mut().find(|(d, _)| d.covers(at, theirs, own)) {
            *found = true;
            comparison.met.insert(difference.id);
        } else if let Some(index) = everywhere.iter().position(|d| d.covers(at, theirs, own)) {
            comparison.met_everywhere.insert(index);
            comparison.met.insert(everywhere[index].id);
        } else {
            let (step, place) = at.split_once('/').unwrap_or((at, ""));
            undeclared.entry((place, theirs, own)).or_default().push(step);
        }
    }
    comparison.complaints.extend(undeclared.iter().map(|((place, theirs, own), steps)| {
        let indent = |text: Option<&str>| text.unwrap_or("(nothing)").replace('\n', "\n              ");
        format!(
            "  {place} [{}]\n    reference {}\n    ours      {}",
            steps.join(", "),
            indent(*theirs),
            indent(*own)
        )
    }));
    for (difference, _) in declared.iter().filter(|(_, found)| !found) {
        comparison.complaints.push(format!("  declared, but not there: {difference:?}"));
    }
    if !comparison.complaints.is_empty() && !ours.stderr.is_empty() {
        comparison.complaints.push(format!("  stderr of ours:\n{}", ours.stderr));
    }
    comparison
}

/// Whether the sides differ in the whole that `at` is a part of: that is said
/// once, for the whole. (A link's name and an answer's kind are such.)
fn is_part_of_another(at: &str, reference: &Record, ours: &Record) -> bool {
    let Some((step, place)) = at.split_once('/') else { return false };
    whole_of(place).is_some_and(|whole| {
        let whole = format!("{step}/{whole}");
        let (reference, ours) = (reference.seen.get(&whole), ours.seen.get(&whole));
        if whole.ends_with("/answer") { reference != ours } else { reference.is_some() != ours.is_some() }
    })
}

/// All steps of the scenario in this world.
fn play(world: &mut World<'_>, scenario: &Scenario) -> Result<Record> {
    let fixed = format!("{scenario:?}");
    let (mut names, mut results, mut record) = (Names::default(), Results::default(), Record::default());
    for (index, step) in scenario.steps.iter().enumerate() {
        let number = index + 1;
        match step {
            Step::Call(call) => {
                let label = format!("{number} {} {}", call.verb.word(), call.container);
                // A namespace that a scenario names is its own business.
                if call.netns.is_none() && call.verb == Verb::Add {
                    world.container(&call.container)?;
                }
                let answers = attach::call(Path::new(BIN_DIR), &scenario.network, call, &mut results)
                    .with_context(|| label.clone())?;
                for (place, what) in observe(world, &mut names, &fixed).with_context(|| label.clone())? {
                    record.seen.insert(format!("{label}/{place}"), what);
                }
                record_answers(&label, &answers, &names, &mut record);
            }
            Step::Probe(probe) => {
                let seen = match probe.run(world) {
                    Ok(seen) => seen,
                    Err(error) => format!("{error:#}"),
                };
                let label = format!("{number} {}", probe.label());
                // Both sides against what is right, not only against each other.
                let right = seen == probe.expected();
                record
                    .seen
                    .insert(label, if right { "as it should be".to_owned() } else { names.apply(&seen) });
                if !right {
                    record.stderr.push_str(&format!("{number} {}: {seen}\n", probe.label()));
                }
            }
            Step::Ip { netns, lines } => {
                let netns = if *netns == "host" || *netns == world::OUTSIDE {
                    world.existing(netns)?
                } else {
                    world.container(netns)?;
                    world.existing(netns)?
                };
                world.ip_batch(netns, &without_symbols(lines, &names))?;
            }
            Step::Sysctl { netns, name, value } => {
                world.existing(netns)?.run(|| linux::sysctl::write(name, value))??;
            }
            Step::File(path, content) => {
                let path = Path::new(path);
                if let Some(dir) = path.parent() {
                    std::fs::create_dir_all(dir)?;
                }
                std::fs::write(path, content).with_context(|| path.display().to_string())?;
            }
            Step::Remove(path) => std::fs::remove_file(path).with_context(|| path.clone())?,
            Step::Filter(line) => filter(world, line)?,
            Step::Container(container) => drop(world.container(container)?),
            Step::Vanish(container) => world.remove_container(container)?,
        }
    }
    Ok(record)
}

fn record_answers(label: &str, answers: &[Answer], names: &Names, record: &mut Record) {
    for (index, answer) in answers.iter().enumerate() {
        let place = format!("{label}/{}", answer.plugin);
        // The same plugin may be twice in a list.
        let twice = answers.iter().take(index).any(|earlier| earlier.plugin == answer.plugin);
        let place = if twice { format!("{place} again") } else { place };
        let parsed = serde_json::from_str::<Value>(&answer.stdout).ok();
        let kind = match &parsed {
            _ if answer.stdout.is_empty() => "nothing".to_owned(),
            None => format!("no JSON: {}", answer.stdout),
            Some(error) if !answer.success => format!("error {}: {}", error["code"], plain(&error["msg"])),
            Some(_) => "a result".to_owned(),
        };
        record.seen.insert(format!("{place}/answer"), names.apply(&format!("{}, {kind}", answer.exit)));
        flatten(&format!("{place}/stdout"), &parsed.unwrap_or_default(), &mut |path, text| {
            if !path.ends_with("/stdout") && !path.ends_with("stdout.code") && !path.ends_with("stdout.msg") {
                record.seen.insert(path, names.apply(&text));
            }
        });
        if !answer.stderr.is_empty() {
            record.stderr.push_str(&format!("{place}: {}\n", answer.stderr.trim_end()));
        }
    }
}

/// A line of a scenario may speak of `<veth c1.eth0>`.
fn without_symbols(line: &str, names: &Names) -> String {
    names.originals().fold(line.to_owned(), |line, (name, symbol)| line.replace(symbol, name))
}

fn filter(world: &World<'_>, line: &str) -> Result<()> {
    let mut words = line.split_whitespace();
    let program = Path::new(world::OWN).join("programs").join(words.next().context("an empty line")?);
    let words: Vec<&str> = words.collect();
    World::ask(&world.host, &program, &words).map(drop)
}
