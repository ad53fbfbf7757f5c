//! Everything that a plugin could have changed, as lines `where = what`: links,
//! addresses, routes, sysctls, packet filter rules, files.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use linux::netns::NetNs;
use serde_json::Value;

use super::names::Names;
use super::world::{Filters, HIDDEN, NETNS_DIR, OWN, World};

/// One moment of a world: each thing by its place.
pub(super) type Observation = BTreeMap<String, String>;

/// Counters and timers, numbers that the kernel gives in order of creation, and
/// what follows from another field.
const VOLATILE: [&str; 19] = [
    "ifindex",
    "link_index",
    "link_netnsid",
    "addr_info",
    "bridge_id",
    "root_id",
    "hello_timer",
    "tcn_timer",
    "topology_change_timer",
    "gc_timer",
    "hold_timer",
    "message_age_timer",
    "forward_delay_timer",
    "id",
    "no",
    "designated_port",
    "topology_change",
    "topology_change_detected",
    "topology_change_ack",
];
/// Files of the programs that plugins start.
const NOT_OF_PLUGINS: [&str; 1] = ["/run/xtables.lock"];

/// Looks at the whole world; `names` learns what is new.
pub(super) fn observe(world: &World<'_>, names: &mut Names, fixed: &str) -> Result<Observation> {
    let mut raw = Observation::new();
    let ip = &world.programs().ip;
    let links_of = |netns: &NetNs| -> Result<Value> {
        Ok(serde_json::from_str(&World::ask(netns, ip, &["-j", "-d", "addr", "show"])?)?)
    };
    let host = links_of(&world.host)?;
    let mut containers = Vec::new();
    for (name, netns) in world.containers() {
        containers.push((name.to_owned(), links_of(netns)?));
    }
    names.learn(&host, &containers, fixed);
    for (place, links) in containers.iter().map(|(n, l)| (n.as_str(), l)).chain([("host", &host)]) {
        let netns = world.existing(place)?;
        describe_links(place, links, &mut raw);
        describe_routes(world, place, netns, &mut raw)?;
        describe_sysctls(place, netns, &mut raw)?;
    }
    describe_nftables(world, &mut raw)?;
    describe_iptables(world, &mut raw)?;
    for dir in HIDDEN {
        describe_files(Path::new(dir), &mut raw)?;
    }
    Ok(raw.into_iter().map(|(place, what)| (names.apply(&place), names.apply(&what))).collect())
}

fn describe_links(place: &str, links: &Value, into: &mut Observation) {
    for link in links.as_array().into_iter().flatten() {
        let name = link["ifname"].as_str().unwrap_or_default();
        flatten(&format!("{place}/link/{name}"), link, &mut |path, value| {
            let key = path.rsplit('.').next().unwrap_or_default();
            if !VOLATILE.iter().any(|volatile| key == *volatile || path.contains(&format!(".{volatile}["))) {
                into.insert(path, value);
            }
        });
        for address in link["addr_info"].as_array().into_iter().flatten() {
            let local = plain(&address["local"]);
            // What the kernel makes out of the hardware address comes when it comes.
            if !local.starts_with("fe80:") {
                let without = ["family", "local", "prefixlen", "valid_life_time", "preferred_life_time"];
                let local = format!("{local}/{}", address["prefixlen"]);
                into.insert(format!("{place}/address/{name} {local}"), compact(address, &without));
            }
        }
    }
}

