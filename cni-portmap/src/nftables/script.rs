//! The same additions as a script for the host's `nft`, for conditions that only nft understands.
//! It is still one transaction, but its rules lack the part with their network.

use std::io::{ErrorKind, Write};
use std::process::{Command, Stdio};

use netfilter::nftables::NfTables;

use super::plan::base_chains;
use super::rules::{
    HOSTIP_HOSTPORTS, HOSTPORTS, HOSTPORTS_ALL, LOCALNET_GUARD, MASQUERADING, OUTPUT, Owner, PREROUTING,
    TABLE, TABLE_COMMENT, base, family_of,
};
use super::{Found, Part, find, unreached};
use crate::config::Config;
use crate::error::Error;

pub(super) fn add(
    kernel: &mut NfTables,
    config: &Config,
    owner: &Owner,
    parts: &[Part],
) -> Result<(), Error> {
    let mut script = String::new();
    let failed = |source| Error::SetUpNftables { source };
    for part in parts {
        let found = find(kernel, part.family, owner).map_err(failed)?;
        let unreached = unreached(kernel, part.family, base_chains(&part.wanted, part.guarded));
        if let Some(unreached) = unreached.map_err(failed)? {
            return Err(Error::NftRefused { words: unreached.to_string() });
        }
        script += &text(config, owner, part, &found);
    }
    run(&script)
}

/// The script for one family. As in the reference, the shared chains are flushed, since only nft
/// could compare their rules.
fn text(config: &Config, owner: &Owner, part: &Part, found: &Found) -> String {
    let table = format!("{} {TABLE}", family_of(part.family).name());
    let conditions = config.conditions(part.family).join(" ");
    let mut lines = vec![format!("add table {table} {{ comment \"{TABLE_COMMENT}\" ; }}")];
    for rule in found.outdated(owner, &part.wanted) {
        lines.push(format!("delete rule {table} {} handle {}", rule.chain, rule.handle));
    }
    for chain in [HOSTPORTS, HOSTIP_HOSTPORTS, HOSTPORTS_ALL, PREROUTING, OUTPUT, MASQUERADING] {
        let hook = match chain {
            PREROUTING => "prerouting",
            OUTPUT => "output",
            _ => "postrouting",
        };
        let hooked = base(chain)
            .map(|base| format!(" {{ type nat hook {hook} priority {} ; policy accept ; }}", base.priority));
        lines.push(format!("add chain {table} {chain}{}", hooked.unwrap_or_default()));
    }
    for chain in [HOSTPORTS_ALL, PREROUTING, OUTPUT] {
        lines.push(format!("flush chain {table} {chain}"));
    }
    for chain in [HOSTIP_HOSTPORTS, HOSTPORTS] {
        lines.push(format!("add rule {table} {HOSTPORTS_ALL} jump {chain}"));
    }
    for chain in [PREROUTING, OUTPUT] {
        let jump = format!("fib daddr type local jump {HOSTPORTS_ALL}");
        lines.push(format!("add rule {table} {chain} {conditions} {jump}"));
    }
    if part.guarded {
        let hook = "{ type filter hook prerouting priority raw ; policy accept ; }";
        lines.push(format!("add chain {table} {LOCALNET_GUARD} {hook}"));
        lines.extend(
            found.missing_guard().map(|(_, text)| format!("add rule {table} {LOCALNET_GUARD} {text}")),
        );
    }
    let there = found.effects(owner);
    for wanted in part.wanted.iter().filter(|wanted| !there.include(wanted)) {
        let Owner { container_id, .. } = owner;
        lines.push(format!("add rule {table} {} {} comment \"{container_id}\"", wanted.chain, wanted.text));
    }
    lines.push(String::new());
    lines.join("\n")
}

fn run(script: &str) -> Result<(), Error> {
    let refused = |words: String| Error::NftRefused { words };
    let spawned = Command::new("nft")
        .args(["-f", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut nft = spawned.map_err(|e| match e.kind() {
        ErrorKind::NotFound => refused("the conditions need the program nft, which is not installed".into()),
        _ => refused(format!("start nft: {}", linux::reason(&e))),
    })?;
    let written = nft.stdin.take().map_or(Ok(()), |mut stdin| stdin.write_all(script.as_bytes()));
    let output =
        nft.wait_with_output().map_err(|e| refused(format!("wait for nft: {}", linux::reason(&e))))?;
    if !output.status.success() {
        return Err(refused(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    written.map_err(|e| refused(format!("write to nft: {}", linux::reason(&e))))
}
