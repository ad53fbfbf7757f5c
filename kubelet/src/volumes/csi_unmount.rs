//! NodeUnpublishVolume and NodeUnstageVolume from the records on disk: the pod's manifest, its
//! claim and its PV may no longer exist.

use std::path::{Path, PathBuf};

use linux::mountinfo::{self, MountEntry};
use tracing::info;

use super::device::{Device, Stage};
use super::layout::{self, Layout, PublishData};
use super::{error::Error, files};
use crate::clients::plugins::Plugins;

/// Unpublishes and removes one volume directory of a pod. The caller holds the device's lock.
pub(super) async fn unpublish(plugins: &Plugins, dir: &Path, data: &PublishData) -> Result<(), Error> {
    let driver = plugins
        .driver(&data.driver_name)
        .ok_or_else(|| Error::DriverMissing { driver: data.driver_name.clone() })?;
    driver.node_unpublish_volume(&data.volume_handle, &layout::target(dir)).await?;
    files::remove_volume_dir(dir)?;
    info!(volume = data.spec_vol_id, dir = %dir.display(), "volume unmounted");
    Ok(())
}

/// Unstages an unused volume. The caller holds the device's lock; `stage` is its state.
pub(super) async fn unstage(
    plugins: &Plugins,
    layout: &Layout,
    device: &Device,
    stage: &mut Stage,
) -> Result<(), Error> {
    if *stage == Stage::No {
        return Ok(());
    }
    let key = &device.key;
    let dir = layout.stage_dir(&key.driver, &key.volume_handle);
    let globalmount = layout::globalmount(&dir);
    check_references(&globalmount)?;
    let driver =
        plugins.driver(&key.driver).ok_or_else(|| Error::DriverMissing { driver: key.driver.clone() })?;
    *stage = Stage::Uncertain;
    if driver.node_capabilities().await?.stage {
        driver.node_unstage_volume(&key.volume_handle, &globalmount).await?;
    }
    files::remove_stage_dir(&dir)?;
    *stage = Stage::No;
    info!(volume_id = key.volume_handle, driver = key.driver, "volume unstaged");
    Ok(())
}

/// kubelet's GetDeviceMountRefs: the staged root must have no other mount.
fn check_references(globalmount: &Path) -> Result<(), Error> {
    let mounts = mountinfo::read().map_err(Error::Kernel)?;
    let references = references(&mounts, globalmount);
    if references.is_empty() {
        return Ok(());
    }
    Err(Error::StillReferenced { path: globalmount.to_owned(), references })
}

fn references(mounts: &[MountEntry], globalmount: &Path) -> Vec<PathBuf> {
    let Some(staged) = mounts.iter().rfind(|m| m.mount_point == globalmount) else { return Vec::new() };
    let mut others: Vec<PathBuf> = mounts
        .iter()
        .filter(|m| m.same_root(staged))
        .map(|m| m.mount_point.clone())
        .filter(|point| point != globalmount)
        .collect();
    others.sort();
    others.dedup();
    others
}

#[cfg(test)]
mod tests {
    use super::*;

    const GLOBALMOUNT: &str = "/k/plugins/kubernetes.io/csi/d/0/globalmount";

    fn mounts(lines: &[(&str, &str)]) -> Vec<MountEntry> {
        let text: String = lines
            .iter()
            .enumerate()
            .map(|(i, (root, point))| format!("{i} 1 0:77 {root} {point} rw - fuse.hawser v rw\n"))
            .collect();
        mountinfo::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn the_same_root_elsewhere_is_a_reference_and_a_copy_of_the_same_path_is_not() {
        let table = mounts(&[("/", GLOBALMOUNT), ("/", GLOBALMOUNT), ("/", "/k/pods/u/mount")]);
        assert_eq!(references(&table, Path::new(GLOBALMOUNT)), [Path::new("/k/pods/u/mount")]);
        let table = mounts(&[("/", GLOBALMOUNT), ("/", GLOBALMOUNT), ("/sub", "/elsewhere")]);
        assert_eq!(references(&table, Path::new(GLOBALMOUNT)), [] as [&Path; 0]);
    }

    #[test]
    fn nothing_staged_has_no_references() {
        assert_eq!(
            references(&mounts(&[("/", "/k/pods/u/mount")]), Path::new(GLOBALMOUNT)),
            [] as [&Path; 0]
        );
    }
}
