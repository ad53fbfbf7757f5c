//! Part switch: the steps of docs/CNI.md, "Switch a node in place, and back",
//! executed as they stand there, on a node that has pods all the while.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use ::tests::binaries::workspace_root;
use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};
use xtask::progress::step;

use super::attach::{self, Results};
use super::scenario::{Call, Verb, add, check, del, list};
use super::world::{self, Filters, OWN, World};
use super::{Node, PLUGINS, Side};

const DOCUMENT: &str = "docs/CNI.md";
const HEADING: &str = "## Switch a node in place, and back";
/// As the document has it.
const CNI_BIN_DIR: &str = "/opt/cni/bin";
/// The reference has no portmap on this node.
const ABSENT: &str = "portmap";

pub(super) fn run(node: &Node) -> Result<()> {
    if !node.wants("switch") {
        return Ok(());
    }
    let path = workspace_root().join(DOCUMENT);
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let steps = steps(&text);
    let [look, install, verify, put_back, look_again] = &steps[..] else {
        anyhow::bail!("{DOCUMENT} has {} steps under {HEADING:?}, expected 5", steps.len());
    };
    World::with(node, Side::Reference, Filters::Nft, |world| {
        let mut pods = Pods { world, results: Results::default() };
        let before = prepare(node)?;
        step("a pod by the reference", || pods.call(&add("before-switch")))?;
        step("1. see what is there", || execute(node, look))?;
        step("2. install", || execute(node, install))?;
        step("3. see that it is ours", || execute(node, verify))?;
        ensure_ours(node)?;
        step("its pod checked and deleted by ours, others made", || {
            pods.call(&check("before-switch"))?;
            pods.call(&add("between"))?;
            pods.call(&add("vanishing"))?;
            pods.call(&del("before-switch"))?;
            pods.call(&check("between"))
        })?;
        step("4. go back", || execute(node, put_back))?;
        step("5. see that all is as it was", || execute(node, look_again))?;
        ensure!(files()? == before, "{CNI_BIN_DIR}: {:#?}, before it was {before:#?}", files()?);
        step("our pods checked and deleted by the reference, another made", || {
            pods.call(&check("between"))?;
            pods.call(&del("between"))?;
            pods.call(&del("vanishing"))?;
            pods.call(&add("after-switch"))?;
            pods.call(&del("after-switch"))
        })?;
        step("nothing of the pods is left", || pods.ensure_nothing_left())
    })
}

/// The shell commands of the section's code blocks.
fn steps(document: &str) -> Vec<String> {
    let section = document.lines().skip_while(|line| *line != HEADING).skip(1);
    let mut steps = Vec::new();
    let mut block: Option<String> = None;
    for line in section.take_while(|line| !line.starts_with("## ")) {
        match (line.trim(), &mut block) {
            ("```sh", None) => block = Some(String::new()),
            ("```", Some(_)) => steps.extend(block.take()),
            (command, Some(commands)) => {
                commands.push_str(command);
                commands.push('\n');
            }
            _ => {}
        }
    }
    steps
}

/// The plugin directory of a node with the reference's plugins, and a `cargo`
/// that starts `xtask` as built; what is then in the directory.
fn prepare(node: &Node) -> Result<BTreeMap<String, String>> {
    let nothing = None::<&str>;
    mount(Some("tmpfs"), "/opt", Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
        .context("tmpfs on /opt")?;
    mount(nothing, "/opt", nothing, MsFlags::MS_PRIVATE, nothing).context("private /opt")?;
    fs::create_dir_all(CNI_BIN_DIR)?;
    for plugin in PLUGINS.into_iter().filter(|plugin| *plugin != ABSENT) {
        fs::copy(node.plugin_dir(Side::Reference).join(plugin), Path::new(CNI_BIN_DIR).join(plugin))?;
    }
    let cargo = Path::new(OWN).join("programs/cargo");
    let xtask = std::env::current_exe().context("find this program")?.with_file_name("xtask");
    ensure!(xtask.is_file(), "{}: not built: run `cargo xtask conformance cni`", xtask.display());
    // The first word is `xtask`.
    fs::write(&cargo, format!("#!/bin/sh\nshift\nexec '{}' \"$@\"\n", xtask.display()))?;
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755))?;
    files()
}