fn describe_routes(world: &World<'_>, place: &str, netns: &NetNs, into: &mut Observation) -> Result<()> {
    for family in ["-4", "-6"] {
        let words = ["-j", "-d", family, "route", "show", "table", "all"];
        let text = World::ask(netns, &world.programs().ip, &words)?;
        let routes: Value = if text.trim().is_empty() { Value::Null } else { serde_json::from_str(&text)? };
        for route in routes.as_array().into_iter().flatten() {
            let to = plain(&route["dst"]);
            // What comes with a link of IPv6, at some time after it is up.
            if to.starts_with("fe80:") || to == "ff00::/8" {
                continue;
            }
            let table = if route["table"].is_null() { "main".to_owned() } else { plain(&route["table"]) };
            // Whether the link has its carrier yet, or still.
            let line = compact(route, &["dst", "table"]).replace(r#"flags=["linkdown"]"#, "flags=[]");
            let entry =
                into.entry(format!("{place}/route/{table} {to} dev {}", plain(&route["dev"]))).or_default();
            if !entry.is_empty() {
                entry.push('\n');
            }
            entry.push_str(&line);
        }
    }
    Ok(())
}

/// Every setting of every link, and forwarding.
fn describe_sysctls(place: &str, netns: &NetNs, into: &mut Observation) -> Result<()> {
    let found = netns.run(|| -> Result<Observation> {
        let mut found = Observation::new();
        let base = Path::new("/proc/sys/net");
        let forward = fs::read_to_string(base.join("ipv4/ip_forward"))?;
        found.insert("ipv4/ip_forward".to_owned(), forward.trim().to_owned());
        for family in ["ipv4/conf", "ipv6/conf"] {
            for link in fs::read_dir(base.join(family))? {
                let link = link?.path();
                for setting in fs::read_dir(&link).with_context(|| link.display().to_string())? {
                    let path = setting?.path();
                    // Some are write-only, some have no value yet.
                    let Ok(value) = fs::read_to_string(&path) else { continue };
                    let name = path.strip_prefix(base)?.display().to_string();
                    found.insert(name, value.trim().to_owned());
                }
            }
        }
        Ok(found)
    })??;
    into.extend(found.into_iter().map(|(name, value)| (format!("{place}/sysctl/{name}"), value)));
    Ok(())
}

/// Of nft's listing, every chain, set and map with its lines; handles and counters are left out by `-s`.
fn describe_nftables(world: &World<'_>, into: &mut Observation) -> Result<()> {
    let text = World::ask(&world.host, &world.programs().nft, &["-s", "list", "ruleset"])?;
    let mut table = String::new();
    let mut block: Option<(String, Vec<&str>)> = None;
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix("table ").and_then(|rest| rest.strip_suffix(" {")) {
            name.clone_into(&mut table);
            into.insert(format!("nft/{table}"), String::new());
        } else if line == "}" {
            if let Some((name, lines)) = block.take() {
                into.insert(format!("nft/{table}/{name}"), lines.join("\n"));
            }
        } else if let Some((_, lines)) = &mut block {
            lines.push(line);
        } else if let Some(name) = line.strip_suffix(" {") {
            block = Some((name.to_owned(), Vec::new()));
        } else {
            into.insert(format!("nft/{table}"), line.to_owned());
        }
    }
    Ok(())
}

fn describe_iptables(world: &World<'_>, into: &mut Observation) -> Result<()> {
    let variant = match world.filters {
        Filters::Legacy => "legacy",
        Filters::Nft | Filters::WithoutIptables => "nft",
    };
    for family in ["iptables", "ip6tables"] {
        let program = world.programs().iptables(&format!("{family}-{variant}-save"));
        let text = World::ask(&world.host, &program, &[])?;
        let mut table = "";
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name;
            } else if let Some(chain) = line.strip_prefix(':') {
                let (name, rest) = chain.split_once(' ').unwrap_or((chain, ""));
                let policy = rest.split(' ').next().unwrap_or_default();
                into.insert(format!("{family}/{table}/{name}"), format!("policy {policy}"));
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let (chain, rule) = rule.split_once(' ').unwrap_or((rule, ""));
                let lines = into.entry(format!("{family}/{table}/{chain}")).or_default();
                lines.push('\n');
                lines.push_str(rule);
            }
        }
    }
    Ok(())
}

fn describe_files(dir: &Path, into: &mut Observation) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        let name = path.display().to_string();
        if name == OWN || name == NETNS_DIR || NOT_OF_PLUGINS.contains(&name.as_str()) {
            continue;
        }
        let metadata = fs::symlink_metadata(&path)?;
        let mode = metadata.mode() & 0o7777;
        if metadata.is_dir() {
            into.insert(format!("file{name}/"), format!("{mode:04o}"));
            describe_files(&path, into)?;
        } else {
            let content = fs::read(&path).with_context(|| name.clone())?;
            let content = String::from_utf8_lossy(&content);
            into.insert(format!("file{name}"), format!("{mode:04o} {content:?}"));
        }
    }
    Ok(())
}

/// Every leaf of `value` with its path: `prefix.key[0].key`.
pub(super) fn flatten(prefix: &str, value: &Value, leaf: &mut impl FnMut(String, String)) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (key, value) in fields {
                flatten(&format!("{prefix}.{key}"), value, leaf);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, value) in items.iter().enumerate() {
                flatten(&format!("{prefix}[{index}]"), value, leaf);
            }
        }
        leaf_value => leaf(prefix.to_owned(), plain(leaf_value)),
    }
}

/// `key=value` of every field but `without`.
fn compact(object: &Value, without: &[&str]) -> String {
    let fields = object.as_object().into_iter().flatten();
    let fields = fields.filter(|(key, _)| !without.contains(&key.as_str()));
    fields.map(|(key, value)| format!("{key}={}", plain(value))).collect::<Vec<_>>().join(" ")
}

/// A text without its quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
