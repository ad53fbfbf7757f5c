//! What the machine was like before `up`, and which names the node uses outside its directory.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use ::tests::netlink::{self, Link};
use anyhow::{Context, Result, ensure};
use linux::atomic_file::content_of;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use super::place::Place;

/// Links of these kinds belong to networks of containers and virtual machines, which may need forwarding.
const KINDS_OF_NETWORKS: [&str; 2] = ["bridge", "veth"];
/// The switches that a bridge with a gateway turns on.
const FORWARDING: [&str; 2] = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    /// Control group of the node's pods, absolute within each hierarchy.
    pub(super) cgroup: PathBuf,
    /// Tables of nf_tables, each with its family's number.
    pub(super) nft_tables: Vec<String>,
    /// Names of the bridges and veth links.
    #[serde(default)]
    links: Vec<String>,
    /// Whether the control group was made for this node. Until then, nothing else was changed either.
    /// Records without the field are from nodes that were started before there was one.
    #[serde(default = "claimed")]
    pub(super) is_claimed: bool,
    /// Files of /proc/sys, and what was in them.
    forwarding: Vec<(PathBuf, String)>,
}

impl Record {
    /// The machine as it is now.
    pub(super) fn take(cgroup: &Path) -> Result<Self> {
        // A kernel without IPv6 lacks the second file.
        let present =
            FORWARDING.iter().filter_map(|file| Some((file.into(), fs::read_to_string(file).ok()?)));
        Ok(Self {
            cgroup: cgroup.to_owned(),
            nft_tables: netlink::nft_tables().context("list the tables of nf_tables")?,
            links: netlink::links()?.into_iter().filter(is_of_a_network).map(|link| link.name).collect(),
            is_claimed: false,
            forwarding: present.collect(),
        })
    }

    /// `None` if there is none: nothing was changed yet.
    pub(super) fn read(place: &Place) -> Result<Option<Self>> {
        let path = place.record();
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let text =
            match File::options().read(true).custom_flags(flags.bits()).open(&path).and_then(content_of) {
                Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
                read => read.with_context(|| path.display().to_string())?,
            };
        Self::parse(&text).map(Some).with_context(|| path.display().to_string())
    }

    fn parse(text: &[u8]) -> Result<Self> {
        let record: Self = serde_json::from_slice(text)?;
        require_group(&record.cgroup)?;
        for (file, _) in &record.forwarding {
            let is_known = FORWARDING.iter().any(|known| Path::new(known) == file);
            ensure!(is_known, "{}: no switch of forwarding", file.display());
        }
        Ok(record)
    }

    /// On the disk when this returns.
    pub(super) fn write(&self, place: &Place) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).context("write the record")?;
        Ok(linux::atomic_file::replace(&place.record(), &text, 0o600)?)
    }

    /// A bridge, a veth link or a table that came after `up`, and that the node does not have. `ours` are
    /// the links of the node's pods, some of which the kernel may still have to remove.
    pub(super) fn newcomer(&self, ours: &[String]) -> Result<Option<String>> {
        let is_new = |name: &String| !self.links.contains(name) && !ours.contains(name);
        let mut links = netlink::links()?.into_iter().filter(is_of_a_network).map(|link| link.name);
        if let Some(link) = links.find(is_new) {
            return Ok(Some(format!("link {link}")));
        }
        let table = netlink::nft_tables()?.into_iter().find(|table| !self.nft_tables.contains(table));
        Ok(table.map(|table| format!("table {table}")))
    }

    /// Restores the forwarding switches. Returns those that were changed.
    pub(super) fn write_forwarding_back(&self) -> Result<Vec<String>> {
        let mut changed = Vec::new();
        for (file, before) in &self.forwarding {
            let shown = || file.display().to_string();
            if fs::read_to_string(file).with_context(shown)? != *before {
                fs::write(file, before).with_context(shown)?;
                changed.push(shown());
            }
        }
        Ok(changed)
    }
}

fn claimed() -> bool {
    true
}

fn is_of_a_network(link: &Link) -> bool {
    KINDS_OF_NETWORKS.contains(&link.kind.as_str())
}

/// An error unless it is a group directly below the root: `down` kills what is in it.
pub(super) fn require_group(cgroup: &Path) -> Result<()> {
    let parts: Vec<_> = cgroup.components().collect();
    ensure!(
        matches!(parts[..], [Component::RootDir, Component::Normal(_)]),
        "--cgroup {}: a group directly below the root is needed, such as /hawser-up",
        cgroup.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_names_other_files_or_groups_is_refused() {
        let parse = |cgroup: &str, file: &str| {
            let text = serde_json::json!({
                "cgroup": cgroup, "nftTables": [], "isClaimed": true, "forwarding": [[file, "0\n"]],
            });
            Record::parse(text.to_string().as_bytes()).map_err(|error| error.to_string())
        };
        parse("/hawser-up", FORWARDING[0]).unwrap();
        assert!(parse("/hawser-up", "/etc/passwd").unwrap_err().contains("no switch of forwarding"));
        for group in ["/", "/..", "hawser-up", "/a/b", "/a/.."] {
            assert!(parse(group, FORWARDING[1]).unwrap_err().contains("directly below the root"), "{group}");
        }
    }
}
