//! A node of its own for one run of a scenario: a network namespace in the
//! host's place with a neighbour outside, containers, and mounts that hide the
//! machine's `/run` and `/var/lib`.
//!
//! Invariant: everything lives in namespaces of one thread and is gone with it,
//! whatever happened. Paths are the same in every world, so that what two sides
//! print can be compared.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use ::tests::{eventually, netlink};
use anyhow::{Context, Result, ensure};
use linux::netns::{self, NetNs};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use serde_json::Value;

use super::{Node, Side};

/// What belongs to the suite inside a world; everything else under [`HIDDEN`] is the plugins'.
pub(super) const OWN: &str = "/run/suite";
/// Where a container's namespace is.
pub(super) const NETNS_DIR: &str = "/run/netns";
/// `CNI_PATH`.
pub(super) const BIN_DIR: &str = "/run/suite/bin";
/// Directories of the machine that a world has empty ones of its own for.
pub(super) const HIDDEN: [&str; 2] = ["/run", "/var/lib"];
/// The neighbour: no container, reached through the host's link `out0`.
pub(super) const OUTSIDE: &str = "outside";

/// The neighbour is 203.0.113.2 and 2001:db8:f::2, the host 203.0.113.1 and
/// 2001:db8:f::1. The neighbour sends what it does not know to the host: what
/// it sees of a container is then the plugins' doing, not a missing route's.
/// Without duplicate detection on the host's links there is nothing to wait for.
const NEIGHBOUR: [&str; 2] = [
    "link set lo up
link add out0 type veth peer name eth0 netns outside
addr add 203.0.113.1/24 dev out0
addr add 198.51.100.1/32 dev out0
addr add 2001:db8:f::1/64 dev out0 nodad
link set out0 up",
    "link set lo up
addr add 203.0.113.2/24 dev eth0
addr add 2001:db8:f::2/64 dev eth0 nodad
link set eth0 up
route add default via 203.0.113.1
route add default via 2001:db8:f::1",
];

/// Which packet filter programs a plugin finds in `PATH`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Filters {
    /// `nft`, and `iptables` that writes nf_tables
    Nft,
    /// `nft`, and `iptables` of old
    Legacy,
    /// `nft` alone
    WithoutIptables,
}

#[derive(Debug)]
pub(super) struct World<'n> {
    node: &'n Node,
    pub(super) filters: Filters,
    pub(super) host: NetNs,
    /// With the neighbour.
    containers: BTreeMap<String, NetNs>,
}

