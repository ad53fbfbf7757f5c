//! Proof that nothing is left: everything a pod, a volume or a network could
//! leave behind, taken from the kernel before and after, and compared.
//!
//! Speaks of the calling thread's namespaces, the sandbox's directory, its
//! cgroups and its processes.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::mount_table::mounts;
use crate::sandbox::{self, Sandbox};
use crate::{eventually, netlink};

/// What was there at one moment: one line a thing, with how often it was there.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Snapshot(BTreeMap<String, usize>);

/// In the name of the process that unpacks a layer, and of its control group.
const UNPACKER: &str = "hawser-unpack";
/// The name of a process between fork and exec: that of the thread which forked.
const FORKED: &str = "process tokio-rt-worker";
const UNPACKING_TIMEOUT: Duration = Duration::from_secs(60);

/// The state before, and what may differ after.
#[derive(Debug)]
pub struct LeakCheck {
    before: Snapshot,
    allowed: Allowed,
}

/// What may differ: things of the node, of which there is one whatever the number of pods.
#[derive(Debug, Clone, Default)]
pub struct Allowed {
    /// Trees in which files come, go and change: caches, logs of the test itself.
    pub changing: Vec<PathBuf>,
    /// Directories and files that appear once and stay; what is in them does not.
    pub standing: Vec<PathBuf>,
    /// Links that CNI creates and by contract never deletes: the bridge.
    pub links: Vec<String>,
    /// Control groups, absolute within each hierarchy, that stay as long as the node runs.
    pub cgroups: Vec<PathBuf>,
}

/// Things that are there and were not, or the other way round.
#[derive(Debug, PartialEq, Eq)]
pub struct Leaks(Vec<String>);

impl fmt::Display for Leaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} leaks:\n  {}", self.0.len(), self.0.join("\n  "))
    }
}

impl std::error::Error for Leaks {}

impl LeakCheck {
    /// Remembers what is there, once no image is being unpacked any more and no program
    /// is being started: a node does that when images appear, and it ends by itself.
    pub fn start(sandbox: &Sandbox, allowed: Allowed) -> Result<Self> {
        let before = eventually("images are unpacked", UNPACKING_TIMEOUT, || {
            let now = Snapshot::take(sandbox, &allowed)?;
            let unpacking = now.0.keys().find(|thing| thing.contains(UNPACKER) || thing.starts_with(FORKED));
            ensure!(unpacking.is_none(), "{}", unpacking.map_or("", String::as_str));
            Ok(now)
        })?;
        Ok(Self { before, allowed })
    }

    /// What differs now.
    pub fn leaks(&self, sandbox: &Sandbox) -> Result<Leaks> {
        let after = Snapshot::take(sandbox, &self.allowed)?;
        Ok(self.before.difference(&after))
    }

    /// Waits for everything to be as it was: what ends asynchronously (a process
    /// that has been sent its signal, a cgroup that the kernel still drains) has `timeout`.
    pub fn verify(&self, sandbox: &Sandbox, timeout: Duration) -> Result<()> {
        eventually("nothing is left", timeout, || {
            let leaks = self.leaks(sandbox)?;
            ensure!(leaks.0.is_empty(), leaks);
            Ok(())
        })
    }
}

impl Snapshot {
    fn take(sandbox: &Sandbox, allowed: &Allowed) -> Result<Self> {
        let mut things = Vec::new();
        for link in netlink::links()?.iter().filter(|link| !allowed.links.contains(&link.name)) {
            things.push(format!("link {}", link.name));
        }
        things.extend(routes(&allowed.links)?);
        things.extend(netlink::nft_tables()?.into_iter().map(|table| format!("nft table {table}")));
        things.extend(iptables_tables());
        for mount in mounts()?.iter().filter(|mount| !is_another_tests(&mount.mount_point, sandbox)) {
            things.push(format!("mount {} on {}", mount.fs_type, mount.mount_point.display()));
        }
        let stays = |dir: &PathBuf| allowed.cgroups.iter().any(|path| is_cgroup(dir, path));
        for dir in sandbox.tag().directories()?.iter().filter(|dir| !stays(dir)) {
            things.push(format!("cgroup {}", dir.display()));
        }
        for process in sandbox.tag().processes()? {
            let zombie = if process.is_zombie { "zombie " } else { "" };
            things.push(format!("{zombie}process {} ({})", process.name, process.command_line));
            things.extend(
                suspicious_descriptors(process.pid)
                    .into_iter()
                    .map(|fd| format!("fd of {}: {fd}", process.name)),
            );
        }
        things.extend(unix_sockets(sandbox.dir())?);
        things.extend(named_network_namespaces());
        collect_files(sandbox.dir(), allowed, &mut things)?;
        let mut counted = BTreeMap::new();
        for thing in things {
            *counted.entry(thing).or_insert(0) += 1;
        }
        Ok(Self(counted))
    }

    fn difference(&self, after: &Self) -> Leaks {
        let mut leaks = Vec::new();
        for thing in self.0.keys().chain(after.0.keys().filter(|thing| !self.0.contains_key(*thing))) {
            let count = |snapshot: &Self| snapshot.0.get(thing).copied().unwrap_or(0);
            match (count(self), count(after)) {
                (before, after) if before == after => {}
                (before, after) => leaks.push(format!("{thing}: {before} before, {after} after")),
            }
        }
        Leaks(leaks)
    }
}

/// Inherited with the mount namespace, and gone with its mount point when the other test removes that.
fn is_another_tests(mount_point: &Path, sandbox: &Sandbox) -> bool {
    mount_point.starts_with("/tmp")
        && mount_point != Path::new("/tmp")
        && !mount_point.starts_with(sandbox.dir())
}

