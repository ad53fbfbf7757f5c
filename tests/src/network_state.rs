//! What an attachment can leave on a node, line by line: links, addresses,
//! routes, nf_tables, leases, lock files. Two states are equal when nothing was
//! left and nothing was taken.
//!
//! Speaks of the calling thread's network namespace.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use linux::netns::NetNs;

use crate::{leaks, netlink};

/// Where to look beside the kernel.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// Network namespaces of containers, with all that is in them.
    pub containers: Vec<PathBuf>,
    /// Directories whose files count, with their contents.
    pub directories: Vec<PathBuf>,
    /// Files and directories below those that may come and change.
    pub changing: Vec<PathBuf>,
}

/// How often each line was there.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct State(BTreeMap<String, usize>);

impl State {
    pub fn take(places: &Places) -> Result<Self> {
        let mut lines = network("host")?;
        for path in &places.containers {
            let netns = NetNs::open(path).with_context(|| path.display().to_string())?;
            let name = path.file_name().unwrap_or_default().display().to_string();
            lines.extend(netns.run(|| network(&name)).context("look into a container")??);
        }
        for dir in &places.directories {
            collect_files(dir, &places.changing, &mut lines);
        }
        let mut state = Self::default();
        for line in lines {
            *state.0.entry(line).or_insert(0) += 1;
        }
        Ok(state)
    }

    /// What is in `after` and not here, with a plus, and the other way round
    /// with a minus; one line each.
    pub fn difference(&self, after: &Self) -> Difference {
        let mut lines = Vec::new();
        for line in self.0.keys().chain(after.0.keys().filter(|line| !self.0.contains_key(*line))) {
            let count = |state: &Self| state.0.get(line).copied().unwrap_or(0);
            let (was, is) = (count(self), count(after));
            lines.extend((was..is).map(|_| format!("+ {line}")));
            lines.extend((is..was).map(|_| format!("- {line}")));
        }
        Difference(lines)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference(pub Vec<String>);

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.join("; "))
    }
}

fn network(whose: &str) -> Result<Vec<String>> {
    let links = netlink::links()?;
    let name = |index: i32| {
        let link = links.iter().find(|link| link.index == index);
        link.map_or_else(|| format!("link {index}"), |link| link.name.clone())
    };
    let mut lines = Vec::new();
    for link in &links {
        let master = link.master.map(|index| format!(" master {}", name(index))).unwrap_or_default();
        let state = if link.is_up { "up" } else { "down" };
        lines.push(format!("link {} mtu {} {state}{master} {:?}", link.name, link.mtu, link.alias));
    }
    for (index, address) in netlink::addresses()? {
        lines.push(format!("address {address} dev {}", name(index)));
    }
    lines.extend(leaks::routes(&[])?.into_iter().filter(|route| !is_kernels_own(route)));
    lines.extend(netlink::nft_tables()?.into_iter().map(|table| format!("nft table {table}")));
    for line in netlink::nft_chains_and_rules()? {
        let place = format!("{} {} {}", line.family, line.table, line.chain);
        lines.push(match line.expressions {
            None => format!("nft chain {place}"),
            Some(expressions) => format!("nft rule {place} {:?} {expressions}", line.comment),
        });
    }
    for line in &mut lines {
        line.insert_str(0, &format!("{whose}: "));
    }
    Ok(lines)
}

/// IPv6's link-local and multicast routes, those to an address itself and the
/// one to nowhere follow a link's state and its addresses, some of them late.
fn is_kernels_own(route: &str) -> bool {
    let prefixes = ["route fe80", "route ff00"];
    prefixes.iter().any(|prefix| route.starts_with(prefix))
        || ["/80 via 0", "/00 via 00000000000000000000000000000000"].iter().any(|part| route.contains(part))
}

fn collect_files(dir: &Path, changing: &[PathBuf], lines: &mut Vec<String>) {
    // What vanishes while it is being read is not there.
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.flatten().map(|entry| entry.path()).filter(|path| !changing.contains(path)) {
        if path.is_dir() {
            lines.push(format!("directory {}", path.display()));
            collect_files(&path, changing, lines);
        } else {
            let content = fs::read(&path).unwrap_or_default();
            lines.push(format!("file {} {:?}", path.display(), String::from_utf8_lossy(&content)));
        }
    }
}