impl<'n> World<'n> {
    /// Runs `work` in a new world whose `CNI_PATH` has the plugins of `side`.
    pub(super) fn with<T: Send>(
        node: &'n Node,
        side: Side,
        filters: Filters,
        work: impl FnOnce(&mut World<'n>) -> Result<T> + Send,
    ) -> Result<T> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("world".to_owned());
            let thread = thread.spawn_scoped(scope, || work(&mut Self::enter(node, side, filters)?))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread into a new world.
    fn enter(node: &'n Node, side: Side, filters: Filters) -> Result<Self> {
        unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWNET).context("new namespaces")?;
        let nothing = None::<&str>;
        mount(nothing, "/", nothing, MsFlags::MS_REC | MsFlags::MS_PRIVATE, nothing).context("private /")?;
        for dir in HIDDEN {
            mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))
                .with_context(|| format!("tmpfs on {dir}"))?;
        }
        for dir in [NETNS_DIR, OWN, &format!("{OWN}/programs"), BIN_DIR] {
            fs::create_dir(dir).with_context(|| format!("create {dir}"))?;
        }
        let mut world = Self { node, filters, host: NetNs::current()?, containers: BTreeMap::new() };
        world.install(side)?;
        world.install_programs()?;
        world.add_neighbour()?;
        Ok(world)
    }

    /// Puts the plugins of `side` where `CNI_PATH` says, each by a rename.
    pub(super) fn install(&self, side: Side) -> Result<()> {
        for plugin in super::PLUGINS {
            let (link, new) = (Path::new(BIN_DIR).join(plugin), Path::new(BIN_DIR).join("new"));
            symlink(self.node.plugin_dir(side).join(plugin), &new)?;
            fs::rename(&new, &link)?;
        }
        Ok(())
    }

    fn install_programs(&self) -> Result<()> {
        let dir = Path::new(OWN).join("programs");
        symlink(&self.node.programs.nft, dir.join("nft"))?;
        let variant = match self.filters {
            Filters::Nft => "nft",
            Filters::Legacy => "legacy",
            Filters::WithoutIptables => return Ok(()),
        };
        for family in ["iptables", "ip6tables"] {
            for tool in ["", "-save", "-restore"] {
                let program = self.node.programs.iptables(&format!("{family}-{variant}{tool}"));
                symlink(program, dir.join(format!("{family}{tool}")))?;
            }
        }
        Ok(())
    }

    fn add_neighbour(&mut self) -> Result<()> {
        // A new namespace takes these from the machine's, where a bridge may have set them.
        for forwarding in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            linux::sysctl::write(forwarding, "0")?;
        }
        linux::sysctl::write("net/ipv6/conf/default/accept_dad", "0")?;
        self.container(OUTSIDE)?;
        self.ip_batch(&self.host, NEIGHBOUR[0])?;
        self.ip_batch(self.existing(OUTSIDE)?, NEIGHBOUR[1])
    }

    /// The container's namespace, which is made when it is first spoken of; its path.
    pub(super) fn container(&mut self, name: &str) -> Result<PathBuf> {
        let path = Path::new(NETNS_DIR).join(name);
        if !self.containers.contains_key(name) {
            self.containers.insert(name.to_owned(), netns::create_persistent(&path)?);
        }
        Ok(path)
    }

    /// The container dies without a DEL; the host's ends of its links are gone when this returns.
    pub(super) fn remove_container(&mut self, name: &str) -> Result<()> {
        let links = Self::ask(self.existing(name)?, &self.node.programs.ip, &["-j", "link"])?;
        let links: Value = serde_json::from_str(&links)?;
        let ends: BTreeSet<i64> =
            links.as_array().into_iter().flatten().filter_map(|link| link["link_index"].as_i64()).collect();
        self.containers.remove(name);
        netns::remove_persistent(&Path::new(NETNS_DIR).join(name))?;
        eventually("the kernel takes the namespace apart", Duration::from_secs(10), || {
            let left = netlink::links()?.into_iter().find(|link| ends.contains(&link.index.into()));
            ensure!(left.is_none(), "{left:?}");
            Ok(())
        })
    }

    /// The containers, without the neighbour.
    pub(super) fn containers(&self) -> impl Iterator<Item = (&str, &NetNs)> {
        self.containers
            .iter()
            .map(|(name, netns)| (name.as_str(), netns))
            .filter(|(name, _)| *name != OUTSIDE)
    }

    /// `host`, `outside` or a container.
    pub(super) fn existing(&self, name: &str) -> Result<&NetNs> {
        if name == "host" {
            return Ok(&self.host);
        }
        self.containers.get(name).with_context(|| format!("no container {name} in this world"))
    }

    /// A command whose `PATH` is this world's.
    pub(super) fn command(program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("PATH", format!("{OWN}/programs"));
        command
    }

    /// One of the witnesses' programs in `netns`; its output.
    pub(super) fn ask(netns: &NetNs, program: &Path, words: &[&str]) -> Result<String> {
        let mut command = Self::command(program);
        command.args(words);
        let output = run_in(netns, command, b"")?;
        ensure!(
            output.status.success(),
            "{} {}: {}",
            program.display(),
            words.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Lines as `ip -batch` reads them.
    pub(super) fn ip_batch(&self, netns: &NetNs, lines: &str) -> Result<()> {
        let mut command = Self::command(&self.node.programs.ip);
        command.args(["-batch", "-"]);
        let output = run_in(netns, command, lines.as_bytes())?;
        ensure!(output.status.success(), "ip {lines:?}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    pub(super) fn programs(&self) -> &super::Programs {
        &self.node.programs
    }
}

/// Runs the command in the namespace and gives it `stdin`.
pub(super) fn run_in(netns: &NetNs, command: Command, stdin: &[u8]) -> Result<Output> {
    netns.run(move || finish(command, stdin))?
}

/// Runs the command where the calling thread is and gives it `stdin`.
pub(super) fn finish(mut command: Command, stdin: &[u8]) -> Result<Output> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("start {}", xtask::build::words(&command)))?;
    match child.stdin.take().context("a pipe to the program")?.write_all(stdin) {
        // It did not care to read.
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => return Err(e.into()),
        _ => {}
    }
    Ok(child.wait_with_output()?)
}
