//! Plans changes from iptables' listing and the wanted rules, as commands of `iptables-restore`. No
//! I/O.

use std::collections::BTreeSet;

use netfilter::iptables::quote;

use super::rules::{
    DNAT_CHAIN, Entrance, GUARD_CHAIN, Gist, OLD_SNAT_CHAIN, Owner, Place, Rule, Wanted, guard_rules,
    owner_of_comment,
};

/// A table as `iptables -S` prints it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Listing {
    chains: BTreeSet<String>,
    rules: Vec<Listed>,
}

#[derive(Clone, Debug)]
struct Listed {
    chain: String,
    /// The printed line, from the chain's name on.
    text: String,
    gist: Gist,
}

impl Listing {
    /// Skips lines without a chain or rule.
    pub(crate) fn read(lines: &[String]) -> Self {
        let mut listing = Self::default();
        for line in lines {
            let words = words(line);
            match words.as_slice() {
                [word, chain, ..] if word == "-N" || word == "-P" => {
                    listing.chains.insert(chain.clone());
                }
                [word, chain, rest @ ..] if word == "-A" => listing.rules.push(Listed {
                    chain: chain.clone(),
                    text: line.trim_start_matches("-A").trim().to_owned(),
                    gist: Gist::of(rest),
                }),
                _ => {}
            }
        }
        listing
    }

    fn in_chain<'a>(&'a self, chain: &'a str) -> impl Iterator<Item = &'a Listed> {
        self.rules.iter().filter(move |rule| rule.chain == chain)
    }

    fn leading_to<'a>(&'a self, chain: &'a str) -> impl Iterator<Item = &'a Listed> {
        self.rules.iter().filter(move |rule| rule.gist.target == chain)
    }

    fn has(&self, rule: &Rule) -> bool {
        let gist = Gist::of(&rule.words);
        self.in_chain(&rule.chain).any(|listed| listed.gist.does_like(&gist))
    }

    fn has_entry(&self, rule: &Rule) -> bool {
        let gist = Gist::of(&rule.words);
        self.in_chain(&rule.chain).any(|listed| listed.gist.enters_like(&gist))
    }
}

/// Commands, and commands that undo them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    pub(crate) commands: Vec<String>,
    pub(crate) undo: Vec<String>,
}

/// The wanted rules that are not listed.
pub(crate) fn add(wanted: &Wanted, listing: &Listing) -> Change {
    let mut change = Change::default();
    let mut created = Vec::new();
    for chain in &wanted.shared_chains {
        if !listing.chains.contains(*chain) {
            change.commands.push(format!(":{chain} - [0:0]"));
            created.push((*chain).to_owned());
        }
    }
    for rule in wanted.shared.iter().filter(|rule| !listing.has(rule)) {
        change.append(rule);
    }
    for stale in outdated_entries(wanted, listing) {
        change.commands.push(format!("-D {stale}"));
        change.undo.push(format!("-A {stale}"));
    }
    let is_there = listing.chains.contains(&wanted.chain);
    let there: Vec<&Gist> = listing.in_chain(&wanted.chain).map(|listed| &listed.gist).collect();
    let forwards: Vec<Gist> = wanted.forwards.iter().map(|rule| Gist::of(&rule.words)).collect();
    let same = there.len() == forwards.len() && there.iter().zip(&forwards).all(|(a, b)| a.does_like(b));
    if !is_there || !same {
        // Creates the chain, or empties one that an ADD with another address left.
        change.commands.push(format!(":{} - [0:0]", wanted.chain));
        if is_there {
            change.undo.push(format!(":{} - [0:0]", wanted.chain));
            change.undo.extend(listing.in_chain(&wanted.chain).map(|old| format!("-A {}", old.text)));
            change.commands.extend(wanted.forwards.iter().map(|rule| command("-A", rule)));
        } else {
            created.push(wanted.chain.clone());
            wanted.forwards.iter().for_each(|rule| change.append(rule));
        }
    }
    for rule in wanted.entries.iter().filter(|rule| !listing.has_entry(rule)) {
        change.append(rule);
    }
    change.undo.extend(created.iter().map(|chain| format!("-X {chain}")));
    change
}

/// The guard's rules that the listed table lacks. They follow an administrator's exceptions.
pub(crate) fn add_guard(listing: &Listing) -> Vec<String> {
    let chain = (!listing.chains.contains(GUARD_CHAIN)).then(|| format!(":{GUARD_CHAIN} - [0:0]"));
    let rules = guard_rules();
    let missing = rules.iter().filter(|rule| !listing.has(rule)).map(addition);
    chain.into_iter().chain(missing).collect()
}

