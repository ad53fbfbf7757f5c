//! The containers that were stopped for another instance, in `pods/<uid>/replaced-containers`: one id a line.
//!
//! Invariant: an id is in the file before its container is stopped. So the next kubelet starts the other
//! instance also with restartPolicy Never.

use std::collections::BTreeSet;
use std::path::Path;

use crate::pod_state::plan::Target;
use crate::worker::container_ids;

const FILE: &str = "replaced-containers";

/// The ids that an earlier kubelet wrote.
pub(super) fn read(pod_dir: &Path) -> BTreeSet<String> {
    container_ids::read(&pod_dir.join(FILE))
}

/// Adds the targets that are stopped for another instance to `known`, first on disk.
pub(super) fn add(known: &mut BTreeSet<String>, targets: &[Target], pod_dir: &Path) -> linux::Result<()> {
    let replaced = targets.iter().filter(|target| target.cause.replaces()).map(|target| target.id.clone());
    let mut all = known.clone();
    all.extend(replaced);
    if all == *known {
        return Ok(());
    }
    container_ids::write(&pod_dir.join(FILE), &all)?;
    *known = all;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pod_state::plan::Cause;

    #[test]
    fn the_next_kubelet_knows_what_was_stopped_for_another_instance() {
        let dir = tempfile::tempdir().unwrap();
        let target = |id: &str, cause| Target {
            id: id.to_owned(),
            name: "c".to_owned(),
            full_name: "default/p/c".to_owned(),
            cause,
            grace: None,
        };
        let mut known = read(dir.path());
        assert!(known.is_empty());
        add(&mut known, &[target("ended", Cause::End)], dir.path()).unwrap();
        assert!(!dir.path().join(FILE).exists());
        let targets = [target("a", Cause::Changed), target("b", Cause::Resized), target("c", Cause::End)];
        add(&mut known, &targets, dir.path()).unwrap();
        assert_eq!(known, BTreeSet::from(["a".to_owned(), "b".to_owned()]));
        assert_eq!(read(dir.path()), known);
    }
}
