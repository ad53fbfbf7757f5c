//! The host's iptables program: used if a configuration requests it by name, or if the kernel's
//! legacy tables have rules that nf_tables does not show.

use std::collections::BTreeSet;

use cni_plugin::{CniError, Invocation, ValidAttachments};
use ipnetwork::IpNetwork;
use netfilter::iptables::{IpTables, IpVersion, legacy_tables, quote};

use crate::error::{Error, Failures};
use crate::iptables_chain::{Addresses, TABLE, chain_name, comment, own_jumps, rules_of};
use crate::keys::KEYS;

const VERSIONS: [IpVersion; 2] = [IpVersion::V4, IpVersion::V6];

/// Adds the missing rules, with one reading and one writing process for each IP version among
/// `addresses`.
pub(crate) fn ensure(call: &Invocation, addresses: &[IpNetwork]) -> Result<(), Error> {
    for version in VERSIONS {
        let addresses = of_version(addresses, version);
        if addresses.is_empty() {
            continue;
        }
        let tool = IpTables::find(version)?;
        let there = tool.rules(TABLE)?;
        let commands = missing(call, &addresses, &there);
        tool.apply(TABLE, &commands)?;
    }
    Ok(())
}

/// Removes the attachment's jumps to its chain from the legacy tables and, if none is left, the
/// chain. After a failure for one IP version, the rules of the other are still removed. Without
/// `ipMasq` it starts no program.
pub(crate) fn remove(call: &Invocation, addresses: &dyn Fn() -> Addresses) -> Result<(), Error> {
    if !is_masqueraded(call) {
        return Ok(());
    }
    let mut failures = Failures::default();
    let with_table = VERSIONS.map(|version| failures.keep(has_table(version)) == Some(true));
    if with_table == [false; 2] {
        return failures.into_result();
    }
    let mut addresses = addresses();
    let listed = [0, 1].map(|at| {
        let is_read = with_table[at] && addresses.may_include(VERSIONS[at] == IpVersion::V4);
        is_read.then(|| failures.keep(Listed::read(VERSIONS[at], call)).flatten()).flatten()
    });
    // Rules that were not read may show a second interface of the container.
    addresses.complete |= !failures.is_empty();
    let chain = chain_name(&call.conf.name, &call.container_id);
    let there = listed.each_ref().map(|listed| listed.as_ref().map_or(&[][..], |listed| &listed.lines));
    let commands = removal(&chain, &addresses, there);
    for (listed, commands) in listed.iter().zip(&commands) {
        if let Some(Listed { tool, .. }) = listed {
            failures.keep(tool.apply(TABLE, commands));
        }
    }
    failures.into_result()
}

/// A program and its output for the table: lines of `-S`.
struct Listed {
    tool: IpTables,
    lines: Vec<String>,
}

impl Listed {
    fn read(version: IpVersion, call: &Invocation) -> Result<Option<Self>, Error> {
        let Some(tool) = legacy_tool(version, call)? else { return Ok(None) };
        let lines = tool.rules(TABLE)?;
        Ok(Some(Self { tool, lines }))
    }
}

/// Removes the legacy chains of this network's containers without any valid interface, for each IP
/// version on its own. Without `ipMasq`, there may be rules of an earlier configuration: a failure is
/// only a warning then.
pub(crate) fn collect(call: &Invocation, valid: &ValidAttachments) -> Result<(), Error> {
    let mut failures = Failures::default();
    for version in VERSIONS {
        match collect_version(version, call, valid) {
            Err(e) if !is_masqueraded(call) => warn_of_rest(version, &e),
            outcome => drop(failures.keep(outcome)),
        }
    }
    failures.into_result()
}

fn collect_version(version: IpVersion, call: &Invocation, valid: &ValidAttachments) -> Result<(), Error> {
    let Some(Listed { tool, lines }) = Listed::read(version, call)? else { return Ok(()) };
    for chain in stale_chains(&call.conf.name, valid, &lines) {
        let [commands, _] = removal(&chain, &Addresses::default(), [&lines, &[]]);
        tool.apply(TABLE, &commands)?;
    }
    Ok(())
}

