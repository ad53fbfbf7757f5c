//! Which node has this machine's network: bridge, addresses and rules have the same names for all nodes.
//!
//! Invariant: a node starts its daemons only while the claim names its directory. The claim outlives the
//! node's processes: it goes with `down`, and does not count once its directory has no record.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use linux::lock::FileLock;

use super::place::Place;

const NAMESPACE: &str = "/proc/self/ns/net";
/// Its files are gone after a reboot, as the network is.
const CLAIMS: &str = "/run";

/// Claims the network for the node. An error if another node has it, which may have lost all its processes.
pub(super) fn take(place: &Place) -> Result<()> {
    take_at(Path::new(CLAIMS), place)
}

/// Gives the claim up, if the node has it.
pub(super) fn release(place: &Place) -> Result<()> {
    release_at(Path::new(CLAIMS), place)
}

fn take_at(claims: &Path, place: &Place) -> Result<()> {
    let _lock = lock()?;
    let claim = claim(claims)?;
    match holder(&claim)? {
        Some(holder) if holder == place.dir() => return Ok(()),
        Some(holder) => {
            ensure!(
                !Place::is_recorded(&holder),
                "the node in {} has this machine's network, even if it is not running: remove it first, with \
                 cargo xtask down --dir {0}",
                holder.display()
            );
            fs::remove_file(&claim).with_context(|| format!("remove {}", claim.display()))?;
        }
        None => {}
    }
    symlink(place.dir(), &claim).with_context(|| format!("make {}", claim.display()))
}

fn release_at(claims: &Path, place: &Place) -> Result<()> {
    let _lock = lock()?;
    let claim = claim(claims)?;
    if holder(&claim)?.is_some_and(|holder| holder == place.dir()) {
        fs::remove_file(&claim).with_context(|| format!("remove {}", claim.display()))?;
    }
    Ok(())
}

/// Held for a moment alone, and free when its holder ends.
fn lock() -> Result<FileLock> {
    FileLock::of(File::open(NAMESPACE).context(NAMESPACE)?).context(NAMESPACE)
}

/// A symbolic link, which is made at once with its content: the node's directory.
fn claim(claims: &Path) -> Result<PathBuf> {
    let namespace = fs::metadata(NAMESPACE).context(NAMESPACE)?.ino();
    Ok(claims.join(format!("hawser-up-network-{namespace}")))
}

fn holder(claim: &Path) -> Result<Option<PathBuf>> {
    match fs::read_link(claim) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        read => read.map(Some).with_context(|| format!("read {}", claim.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_has_one_node_until_its_record_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let place = |name: &str| {
            let place = Place::new(&root.path().join(name)).unwrap();
            drop(place.lock_or_create().unwrap());
            fs::write(place.record(), "{}").unwrap();
            place
        };
        let (first, second) = (place("first"), place("second"));
        take_at(root.path(), &first).unwrap();
        take_at(root.path(), &first).unwrap();
        let refused = format!("{:#}", take_at(root.path(), &second).unwrap_err());
        assert!(refused.contains(&format!("the node in {} has", first.dir().display())), "{refused}");
        release_at(root.path(), &second).unwrap();
        take_at(root.path(), &second).unwrap_err();
        // A directory that was removed by hand.
        fs::remove_file(first.record()).unwrap();
        take_at(root.path(), &second).unwrap();
        fs::write(first.record(), "{}").unwrap();
        take_at(root.path(), &first).unwrap_err();
        release_at(root.path(), &second).unwrap();
        take_at(root.path(), &first).unwrap();
        release_at(root.path(), &first).unwrap();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 2, "only the directories are left");
    }
}
