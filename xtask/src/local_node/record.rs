//! What the machine was like before `up`, and which names the node uses outside its directory.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ::tests::netlink;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::place::Place;

/// The switches that a bridge with a gateway turns on.
const FORWARDING: [&str; 2] = ["/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding"];

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    /// Control group of the node's pods, absolute within each hierarchy.
    pub(super) cgroup: PathBuf,
    /// Tables of nf_tables, each with its family's number.
    pub(super) nft_tables: Vec<String>,
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
            forwarding: present.collect(),
        })
    }

    /// `None` if there is none: nothing was changed yet.
    pub(super) fn read(place: &Place) -> Result<Option<Self>> {
        let path = place.record();
        let text = match fs::read(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.with_context(|| path.display().to_string())?,
        };
        serde_json::from_slice(&text).map(Some).with_context(|| path.display().to_string())
    }

    /// On the disk when this returns.
    pub(super) fn write(&self, place: &Place) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).context("write the record")?;
        Ok(linux::atomic_file::replace(&place.record(), &text, 0o600)?)
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