impl Change {
    fn append(&mut self, rule: &Rule) {
        self.commands.push(addition(rule));
        self.undo.push(command("-D", rule));
    }
}

fn addition(rule: &Rule) -> String {
    match rule.place {
        Place::First => command("-I", rule),
        Place::Last => command("-A", rule),
    }
}

fn command(verb: &str, rule: &Rule) -> String {
    let words = rule.words.iter().map(|word| quote(word));
    [verb.to_owned(), rule.chain.clone()].into_iter().chain(words).collect::<Vec<_>>().join(" ")
}

/// Jumps into the container's chain for ports that are no longer mapped.
fn outdated_entries(wanted: &Wanted, listing: &Listing) -> Vec<String> {
    let entries: Vec<Gist> = wanted.entries.iter().map(|rule| Gist::of(&rule.words)).collect();
    let there = listing.leading_to(&wanted.chain).filter(|listed| listed.chain == DNAT_CHAIN);
    let outdated = there.filter(|listed| !entries.iter().any(|entry| listed.gist.enters_like(entry)));
    outdated.map(|listed| listed.text.clone()).collect()
}

/// The listed rules of containers of `network` that are not in use.
pub(crate) fn remove_stale(network: &str, is_valid: impl Fn(&str) -> bool, listing: &Listing) -> Vec<String> {
    let mut commands = Vec::new();
    let mut chains = BTreeSet::new();
    for entry in listing.in_chain(DNAT_CHAIN) {
        let owner = entry.gist.comment.as_deref().and_then(owner_of_comment);
        let owner = owner.filter(|owner| owner.is_stale(network, &is_valid, &entry.gist.target));
        if let Some(owner) = owner.filter(|owner| chains.insert(owner.chain())) {
            commands.extend(remove(&owner, listing));
        }
    }
    commands
}

/// The listed rules of the container.
pub(crate) fn remove(owner: &Owner<'_>, listing: &Listing) -> Vec<String> {
    let mut commands = Vec::new();
    for (chain, entrance) in [(owner.chain(), DNAT_CHAIN), (owner.old_snat_chain(), OLD_SNAT_CHAIN)] {
        if listing.chains.contains(&chain) {
            let entries = listing.leading_to(&chain).filter(|listed| listed.chain == entrance);
            commands.extend(entries.map(|listed| format!("-D {}", listed.text)));
            commands.extend([format!("-F {chain}"), format!("-X {chain}")]);
        }
    }
    commands
}

/// A chain or rule that CHECK does not find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    Chain(String),
    Rule { chain: String, rule: String },
}

pub(crate) fn missing(wanted: &Wanted, listing: &Listing) -> Option<Missing> {
    if !listing.chains.contains(&wanted.chain) {
        return Some(Missing::Chain(wanted.chain.clone()));
    }
    // There may be thousands of ports, each with three rules.
    let listed = listing.rules.iter();
    let effects: BTreeSet<(&str, Gist)> =
        listed.clone().map(|listed| (listed.chain.as_str(), listed.gist.effect())).collect();
    let entrances: BTreeSet<(&str, Entrance<'_>)> =
        listed.map(|listed| (listed.chain.as_str(), listed.gist.entrance())).collect();
    let has = |rule: &Rule| effects.contains(&(rule.chain.as_str(), Gist::of(&rule.words).effect()));
    let has_entry =
        |rule: &Rule| entrances.contains(&(rule.chain.as_str(), Gist::of(&rule.words).entrance()));
    let rule = wanted.forwards.iter().chain(&wanted.shared).find(|rule| !has(rule));
    let rule = rule.or_else(|| wanted.entries.iter().find(|rule| !has_entry(rule)))?;
    Some(Missing::Rule { chain: rule.chain.clone(), rule: rule.words.join(" ") })
}

/// The missing chain and rule of the guard. The reference makes no guard: if its chain does not
/// exist, nothing is missing.
pub(crate) fn missing_guard(listing: &Listing) -> Option<(String, String)> {
    let made_by_us = listing.chains.contains(GUARD_CHAIN);
    let rule = guard_rules().into_iter().find(|rule| made_by_us && !listing.has(rule))?;
    let text = rule.words.join(" ");
    Some((rule.chain, text))
}

/// The arguments of a line. Those in double quotes have backslashes before special characters.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let (mut quoted, mut chars) = (false, line.chars());
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' => word.get_or_insert_default().extend(chars.next()),
            c if c.is_whitespace() && !quoted => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_quoted_argument_is_read_back(arguments in prop::collection::vec("[ -~é]{0,12}", 0..5)) {
            let line: Vec<String> = arguments.iter().map(|argument| quote(argument)).collect();
            prop_assert_eq!(words(&line.join(" ")), arguments);
        }
    }
}
