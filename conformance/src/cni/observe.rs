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

/// Numbers that the kernel gives in order of creation, timers, and what follows from another field.
const VOLATILE: [&str; 20] = [
    "ifindex",
    "link_index",
    "link_netnsid",
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
    "info_kind",
    "info_slave_kind",
];
/// What is compared one by one; the rest is one line.
const PROPERTIES: [&str; 9] = [
    "address",
    "ifalias",
    "master",
    "mtu",
    "promiscuity",
    "txqlen",
    "num_tx_queues",
    "num_rx_queues",
    "operstate",
];
/// The tables of nf_tables that the iptables programs write.
const IPTABLES_TABLES: [&str; 6] =
    ["ip nat", "ip filter", "ip mangle", "ip6 nat", "ip6 filter", "ip6 mangle"];
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
        // The suite's own.
        if name == "out0" {
            continue;
        }
        let place_of = |what: &str| format!("{place}/link/{name}{what}");
        let kind = plain(&link["linkinfo"]["info_kind"]);
        into.insert(place_of(""), kind.clone());
        for property in PROPERTIES.iter().filter(|property| !link[**property].is_null()) {
            // The kernel reports it later; ADD waits for the host's end alone.
            if *property != "operstate" || (kind == "veth" && place == "host") {
                // `UNKNOWN` is up; the kernel's worker has not reported it yet.
                into.insert(
                    place_of(&format!("/{property}")),
                    plain(&link[*property]).replace("UNKNOWN", "UP"),
                );
            }
        }
        let flags = link["flags"].as_array().into_iter().flatten().map(plain);
        let flags = flags.filter(|flag| !["NO-CARRIER", "LOWER_UP"].contains(&flag.as_str()));
        into.insert(place_of("/flags"), flags.collect::<Vec<_>>().join(","));
        for (what, data) in [("/of-kind", "info_data"), ("/as-port", "info_slave_data")] {
            if !link["linkinfo"][data].is_null() {
                into.insert(place_of(what), compact(&link["linkinfo"][data], &VOLATILE));
            }
        }
        let others =
            PROPERTIES.into_iter().chain(VOLATILE).chain(["addr_info", "linkinfo", "flags", "ifname"]);
        into.insert(place_of("/rest"), compact(link, &others.collect::<Vec<_>>()));
        for address in link["addr_info"].as_array().into_iter().flatten() {
            let local = plain(&address["local"]);
            // What the kernel makes out of the hardware address comes when it comes.
            if !local.starts_with("fe80:") {
                // Whether duplicates were looked for is `nodad`; when that ends is the kernel's.
                let without =
                    ["family", "local", "prefixlen", "valid_life_time", "preferred_life_time", "tentative"];
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
            // What comes with a link or an address of IPv6, at some time after it.
            let of_address = family == "-6" && route["type"] == "local";
            if to.starts_with("fe80:") || to == "ff00::/8" || of_address || route["dev"] == "out0" {
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

/// Forwarding, and the settings of each link that are not what a new link has.
fn describe_sysctls(place: &str, netns: &NetNs, into: &mut Observation) -> Result<()> {
    let found = netns.run(|| -> Result<Observation> {
        let mut found = Observation::new();
        let base = Path::new("/proc/sys/net");
        let forward = fs::read_to_string(base.join("ipv4/ip_forward"))?;
        found.insert("ipv4/ip_forward".to_owned(), forward.trim().to_owned());
        for family in ["ipv4/conf", "ipv6/conf"] {
            let new = settings(&base.join(family).join("default"))?;
            for link in fs::read_dir(base.join(family))? {
                let link = link?;
                let link_name = link.file_name().to_string_lossy().into_owned();
                for (name, value) in settings(&link.path())? {
                    if ["all", "default"].contains(&link_name.as_str()) || new.get(&name) != Some(&value) {
                        found.insert(format!("{family}/{link_name}/{name}"), value);
                    }
                }
            }
        }
        Ok(found)
    })??;
    into.extend(found.into_iter().map(|(name, value)| (format!("{place}/sysctl/{name}"), value)));
    Ok(())
}

fn settings(dir: &Path) -> Result<Observation> {
    let mut found = Observation::new();
    for setting in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = setting?.path();
        // Some are write-only, some have no value yet.
        let Ok(value) = fs::read_to_string(&path) else { continue };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.insert(name, value.trim().to_owned());
    }
    Ok(found)
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
            block = None;
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
    // iptables-save shows those in its own format.
    into.retain(|place, _| !IPTABLES_TABLES.iter().any(|table| place.starts_with(&format!("nft/{table}"))));
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
        let mut chains: BTreeMap<String, String> = BTreeMap::new();
        for line in text.lines() {
            if let Some(name) = line.strip_prefix('*') {
                table = name;
            } else if let Some(chain) = line.strip_prefix(':') {
                let (name, rest) = chain.split_once(' ').unwrap_or((chain, ""));
                let policy = rest.split(' ').next().unwrap_or_default();
                chains.insert(format!("{family}/{table}/{name}"), format!("policy {policy}"));
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let (chain, rule) = rule.split_once(' ').unwrap_or((rule, ""));
                let lines = chains.entry(format!("{family}/{table}/{chain}")).or_default();
                lines.push('\n');
                lines.push_str(rule);
            }
        }
        // Looking is enough for the programs to make the chains of the kernel's hooks.
        chains.retain(|_, lines| lines != "policy ACCEPT");
        for place in chains.keys() {
            into.insert(
                place.rsplit_once('/').map(|(table, _)| table.to_owned()).unwrap_or_default(),
                String::new(),
            );
        }
        into.extend(chains);
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
            // What is not for the other side to read has no form to compare.
            let content = match String::from_utf8(content) {
                Ok(text) if !name.contains("/.hawser/") => format!("{text:?}"),
                _ => "of its own".to_owned(),
            };
            into.insert(format!("file{name}"), format!("{mode:04o} {content}"));
        }
    }
    Ok(())
}

/// The thing that `place` is a part of, where that is a place too: a property,
/// setting, address or route is of a link, a chain of a table, a field of an answer.
pub(super) fn whole_of(place: &str) -> Option<String> {
    let parts: Vec<&str> = place.splitn(3, '/').collect();
    match *parts.as_slice() {
        ["nft", table, _chain] => Some(format!("nft/{table}")),
        [family @ ("iptables" | "ip6tables"), table, _chain] => Some(format!("{family}/{table}")),
        [netns, "link", property] => Some(format!("{netns}/link/{}", property.split_once('/')?.0)),
        [netns, "sysctl", setting] => Some(format!("{netns}/link/{}", setting.split('/').nth(2)?)),
        [netns, "address", address] => Some(format!("{netns}/link/{}", address.rsplit_once(' ')?.0)),
        [netns, "route", route] => Some(format!("{netns}/link/{}", route.rsplit_once(" dev ")?.1)),
        [plugin, field] if field.starts_with("stdout") => Some(format!("{plugin}/answer")),
        _ => None,
    }
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
pub(super) fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