/// Whether the legacy tables have all rules for `addresses`.
pub(crate) fn is_complete(call: &Invocation, addresses: &[IpNetwork]) -> Result<bool, Error> {
    for version in VERSIONS {
        let addresses = of_version(addresses, version);
        if addresses.is_empty() {
            continue;
        }
        let Some(listed) = Listed::read(version, call)? else { return Ok(false) };
        if !missing(call, &addresses, &listed.lines).is_empty() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the configuration masquerades. Also if the key has a wrong type: an earlier configuration
/// may have masqueraded.
fn is_masqueraded(call: &Invocation) -> bool {
    call.conf.fields(KEYS).bool("ipMasq").unwrap_or(true)
}

/// Starts no program.
fn has_table(version: IpVersion) -> Result<bool, Error> {
    let tables = legacy_tables(version)
        .map_err(|source| linux::Error::new("list legacy tables", version.program(), source))?;
    Ok(tables.iter().any(|table| table == TABLE))
}

/// `None` if the kernel has no legacy table, since running the program would create one, or if
/// there is a table but no program for it.
fn legacy_tool(version: IpVersion, call: &Invocation) -> Result<Option<IpTables>, Error> {
    if !has_table(version)? {
        return Ok(None);
    }
    match IpTables::find_legacy(version) {
        Ok(tool) => Ok(Some(tool)),
        Err(e) => {
            if is_masqueraded(call) {
                warn_of_rest(version, &e);
            }
            Ok(None)
        }
    }
}

fn warn_of_rest(version: IpVersion, e: &dyn std::error::Error) {
    let what = format!("the legacy table {TABLE} of {} is left as it is", version.program());
    cni_plugin::warn("bridge", format_args!("{what}: {}", CniError::chain(e).msg));
}

fn of_version(addresses: &[IpNetwork], version: IpVersion) -> Vec<IpNetwork> {
    addresses.iter().filter(|address| address.is_ipv4() == (version == IpVersion::V4)).copied().collect()
}

/// Restore commands for the rules that `there` (lines of `-S`) lacks.
fn missing(call: &Invocation, addresses: &[IpNetwork], there: &[String]) -> Vec<String> {
    let chain = chain_name(&call.conf.name, &call.container_id);
    let comment = comment(&call.conf.name, &call.container_id);
    let is_there = |line: &String| there.contains(line);
    let mut commands = Vec::new();
    if !is_there(&format!("-N {chain}")) {
        commands.push(format!(":{chain} - [0:0]"));
    }
    for (chain, words) in addresses.iter().flat_map(|address| rules_of(address, &chain, &comment)) {
        let words: Vec<String> = words.iter().map(|word| quote(word)).collect();
        let line = format!("-A {chain} {}", words.join(" "));
        if !is_there(&line) && !commands.contains(&line) {
            commands.push(line);
        }
    }
    commands
}

/// Finds chains by the comments of their rules, which are quoted in the lines.
fn stale_chains(network: &str, valid: &ValidAttachments, there: &[String]) -> BTreeSet<String> {
    let before = quote(&comment(network, ""));
    // Without the closing quotes after the id, escaped or not.
    let before = before.strip_suffix("\\\"\"").unwrap_or(&before);
    let ids = there.iter().filter_map(|line| line.split_once(before)?.1.split_once('\\').map(|(id, _)| id));
    let stale = ids.filter(|id| !valid.contains_container(id));
    stale.map(|id| chain_name(network, id)).filter(|chain| there.contains(&format!("-N {chain}"))).collect()
}

/// Restore commands for each family; `there` has the lines of `-S`.
fn removal(chain: &str, addresses: &Addresses, there: [&[String]; 2]) -> [Vec<String>; 2] {
    let target = format!("-j {chain}");
    let is_jump = |line: &&String| line.ends_with(&target) && line.starts_with("-A ");
    let jumps = there.map(|lines| lines.iter().filter(is_jump).collect::<Vec<_>>());
    let own = own_jumps(addresses, jumps.each_ref().map(Vec::as_slice), |line| source_of(line));
    [0, 1].map(|at| {
        let mut commands: Vec<String> = own[at].iter().map(|line| line.replacen("-A ", "-D ", 1)).collect();
        if own[at].len() == jumps[at].len() && there[at].contains(&format!("-N {chain}")) {
            commands.extend([format!("-F {chain}"), format!("-X {chain}")]);
        }
        commands
    })
}

/// The addresses from which a line jumps.
fn source_of(line: &str) -> Option<IpNetwork> {
    line.split_once(" -s ")?.1.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stale_chains_are_those_of_this_network_without_a_valid_interface() {
        let conf = r#"{"name":"net","cniVersion":"1.1.0",
            "cni.dev/valid-attachments":[{"containerID":"valid","ifname":"eth3"}]}"#;
        let conf = cni_plugin::NetConf::parse(conf.into()).unwrap();
        let valid = ValidAttachments::read(&conf).unwrap();
        let mut there = Vec::new();
        for (network, id) in [("net", "valid"), ("net", "stale"), ("net2", "stale")] {
            let (chain, comment) = (chain_name(network, id), quote(&comment(network, id)));
            there.push(format!("-N {chain}"));
            there.push(format!("-A POSTROUTING -m comment --comment {comment} -j {chain}"));
        }
        assert_eq!(stale_chains("net", &valid, &there), BTreeSet::from([chain_name("net", "stale")]));
    }

    #[test]
    fn removal_takes_the_jumps_of_the_known_addresses_and_the_last_one_takes_the_chain() {
        let there: Vec<String> = [
            "-N CNI-x",
            "-A POSTROUTING -s 10.0.0.2/32 -m comment --comment \"a b\" -j CNI-x",
            "-A POSTROUTING -s 10.0.0.3/32 -j CNI-x",
        ]
        .map(str::to_owned)
        .to_vec();
        let first = Addresses { known: vec!["10.0.0.2".parse().unwrap()], complete: false };
        let delete = "-D POSTROUTING -s 10.0.0.2/32 -m comment --comment \"a b\" -j CNI-x";
        let removal = |chain, addresses: Addresses| removal(chain, &addresses, [&there, &[]]);
        assert_eq!(removal("CNI-x", first), [vec![delete.to_owned()], vec![]]);
        assert_eq!(removal("CNI-x", Addresses::default())[0][2..], ["-F CNI-x", "-X CNI-x"]);
        assert_eq!(removal("CNI-y", Addresses::default()), [[""; 0]; 2]);
    }

    #[test]
    fn a_jump_from_the_network_is_that_of_an_address_without_its_own() {
        let there = ["-N CNI-x", "-A POSTROUTING -s 10.0.0.0/24 -j CNI-x"].map(str::to_owned).to_vec();
        let removal = |address: &str, there: &[String]| {
            let addresses = Addresses { known: vec![address.parse().unwrap()], complete: true };
            let [commands, _] = removal("CNI-x", &addresses, [there, &[]]);
            commands
        };
        let all = ["-D POSTROUTING -s 10.0.0.0/24 -j CNI-x", "-F CNI-x", "-X CNI-x"];
        assert_eq!(removal("10.0.0.2", &there), all);
        assert_eq!(removal("10.0.1.2", &there), [""; 0]);
        let with_its_own = [there, vec!["-A POSTROUTING -s 10.0.0.3/32 -j CNI-x".to_owned()]].concat();
        assert_eq!(removal("10.0.0.3", &with_its_own), ["-D POSTROUTING -s 10.0.0.3/32 -j CNI-x"]);
        assert_eq!(removal("10.0.0.2", &with_its_own), all[..1]);
    }
}