/// By name: inode, mode and owner.
fn files() -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(CNI_BIN_DIR)? {
        let entry = entry?;
        let found = entry.metadata()?;
        let what = format!("{} {:o} {}:{}", found.ino(), found.mode(), found.uid(), found.gid());
        files.insert(entry.file_name().to_string_lossy().into_owned(), what);
    }
    Ok(files)
}

/// One step as an administrator's shell runs it.
fn execute(node: &Node, commands: &str) -> Result<()> {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-eu", "-c", commands]).current_dir(workspace_root()).env_clear();
    shell.env("PATH", format!("{OWN}/programs:/usr/sbin:/usr/bin:/sbin:/bin"));
    shell.env("HAWSER_BIN_DIR", node.plugin_dir(Side::Ours));
    let output = world::finish(shell, b"")?;
    ensure!(
        output.status.success(),
        "{commands}{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn ensure_ours(node: &Node) -> Result<()> {
    for plugin in PLUGINS {
        let installed = fs::read(Path::new(CNI_BIN_DIR).join(plugin))?;
        ensure!(installed == fs::read(node.plugin_dir(Side::Ours).join(plugin))?, "{plugin} is not ours");
    }
    Ok(())
}

/// What a runtime on the node does.
struct Pods<'w, 'n> {
    world: &'w mut World<'n>,
    results: Results,
}

impl Pods<'_, '_> {
    fn call(&mut self, call: &Call) -> Result<()> {
        let bin_dir = Path::new(CNI_BIN_DIR);
        if call.verb == Verb::Add {
            self.world.container(&call.container)?;
        }
        let answers = attach::call(bin_dir, &network(), call, &mut self.results)?;
        match answers.iter().find(|answer| !answer.success) {
            None => Ok(()),
            Some(failed) => anyhow::bail!("{} {}: {failed:?}", call.verb.word(), call.container),
        }
    }

    fn ensure_nothing_left(&self) -> Result<()> {
        let rules = World::ask(&self.world.host, &self.world.programs().nft, &["list", "ruleset"])?;
        let links = World::ask(&self.world.host, &self.world.programs().ip, &["link"])?;
        let leases: Vec<String> = fs::read_dir("/var/lib/cni/networks/net")?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<_>>()?;
        let lines = rules.lines().chain(links.lines()).chain(leases.iter().map(String::as_str));
        let is_left = |line: &&str| {
            let words = ["before-switch", "between", "vanishing", "after-switch", "10.1.0.", "fd00:1::"];
            words.iter().any(|word| line.contains(word)) || line.contains("veth")
        };
        let left: Vec<&str> = lines.filter(is_left).collect();
        ensure!(left.is_empty(), "left: {left:#?}");
        Ok(())
    }
}

/// The reference chooses iptables for masquerading, ours nf_tables.
fn network() -> Value {
    let ranges = json!([[{ "subnet": "10.1.0.0/24" }], [{ "subnet": "fd00:1::/64" }]]);
    let ipam = json!({ "type": "host-local", "ranges": ranges });
    list("1.0.0", [json!({ "type": "bridge", "isDefaultGateway": true, "ipMasq": true, "ipam": ipam })])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_the_code_blocks_of_the_section() {
        let document = format!(
            "```sh\nno\n```\n{HEADING}\nWords.\n1. One\n\n   ```sh\n   a\n   b\n   ```\n```\nno\n```\n2.\n```sh\nc\n```\n## Next\n```sh\nno\n```\n"
        );
        assert_eq!(steps(&document), ["a\nb\n", "c\n"]);
    }
}
