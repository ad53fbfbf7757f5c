//! Common conditions in nft's syntax: parses the matches of a rule without running nft. No I/O.
//!
//! Invariant: the result means exactly what nft would make of the text. For anything unusual there
//! is no result, and nft itself is run.

use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::family::Family;
use crate::mapping::Protocol;

/// One match; a packet must satisfy all matches of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) subject: Subject,
    pub(crate) negated: bool,
}

/// The compared property and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    /// Without host bits; in the family of the rule's table.
    Address(Side, IpNetwork),
    Interface(Direction, InterfaceName),
    Mark(u32),
    L4Protocol(u8),
    Port(Protocol, Side, u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Destination,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    In,
    Out,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum InterfaceName {
    Exact(String),
    /// Written `veth*`; stored without the star.
    StartsWith(String),
}

/// A set of values becomes this many rules at most; nft's own set is better for more.
const MAX_RULES: usize = 16;

/// The rules that together match `conditions`, each as a list of matches: one rule, or several for
/// a set of values. `None`: not understood.
pub(crate) fn parse(conditions: &[String], family: Family) -> Option<Vec<Vec<Match>>> {
    let text = conditions.join(" ");
    let mut tokens = Tokens { rest: tokens(&text)?.into_iter().peekable(), family };
    let mut rules = vec![Vec::new()];
    while let Some(word) = tokens.rest.next() {
        let (values, negated) = tokens.values(word)?;
        if negated {
            // "None of them" means different from each.
            let all = values.into_iter().map(|subject| Match { subject, negated });
            let all: Vec<Match> = all.collect();
            rules.iter_mut().for_each(|rule| rule.extend(all.iter().cloned()));
        } else {
            rules = values
                .iter()
                .flat_map(|subject| {
                    let one = Match { subject: subject.clone(), negated };
                    rules.iter().map(move |rule| [rule.as_slice(), std::slice::from_ref(&one)].concat())
                })
                .collect();
        }
        if rules.len() > MAX_RULES {
            return None;
        }
    }
    Some(rules)
}

/// Words, quoted strings (with their opening quote), braces and commas. `None` for text with a
/// special meaning in nft scripts.
fn tokens(text: &str) -> Option<Vec<&str>> {
    let mut found = Vec::new();
    let mut rest = text.trim_start();
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '{' | '}' | ',' => 1,
            '"' => 1 + rest[1..].find('"')?,
            _ => rest.find(|c: char| c.is_ascii_whitespace() || "{},\"".contains(c)).unwrap_or(rest.len()),
        };
        let (token, after) = rest.split_at(len);
        let after = if first == '"' { &after[1..] } else { after };
        if token.contains([';', '#', '$', '\\', '(', ')', '@', '\n']) {
            return None;
        }
        found.push(token);
        rest = after.trim_start();
    }
    Some(found)
}

struct Tokens<'a> {
    rest: std::iter::Peekable<std::vec::IntoIter<&'a str>>,
    family: Family,
}

impl<'a> Tokens<'a> {
    /// Parses the rest of the match that begins with `word`: its values, and whether they are
    /// excluded.
    fn values(&mut self, word: &str) -> Option<(Vec<Subject>, bool)> {
        let word = if word == "meta" { self.meta_key()? } else { word };
        let family = self.family;
        match word {
            "ip" | "ip6" => {
                if (word == "ip") != (family == Family::V4) {
                    return None;
                }
                let side = self.side("saddr", "daddr")?;
                self.compared(|text| address(text, family).map(|network| Subject::Address(side, network)))
            }
            "iifname" | "oifname" => {
                let direction = if word == "iifname" { Direction::In } else { Direction::Out };
                self.compared(|text| interface(text).map(|name| Subject::Interface(direction, name)))
            }
            "mark" => self.compared(|text| number(text).map(Subject::Mark)),
            "l4proto" => self.compared(|text| l4_protocol(text).map(Subject::L4Protocol)),
            other => {
                let protocol = Protocol::parse(other).filter(|protocol| protocol.name() == other)?;
                let side = self.side("sport", "dport")?;
                self.compared(|text| {
                    let port = number(text).and_then(|port| u16::try_from(port).ok());
                    port.map(|port| Subject::Port(protocol, side, port))
                })
            }
        }
    }

    /// `meta` may be omitted only before names and marks.
    fn meta_key(&mut self) -> Option<&'a str> {
        self.rest.next().filter(|key| matches!(*key, "iifname" | "oifname" | "mark" | "l4proto"))
    }

    fn side(&mut self, source: &str, destination: &str) -> Option<Side> {
        match self.rest.next()? {
            word if word == source => Some(Side::Source),
            word if word == destination => Some(Side::Destination),
            _ => None,
        }
    }

    /// An operator (equality by default), then a value or a set of values.
    fn compared(&mut self, read: impl Fn(&str) -> Option<Subject>) -> Option<(Vec<Subject>, bool)> {
        let negated = self.rest.next_if(|word| matches!(*word, "!=" | "ne")).is_some();
        if !negated {
            // Skipped: equality is the default.
            let _equality = self.rest.next_if(|word| matches!(*word, "==" | "eq"));
        }
        let first = self.rest.next()?;
        if first != "{" {
            return Some((vec![read(first)?], negated));
        }
        let mut values = Vec::new();
        loop {
            match self.rest.next()? {
                "}" if !values.is_empty() => return Some((values, negated)),
                value => values.push(read(value)?),
            }
            match self.rest.next()? {
                "," => {}
                "}" => return Some((values, negated)),
                _ => return None,
            }
        }
    }
}

fn address(text: &str, family: Family) -> Option<IpNetwork> {
    let network = match text.contains('/') {
        true => cni_plugin::conf::parse_cidr(text)?,
        false => IpNetwork::from(text.parse::<IpAddr>().ok()?),
    };
    // nft treats a comparison with an empty prefix specially.
    let usual = network.prefix() > 0 && Family::of(network.ip()) == family;
    usual.then(|| IpNetwork::new(network.network(), network.prefix()).ok()).flatten()
}

/// With or without quotes; a star at the end matches any suffix.
fn interface(text: &str) -> Option<InterfaceName> {
    let name = text.strip_prefix('"').unwrap_or(text);
    let (name, starred) = name.strip_suffix('*').map_or((name, false), |name| (name, true));
    let usual = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    // IFNAMSIZ is 16 with the final zero.
    if name.is_empty() || name.len() > 15 || !name.chars().all(usual) {
        return None;
    }
    let name = name.to_owned();
    Some(if starred { InterfaceName::StartsWith(name) } else { InterfaceName::Exact(name) })
}

fn l4_protocol(text: &str) -> Option<u8> {
    Protocol::parse(text).filter(|protocol| protocol.name() == text).map(Protocol::number)
}

/// Decimal without leading zeros, or hexadecimal.
fn number(text: &str) -> Option<u32> {
    if let Some(hex) = text.strip_prefix("0x") {
        return u32::from_str_radix(hex, 16).ok();
    }
    let decimal = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    decimal.then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests;