/// Whether `dir` is the control group `path` of some hierarchy: /sys/fs/cgroup/<hierarchy><path>,
/// and without a hierarchy's name where there is cgroup v2 alone.
fn is_cgroup(dir: &Path, path: &Path) -> bool {
    let within = path.strip_prefix("/").unwrap_or(path);
    [4, 5].iter().any(|&above| dir.iter().skip(above).eq(within.iter()))
}

/// linux/ipv6_route.h. The kernel adds an anycast route for each prefix of a link
/// as long as the host forwards; no test creates or leaves one.
const RTF_ANYCAST: u32 = 0x0010_0000;

/// IPv4 and IPv6 routes; those of links that may stay are theirs.
pub(crate) fn routes(links_that_stay: &[String]) -> Result<Vec<String>> {
    let mut routes = Vec::new();
    let v4 = read_table("/proc/thread-self/net/route")?;
    for columns in v4.iter().skip(1) {
        if let [link, destination, gateway, .., mask, _mtu, _window, _irtt] = &columns[..]
            && !links_that_stay.contains(link)
        {
            routes.push(format!("route {destination}/{mask} via {gateway} dev {link}"));
        }
    }
    for columns in read_table("/proc/thread-self/net/ipv6_route")? {
        if let [destination, length, .., gateway, _metric, _references, _use, flags, link] = &columns[..]
            && !links_that_stay.contains(link)
            && u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & RTF_ANYCAST == 0)
        {
            routes.push(format!("route {destination}/{length} via {gateway} dev {link}"));
        }
    }
    Ok(routes)
}

fn read_table(path: &str) -> Result<Vec<Vec<String>>> {
    let text = fs::read_to_string(path).context(path.to_owned())?;
    Ok(text.lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect())
}

/// Tables of the legacy iptables; the files are absent where the kernel has none.
fn iptables_tables() -> Vec<String> {
    let files = ["/proc/thread-self/net/ip_tables_names", "/proc/thread-self/net/ip6_tables_names"];
    let tables = files.iter().flat_map(|file| {
        let text = fs::read_to_string(file).unwrap_or_default();
        text.lines().map(|table| format!("iptables table {table}")).collect::<Vec<_>>()
    });
    tables.collect()
}

/// Descriptors that hold a kernel object alive: FUSE connections, network
/// namespaces, deleted files, processes. A process that ended has none.
fn suspicious_descriptors(pid: i32) -> Vec<String> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let links = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let names = links.map(|link| link.display().to_string());
    let holds = |name: &String| {
        name == "/dev/fuse"
            || name.starts_with("net:[")
            || name.starts_with("mnt:[")
            || name.contains("[pidfd]")
            || name.ends_with(" (deleted)")
    };
    // Numbers differ from one object to the next; the count is compared.
    names.filter(holds).map(|name| name.split(['[', '#']).next().unwrap_or_default().to_owned()).collect()
}

fn unix_sockets(dir: &Path) -> Result<Vec<String>> {
    let rows = read_table("/proc/thread-self/net/unix")?;
    let listening = rows.iter().filter(|row| row.get(3).is_some_and(|flags| flags == "00010000"));
    let paths =
        listening.filter_map(|row| row.get(7)).filter(|path| Path::new(path.as_str()).starts_with(dir));
    Ok(paths.map(|path| format!("listening socket {path}")).collect())
}

/// What `ip netns list` would show.
fn named_network_namespaces() -> Vec<String> {
    let Ok(entries) = fs::read_dir("/run/netns") else { return Vec::new() };
    entries.flatten().map(|entry| format!("netns {}", entry.file_name().display())).collect()
}

fn collect_files(dir: &Path, allowed: &Allowed, things: &mut Vec<String>) -> Result<()> {
    // Removed while it was being read, or the root of a dead FUSE mount, which is listed as a mount.
    let Ok(entries) = fs::read_dir(dir) else { return Ok(()) };
    for entry in entries {
        let path = entry.with_context(|| dir.display().to_string())?.path();
        // The sandbox's own mount shows the FUSE connections of the whole machine.
        let is_fusectl = path.file_name().is_some_and(|name| name == sandbox::FUSECTL);
        if is_fusectl || allowed.changing.iter().any(|changing| path.starts_with(changing)) {
            continue;
        }
        let is_dir = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
        if !allowed.standing.contains(&path) {
            things.push(format!("{} {}", if is_dir { "directory" } else { "file" }, path.display()));
        }
        if is_dir {
            collect_files(&path, allowed, things)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_group_is_known_in_every_hierarchy() {
        let path = Path::new("/hw-1/pods");
        assert!(is_cgroup(Path::new("/sys/fs/cgroup/memory/hw-1/pods"), path));
        assert!(is_cgroup(Path::new("/sys/fs/cgroup/hw-1/pods"), path));
        assert!(!is_cgroup(Path::new("/sys/fs/cgroup/memory/hw-1/pods/pod1"), path));
        assert!(!is_cgroup(Path::new("/sys/fs/cgroup/memory/hw-1"), path));
    }

    #[test]
    fn what_came_and_what_went_is_named_with_its_count() {
        let snapshot =
            |things: &[(&str, usize)]| Snapshot(things.iter().map(|&(t, n)| (t.to_owned(), n)).collect());
        let before = snapshot(&[("link lo", 1), ("mount ext4 on /", 1)]);
        assert_eq!(before.difference(&before), Leaks(Vec::new()));
        let after = snapshot(&[("link lo", 1), ("link veth1", 1), ("mount fuse on /v", 2)]);
        assert_eq!(
            before.difference(&after).0,
            [
                "mount ext4 on /: 1 before, 0 after",
                "link veth1: 0 before, 1 after",
                "mount fuse on /v: 0 before, 2 after"
            ]
        );
    }
}
